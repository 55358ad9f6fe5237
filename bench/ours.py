"""Runs the training step of `pentatron train` alone, with one batch repeated.

Settings, session, model, optimizer and trainer are those of `pentatron train`. bench/gpu.py starts this
script and sends it commands:

    python bench/ours.py --shape qwen3-8b-8l --micro-batch 4 --seq 4096
"""

import argparse
import contextlib
import dataclasses
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.kernel_groups import GRADIENT_NORM, OPTIMIZER
from bench.steps import SHAPES, Case, Server, Step
from pentatron.cli.configure import prepare
from pentatron.cli.environment import RankInfo
from pentatron.cli.train import joined_process_group
from pentatron.data.loader import Batch
from pentatron.settings.entry_points import TRAIN
from pentatron.train.batches import micro_batches
from pentatron.train.session import Session, open_session

# The shapes as settings; everything else has the default of `pentatron train`.
MODELS = {
    "qwen2.5-1.5b": "--preset qwen2.5-1.5b",
    "qwen3-8b-8l": "--preset qwen3-8b --num-layers 8",
    "qwen3-30b-a3b-4l": "--preset qwen3-30b-a3b --num-layers 4",
    "qwen3-dense-a3b-4l": "--preset qwen3-8b --num-layers 4 --hidden-size 2048 --ffn-hidden-size 6144 --num-query-groups 4",
    "gpt2-124m": "--preset gpt2 --hidden-dropout 0 --attention-dropout 0",
    "tiny": "--preset qwen3-0.6b --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 "
    "--kv-channels 16 --vocab-size 512 --untie-embeddings-and-output-weights",
}
# As in bench/peers.py: AdamW with these betas, gradients clipped at 1.
TRAINING = "--lr 1e-5 --lr-decay-style constant --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.01 --clip-grad 1.0"
# Flags of the variant that a case's name has after the colon.
VARIANTS = {
    "fp8": "--fp8 hybrid",
    "fp8-e4m3": "--fp8 e4m3",
    "fp8-head": "--fp8 hybrid --fp8-output-layer",
    "fp8-rowwise": "--fp8 hybrid --fp8-recipe rowwise",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective": "--recompute-granularity selective",
}
QUIET = "--no-save-checkpoints --eval-interval 0 --eval-iters 0 --progress-bar off --nproc-per-node 1"


def words_of(case: Case, flags: str, run_dir: Path, steps: int) -> list[str]:
    """Returns the arguments of `pentatron train` without its data."""
    variant = case.name.partition(":")[2]
    chosen = "" if not variant else VARIANTS.get(variant, variant)
    precision = "--bf16" if case.device == "cuda" else "--device cpu"
    sizes = f"--micro-batch-size {case.micro_batch} --global-batch-size {case.micro_batch} --seq-length {case.sequence}"
    text = (
        f"{MODELS[case.shape]} {sizes} {precision} {TRAINING} {QUIET} --train-iters {steps} {chosen} {flags}"
    )
    return [*shlex.split(text), "--run-dir", str(run_dir)]


def random_batch(session: Session) -> list[Batch]:
    """Returns the micro-batches of one step as the loop draws them, with random tokens."""
    trainer = session.trainer
    source = micro_batches(session.config, session.world, trainer.datasets.train, 0)
    count = session.config.accumulation
    vocabulary = session.config.model.vocab_size
    assert vocabulary is not None
    found = []
    for _ in range(count):
        batch = next(source)
        tokens = torch.randint_like(batch.tokens, vocabulary)
        found.append(dataclasses.replace(batch, tokens=tokens, labels=tokens.roll(-1, 1)))
    return found


def mark(owner: Any, name: str, label: str) -> None:
    """Wraps a method in `record_function`, so that its kernels are found by `label` in a profile."""
    method: Callable[..., Any] | None = getattr(owner, name, None)
    if method is None:
        return
    plain = method

    def marked(*args: Any, **named: Any) -> Any:
        with record_function(label):
            return plain(*args, **named)

    with contextlib.suppress(AttributeError):
        setattr(owner, name, marked)


def opened(words: Sequence[str], cleanup: contextlib.ExitStack) -> Session:
    """Returns the session of `pentatron train` with these arguments, ready for its first step."""
    prepared = prepare(list(words), dataclasses.replace(TRAIN, default_preset=None, resumes=False))
    world, resolved = cleanup.enter_context(joined_process_group(prepared, RankInfo(0, 1, 0, 1, "none")))
    session = cleanup.enter_context(open_session(resolved, world, resumes=False))
    session.open_data()
    session.build()
    session.prepare()
    return session


def build(case: Case, flags: str, run_dir: Path, cleanup: contextlib.ExitStack) -> Step:
    session = opened([*words_of(case, flags, run_dir, 10_000), "--dataset-size", "1000"], cleanup)
    trainer, batch = session.trainer, random_batch(session)
    for name in ("step", "start_step"):
        mark(session.optimizer, name, OPTIMIZER)
    mark(session.optimizer, "squared_norm", GRADIENT_NORM)

    def step() -> Any:
        result, _ = trainer.advance(batch)
        return result.loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Computes training steps of Pentatron on commands from standard input."
    )
    parser.add_argument("--case", default="ours")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b-8l")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--flags", default="", help="further flags for pentatron train")
    options = parser.parse_args()
    case = Case(options.case, options.shape, options.micro_batch, options.seq, options.device)
    folder = tempfile.TemporaryDirectory()
    run_dir = Path(folder.name) / "run"
    with contextlib.ExitStack() as cleanup:
        Server(case, lambda: build(case, options.flags, run_dir, cleanup), folder.cleanup).run()


if __name__ == "__main__":
    main()
