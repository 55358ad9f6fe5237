"""`pentatron bench`: every layout of a number of processes, measured one after the other."""

import dataclasses
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.bench import plot_results
from pentatron.bench.candidates import VARIANTS, Candidate, candidates
from pentatron.bench.folder import ResultsFolder
from pentatron.bench.measure import measure
from pentatron.bench.results import Row, Table, conclusions, write_summary
from pentatron.bench.sizes import default_sizes
from pentatron.cli.environment import find_worker, prepare_for_workers
from pentatron.cli.options import read_options
from pentatron.cli.prepare import Prepared, prepare
from pentatron.cli.terminal import say
from pentatron.config.entry import TRAIN, EntryPoint
from pentatron.config.errors import ConfigError, UserError
from pentatron.config.flags import is_flag, normal
from pentatron.config.resolve import gather
from pentatron.config.run import table

USAGE = f"""usage: pentatron bench [--nproc-per-node N] [--variants V ...] [--steps N] [--out FOLDER] [--setting value ...]

Trains every layout that N processes allow (data, tensor, context and pipeline parallel, and expert parallel for a model with
experts) for a few steps, each as `pentatron train` does it, and writes a table here and in FOLDER/summary.csv. A layout that fails or
that the rules refuse is listed with the reason. Without a model a small one is made up; all settings of `pentatron
train` are understood. A size that is given (--tp_size 2) holds for all layouts.

  --nproc-per-node N   processes of a layout (one per GPU; 2 without GPU)
  --variants V ...     also try: {", ".join(VARIANTS)} (ZeRO stages, sequence parallel, orders of the pipeline)
  --steps N            steps that are measured (4), after --warmup N that are not (2)
  --out FOLDER         results (benchmark_results); an earlier folder of that name is moved aside
  --layout-timeout S   seconds a layout may take (600)
  --list               show the layouts and run none

Communication is the time a rank stands still for others: in collectives that no computation hides, and for messages of the
pipeline, its bubble included. On a CPU the calls are timed, on a GPU the stream that computes, by events; summary.csv has both
parts. Rates are of the median step, memory is of the rank that takes most.

  pentatron bench --nproc-per-node 4
  pentatron bench --nproc-per-node 8 --preset llama3-8b --seq-length 4096 --variants zero sp
"""
_OPTIONS: dict[str, Any] = {
    "variants": ("",),
    "steps": 4,
    "warmup": 2,
    "out": "benchmark_results",
    "layout-timeout": 600.0,
    "list": False,
}
_AXES = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
    "data": "data_parallel_size",
}
# As a shell says it of SIGINT.
_STOPPED = 130
# Every step is measured, and nothing is shown or kept.
_HOW_TO_MEASURE = {"log_interval": 1, "progress_bar": "off", "save_checkpoints": False, "eval_interval": 0}
# Whoever says the batch in another way does not want ours.
_OTHER_BATCHES = ("gradient_accumulation_steps", "num_microbatches", "rank_batch_size")


@dataclass(frozen=True)
class Sweep:
    """What is measured, and where it goes."""

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


def bench_command(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        say(USAGE)
        return 0
    if find_worker(os.environ) is not None:
        raise UserError("pentatron bench starts its processes itself; run it without a launcher")
    own, settings = _divided(words)
    options, _ = read_options(own, _OPTIONS, "pentatron bench")
    if options["steps"] < 1 or options["warmup"] < 0 or not 0 < options["layout-timeout"] < math.inf:
        raise UserError("--steps must be 1 or more, --warmup 0 or more and --layout-timeout above 0")
    sweep, experts, fixed = _sweep(settings, options)
    variants = [name for word in options["variants"] for name in word.split(",") if name]
    layouts = candidates(sweep.processes, experts, fixed, variants)
    if not layouts:
        raise UserError(
            f"no layout of {sweep.processes} processes has the sizes that were given; leave some of them out"
        )
    if options["list"]:
        return _show(sweep, layouts)
    return _run(sweep, layouts)


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of our own options, and those of the settings."""
    own: list[str] = []
    settings: list[str] = []
    target = settings
    for word in words:
        if is_flag(word):
            target = own if normal(word) in _OPTIONS else settings
        target.append(word)
    return own, settings


def _sweep(settings: Sequence[str], options: dict[str, Any]) -> tuple[Sweep, int | None, dict[str, int]]:
    """Also the number of experts, and the axes whose size was given."""
    import torch

    plain = dataclasses.replace(TRAIN, name="pentatron bench", default_preset=None, resumes=False)
    draft = gather(settings, plain)
    for name, instead in (("train_iters", "--steps and --warmup"), ("run_dir", "--out")):
        if draft.given(name):
            raise UserError(f"{table()[name].flag} is not the user's to say in a benchmark; use {instead}")
    gpus = 0 if draft["device"] == "cpu" else torch.cuda.device_count()
    asked = draft["nproc_per_node"]
    if asked is not None and asked < 1:
        raise UserError(f"--nproc-per-node {asked} must be more than 0")
    processes = asked or gpus or 2
    sizes = default_sizes(processes, on_gpu=gpus > 0)
    if any(draft.given(name) for name in ("tokenizer_type", "tokenizer_model", "vocab_file")):
        # The tokenizer says how large it is.
        del sizes["vocab_size"]
    if any(draft.given(name) for name in _OTHER_BATCHES):
        del sizes["global_batch_size"]
    total = options["warmup"] + options["steps"]
    entry = dataclasses.replace(plain, defaults={**sizes, "dataset_size": 1000, **_HOW_TO_MEASURE})
    device = _name_of_gpu() if gpus else "CPU"
    started = [] if draft.given("nproc_per_node") else ["--nproc-per-node", str(processes)]
    words = [*settings, *started, "--train-iters", str(total)]
    fixed = {axis: draft[name] for axis, name in _AXES.items() if draft.given(name)}
    sweep = Sweep(
        words,
        entry,
        processes,
        device,
        options["steps"],
        options["warmup"],
        options["layout-timeout"],
        ResultsFolder(Path(options["out"])),
    )
    return sweep, draft["num_experts"], fixed


def _name_of_gpu() -> str:
    """Asked by a process that ends: this one must not take memory of a GPU that is measured."""
    words = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    asked = subprocess.run(words, capture_output=True, text=True)
    if asked.returncode:
        raise UserError(
            f"the GPU does not answer ({asked.stderr.strip().splitlines()[-1]}); measure without it: --device cpu"
        )
    return asked.stdout.strip()


def _prepared(sweep: Sweep, layout: Candidate) -> tuple[list[str], Prepared | None, str]:
    """The words of the layout, its configuration, or why the rules refuse it."""
    words = [*sweep.words, *layout.words, "--run-dir", str(sweep.folder.run(layout.name))]
    try:
        return words, prepare(words, sweep.entry), ""
    except ConfigError as error:
        return words, None, "; ".join(error.problems)
    except UserError as error:
        return words, None, str(error)


def _command(sweep: Sweep, layout: Candidate, prepared: Prepared | None) -> str:
    """What trains the same way by hand."""
    made_up: list[str] = []
    if prepared is not None:
        values = prepared.resolved.config.flat()
        ours = f"default of {sweep.entry.name}"
        for name, source in prepared.resolved.sources.items():
            # A switch that is off says nothing.
            if source == ours and name not in _HOW_TO_MEASURE and values[name] is not False:
                made_up += table()[name].written(values[name]).split()
    return shlex.join(["pentatron", "train", *made_up, *sweep.words, *layout.words])


def _show(sweep: Sweep, layouts: Sequence[Candidate]) -> int:
    width = max(len(layout.name) for layout in layouts)
    for layout in layouts:
        _, prepared, reason = _prepared(sweep, layout)
        told = f"refused: {reason}" if prepared is None else " ".join(layout.words) or "no flags"
        say(f"{layout.name:<{width}}  {told}")
    return 0


def _introduction(sweep: Sweep, count: int) -> list[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    lines = [
        f"{count} layout{'s' if count > 1 else ''} of {sweep.processes} process{'es' if sweep.processes > 1 else ''} on {sweep.device}, "
        f"{sweep.warmup} + {sweep.steps} steps each"
    ]
    if not sweep.on_gpu:
        lines.append(
            f"note: no GPU is used, so the processes share {cores} CPU core{'s' if cores > 1 else ''}; the numbers compare "
            f"layouts here and say nothing about a GPU"
        )
    else:
        import torch

        if sweep.processes > torch.cuda.device_count():
            lines.append(
                f"note: {sweep.processes} processes share {torch.cuda.device_count()} GPU(s) and talk over gloo, so the "
                f"numbers say little about as many GPUs"
            )
    return lines


def _run(sweep: Sweep, layouts: Sequence[Candidate]) -> int:
    from pentatron.bench.processes import Starter
    from pentatron.monitor.display import open_display

    moved = sweep.folder.open()
    if moved is not None:
        say(f"the earlier results were moved to {moved}")
    display = open_display("auto" if sys.stdout.isatty() else "off")
    starter = Starter(["pentatron.cli.bench_rank"])
    shown = Table([layout.name for layout in layouts], sweep.on_gpu)
    rows = [Row(layout, "not run", sweep.processes, "", "the sweep ended before") for layout in layouts]
    write_summary(sweep.folder.summary, rows)
    interrupted = False
    try:
        for text in [*_introduction(sweep, len(layouts)), "", shown.header()]:
            display.say(text)
        for number, layout in enumerate(layouts):
            live = _Progress(display, layout.name, number, len(layouts)) if sys.stdout.isatty() else None
            rows[number] = _measured(sweep, layout, starter, live)
            write_summary(sweep.folder.summary, rows)
            display.say(shown.line(rows[number]))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        display.close()
    pictures = plot_results.draw_all(sweep.folder.path)
    if interrupted:
        missing = sum(row.status == "not run" for row in rows)
        say(f"\nstopped; {missing} of {len(rows)} layouts were not measured")
    say("\n" + "\n".join(conclusions(rows)))
    utilisation = [row.measured.utilisation for row in rows if row.measured is not None]
    if sweep.on_gpu and utilisation and all(percent is None for percent in utilisation):
        say(
            "GPU utilisation was not measured: torch asks the driver through a library (pip install nvidia-ml-py)"
        )
    say(
        f"results: {sweep.folder.summary}; pictures: {', '.join(file.name for file in pictures) or 'none'} beside it "
        f"(again with: cd {sweep.folder.path} && python plot_results.py)"
    )
    if interrupted:
        return _STOPPED
    return 0 if any(row.status == "ok" for row in rows) else 1


class _Progress:
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


def _measured(sweep: Sweep, layout: Candidate, starter: Any, live: _Progress | None) -> Row:
    from pentatron.bench.processes import free_port
    from pentatron.cli.bench_rank import Job, reason_of_failure, work
    from pentatron.models.flops import step_flops
    from pentatron.monitor.peaks import peak_of

    words, prepared, reason = _prepared(sweep, layout)
    row = Row(layout, "refused", sweep.processes, _command(sweep, layout, prepared), reason)
    if prepared is None:
        return row
    config = prepared.resolved.config
    assert config.launch.threads_per_process is not None and config.train.global_batch_size is not None
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
    peak = peak_of(sweep.device)
    mfu = teraflops / peak.of(config.precision.name != "fp32") if peak else None
    return dataclasses.replace(row, status="ok", reason="", measured=found, teraflops=teraflops, mfu=mfu)
