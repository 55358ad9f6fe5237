"""Entry points: the programs that share the settings, with their own defaults and meanings of flags.

`--batch-size` is the global batch in the example script and the batch of one data-parallel rank in the 3D
project. `pentatron train` refuses it and suggests the unambiguous flags.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EntryPoint:
    """A program that the user starts.

    `spellings` maps further flags to settings, `refused` maps ambiguous flags to the advice in the error
    message. `resumes`: resume from checkpoints in the run folder by default. Other programs start a new run
    unless --load names that folder. `own`: flags of the program that are not settings, for suggestions after
    a misspelling; `own_help`: the program whose --help lists them, if it is another one.
    """

    name: str
    summary: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    default_preset: str | None = None
    resumes: bool = True
    own: Sequence[str] = ()
    own_help: str = ""


_SMALL_MODEL = {"vocab_size": 8192, "num_layers": 4, "hidden_size": 256, "seq_length": 256}

TRAIN = EntryPoint(
    name="pentatron train",
    summary="Train a model. Without flags: a small demo model on the source of Python's standard library.",
    refused={"batch-size": "use --micro-batch-size (samples per micro-batch) or --global-batch-size instead"},
    default_preset="demo",
)
PRETRAIN_GPT = EntryPoint(
    name="pretrain_gpt.py",
    summary="Pretrain a GPT-like model with Megatron's flags.",
    refused={"batch-size": "use --micro-batch-size or --global-batch-size instead, as in Megatron"},
    defaults={
        "run_dir": "runs/pretrain_gpt",
        "lr_decay_style": "linear",
        "tokenizer_type": "GPT2BPETokenizer",
        "console_lines": "megatron",
        # As in Megatron, checkpoints are saved only with --save.
        "save_checkpoints": False,
    },
    resumes=False,
)
EXAMPLE = EntryPoint(
    name="megatron_core_training_example.py",
    summary="The self-contained example: synthetic data by default; --batch-size is the global batch.",
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
# Defaults of torch's GradScaler, which the guide of the 3D project uses.
GRAD_SCALER: Mapping[str, Any] = {
    "initial_loss_scale": 2.0**16,
    "loss_scale_window": 2000,
    "hysteresis": 1,
    "min_loss_scale": 0.0,
}


def _3d_script(kind: str, name: str, summary: str) -> EntryPoint:
    """Returns a script of the 3D project. They share defaults, and their batch is that of a rank."""
    own = {"dataset_size": 10000, "rank_batch_size": 8, "train_iters": 200, "eval_interval": 0}
    return EntryPoint(
        name,
        f"{summary}; --batch_size is per data-parallel rank.",
        defaults={**_SMALL_MODEL, **GRAD_SCALER, **own, "run_dir": f"output_{kind}"},
        spellings={"batch-size": "rank_batch_size"},
        resumes=False,
    )


STANDARD = _3d_script("standard", "train.py", "Standard training: data parallel, or data and tensor parallel")
PARALLEL_3D = _3d_script(
    "3d_parallel", "train_3d_parallel.py", "3D parallel training: data, tensor and pipeline"
)
MEGATRON = _3d_script("megatron", "train_megatron.py", "Megatron-style training of the 3D project")

# Only shows a layout, so data and length have defaults.
LAYOUT = EntryPoint(
    name="pentatron layout",
    summary="Show ranks, process groups and stages with the settings of `pentatron train`. Nothing is started.",
    refused=TRAIN.refused,
    defaults={"dataset_size": 1000, "vocab_size": 32768, "train_iters": 1},
    own=("draw", "all", "json"),
)

_PROGRAMS = (TRAIN, PRETRAIN_GPT, EXAMPLE, STANDARD, PARALLEL_3D, MEGATRON)
ENTRY_POINTS = {entry.name: entry for entry in _PROGRAMS}
