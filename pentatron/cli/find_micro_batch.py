"""`pentatron bench --find-micro-batch`: the largest micro-batch that fits the device, by real steps in processes of their own."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

from pentatron.bench.micro_batch import LARGEST, MicroBatch, Trial, find_largest, largest, lines
from pentatron.bench.processes import Starter
from pentatron.bench.results import Row, write_summary
from pentatron.cli.bench_layout import Sweep, command_of, measured_layout, prepared_layout
from pentatron.cli.terminal import say
from pentatron.config.run import RunConfig
from pentatron.errors import UserError
from pentatron.launch.host_memory import host_memory
from pentatron.layout.divisors import divisors
from pentatron.plan.memory import memory_of
from pentatron.text import binary_size, plural

# Of what is free, as `pentatron train` judges it before it starts.
_USABLE = 0.95
# Of what is free, what torch can hand out to tensors at best.
_ALMOST_ALL = 0.97
# Tried until one is not refused.
_SMALLEST = (1, 2, 4, 8, 16)
# How the end of a process says that memory was the cause.
_SIGNS = (
    "out of GPU memory",
    "out of host memory",
    "cannot fit",
    "out of memory",
    "ALLOC_FAILED",
    "killed by SIGKILL",
)
_ALL_OF_IT = "the rest of the memory is for the allocator's gaps and the libraries: a long run may need a little more than a short one"


def find_micro_batch(sweep: Sweep, batch_is_given: bool) -> int:
    """`batch_is_given`: whether the user has set the batch size of a step, by any of its settings."""
    hunt = _Hunt(sweep, batch_is_given)
    say(hunt.introduction())
    room = hunt.room()
    estimates = find_largest(hunt.sizes, 1, _USABLE * room, lambda size: hunt.estimate(size, room))
    foreseen = largest(estimates)
    if not sweep.on_gpu:
        # A process that asks a machine for all of its memory harms everything else that runs there.
        say(
            f"note: no GPU is used, so nothing is tried: this is what `pentatron plan` foresees, for {binary_size(room)} of free memory a process"
        )
        return _conclude(hunt, estimates)
    say(f"foreseen by `pentatron plan`: {'not even the smallest' if foreseen is None else foreseen.size}")
    moved = sweep.folder.open()
    if moved is not None:
        say(f"the earlier results were moved to {moved}")
    first = foreseen.size if foreseen else hunt.sizes[0]
    trials = find_largest(hunt.sizes, first, _ALMOST_ALL * room, hunt.attempt)
    say(f"runs: {sweep.folder.summary}")
    _keep(sweep, foreseen, trials)
    return _conclude(hunt, trials)


def _keep(sweep: Sweep, foreseen: Trial | None, trials: Sequence[Trial]) -> None:
    """For whoever makes tables of it: bench/performance_page.py, say."""
    found = largest(trials)
    told = {
        "kind": "micro-batch",
        "device": sweep.device,
        "processes": sweep.processes,
        "settings": shlex.join(sweep.settings),
        "command": shlex.join(["pentatron", "bench", "--find-micro-batch", *sweep.settings]),
        "foreseen": foreseen and foreseen.size,
        "largest": found and found.size,
        "trials": [dataclasses.asdict(trial) for trial in trials],
    }
    (sweep.folder.path / "micro_batch.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _conclude(hunt: "_Hunt", trials: list[Trial]) -> int:
    found = largest(trials)
    if found is None:
        why = trials[-1].reason
        raise UserError(
            f"not even a micro-batch of {hunt.sizes[0]} fits ({why}); try --recompute-granularity full, a shorter --seq-length or more GPUs"
        )
    for line in ["", *lines(trials), ""]:
        say(line)
    if found.size == hunt.sizes[-1]:
        say(f"largest: {found.size}, the largest there can be here; there would be room for more")
    else:
        say(f"largest: {found.size}; {_ALL_OF_IT}")
    measured = [trial for trial in trials if trial.fits and trial.rate]
    if measured:
        fastest = max(measured, key=lambda trial: trial.rate or 0.0)
        if fastest.size != found.size:
            say(f"fastest: {fastest.size} with {fastest.rate:,.0f} tokens/s")
    say(f"\n  {hunt.command(found.size)}")
    return 0


class _Hunt:
    """`sizes` are the micro-batches there can be; `rows` what was tried."""

    def __init__(self, sweep: Sweep, batch_is_given: bool) -> None:
        self.sweep, self.batch_is_given = sweep, batch_is_given
        smallest, config = self._smallest()
        self.grid, self.rows = config.grid, list[Row]()
        total = config.train.global_batch_size
        self.sizes: Sequence[int] = range(smallest, LARGEST + 1, smallest)
        if batch_is_given and not self._follows_micro_batch(smallest, total):
            self.sizes = [size for size in divisors(total // self.grid.data) if size % smallest == 0]

    def _smallest(self) -> tuple[int, RunConfig]:
        """The size whose multiples there can be: 1, or more where a micro-batch of some formats has to be of so many tokens."""
        reasons = []
        for size in _SMALLEST:
            # A batch of a step that every layout of these processes can divide.
            total = None if self.batch_is_given else size * self.sweep.processes
            _, prepared, reason = prepared_layout(self.sweep, MicroBatch(1, size=size, global_batch=total))
            if prepared is not None:
                return size, prepared.resolved.config
            reasons.append(reason)
        raise UserError(reasons[0])

    def _follows_micro_batch(self, size: int, total: int) -> bool:
        """Whether the batch of a step grows with the micro-batch, as it does where the number of micro-batches was given."""
        _, prepared, _ = prepared_layout(self.sweep, MicroBatch(1, size=2 * size, global_batch=None))
        return prepared is not None and prepared.resolved.config.train.global_batch_size != total

    def introduction(self) -> str:
        sweep = self.sweep
        count = f"{sweep.processes} {plural(sweep.processes, 'process')}"
        batch = (
            "with the batch of a step that was given"
            if self.batch_is_given
            else "with as few micro-batches a step as there are pipeline stages; for more, which keep sums of gradients, say --global-batch-size"
        )
        return f"looking for the largest micro-batch of {count} on {sweep.device}, {batch}"

    def candidate(self, size: int) -> MicroBatch:
        grid = self.grid
        step = None if self.batch_is_given else size * grid.data * grid.pipeline
        sizes = (grid.data, grid.tensor, grid.context, grid.pipeline, grid.expert)
        return MicroBatch(*sizes, size=size, global_batch=step)

    def room(self) -> float:
        """Bytes that are free for one process."""
        if not self.sweep.on_gpu:
            host = host_memory()
            if host is None:
                raise UserError(
                    "this system does not say how much memory it has; say --micro-batch-size yourself"
                )
            return host[1] / self.sweep.processes
        # Asked by a process that ends: this one must not take memory of a GPU that is measured.
        code = "import torch; print(torch.cuda.mem_get_info()[0], torch.cuda.device_count())"
        asked = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=dict(os.environ)
        )
        if asked.returncode:
            said = asked.stderr.strip().splitlines() or ["it ended without a word"]
            raise UserError(f"the GPU does not answer ({said[-1]})")
        free, count = (int(word) for word in asked.stdout.split())
        return free / -(-self.sweep.processes // count)

    def estimate(self, size: int, room: float) -> Trial:
        _, prepared, reason = prepared_layout(self.sweep, self.candidate(size))
        if prepared is None:
            return Trial(size, False, reason=reason)
        needed = memory_of(prepared.resolved.config, self.sweep.on_gpu).largest.total
        fits = needed <= _USABLE * room
        return Trial(size, fits, needed, reason="" if fits else f"{binary_size(needed)} are foreseen")

    def attempt(self, size: int) -> Trial:
        """Some real steps in processes that end."""
        row = measured_layout(self.sweep, self.candidate(size), Starter(["pentatron.cli.bench_rank"]), None)
        self.rows.append(row)
        write_summary(self.sweep.folder.summary, self.rows)
        trial = trial_of(size, row)
        say(lines([trial])[1])
        return trial

    def command(self, size: int) -> str:
        candidate = self.candidate(size)
        _, prepared, _ = prepared_layout(self.sweep, candidate)
        return command_of(self.sweep, candidate, prepared)


def trial_of(size: int, row: Row) -> Trial:
    """What became of a run; one that failed for another reason than memory ends the search."""
    if row.measured is not None:
        return Trial(size, True, max(row.measured.memory_bytes), row.measured.tokens_per_second)
    if any(sign in row.reason for sign in _SIGNS):
        return Trial(size, False, reason="out of memory")
    if row.status == "refused":
        return Trial(size, False, reason=row.reason)
    raise UserError(f"micro-batch {size}: {row.reason}")
