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
from pentatron.plan.shape import Shape
from pentatron.plan.static_memory import total_parameters
from pentatron.settings.command_line import is_flag
from pentatron.settings.run_config import table
from pentatron.text import binary_size, parameter_count, seconds_text

# Settings of the planner itself, which the training command does not have.
_NOT_COPIED = ("world_size", "nproc_per_node", "dataset_size", "train_iters")
_DATA = (
    *("data_path", "train_data_path", "data_path_config", "data_args_path", "per_split_data_args_path"),
    *("mock_data", "corpus", "dataset_size"),
)
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
    "buffers": "messages and collectives",
    "working": "temporary in backward: recomputed layers, gradients of the loss or of one matrix",
    "graphs": "outside CUDA graphs, which do not share their memory: evaluation, first gradients",
}
_AXES = {"tensor": "TP", "context": "CP", "pipeline": "PP", "data": "DP", "expert": "EP"}


@dataclass(frozen=True)
class PlanReport:
    """Result of a search. `given` is the layout the user wrote, if any; `layouts` are those found, the best
    first."""

    search: Search
    given: Layout | None
    layouts: list[Layout]
    model: str
    assumed: tuple[str, ...]
    top: int
    notices: tuple[str, ...] = ()

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
            return self.given, "the layout as given"
        return None if self.best is None else (self.best, "the first of the list")

    @property
    def varied(self) -> list[str]:
        """Given sizes that the list varies nevertheless."""
        return [name for name in DIVISION_SETTINGS if self.search.draft.given(name)]

    @cached_property
    def advice(self) -> Advice:
        return advise(self.search, self.shown, self.layouts)

    @property
    def shape(self) -> Shape:
        return self.shown.shape


def as_text(report: PlanReport) -> str:
    blocks = [
        _model(report),
        _tree(report),
        _list(report),
        _detail(report),
        _experts(report),
        "" if report.chosen is None else command_block(report.search, *report.chosen),
        _assumptions(report),
        "\n".join(f"note: {notice}" for notice in report.notices),
    ]
    return "\n\n".join(block for block in blocks if block)


def _model(report: PlanReport) -> str:
    shape, config, search = report.shape, report.shape.config, report.search
    model, train = config.model, config.train
    parameters, active = total_parameters(shape)
    tokens = train.global_batch_size * model.seq_length
    flops = report.shown.estimate.flops
    grouped = model.num_query_groups != model.num_attention_heads
    groups = f" in {model.num_query_groups} groups" if grouped else ""
    count = f"{parameter_count(parameters)} parameters"
    if active < parameters:
        count += f", {parameter_count(active)} of them for each token"
    experts = f", {config.moe.num_experts} experts" if config.moe.num_experts else ""
    return "\n".join(
        [
            f"{report.model} on {search.world} × {search.device.name}, {binary_size(search.device.memory)} each",
            "",
            f"  model  {count}: {model.num_layers} layers, {model.hidden_size} wide, "
            f"{model.num_attention_heads} heads{groups}{experts}, {model.vocab_size} words",
            f"  step   {train.global_batch_size} sequences × {model.seq_length} tokens = {tokens:,} tokens; "
            f"{flops:.4g} FLOPs, {flops / tokens:.3g} a token",
        ]
    )


def _tree(report: PlanReport) -> str:
    advice = report.advice
    width = max(len(answer.question) for answer in advice.tree)
    lines = ["How to divide it", ""]
    lines += [f"  {answer.question:<{width}}  {answer.answer}" for answer in advice.tree]
    if advice.combination:
        lines.append(f"  {'→':>{width}}  {advice.combination}")
    lines += [f"  the guides' {line}" for line in advice.tables]
    return "\n".join(lines)


def _list(report: PlanReport) -> str:
    search, fitting = report.search, [layout for layout in report.layouts if layout.fits]
    if not report.layouts:
        return f"No other layout of {search.world} GPUs is possible with {_flags(search.kept)}"
    if fitting:
        title = f"Layouts that fit ({len(fitting)} of {len(report.layouts)} divisions), the fastest first"
    else:
        host = search.host_memory
        host_text = "" if host is None else f", and a machine {binary_size(host)} of its own"
        title = f"No layout fits: a GPU has room for {binary_size(usable_memory(search.device))}{host_text}. The smallest are"
    lines = [title, "", *_rows(report, (fitting or report.layouts)[: report.top])]
    if report.varied or search.kept:
        lines += ["", f"  {_varied_text(report)}"]
    if not fitting:
        lines += ["", f"  {_remedies(report)}"]
    return "\n".join(lines)


def _varied_text(report: PlanReport) -> str:
    """Describes which given settings the list varies and which it keeps."""
    kept, draft = report.search.kept, report.search.draft
    parts = []
    if report.varied:
        given = _flags({name: getattr(draft, name) for name in report.varied})
        parts.append(f"sizes other than {given} are listed too")
    if kept:
        parts.append(f"all have {_flags(kept)}, as given")
    return "; ".join(parts)


def _flag_words(settings: Mapping[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in setting_words(name, value)]


def _flags(settings: Mapping[str, Any]) -> str:
    return " ".join(_flag_words(settings))


def _remedies(report: PlanReport) -> str:
    config = report.shape.config
    ways = ["more GPUs (--gpus)", f"a shorter --seq-length (now {config.model.seq_length})"]
    if (config.train.micro_batch_size or 1) > 1:
        ways.insert(0, "--micro-batch-size 1")
    return "try " + ", ".join(ways) + ", or a smaller model (--num-layers, --hidden-size)"


def _rows(report: PlanReport, layouts: Sequence[Layout]) -> Iterator[str]:
    sparse = any(layout.shape.sparse_layers for layout in layouts)
    split = any(layout.shape.grid.context > 1 for layout in layouts)
    heads = ["TP", "PP", *(["CP"] if split else []), *(["EP"] if sparse else []), "DP"]
    width = 8 if any(layout.shape.decisions.offload.on for layout in layouts) else 5
    yield (
        f"      {''.join(f'{head:>5}' for head in heads)}{'ZeRO':>{width}}  {'recompute':<9} {'micro-batch':>11}  {'memory a GPU':>12}  "
        f"{'':<{_BAR}}  bubble     step  tokens/s/GPU  MFU"
    )
    for number, layout in enumerate(layouts, 1):
        yield _row(report, number, layout, split, sparse, width)


def _row(report: PlanReport, number: int, layout: Layout, split: bool, sparse: bool, width: int) -> str:
    """Formats a row of the list; `width` is that of the ZeRO column."""
    grid, config = layout.shape.grid, layout.config
    stages = f"{grid.pipeline}×{config.virtual_stages}" if config.virtual_stages > 1 else f"{grid.pipeline}"
    sizes = [grid.tensor, stages, *([grid.context] if split else []), *([grid.expert] if sparse else [])]
    zero = f"{config.parallel.zero_stage}{'+host' if layout.shape.decisions.offload.on else ''}"
    total = layout.largest.total
    speed, utilisation = speed_of(layout)
    return (
        f"  {number:>3} "
        + "".join(f"{size:>5}" for size in [*sizes, grid.data])
        + f"{zero:>{width}}  {config.memory.recompute_granularity or 'none':<9} {config.train.micro_batch_size:>11}  {binary_size(total):>12}  "
        + f"{_bar(total / report.search.device.memory)}  {layout.estimate.bubble:>6.1%}  {seconds_text(layout.estimate.seconds):>7}  "
        + f"{speed:>12,.0f}  {utilisation:>3.0%}"
    )


def speed_of(layout: Layout) -> tuple[float, float]:
    """Returns tokens per second per device, and the MFU."""
    config, estimate = layout.config, layout.estimate
    devices, seconds = layout.shape.grid.world_size, estimate.seconds
    tokens = config.train.global_batch_size * config.model.seq_length / seconds / devices
    return tokens, estimate.flops / seconds / devices / layout.device.peak(layout.shape.width)


def _bar(share: float) -> str:
    """Draws a share of a device's memory; the bar ends in an arrow if it exceeds 1."""
    filled = round(_BAR * min(1.0, share))
    return ("█" * filled + "·" * (_BAR - filled)) if share <= 1 else "█" * (_BAR - 1) + "▶"


def _name(layout: Layout) -> str:
    grid, config = layout.shape.grid, layout.config
    sizes = [f"{name} {getattr(grid, axis)}" for axis, name in _AXES.items() if getattr(grid, axis) > 1]
    if config.parallel.zero_stage:
        sizes.append(f"ZeRO {config.parallel.zero_stage}")
    return ", ".join(sizes) or "one GPU"


def _detail(report: PlanReport) -> str:
    layout = report.shown
    title = "The layout as given" if report.given is not None else "The first of the list"
    lines = [f"{title}: {_name(layout)}; it {_verdict(layout)}", ""]
    return "\n".join([*lines, *_memory(layout), "", *_traffic(layout), "", *_pipeline(layout)])


def _verdict(layout: Layout) -> str:
    if layout.fits:
        return "fits"
    if layout.lacks_host_memory:
        assert layout.host_memory is not None
        return (
            f"does NOT fit: {_in_host(layout)} needs {binary_size(layout.machine_host_bytes)} of a machine's memory, which is "
            f"{binary_size(layout.host_memory)}"
        )
    return f"does NOT fit: there is room for {binary_size(usable_memory(layout.device))}"


def memory_parts(rank: RankMemory) -> dict[str, int]:
    static = rank.held
    return {
        "weights": static.weights,
        "gradients": static.gradients,
        "optimizer": static.optimizer,
        "activations": rank.activations,
        "logits": rank.logits,
        "buffers": rank.buffers,
        "working": rank.working,
        "graphs": rank.graphs,
    }


def _memory(layout: Layout) -> Iterator[str]:
    ranks = layout.memory.ranks
    shown = list(range(len(ranks))) if len(ranks) <= _MOST_RANKS else [0, 1, len(ranks) - 2, len(ranks) - 1]
    if len(ranks) == 1:
        yield "  memory of a GPU"
    else:
        yield f"  {'stages of rank':<16}" + "".join(f"{rank:>10}" for rank in shown)

    def row(title: str, cells: Iterable[str], note: str) -> str:
        return f"  {title:<16}{''.join(f'{cell:>10}' for cell in cells)}  {note}"

    parts = [memory_parts(ranks[rank]) for rank in shown]
    for name, meaning in (_PARTS | {"optimizer": _optimizer(layout)}).items():
        if any(part[name] for part in parts):
            yield row(name, [binary_size(part[name]) for part in parts], meaning)
    if any(ranks[rank].spared for rank in shown):
        spared = [f"-{binary_size(ranks[rank].spared)}" if ranks[rank].spared else "" for rank in shown]
        yield row("not at once", spared, "gradients are allocated while activations are freed")
    bar = _bar(max(rank.total for rank in ranks) / layout.device.memory)
    totals = [binary_size(ranks[rank].total) for rank in shown]
    yield row("together", totals, f"{bar} of {binary_size(layout.device.memory)}")
    if (recorded := layout.with_graphs) is not None:
        note = "small layers are captured as CUDA graphs if there is room; --cuda-graphs off avoids them"
        yield row("with graphs", [binary_size(recorded.total)], note)
    if in_host := max(rank.held.in_host for rank in ranks):
        machine = binary_size(layout.machine_host_bytes)
        limit = "not compared with what it has: --host-memory GB"
        if layout.host_memory is not None:
            limit = f"of {binary_size(layout.host_memory)}"
        note = f"{_in_host(layout)} of each GPU, {machine} in a machine ({limit})"
        yield row("in host memory", [binary_size(in_host)], note)


def _in_host(layout: Layout) -> str:
    static = layout.largest.held
    parts = {"the optimizer": static.host, "the copy that is saved in the background": static.async_save_copy}
    return " and ".join(name for name, count in parts.items() if count)


def _optimizer(layout: Layout) -> str:
    static = layout.largest.held
    state = "Adam's moments" if layout.config.optim.optimizer == "adam" else "momentum"
    parts = {"master weights": static.master, state: static.moments}
    return " and ".join(name for name, count in parts.items() if count) + ", in fp32"


def _traffic(layout: Layout) -> Iterator[str]:
    traffic, sending = layout.estimate.traffic, layout.estimate.sending
    sent = {axis: getattr(traffic, axis) for axis in _AXES if getattr(traffic, axis)}
    if not sent:
        yield "  no communication: there is one GPU"
        return
    yield f"  {'sent in a step':<16}{'bytes':>10}{'not hidden':>12}"
    for axis, count in sent.items():
        stage = layout.config.parallel.zero_stage
        meaning = TRADE_OFFS[f"ZeRO {stage}" if axis == "data" and stage else axis]
        yield f"  {_AXES[axis]:<16}{binary_size(count):>10}{seconds_text(getattr(sending, axis)):>12}  {meaning}"


def _pipeline(layout: Layout) -> Iterator[str]:
    estimate, config = layout.estimate, layout.config
    if layout.shape.grid.pipeline > 1:
        alive = ", ".join(str(rank.micro_batches) for rank in layout.memory.ranks[:_MOST_RANKS])
        more = " ..." if len(layout.memory.ranks) > _MOST_RANKS else ""
        yield (
            f"  pipeline         {config.accumulation} micro-batches, bubble {estimate.bubble:.1%}; kept at once by rank: {alive}{more}"
        )
    speed, utilisation = speed_of(layout)
    yield (
        f"  time of a step   {seconds_text(estimate.seconds)}: computing {seconds_text(estimate.computing)}, waiting "
        f"{seconds_text(estimate.waiting)}, sending {seconds_text(estimate.sending.total)}; {speed:,.0f} tokens/s/GPU, MFU {utilisation:.0%}"
    )
    yield f"  Megatron-LM's    {megatron_estimate_line(config)}"


def _experts(report: PlanReport) -> str:
    rows = by_expert_size(report.shown)
    lines = [
        f"  EP {size:<4} {binary_size(total):>9} a GPU, of which experts' weights {binary_size(weights)}"
        for size, total, weights in rows
    ]
    return (
        "\n".join(["Expert parallelism in this layout, all else equal", "", *lines]) if len(rows) > 1 else ""
    )


def _assumptions(report: PlanReport) -> str:
    device, search = report.search.device, report.search
    rate = device.peak(report.shape.width) / 1e12
    lines = [
        "Assumed",
        "",
        *([f"  not given, so assumed: {'; '.join(report.assumed)}"] if report.assumed else []),
        f"  {device.name}: {rate:.0f} TFLOP/s at its peak, of which matmuls reach {search.efficiency:.0%} (--efficiency), less where they are "
        f"small; {device.link / 1e9:.0f} GB/s between GPUs of a machine, {device.network / 1e9:.0f} GB/s between machines",
        "  tensor and expert parallelism wait for what they send; messages of the pipeline are hidden; gradients are hidden behind the "
        "last backward with --overlap-grad-reduce",
        "  5 % of the memory and 1 GiB are left for the driver, NCCL, workspaces of cuBLAS and torch's gaps between tensors; attention keeps no scores (flash); experts are equally busy",
        "  bytes are within 5 % of what was measured in make plan-check; times are estimates, good for comparing layouts: measure "
        "with pentatron bench",
    ]
    return "\n".join(lines)


def command_block(search: Search, layout: Layout, which: str) -> str:
    lines = [f"To train {which}", "", *(f"  {line}" for line in training_command_lines(search, layout))]
    if not has_data_flags(search):
        lines.append("  (with your own data: --data-path PREFIX instead of --mock-data)")
    if search.world > search.per_machine:
        machines = search.world // search.per_machine
        lines.append(
            f"  on each of {machines} machines, with MASTER the host name of the first; `pentatron launch slurm` writes a job"
        )
    return "\n".join(lines)


def training_command_lines(search: Search, layout: Layout) -> list[str]:
    """Returns the lines of the training command."""
    lines = [_launcher(search), *(line for part in _settings(search, layout) for line in _wrapped(part))]
    continued = [f"{line} {chr(92)}" for line in lines[:-1]] + lines[-1:]
    return [f"{'    ' if i else ''}{line}" for i, line in enumerate(continued)]


def _wrapped(words: Sequence[str]) -> list[str]:
    """Wraps words to lines of the terminal's width, keeping flags together with their values."""
    phrases: list[list[str]] = []
    for word in words:
        if is_flag(word) or not phrases:
            phrases.append([])
        phrases[-1].append(word)
    lines: list[str] = []
    for phrase in map(shlex.join, phrases):
        if lines and len(lines[-1]) + len(phrase) < _WIDTH:
            lines[-1] += f" {phrase}"
        else:
            lines.append(phrase)
    return lines


def settings_words(search: Search, layout: Layout) -> list[str]:
    """Returns the arguments of `pentatron train`, without the number of processes."""
    return [word for part in _settings(search, layout) for word in part]


def has_data_flags(search: Search) -> bool:
    draft = search.draft
    return any(draft.given(name) or draft.source(name).startswith("preset") for name in _DATA)


def _settings(search: Search, layout: Layout) -> tuple[list[str], list[str]]:
    """Returns the flags of the layout, and all others."""
    draft = search.draft
    layout_settings = {n: v for n, v in layout.settings.items() if v != table()[n].default}
    layout_words = [*_flag_words(layout_settings), *_flag_words(_overrides_of_files(search, layout))]
    if "micro_batch_size" not in layout.settings and draft.given("micro_batch_size"):
        layout_words += setting_words("micro_batch_size", draft.micro_batch_size)
    from_flags = [
        n for n in table() if draft.source(n).startswith("flag") and n not in (*LAYOUT_SETTINGS, *_NOT_COPIED)
    ]
    other_words = _flag_words({name: getattr(draft, name) for name in from_flags})
    if not has_data_flags(search):
        other_words.append("--mock-data")
    other_words += setting_words("train_iters", draft.train_iters if draft.given("train_iters") else _STEPS)
    if search.device.name == "CPU process" and not draft.given("device"):
        other_words += ["--device", "cpu"]
    return layout_words, other_words


def _overrides_of_files(search: Search, layout: Layout) -> dict[str, Any]:
    """Returns sizes of the layout that equal the defaults but must be written, because a file that the
    command names sets them differently."""
    draft, parallel = search.draft, layout.config.parallel
    in_file = [n for n in DIVISION_SETTINGS if draft.given(n) and not draft.source(n).startswith("flag")]
    sizes = {name: getattr(parallel, name) for name in in_file if name not in layout.settings}
    return {n: size for n, size in sizes.items() if isinstance(size, int) and size != getattr(draft, n)}


def setting_words(name: str, value: Any) -> list[str]:
    item = table()[name]
    if isinstance(value, bool):
        return [item.written(value)]
    values: Sequence[Any] = value if isinstance(value, tuple) else (value,)
    return [item.flag, *map(str, values)]


def _launcher(search: Search) -> str:
    if search.world <= search.per_machine:
        return f"pentatron train --nproc-per-node {search.world}"
    machines = -(-search.world // search.per_machine)
    return (
        f"torchrun --nnodes {machines} --nproc_per_node {search.per_machine} --rdzv_backend c10d "
        f"--rdzv_endpoint $MASTER:29500 -m pentatron train"
    )
