"""Runs training steps of transformers, transformers with liger-kernel, and torchtitan.

bench/gpu.py starts this script, sends it commands and measures with the same clock as for ours. The steps use
nothing of Pentatron. torchtitan and liger-kernel must be on the Python path: installed with pip, or as wheels
unpacked in the folder that bench/gpu.py receives as --peers.

    python bench/gpu.py --compare titan:compile hf:liger hf:eager --shape qwen3-8b-8l
"""

import argparse
import os
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.kernel_groups import GRADIENT_NORM, LOSS
from bench.steps import SHAPES, Case, Server, Shape, Step

LEARNING_RATE, BETAS, CLIP = 1e-5, (0.9, 0.95), 1.0


def adamw(model: nn.Module, device: str) -> torch.optim.Optimizer:
    """Returns AdamW with state in the precision of the parameters, which is fp32 here."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, fused=device == "cuda")


def random_tokens(case: Case) -> Tensor:
    return torch.randint(SHAPES[case.shape].vocabulary, (case.micro_batch, case.sequence), device=case.device)


def full_step(model: nn.Module, loss_of: Callable[[], Tensor], device: str) -> Step:
    """Returns a step of forward, loss, backward, clipping and update, which then frees the gradients."""
    optimizer = adamw(model, device)

    def step() -> Tensor:
        loss = loss_of()
        loss.backward()
        with record_function(GRADIENT_NORM):
            nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


# --- transformers ---


def hf_config(shape: Shape, sequence: int) -> Any:
    import transformers

    if shape.family == "gpt2":
        return transformers.GPT2Config(
            n_layer=shape.layers,
            n_embd=shape.hidden,
            n_head=shape.heads,
            vocab_size=shape.vocabulary,
            n_positions=sequence,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    kind = {
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "qwen3_moe": transformers.Qwen3MoeConfig,
    }[shape.family]
    more: dict[str, Any] = {} if shape.family == "qwen2" else {"head_dim": shape.head_size}
    if shape.experts is not None:
        count, chosen, width = shape.experts
        more |= {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": width}
        more |= {"norm_topk_prob": True, "output_router_logits": True}
    return kind(
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=sequence,
        use_cache=False,
        **more,
    )


def transformers_step(case: Case, way: str) -> Step:
    """Returns a step of fp32 weights under bf16 autocast, as in the library's own trainer."""
    import transformers

    shape = SHAPES[case.shape]
    if way == "liger":
        from liger_kernel.transformers import monkey_patch

        getattr(monkey_patch, f"apply_liger_kernel_to_{shape.family}")()
    torch.manual_seed(0)
    with torch.device(case.device):
        model = transformers.AutoModelForCausalLM.from_config(
            hf_config(shape, case.sequence), dtype=torch.float32, attn_implementation="sdpa"
        )
    model.train()
    called: Any = torch.compile(model) if way == "compile" else model
    tokens = random_tokens(case)

    def loss_of() -> Tensor:
        with torch.autocast(case.device, torch.bfloat16):
            loss: Tensor = called(input_ids=tokens, labels=tokens).loss
        return loss

    return full_step(model, loss_of, case.device)


# --- torchtitan ---


def _without_initialisation(name: str, folder: Path) -> None:
    """Registers a package without running its `__init__.py`, which imports data sets and loggers."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def torchtitan_step(case: Case, way: str) -> Step:
    """Returns a step of torchtitan's Qwen3 under FSDP2 with mixed precision.

    With `compile`, every block and the loss are compiled.
    """
    import torch.distributed as dist
    import torchtitan
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for absent, names in (
        ("datasets", ("Dataset", "load_dataset")),
        ("datasets.distributed", ("split_dataset_by_node",)),
    ):
        if absent not in sys.modules:
            sys.modules[absent] = types.ModuleType(absent)
            for name in names:
                setattr(sys.modules[absent], name, None)
    _without_initialisation("torchtitan.models.qwen3", Path(torchtitan.__file__).parent / "models" / "qwen3")
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
    from torchtitan.models.qwen3.model.model import Qwen3Model

    shape = SHAPES[case.shape]
    if shape.family not in ("qwen2", "qwen3"):
        raise ValueError(f"torchtitan's Qwen3 model has no {shape.family} shape here")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl" if case.device == "cuda" else "gloo", rank=0, world_size=1)
    sizes = Qwen3ModelArgs(
        vocab_size=shape.vocabulary,
        max_seq_len=case.sequence,
        head_dim=shape.head_size,
        dim=shape.hidden,
        n_layers=shape.layers,
        n_heads=shape.heads,
        n_kv_heads=shape.groups,
        hidden_dim=shape.feed_forward,
        rope_theta=shape.theta,
        # Qwen2.5 has biases instead of QK norms; this model has no biases.
        qk_norm=shape.family == "qwen3",
        enable_weight_tying=shape.tied,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen3Model(sizes)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = list(model.layers.values())
    for block in blocks:
        if way == "compile":
            block.compile(fullgraph=True)
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=case.device)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(case.device))
    model.train()
    tokens = random_tokens(case)
    labels = tokens.roll(-1, 1)

    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))

    compiled = torch.compile(cross_entropy) if way == "compile" else cross_entropy

    def loss_of() -> Tensor:
        logits = model(tokens)
        with record_function(LOSS):
            return compiled(logits, labels)

    return full_step(model, loss_of, case.device)


KINDS = {"hf": transformers_step, "titan": torchtitan_step}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Computes training steps of other libraries on commands from standard input."
    )
    parser.add_argument(
        "--case", required=True, help="hf:eager, hf:compile, hf:liger, titan:eager or titan:compile"
    )
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    kind, _, way = options.case.partition(":")
    case = Case(options.case, options.shape, options.micro_batch, options.seq, options.device)
    Server(case, lambda: KINDS[kind](case, way)).run()


if __name__ == "__main__":
    main()
