"""`pentatron bench`: measures every layout of a number of processes, or searches the largest micro-batch that
fits."""

import dataclasses
import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.bench import candidates, plot_results
from pentatron.bench.candidates import Candidate, MicroBatch, Trial, largest_fitting, trial_table
from pentatron.bench.fork_server import ForkServer, free_port
from pentatron.bench.results import ResultsFolder, Row, Table, measure, summary_lines, write_summary
from pentatron.cli.configure import Prepared, prepare
from pentatron.cli.environment import find_worker, set_worker_environment
from pentatron.cli.options import Options, flags_of, option, options_help, parse_options_and_settings, usage
from pentatron.cli.output import say, with_help
from pentatron.devices import find_chip
from pentatron.errors import ConfigError, UserError
from pentatron.launch.machine import host_memory, usable_cores
from pentatron.plan.memory import memory_of
from pentatron.settings.declaration import NON_NEGATIVE, ONE_OR_MORE, POSITIVE
from pentatron.settings.entry_points import TRAIN, EntryPoint
from pentatron.settings.model_sizes import step_flops
from pentatron.settings.resolve import gather
from pentatron.settings.run_config import RunConfig, all_settings
from pentatron.settings.settings import Draft
from pentatron.text import binary_size, divisors, plural

# Logs metrics of every step; no progress bar, checkpoints or evaluation.
_DEFAULTS = {"log_interval": 1, "progress_bar": "off", "save_checkpoints": False, "eval_interval": 0}
# Share of free memory that a run may need, the same as `pentatron train` checks before it starts.
_USABLE = 0.95
# Share of free memory that torch can allocate for tensors at most.
_ALLOCATABLE = 0.97
# Candidates for the smallest micro-batch; the first that the rules accept is taken.
_SMALLEST = (1, 2, 4, 8, 16)
# Substrings of a failed process's reason that identify it as out of memory.
_OOM_MESSAGES = (
    *("out of GPU memory", "out of host memory", "cannot fit", "out of memory", "ALLOC_FAILED"),
    "killed by SIGKILL",
)
_HEADROOM_NOTE = "; the rest of the memory is for fragmentation and libraries, because a long run may need slightly more than a short one"


@dataclass(frozen=True)
class BenchOptions(Options):
    variants: tuple[str, ...] = option(
        (),
        f"also measure these variants: {', '.join(candidates.VARIANTS)} (ZeRO stages, sequence parallel, pipeline schedules)",
        value="V ...",
    )
    steps: int = option(4, "number of measured steps", limit=ONE_OR_MORE)
    warmup: int = option(2, "number of steps before the measured ones", limit=NON_NEGATIVE)
    out: str = option(
        "benchmark_results", "folder of the results; an existing one is moved aside", value="FOLDER"
    )
    layout_timeout: float = option(600.0, "maximum seconds per layout", value="S", limit=POSITIVE)
    list: bool = option(False, "list the layouts without running them")
    find_micro_batch: bool = option(
        False,
        "search the largest micro-batch that fits by running steps of one layout; results are also written to "
        "FOLDER/micro_batch.json",
    )

    def problems(self) -> Iterable[str]:
        if self.find_micro_batch and (self.list or self.variants):
            fix = "leave out --list and --variants, or --find-micro-batch"
            yield f"--find-micro-batch measures one layout; {fix}"


USAGE = f"""{usage("pentatron bench [--nproc-per-node N]", BenchOptions, "[--setting value ...]")}

Trains every layout that N processes allow (data, tensor, context and pipeline parallel, and expert parallel for a model with
experts) for a few steps with `pentatron train`, prints a table and writes it to FOLDER/summary.csv. A layout that fails or
that the rules refuse is listed with the reason. Without a model, a small one is used. All settings of `pentatron
train` are accepted. A given size (--tp_size 2) is the same in all layouts.

{options_help(BenchOptions)}

--nproc-per-node N is the number of processes of a layout (one per GPU; 2 without GPU).

Communication is the time a rank waits for others: in collectives that are not overlapped with computation, and for messages of the
pipeline, including its bubble. On a CPU the calls are timed, on a GPU the compute stream, with CUDA events; summary.csv has both
parts. Rates are of the median step, memory is of the rank that uses most.

  pentatron bench --nproc-per-node 4
  pentatron bench --nproc-per-node 8 --preset llama3-8b --seq-length 4096 --variants zero sp
  pentatron bench --find-micro-batch --preset qwen2.5-1.5b --seq-length 4096
"""
_BENCH = dataclasses.replace(TRAIN, name="pentatron bench", default_preset=None, own=flags_of(BenchOptions))
# Exit code of a shell command that SIGINT ended.
_INTERRUPTED = 130
# Settings that replace the global batch size; with one of them the default of the benchmark is left out.
_OTHER_BATCHES = ("gradient_accumulation_steps", "num_microbatches", "rank_batch_size")


@dataclass(frozen=True)
class BenchConfig:
    """Settings of a benchmark. `settings`: the user's arguments. `words`: these plus the benchmark's."""

    settings: Sequence[str]
    words: Sequence[str]
    entry: EntryPoint
    processes: int
    device: str
    options: BenchOptions
    folder: ResultsFolder

    @property
    def on_gpu(self) -> bool:
        return self.device != "CPU"

    def words_of(self, layout: Candidate) -> list[str]:
        return [*self.words, *layout.words, "--run-dir", str(self.folder.run(layout.name))]


@with_help(USAGE)
def bench_command(words: Sequence[str]) -> int:
    if find_worker(os.environ) is not None:
        raise UserError("pentatron bench starts its processes itself; run it without a launcher")
    options, settings = parse_options_and_settings(BenchOptions, words, _BENCH)
    sweep, draft = _sweep(settings, options)
    if options.find_micro_batch:
        if draft.given("micro_batch_size"):
            raise UserError("--find-micro-batch searches --micro-batch-size, which is given; leave it out")
        return find_micro_batch(sweep, any(draft.given(n) for n in ("global_batch_size", *_OTHER_BATCHES)))
    variants = [name for word in options.variants for name in word.split(",") if name]
    fixed = {axis: getattr(draft, name) for axis, name in candidates.AXES.items() if draft.given(name)}
    layouts = candidates.all_layouts(sweep.processes, draft.num_experts, fixed, variants)
    if not layouts:
        sizes = "has the given sizes; leave some of them out"
        raise UserError(f"no layout of {sweep.processes} processes {sizes}")
    if not options.list:
        return _run(sweep, layouts)
    width = max(len(layout.name) for layout in layouts)
    for layout in layouts:
        prepared, reason = prepare_layout(sweep, layout)
        outcome = f"refused: {reason}" if prepared is None else " ".join(layout.words) or "no flags"
        say(f"{layout.name:<{width}}  {outcome}")
    return 0


def _sweep(settings: Sequence[str], options: BenchOptions) -> tuple[BenchConfig, Draft]:
    """Returns the sweep and the given settings."""
    import torch

    plain = dataclasses.replace(_BENCH, resumes=False)
    draft = gather(settings, plain)
    for name, instead in (("train_iters", "--steps and --warmup"), ("run_dir", "--out")):
        if draft.given(name):
            raise UserError(f"{all_settings()[name].flag} cannot be set in a benchmark; use {instead}")
    gpus = 0 if draft.device == "cpu" else torch.cuda.device_count()
    requested = draft.nproc_per_node
    if requested is not None and requested < 1:
        raise UserError(f"--nproc-per-node {requested} must be more than 0")
    processes = requested or gpus or 2
    sizes = candidates.default_sizes(processes, on_gpu=gpus > 0)
    if any(draft.given(name) for name in ("tokenizer_type", "tokenizer_model", "vocab_file")):
        # The tokenizer determines the vocabulary size.
        del sizes["vocab_size"]
    if any(draft.given(name) for name in _OTHER_BATCHES):
        del sizes["global_batch_size"]
    entry = dataclasses.replace(plain, defaults={**sizes, "dataset_size": 1000, **_DEFAULTS})
    device = _query_gpu("print(torch.cuda.get_device_name())") if gpus else "CPU"
    launch = [] if draft.given("nproc_per_node") else ["--nproc-per-node", str(processes)]
    words = [*settings, *launch, "--train-iters", str(options.warmup + options.steps)]
    folder = ResultsFolder(Path(options.out))
    return BenchConfig(settings, words, entry, processes, device, options, folder), draft


def _query_gpu(code: str) -> str:
    """Runs Python code in a subprocess that exits, so that this process does not keep a CUDA context on a
    measured GPU."""
    words = [sys.executable, "-P", "-c", f"import torch; {code}"]
    queried = subprocess.run(words, capture_output=True, text=True)
    if queried.returncode:
        error = queried.stderr.strip().splitlines() or ["it exited without a message"]
        raise UserError(f"the GPU query failed ({error[-1]}); measure without GPU: --device cpu")
    return queried.stdout.strip()


def _introduction(sweep: BenchConfig, count: int) -> list[str]:
    import torch

    cores, gpus = usable_cores(), torch.cuda.device_count()
    what = f"{count} {plural(count, 'layout')} of {sweep.processes} {plural(sweep.processes, 'process')}"
    lines = [f"{what} on {sweep.device}, {sweep.options.warmup} + {sweep.options.steps} steps each"]
    if not sweep.on_gpu:
        sharing = f"no GPU is used, so the processes share {cores} {plural(cores, 'CPU core')}"
        lines.append(f"note: {sharing}; the numbers compare layouts on this machine and do not predict GPUs")
    elif sweep.processes > gpus:
        sharing = f"{sweep.processes} processes share {gpus} GPU(s) and communicate through gloo"
        lines.append(f"note: {sharing}, so the numbers do not predict that many GPUs")
    return lines


def _open_folder(sweep: BenchConfig) -> None:
    moved_to = sweep.folder.open()
    if moved_to is not None:
        say(f"earlier results were moved to {moved_to}")


def _run(sweep: BenchConfig, layouts: Sequence[Candidate]) -> int:
    from pentatron.monitor.display import open_display
    from pentatron.monitor.terminal import ignore_output_errors

    ignore_output_errors()
    _open_folder(sweep)
    display = open_display("auto" if sys.stdout.isatty() else "off")
    starter = ForkServer(["pentatron.cli.bench_worker"])
    results = Table([layout.name for layout in layouts], sweep.on_gpu)
    rows = [Row(layout, "not run", sweep.processes, "", "the sweep stopped earlier") for layout in layouts]
    write_summary(sweep.folder.summary, rows)
    interrupted = False
    try:
        for text in [*_introduction(sweep, len(layouts)), "", results.header()]:
            display.say(text)
        for number, layout in enumerate(layouts):
            progress = functools.partial(_show_progress, sweep, layout, display, number, len(layouts))
            live = progress if sys.stdout.isatty() else lambda: None
            rows[number] = measure_layout(sweep, layout, starter, live)
            write_summary(sweep.folder.summary, rows)
            display.say(results.line(rows[number]))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        display.close()
    plots = plot_results.draw_all(sweep.folder.path)
    if interrupted:
        missing = sum(row.status == "not run" for row in rows)
        say(f"\nstopped; {missing} of {len(rows)} layouts were not measured")
    say("\n" + "\n".join(summary_lines(rows)))
    utilisation = [row.measured.gpu_utilisation for row in rows if row.measured is not None]
    if sweep.on_gpu and utilisation and all(percent is None for percent in utilisation):
        library = "it needs a library of the driver (pip install nvidia-ml-py)"
        say(f"GPU utilisation was not measured: {library}")
    pictures = f"; pictures in the same folder: {', '.join(file.name for file in plots)}"
    again = f" (redraw with: cd {sweep.folder.path} && python plot_results.py)"
    say(f"results: {sweep.folder.summary}{pictures + again if plots else ''}")
    if interrupted:
        return _INTERRUPTED
    return 0 if any(row.status == "ok" for row in rows) else 1


def find_micro_batch(sweep: BenchConfig, batch_is_given: bool) -> int:
    """Searches the largest micro-batch that fits by running real steps in subprocesses; without a GPU, by
    estimates only.

    `batch_is_given`: whether the user has set the batch size of a step, by any of its settings.
    """
    search = _MicroBatchSearch(sweep, batch_is_given)
    batch = "one micro-batch per step and pipeline stage (more of them accumulate gradients in fp32: set --global-batch-size)"
    if batch_is_given:
        batch = "the given global batch"
    processes = f"{sweep.processes} {plural(sweep.processes, 'process')}"
    say(f"searching the largest micro-batch of {processes} on {sweep.device}, with {batch}")
    room = search.room()
    estimate = functools.partial(search.estimate, room=room)
    estimates = candidates.find_largest(search.sizes, 1, _USABLE * room, estimate)
    foreseen = largest_fitting(estimates)
    if not sweep.on_gpu:
        # Real steps are not tried: filling the host memory would harm everything else on the machine.
        given = f"the estimate of `pentatron plan` for {binary_size(room)} of free memory per process"
        say(f"note: no GPU is used, so no steps are run: this is {given}")
        return _report(search, estimates)
    say(f"estimated by `pentatron plan`: {'none' if foreseen is None else foreseen.size}")
    _open_folder(sweep)
    first = foreseen.size if foreseen else search.sizes[0]
    trials = candidates.find_largest(search.sizes, first, _ALLOCATABLE * room, search.attempt)
    say(f"runs: {sweep.folder.summary}")
    _write_trials(sweep, foreseen, trials)
    return _report(search, trials)


def _write_trials(sweep: BenchConfig, foreseen: Trial | None, trials: Sequence[Trial]) -> None:
    """Writes micro_batch.json, which bench/performance_page.py reads."""
    best = largest_fitting(trials)
    data = {
        "kind": "micro-batch",
        "device": sweep.device,
        "processes": sweep.processes,
        "settings": shlex.join(sweep.settings),
        "command": shlex.join(["pentatron", "bench", "--find-micro-batch", *sweep.settings]),
        "foreseen": foreseen and foreseen.size,
        "largest": best and best.size,
        "trials": [dataclasses.asdict(trial) for trial in trials],
    }
    (sweep.folder.path / "micro_batch.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _report(search: "_MicroBatchSearch", trials: list[Trial]) -> int:
    best = largest_fitting(trials)
    if best is None:
        fix = "try --recompute-granularity full, a shorter --seq-length or more GPUs"
        raise UserError(f"no micro-batch fits, even of size {search.sizes[0]} ({trials[-1].reason}); {fix}")
    say("\n".join(["", *trial_table(trials), ""]))
    is_last = best.size == search.sizes[-1]
    say(
        f"largest: {best.size}{', the largest that this batch allows; memory would suffice for more' if is_last else _HEADROOM_NOTE}"
    )
    measured = [trial for trial in trials if trial.fits and trial.rate]
    fastest = max(measured, key=lambda trial: trial.rate or 0.0, default=best)
    if fastest.size != best.size:
        say(f"fastest: {fastest.size} with {fastest.rate:,.0f} tokens/s")
    say(f"\n  {search.command(best.size)}")
    return 0


class _MicroBatchSearch:
    """`sizes` are the possible micro-batch sizes; `rows` are the results of the runs."""

    def __init__(self, sweep: BenchConfig, batch_is_given: bool) -> None:
        self.sweep, self.batch_is_given = sweep, batch_is_given
        smallest, config = self._smallest()
        self.grid, self.rows = config.grid, list[Row]()
        total = config.train.global_batch_size
        self.sizes: Sequence[int] = range(smallest, candidates.MAX_MICRO_BATCH + 1, smallest)
        if batch_is_given:
            prepared, _ = prepare_layout(sweep, MicroBatch(1, size=2 * smallest))
            # With a given number of micro-batches the global batch size grows with the micro-batch, and any
            # size is possible.
            if prepared is None or prepared.resolved.config.train.global_batch_size == total:
                self.sizes = [size for size in divisors(total // self.grid.data) if size % smallest == 0]

    def _smallest(self) -> tuple[int, RunConfig]:
        """Returns the smallest size that the rules accept, of which all others are multiples, and its
        configuration.

        It is above 1 if a number format needs a multiple of some number of tokens.
        """
        reasons = []
        for size in _SMALLEST:
            # A global batch size that every layout of these processes can divide.
            total = None if self.batch_is_given else size * self.sweep.processes
            prepared, reason = prepare_layout(self.sweep, MicroBatch(1, size=size, global_batch=total))
            if prepared is not None:
                return size, prepared.resolved.config
            reasons.append(reason)
        raise UserError(reasons[0])

    def candidate(self, size: int) -> MicroBatch:
        grid = self.grid
        global_batch = None if self.batch_is_given else size * grid.data * grid.pipeline
        sizes = (grid.data, grid.tensor, grid.context, grid.pipeline, grid.expert)
        return MicroBatch(*sizes, size=size, global_batch=global_batch)

    def room(self) -> float:
        """Returns the bytes of free memory for one process."""
        if not self.sweep.on_gpu:
            host = host_memory()
            if host is None:
                raise UserError("this system does not report its memory; set --micro-batch-size")
            return host[1] / self.sweep.processes
        numbers = _query_gpu("print(torch.cuda.mem_get_info()[0], torch.cuda.device_count())")
        free, count = map(int, numbers.split())
        return free / -(-self.sweep.processes // count)

    def estimate(self, size: int, room: float) -> Trial:
        prepared, reason = prepare_layout(self.sweep, self.candidate(size))
        if prepared is None:
            return Trial(size, False, reason=reason)
        needed = memory_of(prepared.resolved.config, self.sweep.on_gpu).largest.total
        fits = needed <= _USABLE * room
        return Trial(size, fits, needed, reason="" if fits else f"estimated {binary_size(needed)}")

    def attempt(self, size: int) -> Trial:
        """Runs some real steps in subprocesses."""
        starter = ForkServer(["pentatron.cli.bench_worker"])
        row = measure_layout(self.sweep, self.candidate(size), starter, lambda: None)
        self.rows.append(row)
        write_summary(self.sweep.folder.summary, self.rows)
        trial = trial_of(size, row)
        say(trial_table([trial])[1])
        return trial

    def command(self, size: int) -> str:
        candidate = self.candidate(size)
        return training_command(self.sweep, candidate, prepare_layout(self.sweep, candidate)[0])


def trial_of(size: int, row: Row) -> Trial:
    """Converts the result of a run to a trial; raises if the run failed for a reason other than memory."""
    if row.measured is not None:
        return Trial(size, True, max(row.measured.memory_bytes), row.measured.tokens_per_second)
    if any(sign in row.reason for sign in _OOM_MESSAGES):
        return Trial(size, False, reason="out of memory")
    if row.status == "refused":
        return Trial(size, False, reason=row.reason)
    raise UserError(f"micro-batch {size}: {row.reason}")


# --- one layout ---


def prepare_layout(sweep: BenchConfig, layout: Candidate) -> tuple[Prepared | None, str]:
    """Returns the configuration of a layout, or the reason why the rules refuse it."""
    try:
        return prepare(sweep.words_of(layout), sweep.entry), ""
    except UserError as error:
        return None, "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)


def training_command(sweep: BenchConfig, layout: Candidate, prepared: Prepared | None) -> str:
    """Returns the command that trains this layout in the same way."""
    defaults: list[str] = []
    if prepared is not None:
        for name, source in prepared.resolved.sources.items():
            value = getattr(prepared.resolved.config.settings, name)
            # A switch that is off has no flag.
            if source == f"default of {sweep.entry.name}" and name not in _DEFAULTS and value is not False:
                defaults += all_settings()[name].written(value).split()
    return shlex.join(["pentatron", "train", *defaults, *sweep.words, *layout.words])


def _show_progress(sweep: BenchConfig, layout: Candidate, display: Any, number: int, total: int) -> None:
    """Updates the progress bar of a sweep while a layout runs."""
    metrics = sweep.folder.metrics(layout.name)
    steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    text = f"{layout.name}: {f'step {steps}' if steps else 'starting'}"
    display.work("measuring", number, total, text)


def measure_layout(sweep: BenchConfig, layout: Candidate, starter: Any, live: Callable[[], None]) -> Row:
    """Runs a layout and returns its row of the results. `live` is called while it runs."""
    from pentatron.cli.bench_worker import BenchJob, reason_of_failure, run_rank

    prepared, reason = prepare_layout(sweep, layout)
    row = Row(layout, "refused", sweep.processes, training_command(sweep, layout, prepared), reason)
    if prepared is None:
        return row
    config = prepared.resolved.config
    set_worker_environment(config.launch.threads_per_process)
    output, timeout = sweep.folder.output(layout.name), sweep.options.layout_timeout
    output.mkdir(parents=True)
    job = BenchJob(sweep.words_of(layout), sweep.entry, sweep.processes, free_port(), output)
    outcome = starter.run(run_rank, lambda rank: (job, rank), sweep.processes, timeout, live)
    row = dataclasses.replace(row, config=config, device=sweep.device)
    if not outcome.is_good:
        late = f"timed out after {timeout:.0f} s (--layout-timeout)" if outcome.timed_out else ""
        aborted = outcome.killed_message(or_aborted=True)
        cause = late or outcome.killed_message() or reason_of_failure(job, aborted)
        cause = cause or f"exit codes {list(outcome.exit_codes)}"
        return dataclasses.replace(row, status="failed", reason=f"{cause}; see {output}")
    try:
        metrics = sweep.folder.metrics(layout.name)
        measured = measure(metrics, sweep.options.warmup, config.train.global_batch_size)
    except UserError as error:
        return dataclasses.replace(row, status="failed", reason=str(error))
    flops = step_flops(config.model, config.train.global_batch_size, config.model.seq_length, config.moe)
    teraflops = flops / measured.step_seconds / sweep.processes / 1e12
    chip = find_chip(sweep.device)
    mfu = teraflops / chip.teraflops(config.precision.name != "fp32") if chip else None
    return dataclasses.replace(row, status="ok", reason="", measured=measured, teraflops=teraflops, mfu=mfu)
