"""Tests torch_dist checkpoints against megatron-core: it reads ours, we read its own, bit for bit."""

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from pentatron.checkpoint.find import find_step
from pentatron.checkpoint.load import load_fragments, load_tensor
from pentatron.checkpoint.store import Checkpoint
from pentatron.compare.logits import _checkpoint_model
from pentatron.interchange.reading import read_megatron
from pentatron.interchange.torch_dist import open_torch_dist
from pentatron.models.router_load import loads_of, router_fragments
from tests.harness import run_distributed
from tests.interchange.megatron_core_process import FAMILIES, LENGTH, TOKENS, VOCABULARY
from tests.interchange.on_ranks import save_on_a_rank
from tests.train.test_loaded import losses, train_on_a_rank

PROCESS = Path(__file__).with_name("megatron_core_process.py")
TIMEOUT = 240.0
# Names of the parts of a layer in megatron-core's modules, written down independently of the tables.
PARTS = {
    "input_layernorm": "input_norm",
    "self_attention.linear_qkv": "attention.linear_qkv",
    "self_attention.linear_proj": "attention.linear_proj",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.shared_experts": "mlp.shared.mlp",
    "mlp.router.expert_bias": "mlp.router.bias",
}
OUTSIDE = {
    "embedding.word_embeddings.weight": "embedding.word.weight",
    "embedding.position_embeddings.weight": "embedding.position.weight",
    "decoder.final_layernorm.weight": "final_norm.weight",
    "decoder.final_layernorm.bias": "final_norm.bias",
    "output_layer.weight": "head.weight",
}
# Families whose gates, ups and experts megatron-core saves in tensors of their own.
APART = ("qwen", "pattern")
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.core.dist_checkpointing") is None,
    reason="megatron-core is not installed",
)


def ours_by_their_names(found: Checkpoint, kind: str, their: str) -> Tensor:
    """Returns our tensor for a parameter of megatron-core's modules."""
    if their in OUTSIDE:
        return whole(found, f"{kind}/{OUTSIDE[their]}")
    layer, rest = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", their).groups()  # type: ignore[union-attr]
    if expert := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", rest):
        return whole(found, f"{kind}/layers.{layer}.mlp.experts.{expert[2]}")[int(expert[1])]
    for theirs, name in PARTS.items():
        rest = rest.replace(theirs, name)
    return whole(found, f"{'routers' if rest.endswith('router.bias') else kind}/layers.{layer}.{rest}")


def whole(found: Checkpoint, name: str) -> Tensor:
    return load_tensor(found.folder, found.manifest, name)


def require_equal(found: Checkpoint, theirs: dict[str, Any]) -> None:
    for kind in {"weights", "exp_avg", "exp_avg_sq"} & set(theirs):
        assert len(theirs[kind]) > 10
        for name, value in theirs[kind].items():
            mine = ours_by_their_names(found, kind, name)
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                value = value[:VOCABULARY] if mine.shape[0] == VOCABULARY else value
            assert torch.equal(mine, value), (kind, name)


def our_logits(found: Checkpoint) -> Tensor:
    model = _checkpoint_model(found, None)
    load_fragments(
        found.folder,
        found.manifest,
        (f for f in router_fragments(loads_of(model)) if f.tensor in found.manifest.tensors),
    )
    with torch.no_grad():
        return model(TOKENS, torch.arange(LENGTH).expand_as(TOKENS))[..., :VOCABULARY]


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns by family what we saved on four ranks and megatron-core read, and what it saved itself."""
    base = tmp_path_factory.mktemp("exchange")
    ours = {family: base / "ours" / family for family in FAMILIES}
    run_distributed(
        save_on_a_rank, 4, timeout=TIMEOUT, families=ours, layout="--tp 2 --pp 2 --sequence-parallel"
    )
    jobs = []
    for family, folder in ours.items():
        jobs.append(
            {"do": "load", "family": family, "folder": str(folder / "iter_0000005"), "out": f"{folder}.pt"}
        )
        arguments = arguments_of(family)
        theirs = base / "theirs" / family
        jobs.append(
            {
                "do": "save",
                "family": family,
                "folder": str(theirs / "iter_0000007"),
                "out": f"{theirs}.pt",
                "arguments": arguments,
                "apart": family in APART,
            }
        )
    (base / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, PROCESS, base / "jobs.json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for family in FAMILIES:
        (base / "theirs" / family / "latest_checkpointed_iteration.txt").write_text("7")
    return {
        family: {
            "ours": ours[family],
            "read": torch.load(f"{ours[family]}.pt", weights_only=True),
            "theirs": base / "theirs" / family,
            "written": torch.load(base / "theirs" / f"{family}.pt", weights_only=True),
        }
        for family in FAMILIES
    }


def arguments_of(family: str) -> dict[str, Any]:
    """Returns `args` as in a checkpoint of Megatron-LM."""
    same = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "kv_channels": 8, "max_position_embeddings": 16,
        "seq_length": 16, "padded_vocab_size": 128, "vocab_size": None, "make_vocab_size_divisible_by": 128, "iteration": 7,
        "consumed_train_samples": 56, "consumed_valid_samples": 0, "train_iters": 20, "global_batch_size": 8, "optimizer": "adam",
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "swiglu": False, "normalization": "LayerNorm",
        "add_bias_linear": True, "add_qkv_bias": False, "qk_layernorm": False, "group_query_attention": False, "num_query_groups": 1,
        "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False, "norm_epsilon": 1e-5,
        "ffn_hidden_size": 128, "num_experts": None, "rotary_base": 10000, "rotary_percent": 1.0, "moe_layer_freq": 1,
        "moe_router_topk": 2, "multi_latent_attention": False, "squared_relu": False,
    }  # fmt: skip
    modern = {
        "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "group_query_attention": True, "num_query_groups": 2,
        "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True, "norm_epsilon": 1e-6, "ffn_hidden_size": 64,
    }  # fmt: skip
    experts = {
        "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_router_score_function": "sigmoid", "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 40, "train_iters": None, "train_samples": 160,
    }  # fmt: skip
    return {
        "gpt": same,
        "qwen": {**same, **modern, "add_qkv_bias": True, "qk_layernorm": True},
        "mixture": {**same, **modern, **experts},
        "pattern": {**same, **modern, **experts, "moe_layer_freq": [0, 1]},
    }[family]


@needs_megatron
@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_core_reads_what_four_ranks_wrote(family: str, exchanged: dict[str, dict[str, Any]]) -> None:
    mine, read = exchanged[family]["ours"], exchanged[family]["read"]
    assert (mine / "latest_checkpointed_iteration.txt").read_text() == "5"
    # Without its manifest our checkpoint is read like that of another program.
    (mine / "iter_0000005" / "manifest.json").rename(mine / "manifest.json")
    found, _ = read_megatron(mine)
    require_equal(found, read)
    assert not read["weights"]["embedding.word_embeddings.weight"][VOCABULARY:].any(), "padding is zeros"
    logits = our_logits(found)
    torch.testing.assert_close(read["logits"][..., :VOCABULARY], logits, atol=1e-4, rtol=1e-4)
    assert logits.abs().max() > 0.5
    assert read["iteration"] == 5 and read["args"]["consumed_train_samples"] == 40
    assert read["args"]["num_layers"] == 2 and read["args"]["padded_vocab_size"] == 256


@needs_megatron
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_of_megatron_core_is_read(family: str, exchanged: dict[str, dict[str, Any]]) -> None:
    found, _ = read_megatron(exchanged[family]["theirs"])
    written = exchanged[family]["written"]
    require_equal(found, written)
    torch.testing.assert_close(our_logits(found), written["logits"][..., :VOCABULARY], atol=1e-4, rtol=1e-4)
    assert found.manifest.run_state["step"] == 7 and found.manifest.run_state["updates"] == 1
    assert found.manifest.run_state["consumed_samples"] == 56


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_of_a_bf16_run_are_rounded_and_its_masters_kept(tmp_path: Path) -> None:
    """Weights are saved in the dtype of the computation, as by Megatron-LM, beside fp32 master weights."""
    run_distributed(
        save_on_a_rank, 2, timeout=TIMEOUT, families={"qwen": tmp_path}, layout="--bf16 --zero-stage 1"
    )
    stored = open_torch_dist(tmp_path / "iter_0000005").tensors
    name = "decoder.layers.mlp.linear_fc1.weight"
    assert (
        stored[name].dtype == "bfloat16" and stored[f"optimizer.state.fp32_param.{name}"].dtype == "float32"
    )
    kept = find_step(tmp_path)[0]
    alone, _ = read_megatron(tmp_path / "iter_0000005")
    ours = "weights/layers.1.mlp.linear_fc1.weight"
    assert torch.equal(whole(kept, ours), whole(alone, ours)) and whole(alone, ours).dtype == torch.float32
    state = {name: torch.empty(stored[name].shape, dtype=torch.bfloat16)}
    dcp.load(state, checkpoint_id=tmp_path / "iter_0000005", no_dist=True)
    assert torch.equal(state[name][1], whole(kept, ours).bfloat16())


@needs_megatron
def test_run_resumes_from_it_in_another_layout(exchanged: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Resumes what megatron-core saved on one rank on four ranks, with the losses of one."""
    words = f"--load {exchanged['mixture']['theirs']} --ckpt-format torch_dist --allow-changed-data --train-iters 10 --lr 1e-3 --seq-length 16"
    run_distributed(train_on_a_rank, 1, timeout=TIMEOUT, folder=tmp_path / "alone", words=words)
    layout = "--tp 2 --sequence-parallel --ep 2 --zero-stage 1"
    run_distributed(
        train_on_a_rank, 4, timeout=TIMEOUT, folder=tmp_path / "spread", words=f"{words} {layout}"
    )
    alone, spread = losses(tmp_path / "alone"), losses(tmp_path / "spread")
    assert len(alone) == 3 and spread == pytest.approx(alone, rel=1e-5)
    assert find_step(tmp_path / "spread")[0].folder.name == "iter_0000010"


def parts(name: str, value: Tensor, tensors: int, gated: bool) -> list[Tensor]:
    """Splits a parameter into the shards of Megatron-LM's tensor ranks."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return list(value.chunk(tensors, 1))
    if gated and "linear_fc1." in name:
        gate, up = (half.chunk(tensors) for half in value.chunk(2))
        return [torch.cat(pair) for pair in zip(gate, up)]
    whole_rows = (
        "word_embeddings.weight",
        "output_layer.weight",
        "linear_qkv.weight",
        "linear_qkv.bias",
        "linear_fc1.weight",
    )
    if name.endswith((*whole_rows, "linear_fc1.bias")):
        return list(value.chunk(tensors))
    return [value] * tensors


def save_legacy(
    folder: Path, weights: dict[str, Tensor], arguments: dict[str, Any], sizes: tuple[int, int, int]
) -> None:
    """Writes one file for each rank, as Megatron-LM's --ckpt-format torch does."""
    tensors, stages, expert_ranks = sizes
    arguments = {**arguments, "pipeline_model_parallel_size": stages, "params_dtype": torch.bfloat16}
    for tensor, stage, expert in itertools.product(*map(range, sizes)):
        model: dict[str, Tensor] = {}
        for name, value in weights.items():
            here = parts(name, value, tensors, arguments["swiglu"])[tensor].clone()
            if layer := re.match(r"decoder\.layers\.(\d+)\.", name):
                if int(layer[1]) * stages // 2 != stage:
                    continue
                name = name.replace(layer[0], f"decoder.layers.{int(layer[1]) - stage * 2 // stages}.")
            elif (0 if name.startswith("embedding") else stages - 1) != stage:
                continue
            if number := re.search(r"local_experts\.(\d+)\.", name):
                each = 4 // expert_ranks
                if int(number[1]) // each != expert:
                    continue
                name = name.replace(number[0], f"local_experts.{int(number[1]) % each}.")
            model[name] = here
        rank = folder / "".join(
            [f"mp_rank_{tensor:02d}", f"_{stage:03d}" * (stages > 1), f"_{expert:03d}" * (expert_ranks > 1)]
        )
        rank.mkdir(parents=True)
        content = {
            "args": Namespace(**arguments),
            "iteration": 9,
            "checkpoint_version": 3.0,
            "model": model,
            "optimizer": {},
        }
        torch.save(content, rank / "model_optim_rng.pt")


@needs_megatron
@pytest.mark.parametrize(
    ("family", "sizes"),
    [("gpt", (2, 2, 1)), ("qwen", (2, 1, 1)), ("mixture", (1, 2, 2)), ("mixture", (2, 1, 2))],
)
def test_files_of_all_ranks_are_put_together(
    family: str, sizes: tuple[int, int, int], exchanged: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    written = exchanged[family]["written"]
    save_legacy(tmp_path / "iter_0000009", written["weights"], arguments_of(family), sizes)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9\n")
    found, remarks = read_megatron(tmp_path)
    require_equal(found, {"weights": written["weights"]})
    assert found.manifest.step == 9 and "only the weights are read" in remarks[-1]
    torch.testing.assert_close(our_logits(found), written["logits"][..., :VOCABULARY], atol=1e-4, rtol=1e-4)
