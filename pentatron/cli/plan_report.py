"""Report of `pentatron plan` as text, and the training command of a layout."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pentatron.plan.advice import TRADE_OFFS, Advice, advise, by_expert_size
from pentatron.plan.fit import megatron_estimate_line
from pentatron.plan.memory import RankMemory
from pentatron.plan.search import DIVISION_SETTINGS, LAYOUT_SETTINGS, Layout, Search, usable_memory
from pentatron.plan.static_memory import total_parameters
from pentatron.settings.command_line import is_flag
from pentatron.settings.run_config import all_settings
from pentatron.text import binary_size, parameter_count, seconds_text

# Settings of the planner itself, which the training command does not have.
_NOT_COPIED = ("world_size", "nproc_per_node", "dataset_size", "train_iters")
_DATA = """
    data_path train_data_path data_path_config data_args_path per_split_data_args_path mock_data corpus dataset_size
    """.split()
_STEPS = 100
_WIDTH = 105
_BAR = 20
_MOST_RANKS = 8
_PARTS = {
    "weights": "parameters in the model's precision",
    "gradients": "from backward to the update",
    "optimizer": "",
    "activations": "kept for backward",
    "logits": "of the output layer, or log-probabilities",
    "buffers": "of messages and collectives",
    "working": "temporary in backward: recomputed layers, gradients of the loss or of one matrix",
    "graphs": "outside CUDA graphs, which do not share their memory: evaluation, first gradients",
}
# Those of `_PARTS` that are static memory.
_STATIC_PARTS = ("weights", "gradients", "optimizer")
_AXES = {"tensor": "TP", "context": "CP", "pipeline": "PP", "data": "DP", "expert": "EP"}


@dataclass(frozen=True)
class PlanReport:
    """Result of a search. `given`: the layout of the user, if any. `layouts`: those found, best first."""

    search: Search
    given: Layout | None
    layouts: list[Layout]
    model: str
    assumed: list[str]
    top: int
    notices: list[str]

    @property
    def shown(self) -> Layout:
        """The layout whose memory is shown in full."""
        return self.given or self.layouts[0]

    @property
    def best(self) -> Layout | None:
        return next((layout for layout in self.layouts if layout.fits), None)

    @property
    def chosen(self) -> tuple[Layout, str] | None:
        """The layout of the training command, and its description."""
        if self.given is not None and self.given.fits:
            return self.given, "the given layout"
        return None if self.best is None else (self.best, "the first layout of the list")

    @property
    def varied(self) -> list[str]:
        """Given sizes, which the list varies too."""
        return [name for name in DIVISION_SETTINGS if self.search.draft.given(name)]

    @cached_property
    def advice(self) -> Advice:
        return advise(self.search, self.shown, self.layouts)


def as_text(report: PlanReport) -> str:
    blocks = [part(report) for part in (_model, _tree, _list, _detail, _experts)]
    blocks += ["" if report.chosen is None else _command(*report.chosen), _assumptions(report)]
    blocks.append("\n".join(f"note: {notice}" for notice in report.notices))
    return "\n\n".join(block for block in blocks if block)


def _model(report: PlanReport) -> str:
    config, search = report.shown.config, report.search
    model, train = config.model, config.train
    parameters, active = total_parameters(report.shown.sizes)
    tokens, flops = train.global_batch_size * model.seq_length, report.shown.estimate.flops
    grouped = model.num_query_groups != model.num_attention_heads
    groups = f" in {model.num_query_groups} groups" if grouped else ""
    of_token = f", {parameter_count(active)} active per token" if active < parameters else ""
    count = f"{parameter_count(parameters)} parameters{of_token}"
    experts = f", {config.moe.num_experts} experts" if config.moe.num_experts else ""
    sizes = f"{model.num_layers} layers, {model.hidden_size} wide, {model.num_attention_heads} heads{groups}"
    step = f"{train.global_batch_size} sequences × {model.seq_length} tokens = {tokens:,} tokens"
    devices = f"{search.world} × {search.device.name}, {binary_size(search.device.memory)} each"
    shape = f"  model  {count}: {sizes}{experts}, vocabulary of {model.vocab_size}"
    spent = f"  step   {step}; {flops:.4g} FLOPs, {flops / tokens:.3g} per token"
    return "\n".join([f"{report.model} on {devices}", "", shape, spent])


def _tree(report: PlanReport) -> str:
    advice = report.advice
    width = max(len(answer.question) for answer in advice.tree)
    lines = ["Decision tree", ""]
    lines += [f"  {answer.question:<{width}}  {answer.answer}" for answer in advice.tree]
    lines += [f"  {'→':>{width}}  {advice.combination}"] if advice.combination else []
    lines += [f"  the guides' {line}" for line in advice.tables]
    return "\n".join(lines)


def _list(report: PlanReport) -> str:
    search, fitting = report.search, [layout for layout in report.layouts if layout.fits]
    if not report.layouts:
        return f"No other layout of {search.world} GPUs is possible with {_flags(search.kept)}"
    if fitting:
        title = f"Layouts that fit ({len(fitting)} of {len(report.layouts)}), the fastest first"
    else:
        host = search.host_memory
        host_text = "" if host is None else f", and a machine for {binary_size(host)}"
        title = f"No layout fits: a GPU has room for {binary_size(usable_memory(search.device))}{host_text}. The smallest layouts"
    lines = [title, "", *_rows(report, (fitting or report.layouts)[: report.top])]
    # Which given settings the list varies and which it keeps.
    given = {name: getattr(search.draft, name) for name in report.varied}
    remarks = [f"sizes other than {_flags(given)} are listed too"] if given else []
    remarks += [f"all have {_flags(search.kept)}, as given"] if search.kept else []
    if remarks:
        lines += ["", f"  {'; '.join(remarks)}"]
    if not fitting:
        config = report.shown.config
        ways = ["--micro-batch-size 1"] if (config.train.micro_batch_size or 1) > 1 else []
        ways += ["more GPUs (--gpus)", f"a shorter --seq-length (now {config.model.seq_length})"]
        lines += ["", f"  use {', '.join(ways)}, or a smaller model (--num-layers, --hidden-size)"]
    return "\n".join(lines)


def _flags(settings: Mapping[str, Any]) -> str:
    return " ".join(_flag_words(settings))


def _rows(report: PlanReport, layouts: Sequence[Layout]) -> Iterator[str]:
    sparse = any(layout.sizes.sparse_layers for layout in layouts)
    split = any(layout.sizes.grid.context > 1 for layout in layouts)
    heads = ["TP", "PP", *(["CP"] if split else []), *(["EP"] if sparse else []), "DP"]
    width = 8 if any(layout.sizes.decisions.optimizer.in_host_memory for layout in layouts) else 5
    title = f"      {''.join(f'{head:>5}' for head in heads)}{'ZeRO':>{width}}  recompute micro-batch"
    yield f"{title}  memory a GPU  {'':<{_BAR}}  bubble     step  tokens/s/GPU  MFU"
    for number, layout in enumerate(layouts, 1):
        grid, config = layout.sizes.grid, layout.config
        virtual, train = config.virtual_stages, config.train
        stages = f"{grid.pipeline}×{virtual}" if virtual > 1 else f"{grid.pipeline}"
        sizes = [grid.tensor, stages, *([grid.context] if split else []), *([grid.expert] if sparse else [])]
        zero = f"{config.parallel.zero_stage}{'+host' if layout.sizes.decisions.optimizer.in_host_memory else ''}"
        total, (speed, utilisation) = layout.largest.total, speed_of(layout)
        division = f"{''.join(f'{size:>5}' for size in [*sizes, grid.data])}{zero:>{width}}"
        execution = f"{config.memory.recompute_granularity or 'none':<9} {train.micro_batch_size:>11}"
        memory = f"{binary_size(total):>12}  {_bar(total / report.search.device.memory)}"
        time = f"{layout.estimate.bubble:>6.1%}  {seconds_text(layout.estimate.seconds):>7}  {speed:>12,.0f}"
        yield f"  {number:>3} {division}  {execution}  {memory}  {time}  {utilisation:>3.0%}"


def speed_of(layout: Layout) -> tuple[float, float]:
    """Returns tokens per second per device, and the MFU."""
    config, estimate = layout.config, layout.estimate
    devices, seconds = layout.sizes.grid.world_size, estimate.seconds
    tokens = config.train.global_batch_size * config.model.seq_length / seconds / devices
    return tokens, estimate.flops / seconds / devices / layout.search.device.peak(layout.sizes.element_bytes)


def _bar(share: float) -> str:
    """Draws a share of a device's memory; the bar ends in an arrow if it exceeds 1."""
    filled = round(_BAR * min(1.0, share))
    return ("█" * filled + "·" * (_BAR - filled)) if share <= 1 else "█" * (_BAR - 1) + "▶"


def _detail(report: PlanReport) -> str:
    layout = report.shown
    grid, stage = layout.sizes.grid, layout.config.parallel.zero_stage
    sizes = [f"{name} {getattr(grid, axis)}" for axis, name in _AXES.items() if getattr(grid, axis) > 1]
    sizes += [f"ZeRO {stage}"] if stage else []
    title = "The given layout" if report.given is not None else "The first layout of the list"
    lines = [f"{title}: {', '.join(sizes) or 'one GPU'}; it {_verdict(layout)}", ""]
    return "\n".join([*lines, *_memory(layout), "", *_traffic(layout), "", *_pipeline(layout)])


def _verdict(layout: Layout) -> str:
    if layout.fits:
        return "fits"
    if layout.lacks_host_memory:
        needed, host = binary_size(layout.machine_host_bytes), binary_size(layout.search.host_memory or 0)
        return f"does NOT fit: {_in_host(layout)} needs {needed} of host memory per machine, which has {host}"
    return f"does NOT fit: there is room for {binary_size(usable_memory(layout.search.device))}"


def memory_parts(rank: RankMemory) -> dict[str, int]:
    return {name: getattr(rank.static if name in _STATIC_PARTS else rank, name) for name in _PARTS}


def _memory(layout: Layout) -> Iterator[str]:
    device, ranks = layout.search.device, layout.memory.ranks
    numbers = list(range(len(ranks)))
    numbers = numbers if len(ranks) <= _MOST_RANKS else [*numbers[:2], *numbers[-2:]]
    shown = [ranks[number] for number in numbers]
    title = f"  {'stages of rank':<16}" + "".join(f"{number:>10}" for number in numbers)
    yield title if len(ranks) > 1 else "  memory of a GPU"

    def row(title: str, cells: Iterable[str], note: str) -> str:
        return f"  {title:<16}{''.join(f'{cell:>10}' for cell in cells)}  {note}"

    parts = [memory_parts(rank) for rank in shown]
    for name, meaning in (_PARTS | {"optimizer": _optimizer(layout)}).items():
        if any(part[name] for part in parts):
            yield row(name, [binary_size(part[name]) for part in parts], meaning)
    if any(rank.not_simultaneous for rank in shown):
        hidden = [f"-{binary_size(rank.not_simultaneous)}" if rank.not_simultaneous else "" for rank in shown]
        yield row("not simultaneous", hidden, "gradients are allocated while activations are freed")
    bar = _bar(max(rank.total for rank in ranks) / device.memory)
    totals = [binary_size(rank.total) for rank in shown]
    yield row("total", totals, f"{bar} of {binary_size(device.memory)}")
    if (recorded := layout.with_graphs) is not None:
        note = "small layers are captured as CUDA graphs if memory suffices; --cuda-graphs off disables this"
        yield row("with graphs", [binary_size(recorded.total)], note)
    if in_host := max(rank.static.in_host for rank in ranks):
        machine = binary_size(layout.machine_host_bytes)
        host = layout.search.host_memory
        limit = f"of {binary_size(host)}" if host else "not checked; give --host-memory GB"
        note = f"{_in_host(layout)} of each GPU, {machine} in a machine ({limit})"
        yield row("in host memory", [binary_size(in_host)], note)


def _in_host(layout: Layout) -> str:
    static = layout.largest.static
    parts = {"the optimizer": static.host, "the copy for async save": static.async_save_copy}
    return " and ".join(name for name, count in parts.items() if count)


def _optimizer(layout: Layout) -> str:
    static = layout.largest.static
    state = "Adam's moments" if layout.config.optim.optimizer == "adam" else "momentum"
    parts = {"master weights": static.master, state: static.moments}
    return " and ".join(name for name, count in parts.items() if count) + ", in fp32"


def _traffic(layout: Layout) -> Iterator[str]:
    traffic, sending = layout.estimate.traffic, layout.estimate.sending
    stage, sent = layout.config.parallel.zero_stage, {axis: getattr(traffic, axis) for axis in _AXES}
    if not any(sent.values()):
        yield "  no communication on one GPU"
        return
    yield f"  {'sent in a step':<16}{'bytes':>10}{'exposed':>12}"
    for axis, count in ((axis, count) for axis, count in sent.items() if count):
        meaning = TRADE_OFFS[f"ZeRO {stage}" if axis == "data" and stage else axis]
        yield f"  {_AXES[axis]:<16}{binary_size(count):>10}{seconds_text(getattr(sending, axis)):>12}  {meaning}"


def _pipeline(layout: Layout) -> Iterator[str]:
    estimate, config = layout.estimate, layout.config
    if layout.sizes.grid.pipeline > 1:
        in_flight = ", ".join(str(rank.micro_batches) for rank in layout.memory.ranks[:_MOST_RANKS])
        more = " ..." if len(layout.memory.ranks) > _MOST_RANKS else ""
        count = f"{config.accumulation} micro-batches, bubble {estimate.bubble:.1%}"
        yield f"  pipeline         {count}; in flight at most, by rank: {in_flight}{more}"
    parts = {"computing": estimate.computing, "waiting": estimate.waiting, "sending": estimate.sending.total}
    times = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items())
    speed = "{:,.0f} tokens/s/GPU, MFU {:.0%}".format(*speed_of(layout))
    yield f"  time of a step   {seconds_text(estimate.seconds)}: {times}; {speed}"
    yield f"  Megatron-LM's    {megatron_estimate_line(config)}"


def _experts(report: PlanReport) -> str:
    lines = ["Expert parallelism in this layout, all else equal", ""]
    for size, total, weights in by_expert_size(report.shown):
        text = f"{binary_size(total):>9} a GPU, of which experts' weights {binary_size(weights)}"
        lines.append(f"  EP {size:<4} {text}")
    return "\n".join(lines) if len(lines) > 3 else ""


def _assumptions(report: PlanReport) -> str:
    device, search = report.search.device, report.search
    rate = device.peak(report.shown.sizes.element_bytes) / 1e12
    lines = [
        "Assumed",
        "",
        *([f"  not given, so assumed: {'; '.join(report.assumed)}"] if report.assumed else []),
        f"  {device.name}: {rate:.0f} TFLOP/s at its peak, of which matmuls reach {search.efficiency:.0%} (--efficiency), less for "
        f"small matrices; {device.link / 1e9:.0f} GB/s between GPUs of a machine, {device.network / 1e9:.0f} GB/s between machines",
        "  communication of tensor and expert parallelism is exposed; pipeline messages are overlapped; gradient reduction is overlapped with "
        "the last backward with --overlap-grad-reduce",
        "  5 % of the memory and 1 GiB are reserved for the driver, NCCL, cuBLAS workspaces and fragmentation; attention saves no scores (flash); experts are balanced",
        "  bytes are within 5 % of measurements (make plan-check); times are estimates for comparing layouts: measure them with "
        "pentatron bench",
    ]
    return "\n".join(lines)


def _command(layout: Layout, which: str) -> str:
    search = layout.search
    lines = [f"To train {which}", "", *(f"  {line}" for line in training_command_lines(layout))]
    if not _has_data_flags(search):
        lines.append("  (for your own data: --data-path PREFIX instead of --mock-data)")
    if search.world > search.per_machine:
        machines = f"each of {search.world // search.per_machine} machines"
        where = f"on {machines}, where MASTER is the host name of the first"
        lines.append(f"  {where}; `pentatron launch slurm` writes a job script")
    return "\n".join(lines)


def training_command_lines(layout: Layout) -> list[str]:
    """Returns the lines of the training command."""
    search = layout.search
    launcher = f"pentatron train --nproc-per-node {search.world}"
    if search.world > search.per_machine:
        nodes = f"--nnodes {-(-search.world // search.per_machine)} --nproc_per_node {search.per_machine}"
        rendezvous = "--rdzv_backend c10d --rdzv_endpoint $MASTER:29500"
        launcher = f"torchrun {nodes} {rendezvous} -m pentatron train"
    lines = [launcher, *(line for part in command_words(layout) for line in _wrapped(part))]
    continued = [f"{line} {chr(92)}" for line in lines[:-1]] + lines[-1:]
    return [f"{'    ' if i else ''}{line}" for i, line in enumerate(continued)]


def _wrapped(words: Sequence[str]) -> list[str]:
    """Wraps words to lines of the terminal's width, keeping flags together with their values."""
    lines: list[str] = []
    starts = [i for i, word in enumerate(words) if is_flag(word) or i == 0]
    for start, end in zip(starts, [*starts[1:], len(words)]):
        phrase = shlex.join(words[start:end])
        if lines and len(lines[-1]) + len(phrase) < _WIDTH:
            lines[-1] += f" {phrase}"
        else:
            lines.append(phrase)
    return lines


def _has_data_flags(search: Search) -> bool:
    draft = search.draft
    return any(draft.given(name) or draft.source(name).startswith("preset") for name in _DATA)


def command_words(layout: Layout) -> tuple[list[str], list[str]]:
    """Returns the flags of the layout, and all others, without the number of processes."""
    search, draft = layout.search, layout.search.draft
    layout_settings = {n: v for n, v in layout.settings.items() if v != all_settings()[n].default}
    layout_settings |= _overrides_of_files(layout)
    if "micro_batch_size" not in layout.settings and draft.given("micro_batch_size"):
        layout_settings["micro_batch_size"] = draft.micro_batch_size
    from_flags = [n for n in all_settings() if draft.by_flag(n)]
    others = {n: getattr(draft, n) for n in from_flags if n not in (*LAYOUT_SETTINGS, *_NOT_COPIED)}
    others |= {} if _has_data_flags(search) else {"mock_data": True}
    others["train_iters"] = draft.train_iters if draft.given("train_iters") else _STEPS
    if search.device.name == "CPU process" and not draft.given("device"):
        others["device"] = "cpu"
    return _flag_words(layout_settings), _flag_words(others)


def _overrides_of_files(layout: Layout) -> dict[str, Any]:
    """Returns sizes of the layout that equal the defaults but must be written, because a file that the
    command names sets them differently."""
    draft, parallel = layout.search.draft, layout.config.parallel
    in_file = [n for n in DIVISION_SETTINGS if draft.given(n) and not draft.by_flag(n)]
    sizes = {name: getattr(parallel, name) for name in in_file if name not in layout.settings}
    return {n: size for n, size in sizes.items() if isinstance(size, int) and size != getattr(draft, n)}


def _flag_words(settings: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in settings.items():
        item, values = all_settings()[name], value if isinstance(value, tuple) else (value,)
        words += [item.written(value)] if isinstance(value, bool) else [item.flag, *map(str, values)]
    return words
