"""Entry points: the same settings, with the defaults and the word meanings each guide gives them.

`--batch-size` is the global batch of the example script and the batch of one data-parallel rank in the 3D
project, so the entry point decides; `pentatron train` asks for the unambiguous flags instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EntryPoint:
    """One program a user starts."""

    name: str
    summary: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    default_preset: str | None = None
    # Whether a run goes on by itself from what its folder holds. Others start anew, unless --load names that folder.
    resumes: bool = True
    # Flags that the program takes for itself beside the settings: whoever misspells one is to hear of it, and where they are listed, if
    # that is another program.
    own: Sequence[str] = ()
    own_help: str = ""


_SMALL_MODEL = {"vocab_size": 8192, "num_layers": 4, "hidden_size": 256, "seq_length": 256}
_RANK_BATCH = {"batch-size": "rank_batch_size"}

TRAIN = EntryPoint(
    name="pentatron train",
    summary="Train a model. With no flag at all: a small one on this machine's own Python library.",
    refused={
        "batch-size": "say --micro-batch-size (samples one rank computes at once) or --global-batch-size instead"
    },
    default_preset="demo",
)
PRETRAIN_GPT = EntryPoint(
    name="pretrain_gpt.py",
    summary="Pretrain a GPT-like model with Megatron's flags.",
    refused={"batch-size": "say --micro-batch-size or --global-batch-size instead, as Megatron does"},
    defaults={
        "run_dir": "runs/pretrain_gpt",
        "lr_decay_style": "linear",
        "tokenizer_type": "GPT2BPETokenizer",
        "console_lines": "megatron",
        # As in Megatron, --save asks for checkpoints.
        "save_checkpoints": False,
    },
    resumes=False,
)
EXAMPLE = EntryPoint(
    name="megatron_core_training_example.py",
    summary="The self-contained example: synthetic data unless told otherwise; --batch-size is the global batch.",
    defaults={
        **_SMALL_MODEL,
        "run_dir": "runs/megatron_core_training_example",
        "dataset_size": 1000,
        "global_batch_size": 8,
        "train_iters": 100,
        "lr_warmup_iters": 10,
        "eval_interval": 0,
    },
    spellings={"batch-size": "global_batch_size"},
    resumes=False,
)
# Those of torch's GradScaler, which the guide of this project writes out.
GRAD_SCALER: Mapping[str, Any] = {
    "initial_loss_scale": 2.0**16,
    "loss_scale_window": 2000,
    "hysteresis": 1,
    "min_loss_scale": 0.0,
}
_PROJECT_3D = {
    **_SMALL_MODEL,
    **GRAD_SCALER,
    "dataset_size": 10000,
    "rank_batch_size": 8,
    "train_iters": 200,
    "eval_interval": 0,
}
STANDARD = EntryPoint(
    name="train.py",
    summary="Standard training: data parallel, or data and tensor parallel; --batch_size is per data-parallel rank.",
    defaults={**_PROJECT_3D, "run_dir": "output_standard"},
    spellings=_RANK_BATCH,
    resumes=False,
)
PARALLEL_3D = EntryPoint(
    name="train_3d_parallel.py",
    summary="3D parallel training: data, tensor and pipeline; --batch_size is per data-parallel rank.",
    defaults={**_PROJECT_3D, "run_dir": "output_3d_parallel"},
    spellings=_RANK_BATCH,
    resumes=False,
)
MEGATRON = EntryPoint(
    name="train_megatron.py",
    summary="Megatron-style training of the 3D project; --batch_size is per data-parallel rank.",
    defaults={**_PROJECT_3D, "run_dir": "output_megatron"},
    spellings=_RANK_BATCH,
    resumes=False,
)

# Shows a layout and trains nothing, so data and length are settled here.
LAYOUT = EntryPoint(
    name="pentatron layout",
    summary="Show which rank does what under the same settings as `pentatron train`. Nothing is started.",
    refused=TRAIN.refused,
    defaults={"dataset_size": 1000, "vocab_size": 32768, "train_iters": 1},
    own=("draw", "all", "json"),
)

ENTRY_POINTS = {
    entry.name: entry for entry in (TRAIN, PRETRAIN_GPT, EXAMPLE, STANDARD, PARALLEL_3D, MEGATRON)
}
