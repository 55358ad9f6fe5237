"""Measures a training step on the CPU against the same model in transformers (eager).

Each side has its own process; the two compute in turns. Ours is the session, optimizer and trainer of
`pentatron train`. The other is a Qwen2 model of the same sizes with weights in the same precision, fp32
optimizer state and clipping at 1.0. A round times some steps of each side; every other round begins with the
other side.

Rates are those of the median step. The ratio is that of the median round, so that other load on the machine
affects both sides alike. The ratio of CPU seconds, over all threads, is disturbed less by other load, but
includes threads that wait for each other. In fp32 most of a step is spent in the same matmuls, so expect a
ratio little above 1. On a machine with other load the ratio is not meaningful.

    python bench/cpu.py --threads 2 --rounds 20
"""

import argparse
import contextlib
import dataclasses
import io
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.ours import opened, random_batch

# At least as fast as transformers.
GOAL = 1.0
LEARNING_RATE, BETAS, EPSILON, DECAY = 1e-5, (0.9, 0.95), 1e-8, 0.01
Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int = 4
    hidden: int = 512
    feed_forward: int = 1408
    heads: int = 8
    groups: int = 2
    vocabulary: int = 8192
    samples: int = 2
    sequence: int = 256

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence


def our_step(sizes: Sizes, precision: str, flags: str, cleanup: contextlib.ExitStack) -> tuple[Step, int]:
    """Returns a training step of Pentatron and the number of parameters."""
    folder = cleanup.enter_context(tempfile.TemporaryDirectory())
    text = (
        f"--preset qwen2.5-0.5b --num-layers {sizes.layers} --hidden-size {sizes.hidden} --ffn-hidden-size {sizes.feed_forward} "
        f"--num-attention-heads {sizes.heads} --num-query-groups {sizes.groups} --kv-channels {sizes.hidden // sizes.heads} "
        f"--vocab-size {sizes.vocabulary} --seq-length {sizes.sequence} --micro-batch-size {sizes.samples} "
        f"--global-batch-size {sizes.samples} --lr {LEARNING_RATE} --lr-decay-style constant --adam-beta2 {BETAS[1]} "
        f"--adam-eps {EPSILON} --weight-decay {DECAY} --clip-grad 1.0 --no-save-checkpoints --eval-interval 0 --progress-bar off "
        f"--train-iters 10000 --dataset-size 1000 --device cpu --nproc-per-node 1 --threads-per-process {torch.get_num_threads()} "
        f"--run-dir {folder}/run {'--bf16' if precision == 'bf16' else ''} {flags}"
    )
    with contextlib.redirect_stdout(io.StringIO()):
        session = opened(shlex.split(text), cleanup)
    batch, trainer = random_batch(session), session.trainer
    return lambda: trainer.advance(batch)[0].loss, session.model.count_parameters()


def their_step(sizes: Sizes, precision: str) -> tuple[Step, int]:
    import transformers

    config = transformers.Qwen2Config(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.groups,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.sequence,
        tie_word_embeddings=True,
        use_cache=False,
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    update = (_plain_update if precision == "fp32" else _update_of_copies)(model)
    tokens = torch.randint(sizes.vocabulary, (sizes.samples, sizes.sequence))

    def step() -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        update()
        return loss.detach()

    return step, sum(p.numel() for p in model.parameters())


def _adamw(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=True
    )


def _plain_update(model: nn.Module) -> Callable[[], None]:
    parameters = list(model.parameters())
    optimizer = _adamw(parameters)

    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def _update_of_copies(model: nn.Module) -> Callable[[], None]:
    """Returns an AdamW update of fp32 copies of bf16 weights, which ours keeps as well."""
    parameters = list(model.parameters())
    copies = [p.detach().float().requires_grad_() for p in parameters]
    optimizer = _adamw(copies)

    @torch.no_grad()
    def update() -> None:
        for copy, p in zip(copies, parameters):
            assert p.grad is not None
            copy.grad = p.grad.float()
            p.grad = None
        nn.utils.clip_grad_norm_(copies, 1.0)
        optimizer.step()
        for copy, p in zip(copies, parameters):
            p.copy_(copy)
            copy.grad = None

    return update


@dataclasses.dataclass
class Times:
    """Seconds of the median step, and CPU seconds per step over all threads, of every round."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)


class StepProcess:
    """Process that computes steps on request.

    Each side has its own process, so that neither benefits from what the other did to its memory.
    """

    def __init__(self, who: str, sizes: Sizes, precision: str, flags: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._asked, answers = context.Pipe()
        words = (answers, who, sizes, precision, flags, threads)
        self._process = context.Process(target=_answer, args=words, daemon=True)
        self._process.start()
        answers.close()
        self.parameters: int = self._asked.recv()

    def steps(self, count: int) -> tuple[float, float]:
        """Returns the seconds of the median step, and the CPU seconds per step."""
        self._asked.send(("steps", count))
        wall, cpu = self._asked.recv()
        return wall, cpu

    def profile(self) -> str:
        self._asked.send(("profile", 2))
        return str(self._asked.recv())

    def end(self) -> None:
        self._asked.close()
        self._process.join(10)
        self._process.kill()


def _answer(asked: Any, who: str, sizes: Sizes, precision: str, flags: str, threads: int) -> None:
    torch.set_num_threads(threads)
    with contextlib.ExitStack() as cleanup:
        step, parameters = (
            our_step(sizes, precision, flags, cleanup) if who == "ours" else their_step(sizes, precision)
        )
        asked.send(parameters)
        with contextlib.suppress(EOFError):
            while True:
                what, count = asked.recv()
                asked.send(timed(step, count) if what == "steps" else _profiled(step, count))


def timed(step: Callable[[], object], count: int) -> tuple[float, float]:
    found = []
    cpu_before = time.process_time()
    for _ in range(count):
        began = time.perf_counter()
        step()
        found.append(time.perf_counter() - began)
    return statistics.median(found), (time.process_time() - cpu_before) / count


def _profiled(step: Step, count: int) -> str:
    with torch.profiler.profile() as profiler:
        for _ in range(count):
            step()
    return str(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=22))


class Timed(Protocol):
    def steps(self, count: int) -> tuple[float, float]: ...


def in_turns(processes: Sequence[Timed], rounds: int, count: int, warm: int = 2) -> list[Times]:
    """Times the processes in rounds of alternating order, after `warm` untimed steps of each."""
    times = [Times() for _ in processes]
    for process in processes:
        process.steps(warm)
    for number in range(rounds):
        order = list(range(len(processes)))
        for which in order if number % 2 == 0 else order[::-1]:
            wall, cpu = processes[which].steps(count)
            times[which].wall.append(wall)
            times[which].cpu.append(cpu)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Times training steps of Pentatron and of transformers on the CPU."
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1, help="steps of each side in a round")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--layers", type=int, default=Sizes.layers)
    parser.add_argument("--sequence", type=int, default=Sizes.sequence)
    parser.add_argument("--flags", default="", help="further flags for pentatron train")
    parser.add_argument(
        "--json", metavar="FOLDER", help="write the result into this folder, for docs/performance.md"
    )
    parser.add_argument("--profile", action="store_true", help="print the slowest operations of both sides")
    options = parser.parse_args()
    sizes = Sizes(layers=options.layers, sequence=options.sequence)
    import transformers

    where = (
        f"{sizes.layers} layers of {sizes.hidden}, vocabulary {sizes.vocabulary}, {sizes.samples} × {sizes.sequence} tokens a step; "
        f"{options.threads} threads, torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores"
    )
    rows: list[dict[str, Any]] = []
    print(f"{where}\n")
    print(f"{'':<6} {'ours':>12} {'transformers':>14} {'ratio':>7}  goal")
    good = True
    for precision in options.precision:
        with contextlib.ExitStack() as cleanup:
            both_sides = [
                StepProcess(who, sizes, precision, options.flags, options.threads)
                for who in ("ours", "theirs")
            ]
            for process in both_sides:
                cleanup.callback(process.end)
            ours, theirs = both_sides
            counts = (ours.parameters, theirs.parameters)
            assert counts[0] == counts[1], f"not the same model: {counts[0]} and {counts[1]} parameters"
            times = in_turns([ours, theirs], options.rounds, options.steps)
            rates = [sizes.tokens / statistics.median(found.wall) for found in times]
            of_rounds, of_cpu = (
                sorted(their / our for our, their in zip(*both))
                for both in ([found.wall for found in times], [found.cpu for found in times])
            )
            ratio, cpu_ratio = statistics.median(of_rounds), statistics.median(of_cpu)
            good = good and ratio >= GOAL
            rows.append(
                {
                    "precision": precision,
                    "ours": rates[0],
                    "transformers": rates[1],
                    "ratio": ratio,
                    "rounds": [of_rounds[0], of_rounds[-1]],
                    "cpu_ratio": cpu_ratio,
                }
            )
            verdict = f"at least {GOAL:.2f}: {'holds' if ratio >= GOAL else 'MISSED'}"
            print(
                f"{precision:<6} {rates[0]:>8.0f}/s    {rates[1]:>10.0f}/s    {ratio:>5.2f}x  {verdict}; "
                f"rounds from {of_rounds[0]:.2f} to {of_rounds[-1]:.2f}; CPU seconds {cpu_ratio:.2f}x",
                flush=True,
            )
            if options.profile:
                print(ours.profile(), theirs.profile(), sep="\n")
    if options.json:
        keep(Path(options.json), where, rows)
    return 0 if good else 1


def keep(folder: Path, where: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "bench/cpu.py", *sys.argv[1:]])
    told = {"kind": "cpu", "command": command, "where": where, "goal": GOAL, "rows": rows}
    (folder / "cpu.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
