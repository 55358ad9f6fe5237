"""The scripts under examples/ pass the settings of their presets and guides."""

import os
import subprocess
from pathlib import Path

import pytest

from pentatron.settings.entry_points import PRETRAIN_GPT
from pentatron.settings.presets import presets
from pentatron.settings.resolve import gather

ROOT = Path(__file__).resolve().parents[1]
_QWEN = "examples/post_training/modelopt/conf/Qwen"
CONFIGS = {
    "examples/rl/model_configs/qwen3_8b.sh": "qwen3-8b",
    "examples/rl/model_configs/qwen_2p5_32b.sh": "qwen2.5-32b",
    f"{_QWEN}/Qwen2.5-0.5B-Instruct.sh": "qwen2.5-0.5b",
    f"{_QWEN}/Qwen2.5-7B-Instruct.sh": "qwen2.5-7b",
    f"{_QWEN}/Qwen3-0.6B.sh": "qwen3-0.6b",
    f"{_QWEN}/Qwen3-8B.sh": "qwen3-8b",
    f"{_QWEN}/Qwen3-30B-A3B.sh": "qwen3-30b-a3b",
    f"{_QWEN}/Qwen3-235B-A22B.sh": "qwen3-235b-a22b",
}


@pytest.mark.parametrize("script", CONFIGS)
def test_a_model_script_has_the_shape_of_its_preset(script: str) -> None:
    variable = "MODEL_OPTIONS" if "/rl/" in script else "MODEL_ARGS"
    command = f"source {ROOT / script}; echo ${{{variable}}}"
    words = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, check=True)
    draft = gather(words.stdout.split(), PRETRAIN_GPT)
    shape = presets()[CONFIGS[script]]
    assert {name: getattr(draft, name) for name in shape} == shape


def test_every_model_script_is_compared() -> None:
    found = {str(p.relative_to(ROOT)) for p in (ROOT / "examples").rglob("*.sh") if "conf" in str(p.parent)}
    assert found == set(CONFIGS)


def words_of(script: str, *words: str, **environment: str) -> list[str]:
    """Returns the arguments that a script passes to torchrun."""
    folder = environment.pop("folder")
    stand_in = Path(folder) / "torchrun"
    stand_in.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    found = subprocess.run(
        ["bash", str(ROOT / script), *words],
        cwd=folder,
        env={**os.environ, **environment, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.splitlines()


def test_the_175b_script_gives_every_number_of_its_guide(tmp_path: Path) -> None:
    words = words_of(
        "examples/gpt3/train_gpt3_175b_distributed.sh",
        *("checkpoints", "logs", "vocab.json", "merges.txt", "data"),
        folder=str(tmp_path),
    )
    at = words.index(str(ROOT / "pretrain_gpt.py"))
    assert words[:at] == (
        "--nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6000".split()
    )
    given = gather(words[at + 1 :], PRETRAIN_GPT)
    expected = {
        "num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "seq_length": 2048,
        "max_position_embeddings": 2048, "micro_batch_size": 1, "global_batch_size": 1536,
        "rampup_batch_size": (16, 16, 5859375), "train_iters": 500000, "weight_decay": 0.1, "adam_beta1": 0.9,
        "adam_beta2": 0.95, "init_method_std": 0.006, "clip_grad": 1.0, "fp16": True, "lr": 6e-5, "min_lr": 6e-6,
        "lr_decay_style": "cosine", "lr_warmup_fraction": 0.001, "lr_decay_iters": 430000,
        "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 16, "split": "949,50,1", "log_interval": 100,
        "save_interval": 10000, "eval_interval": 1000, "eval_iters": 10, "save": "checkpoints", "load": "checkpoints",
        "tensorboard_dir": "logs", "vocab_file": "vocab.json", "merge_file": "merges.txt", "data_path": ("data",),
    }  # fmt: skip
    assert {name: getattr(given, name) for name in expected} == expected
    names = ["DISTRIBUTED_ARGS", "GPT_MODEL_ARGS", "TRAINING_ARGS", "MODEL_PARALLEL_ARGS", "DATA_ARGS"]
    text = (ROOT / "examples/gpt3/train_gpt3_175b_distributed.sh").read_text()
    assert all(f"\n{name}=(" in text for name in [*names, "EVAL_AND_LOGGING_ARGS"])


@pytest.mark.parametrize(("script", "processes"), [("train_qwen.sh", 2), ("continue_pretraining.sh", 8)])
def test_the_qwen_scripts_give_every_number_of_their_guide(
    script: str, processes: int, tmp_path: Path
) -> None:
    words = words_of(f"examples/qwen/{script}", "--train-iters", "7", folder=str(tmp_path), TP="4")
    assert words[0] == f"--nproc_per_node={processes}"
    given = gather(words[2:], PRETRAIN_GPT)
    shape = {n: v for n, v in presets()["qwen2.5-7b"].items() if n not in ("vocab_size", "layernorm_epsilon")}
    expected = {
        **shape, "padded_vocab_size": 152064, "seq_length": 4096, "micro_batch_size": 1, "global_batch_size": 64,
        "train_iters": 7, "lr": 1e-5, "min_lr": 1e-6, "lr_warmup_iters": 100, "lr_decay_style": "cosine", "weight_decay": 0.01,
        "clip_grad": 1.0, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "bf16": True, "sequence_parallel": True,
        "zero_stage": 1, "recompute_granularity": "selective", "save_interval": 500, "finetune": True, "split": "99,1,0",
        "tensor_model_parallel_size": 4, "ckpt_format": "torch_dist",
    }  # fmt: skip
    assert {name: getattr(given, name) for name in expected} == expected
