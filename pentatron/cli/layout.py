"""`pentatron layout`: shows the role of every rank and draws the pipeline schedule, without starting a
run."""

import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pentatron.cli.checkpoint_settings import adopt_named_checkpoint
from pentatron.cli.layout_report import LayoutReport, as_data, as_text
from pentatron.cli.options import (
    Options,
    option,
    options_help,
    parse_options_and_settings,
    section_help,
    usage,
)
from pentatron.cli.output import say, say_unescaped, show_report
from pentatron.errors import UserError
from pentatron.layout.actions import Kind, Placement
from pentatron.layout.check import NAMES, ScheduleProperties, TimeSlot
from pentatron.layout.stages import parse_layout
from pentatron.settings.entry_points import LAYOUT, EntryPoint
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.settings import Draft, ProcessFacts

# Colours of forward, backward and weight gradients, cycled over the stages of a rank: the background in a
# terminal of 256 colours, and the colour in a picture.
_FORWARD = ((25, "#4c78a8"), (31, "#7fa3c9"), (62, "#35577a"), (67, "#9dbbd9"))
_BACKWARD = ((28, "#59a14f"), (64, "#8bc07f"), (100, "#3f7a37"), (65, "#aad3a1"))
_WEIGHT = ((94, "#b07a2b"), (130, "#cfa05c"), (136, "#8a5d1c"), (137, "#dcb985"))
_IDLE = "·"
# Sizes of the picture in pixels.
_STEP, _ROW, _LEFT, _TOP = 22, 26, 70, 50
_NARROWEST = 40


@dataclass(frozen=True)
class LayoutOptions(Options):
    draw: str | None = option(
        None, "draw the schedule in the terminal, or as a picture in FILE.svg", value="FILE.svg", alone=""
    )
    all: bool = option(False, "print every rank and every group")
    json: bool = option(False, "print JSON")

    def problems(self) -> Iterable[str]:
        if self.draw and not self.draw.endswith(".svg"):
            yield f"--draw must name a file with the extension .svg, not '{self.draw}'"


USAGE = f"""{usage("pentatron layout [--world-size N]", LayoutOptions, "[--setting value ...]")}

Shows the coordinates of every rank, the process groups, the layers of every pipeline stage, and the schedule of the
micro-batches. Nothing is started. Without --preset or --load, a small model is assumed.

{options_help(LayoutOptions)}

--world-size N is the number of processes (the product of the parallel sizes).

  pentatron layout --world-size 16 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --draw
  pentatron layout --preset llama3-8b --tp_size 2 --pp_size 4 --num-microbatches 8 --draw schedule.svg

All settings of `pentatron train` are accepted. The settings of parallelism:
"""


def layout_command(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        say("\n".join([USAGE, *section_help(LAYOUT, "parallel")]))
        return 0
    options, settings = parse_options_and_settings(LayoutOptions, words, LAYOUT)
    file, report = Path(options.draw) if options.draw else None, resolve_layout(settings)
    if file is not None:
        picture = draw_svg(report.checked, report.config.placement, report.schedule_in_words)
        try:
            file.write_text(picture, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--draw {file}: {error.strerror}; name a file that can be written") from None
    show_report(report, options.json, lambda report: as_text(report, options.all), as_data)
    if options.json:
        return 0
    if file is not None:
        say(f"\nthe schedule is drawn in {file}; open it in a browser")
    elif options.draw is not None:
        colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        width = max(_NARROWEST, shutil.get_terminal_size((110, 24)).columns)
        say_unescaped("\n" + "\n".join(draw_text(report.checked, report.config.placement, width, colours)))
    elif report.config.placement.stages > 1:
        say("\nadd --draw to see the schedule")
    return 0


def resolve_layout(words: Sequence[str], entry: EntryPoint = LAYOUT) -> LayoutReport:
    """Resolves the layout of the words; raises all problems at once."""
    draft = gather(words, entry)
    facts = _facts(draft)
    is_named = adopt_named_checkpoint(draft, facts) or draft.preset is not None
    is_assumed = not is_named and _assume_sizes(draft)
    _assume_batch(draft)
    resolved = resolve(draft, facts, refuse_unimplemented=False)
    per_machine = facts.local_processes if draft.given("nproc_per_node") else None
    return LayoutReport(resolved.config, per_machine, tuple(resolved.notices), is_assumed)


def _facts(draft: Draft) -> ProcessFacts:
    """Returns the given number of processes, or that of one replica of the model."""
    world = draft.world_size
    per_machine = draft.nproc_per_node if draft.given("nproc_per_node") else None
    if world is None and per_machine is None:
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        world = math.prod(getattr(draft, name) for name in sizes) * (draft.data_parallel_size or 1)
    # Sizes below 1 are refused later, together with all other problems.
    world = max(1, (world if world is not None else per_machine) or 1)
    return ProcessFacts(world, max(1, per_machine or world))


def _assume_sizes(draft: Draft) -> bool:
    """Assigns default model sizes that fit the parallel sizes; returns whether the number of layers is one of
    them."""
    tensor = max(1, draft.tensor_model_parallel_size)
    heads = draft.num_attention_heads or 8 * tensor
    length = 256 * tensor * max(1, draft.context_parallel_size)
    defaults = {"num_layers": _layers(draft), "hidden_size": 64 * heads, "seq_length": length}
    defaults |= {} if draft.given("hidden_size") else {"num_attention_heads": heads}
    missing = {name: value for name, value in defaults.items() if not draft.given(name)}
    draft.assign(f"default of {LAYOUT.name}", **missing)
    return "num_layers" in missing


def _assume_batch(draft: Draft) -> None:
    """Assigns enough micro-batches to show the steady state of the pipeline, if no batch setting is given."""
    settings = ("global_batch_size", "gradient_accumulation_steps", "num_microbatches", "rank_batch_size")
    if all(getattr(draft, name) is None for name in settings) and not draft.step_batch_size_schedule:
        enough = max(4, 2 * draft.pipeline_model_parallel_size)
        draft.assign(f"default of {LAYOUT.name}", gradient_accumulation_steps=enough)


def _layers(draft: Draft) -> int:
    """Returns four layers a stage, unless settings of the pipeline determine the number."""
    ranks = max(1, draft.pipeline_model_parallel_size)
    virtual = max(1, draft.virtual_pipeline_model_parallel_size or 1)
    per_stage = draft.num_layers_per_virtual_pipeline_stage
    if draft.pipeline_model_parallel_layout is not None:
        try:
            return max(1, "".join(parse_layout(draft.pipeline_model_parallel_layout)).count("t"))
        except ValueError:
            # The rules report what is wrong with it.
            return ranks * virtual
    if per_stage is not None and per_stage > 0:
        return int(ranks * per_stage * (virtual if virtual > 1 else 2))
    ends = (draft.decoder_first_pipeline_num_layers, draft.decoder_last_pipeline_num_layers)
    given = [count for count in ends if count is not None]
    return int(sum(given) + 4 * virtual * max(0, ranks - len(given)))


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else f"({index})"


def _label(placement: Placement, slot: TimeSlot) -> str:
    """Returns the micro-batch, with the letter of the stage (a, b, ...) if its rank has several."""
    stages = placement.stages_of(placement.rank_of[slot.action.stage])
    letter = "" if len(stages) == 1 else _letter(stages.index(slot.action.stage))
    return f"{slot.action.micro_batch}{letter}"


def _colours(placement: Placement, slot: TimeSlot) -> tuple[int, str]:
    """Returns the colours of a slot in the terminal and in a picture."""
    stages = placement.stages_of(placement.rank_of[slot.action.stage])
    palette = {Kind.FORWARD: _FORWARD, Kind.WEIGHT: _WEIGHT}.get(slot.action.kind, _BACKWARD)
    return palette[stages.index(slot.action.stage) % len(palette)]


def draw_text(checked: ScheduleProperties, placement: Placement, width: int, colours: bool) -> list[str]:
    """Draws the schedule as lines of at most `width` characters; a long one is split into several blocks."""
    cell = 2 + max(len(_label(placement, slot)) for slots in checked.timeline for slot in slots)
    margin = len(f"rank {placement.ranks - 1} ")
    per_line = max(1, (width - margin - 2) // cell)
    lines = []
    for first in range(0, checked.time, per_line):
        last = min(checked.time, first + per_line)
        # The time axis with every fifth step.
        marks = (f"{time if time % 5 == 0 else '':<{cell}}"[:cell] for time in range(first, last))
        lines.append(" " * (margin + 1) + "".join(marks).rstrip())
        for rank, slots in enumerate(checked.timeline):
            drawn = "".join(_cells(slots, placement, first, last, cell, colours))
            lines.append(f"rank {rank}".ljust(margin) + f"▕{drawn}▏")
        lines.append("")
    return [*lines, *_legend(checked, placement)]


def _cells(
    slots: Sequence[TimeSlot], placement: Placement, first: int, last: int, cell: int, colours: bool
) -> Iterator[str]:
    """Yields the cells of one rank from `first` to `last`; a slot of several steps fills several cells."""
    at, idle = first, _IDLE.center(cell - 1) + " "
    for slot in slots:
        start, end = max(slot.start, first), min(slot.end, last)
        if start >= end:
            continue
        length = (end - start) * cell - 1
        # A slot that continues from the previous block begins with a dash.
        text = f"{slot.action.kind.value}{_label(placement, slot)}" if start == slot.start else "─"
        text = text[:length].ljust(length, "─")
        painted = f"\x1b[97;48;5;{_colours(placement, slot)[0]}m{text}\x1b[0m" if colours else text
        yield f"{idle * (start - at)}{painted} "
        at = end
    yield idle * (last - at)


def _legend(checked: ScheduleProperties, placement: Placement) -> list[str]:
    kinds = {slot.action.kind for slots in checked.timeline for slot in slots}
    halves = "I0 input gradient, W0 weight gradient"
    names, note = f"{halves}, B0 backward", " (B is I and W in one)"
    if Kind.INPUT not in kinds:
        names, note = "B0 backward", " (a backward takes two steps)"
    elif Kind.BACKWARD not in kinds:
        names, note = halves, ""
    lines = [f"F0 forward, {names} of micro-batch 0{note}, {_IDLE} waiting"]
    if placement.stages > placement.ranks:
        firsts = enumerate(range(0, placement.stages, placement.ranks))
        letters = (f"{_letter(i)} stages {first}-{first + placement.ranks - 1}" for i, first in firsts)
        lines.append(f"letters denote the stages of a rank: {', '.join(letters)}")
    return lines


def draw_svg(checked: ScheduleProperties, placement: Placement, title: str) -> str:
    """Draws the schedule as an SVG."""
    kinds = "green: backward (takes two steps)"
    if any(checked.deferred):
        kinds = "green: input gradient (two steps: whole backward), brown: weight gradient"
    colours = f"blue: forward, {kinds}, grey: waiting; the numbers are micro-batches"
    legend = [colours, *_legend(checked, placement)[1:]]
    # The width of the text depends on the viewer's font; this fits wide ones.
    text_width = max(10 * len(title), *(7 * len(line) for line in legend)) + 24
    width, height = max(_LEFT + checked.time * _STEP + 20, text_width), _TOP + placement.ranks * _ROW + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    y, idle = _TOP, f'width="{checked.time * _STEP}" height="{_ROW - 4}" fill="#eeeeee"'
    for rank, slots in enumerate(checked.timeline):
        parts.append(f'<text x="12" y="{y + 16}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" {idle}/>')
        parts += [_svg_slot(slot, placement, y) for slot in slots]
        y += _ROW
    for time in range(0, checked.time + 1, 5):
        parts.append(f'<text x="{_LEFT + time * _STEP}" y="{y + 12}" fill="#777777">{time}</text>')
    parts += [f'<text x="12" y="{y + 34 + 15 * i}">{escape(line)}</text>' for i, line in enumerate(legend)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _svg_slot(slot: TimeSlot, placement: Placement, y: int) -> str:
    x, width, action = _LEFT + slot.start * _STEP, (slot.end - slot.start) * _STEP, slot.action
    kind, colour = NAMES.get(action.kind, action.kind.name.lower()), _colours(placement, slot)[1]
    title = f"<title>{kind} of micro-batch {action.micro_batch}, stage {action.stage}</title>"
    rect = f'<rect x="{x}" y="{y}" width="{width - 1}" height="{_ROW - 4}" rx="2" fill="{colour}"/>'
    text = f'<text x="{x + width / 2:g}" y="{y + 15}" fill="white" text-anchor="middle">'
    return f"<g>{title}{rect}{text}{_label(placement, slot)}</text></g>"
