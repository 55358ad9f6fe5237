"""Configures one layout of `pentatron bench`, runs it in worker processes and measures it."""

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.bench.candidates import Candidate
from pentatron.bench.results import ResultsFolder, Row, measure
from pentatron.cli.configure import Prepared, prepare
from pentatron.cli.environment import set_worker_environment
from pentatron.errors import ConfigError, UserError
from pentatron.settings.entry_points import EntryPoint
from pentatron.settings.run_config import table

# Logs metrics of every step; no progress bar, checkpoints or evaluation.
BENCH_DEFAULTS = {"log_interval": 1, "progress_bar": "off", "save_checkpoints": False, "eval_interval": 0}


@dataclass(frozen=True)
class BenchConfig:
    """Settings of a benchmark. `settings` are the user's words, `words` those and the ones of the
    benchmark."""

    settings: Sequence[str]
    words: Sequence[str]
    entry: EntryPoint
    processes: int
    device: str
    steps: int
    warmup: int
    timeout: float
    folder: ResultsFolder

    @property
    def on_gpu(self) -> bool:
        return self.device != "CPU"


def prepare_layout(sweep: BenchConfig, layout: Candidate) -> tuple[list[str], Prepared | None, str]:
    """Returns the words of a layout and its configuration, or the reason why the rules refuse it."""
    words = [*sweep.words, *layout.words, "--run-dir", str(sweep.folder.run(layout.name))]
    try:
        return words, prepare(words, sweep.entry), ""
    except ConfigError as error:
        return words, None, "; ".join(error.problems)
    except UserError as error:
        return words, None, str(error)


def training_command(sweep: BenchConfig, layout: Candidate, prepared: Prepared | None) -> str:
    """Returns the command that trains this layout in the same way."""
    defaults: list[str] = []
    if prepared is not None:
        values = prepared.resolved.config.flat()
        origin = f"default of {sweep.entry.name}"
        for name, source in prepared.resolved.sources.items():
            # A switch that is off has no flag.
            if source == origin and name not in BENCH_DEFAULTS and values[name] is not False:
                defaults += table()[name].written(values[name]).split()
    return shlex.join(["pentatron", "train", *defaults, *sweep.words, *layout.words])


class Progress:
    """Progress bar of a sweep on a terminal."""

    def __init__(self, display: Any, name: str, number: int, total: int) -> None:
        self.display, self.name, self.number, self.total = display, name, number, total
        self.metrics: Path | None = None

    def __call__(self) -> None:
        steps = 0
        if self.metrics is not None and self.metrics.exists():
            steps = self.metrics.read_bytes().count(b"\n")
        text = f"{self.name}: {f'step {steps}' if steps else 'starting'}"
        self.display.work("measuring", self.number, self.total, text)


def measure_layout(sweep: BenchConfig, layout: Candidate, starter: Any, live: Progress | None) -> Row:
    """Runs a layout and returns its row of the results."""
    from pentatron.bench.fork_server import free_port
    from pentatron.cli.bench_worker import Job, reason_of_failure, run_rank
    from pentatron.devices import find_chip
    from pentatron.settings.parameters import step_flops

    words, prepared, reason = prepare_layout(sweep, layout)
    row = Row(layout, "refused", sweep.processes, training_command(sweep, layout, prepared), reason)
    if prepared is None:
        return row
    config = prepared.resolved.config
    set_worker_environment(config.launch.threads_per_process)
    metrics = sweep.folder.run(layout.name) / "metrics.jsonl"
    if live is not None:
        live.metrics = metrics
    output = sweep.folder.output(layout.name)
    output.mkdir(parents=True)
    job = Job(words, sweep.entry, sweep.processes, free_port(), output)
    outcome = starter.run(
        run_rank, lambda rank: (job, rank), sweep.processes, sweep.timeout, live or (lambda: None)
    )
    row = dataclasses.replace(row, config=config, device=sweep.device)
    if not outcome.is_good:
        late = f"no result after {sweep.timeout:.0f} s (--layout-timeout)" if outcome.timed_out else None
        cause = (
            late
            or outcome.killed_message()
            or reason_of_failure(job, outcome.killed_message(or_aborted=True))
        )
        cause = cause or f"exit codes {list(outcome.exit_codes)}"
        return dataclasses.replace(row, status="failed", reason=f"{cause}; see {output}")
    try:
        measured = measure(metrics, sweep.warmup, config.train.global_batch_size)
    except UserError as error:
        return dataclasses.replace(row, status="failed", reason=str(error))
    flops = step_flops(config.model, config.train.global_batch_size, config.model.seq_length, config.moe)
    teraflops = flops / measured.step_seconds / sweep.processes / 1e12
    chip = find_chip(sweep.device)
    mfu = teraflops / chip.teraflops(config.precision.name != "fp32") if chip else None
    return dataclasses.replace(row, status="ok", reason="", measured=measured, teraflops=teraflops, mfu=mfu)
