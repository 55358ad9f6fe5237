"""One layout of `pentatron bench`: its settings, the command that trains the same way, and a run of it that is measured."""

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.bench.candidates import Candidate
from pentatron.bench.results import ResultsFolder, Row, measure
from pentatron.cli.configure import Prepared, prepare
from pentatron.cli.environment import prepare_for_workers
from pentatron.errors import ConfigError, UserError
from pentatron.settings.entry import EntryPoint
from pentatron.settings.run import table

# Every step is measured, and nothing is shown or kept.
HOW_TO_MEASURE = {"log_interval": 1, "progress_bar": "off", "save_checkpoints": False, "eval_interval": 0}


@dataclass(frozen=True)
class Sweep:
    """What is measured, and where it goes. `settings` are the user's among the words."""

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


def prepared_layout(sweep: Sweep, layout: Candidate) -> tuple[list[str], Prepared | None, str]:
    """The words of the layout, its configuration, or why the rules refuse it."""
    words = [*sweep.words, *layout.words, "--run-dir", str(sweep.folder.run(layout.name))]
    try:
        return words, prepare(words, sweep.entry), ""
    except ConfigError as error:
        return words, None, "; ".join(error.problems)
    except UserError as error:
        return words, None, str(error)


def command_of(sweep: Sweep, layout: Candidate, prepared: Prepared | None) -> str:
    """What trains the same way by hand."""
    made_up: list[str] = []
    if prepared is not None:
        values = prepared.resolved.config.flat()
        ours = f"default of {sweep.entry.name}"
        for name, source in prepared.resolved.sources.items():
            # A switch that is off says nothing.
            if source == ours and name not in HOW_TO_MEASURE and values[name] is not False:
                made_up += table()[name].written(values[name]).split()
    return shlex.join(["pentatron", "train", *made_up, *sweep.words, *layout.words])


class Progress:
    """The bar on a terminal: which layout runs, and how far it is."""

    def __init__(self, display: Any, name: str, number: int, total: int) -> None:
        self.display, self.name, self.number, self.total = display, name, number, total
        self.metrics: Path | None = None

    def __call__(self) -> None:
        done = 0
        if self.metrics is not None and self.metrics.exists():
            done = self.metrics.read_bytes().count(b"\n")
        facts = f"{self.name}: {f'step {done}' if done else 'starting'}"
        self.display.work("measuring", self.number, self.total, facts)


def measured_layout(sweep: Sweep, layout: Candidate, starter: Any, live: Progress | None) -> Row:
    from pentatron.bench.processes import free_port
    from pentatron.cli.bench_rank import Job, reason_of_failure, work
    from pentatron.devices import chip_of
    from pentatron.settings.parameters import step_flops

    words, prepared, reason = prepared_layout(sweep, layout)
    row = Row(layout, "refused", sweep.processes, command_of(sweep, layout, prepared), reason)
    if prepared is None:
        return row
    config = prepared.resolved.config
    prepare_for_workers(config.launch.threads_per_process)
    metrics = sweep.folder.run(layout.name) / "metrics.jsonl"
    if live is not None:
        live.metrics = metrics
    said = sweep.folder.output(layout.name)
    said.mkdir(parents=True)
    job = Job(words, sweep.entry, sweep.processes, free_port(), said)
    ended = starter.run(
        work, lambda rank: (job, rank), sweep.processes, sweep.timeout, live or (lambda: None)
    )
    row = dataclasses.replace(row, config=config, device=sweep.device)
    if not ended.is_good:
        late = f"no result after {sweep.timeout:.0f} s (--layout-timeout)" if ended.timed_out else None
        why = late or ended.killed() or reason_of_failure(job, ended.killed(or_aborted=True))
        why = why or f"exit codes {list(ended.exit_codes)}"
        return dataclasses.replace(row, status="failed", reason=f"{why}; see {said}")
    try:
        found = measure(metrics, sweep.warmup, config.train.global_batch_size)
    except UserError as error:
        return dataclasses.replace(row, status="failed", reason=str(error))
    flops = step_flops(config.model, config.train.global_batch_size, config.model.seq_length, config.moe)
    teraflops = flops / found.step_seconds / sweep.processes / 1e12
    chip = chip_of(sweep.device)
    mfu = teraflops / chip.teraflops(config.precision.name != "fp32") if chip else None
    return dataclasses.replace(row, status="ok", reason="", measured=found, teraflops=teraflops, mfu=mfu)
