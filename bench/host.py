"""Measures the host time of a training step against transformers (eager), with tiny tensors.

The model is a GPT-2 of twelve layers and hidden size 16; a step has one sequence of eight tokens, in fp32, on
one thread. (In bf16 the small matmuls of a CPU take longer than everything around them.) Ours is the step of
`pentatron train`; the other is a minimal step with clipping at 1.0 and torch's fused AdamW. A round times
some steps of each; every other round begins with the other side. The ratio is that of the median round. On a
CPU the CPU time of the process counts, which other load disturbs less. On a GPU (`--device cuda`) the time
until the loss of a step is known counts.

    python bench/host.py
    python bench/host.py --flags "--compile on --compile-layers-together 4" --profile 30
"""

import argparse
import contextlib
import cProfile
import io
import os
import platform
import pstats
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.ours import opened, random_batch

# At least as fast as transformers.
GOAL = 1.0
LAYERS, HIDDEN, HEADS, VOCABULARY, SAMPLES, SEQUENCE = 12, 16, 2, 64, 1, 8
Step = Callable[[], Any]


def our_step(device: str, flags: str, cleanup: contextlib.ExitStack) -> tuple[Step, int]:
    """Returns a training step of Pentatron and the number of parameters."""
    folder = cleanup.enter_context(tempfile.TemporaryDirectory())
    text = (
        f"--preset gpt2 --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {4 * HIDDEN} --num-attention-heads {HEADS} "
        f"--kv-channels {HIDDEN // HEADS} --vocab-size {VOCABULARY} --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} "
        f"--micro-batch-size {SAMPLES} --global-batch-size {SAMPLES} --hidden-dropout 0 --attention-dropout 0 --lr 1e-5 "
        f"--lr-decay-style constant --clip-grad 1.0 --no-save-checkpoints --eval-interval 0 --progress-bar off --train-iters 100000 "
        f"--dataset-size 1000 --device {device} --nproc-per-node 1 --threads-per-process {torch.get_num_threads()} "
        f"--run-dir {folder}/run {flags}"
    )
    with contextlib.redirect_stdout(io.StringIO()):
        session = opened(shlex.split(text), cleanup)
    batch, trainer = random_batch(session), session.trainer
    return lambda: trainer.advance(batch)[0].loss, session.model.count_parameters()


def their_step(device: str) -> tuple[Step, int]:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    model.train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    tokens = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE), device=device)

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step, sum(p.numel() for p in parameters)


def in_turns(steps: list[Step], rounds: int, count: int, clock: Callable[[], float]) -> list[list[float]]:
    """Returns the seconds of the median step of each side in every round, after warm-up steps."""
    times: list[list[float]] = [[] for _ in steps]
    for step in steps:
        for _ in range(5):
            step()
    for number in range(rounds):
        order = list(range(len(steps)))
        for which in order if number % 2 == 0 else order[::-1]:
            found = []
            for _ in range(count):
                began = clock()
                steps[which]()
                found.append(clock() - began)
            times[which].append(statistics.median(found))
    return times


def show_profile(step: Step, rows: int, count: int = 10) -> None:
    """Profiles steps with backward in this thread; on a GPU it would otherwise run in another one."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        step()
        profile.enable()
        for _ in range(count):
            step()
        profile.disable()
    for order in ("tottime", "cumulative"):
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats(order).print_stats(rows)
        print(f"{count} steps", text.getvalue())


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Times the host work of a training step against transformers."
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="steps of each side in a round")
    parser.add_argument("--flags", default="", help="further flags for pentatron train")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="ROWS", help="print this many of the slowest functions"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    import transformers

    print(
        f"{LAYERS} layers of {HIDDEN}, {SAMPLES} × {SEQUENCE} tokens a step, {options.device}; torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    )
    with contextlib.ExitStack() as cleanup:
        (ours, own_count), (theirs, count) = (
            our_step(options.device, options.flags, cleanup),
            their_step(options.device),
        )
        assert own_count == count, f"not the same model: {own_count} and {count} parameters"
        clock = time.perf_counter if options.device == "cuda" else time.process_time
        times = in_turns([ours, theirs], options.rounds, options.steps, clock)
        own, other = (1000 * statistics.median(found) for found in times)
        of_rounds = sorted(their / our for our, their in zip(*times))
        ratio = statistics.median(of_rounds)
        verdict = f"at least {GOAL:.2f}: {'holds' if ratio >= GOAL else 'MISSED'}"
        print(
            f"ours {own:.2f} ms, transformers {other:.2f} ms: {ratio:.2f}x as fast, rounds from {of_rounds[0]:.2f} to "
            f"{of_rounds[-1]:.2f}; {verdict}",
            flush=True,
        )
        if options.profile:
            show_profile(ours, options.profile)
    return 0 if ratio >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
