"""`pentatron layout`: which rank does what, shown before anything is started."""

import dataclasses
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.cli.help import section_help
from pentatron.cli.layout_report import Report, as_data, as_text
from pentatron.cli.loaded import learn_from_named
from pentatron.cli.options import Options, flags_of, option, options_help, read_among, usage
from pentatron.cli.report_output import show
from pentatron.cli.terminal import paint, say
from pentatron.cli.timeline import picture, rows
from pentatron.config.draft import Draft
from pentatron.config.entry import LAYOUT, EntryPoint
from pentatron.config.resolve import gather, resolve
from pentatron.config.settings import Facts
from pentatron.errors import UserError
from pentatron.layout.stages import written_stages

_PICTURE = ".svg"


@dataclass(frozen=True)
class LayoutOptions(Options):
    draw: str | None = option(
        None, "draw the schedule here; with a file name, as a picture", value=f"FILE{_PICTURE}", alone=""
    )
    all: bool = option(False, "every rank and every group, however many there are")
    json: bool = option(False, "everything, for machines")

    def problems(self) -> Iterable[str]:
        if self.draw and not self.draw.endswith(_PICTURE):
            yield f"--draw wants the name of a picture that ends in {_PICTURE}, not '{self.draw}'"


USAGE = f"""{usage("pentatron layout [--world-size N]", LayoutOptions, "[--setting value ...]")}

Shows which rank sits where, which ranks talk to each other, which layers each pipeline stage holds, and how the
micro-batches run through the pipeline. Nothing is started; a model that is not named, by --preset or --load, is made up.

{options_help(LayoutOptions)}

--world-size N is the number of processes (the product of the parallel sizes).

  pentatron layout --world-size 16 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --draw
  pentatron layout --preset llama3-8b --tp_size 2 --pp_size 4 --num-microbatches 8 --draw schedule.svg

All settings of `pentatron train` are understood; those about parallelism are:
"""
_NARROWEST = 40


def layout_command(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        say("\n".join([USAGE, *section_help(LAYOUT, "parallel")]))
        return 0
    options, settings = read_among(
        LayoutOptions, words, dataclasses.replace(LAYOUT, own=flags_of(LayoutOptions))
    )
    file = Path(options.draw) if options.draw else None
    report = describe(settings)
    if file is not None:
        _write(file, picture(report.checked, report.placement, report.schedule_in_words))
    show(report, options.json, lambda report: as_text(report, options.all), as_data)
    if options.json:
        return 0
    if file is not None:
        say(f"\nthe schedule is drawn in {file}: open it in any browser")
    elif options.draw is not None:
        paint("\n" + "\n".join(rows(report.checked, report.placement, _width(), _has_colours())))
    elif report.placement.stages > 1:
        say("\nadd --draw to see the schedule")
    return 0


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--draw {file}: {error.strerror}; name a file that can be written") from None


def _width() -> int:
    return max(_NARROWEST, shutil.get_terminal_size((110, 24)).columns)


def _has_colours() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def describe(words: Sequence[str], entry: EntryPoint = LAYOUT) -> Report:
    """The layout that the words ask for; raises every problem at once."""
    draft = gather(words, entry)
    facts = _facts(draft)
    known = learn_from_named(draft, facts) or draft.preset is not None
    stands_in = not known and _stand_in(draft)
    _settle_batch(draft)
    resolved = resolve(draft, facts, built_only=False)
    per_machine = facts.local_processes if draft.given("nproc_per_node") else None
    return Report(resolved.config, per_machine, tuple(resolved.notices), stands_in)


def _facts(draft: Draft) -> Facts:
    """As many processes as were said, or as one copy of the model takes."""
    world = draft.world_size
    per_machine = draft.nproc_per_node if draft.given("nproc_per_node") else None
    if world is None:
        copies = draft.data_parallel_size or 1
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        world = per_machine or copies
        if per_machine is None:
            for name in sizes:
                world *= getattr(draft, name)
    # Numbers below 1 are refused later, together with all other problems.
    world = max(1, world)
    return Facts(world, max(1, per_machine or world))


def _stand_in(draft: Draft) -> bool:
    """Makes up what was not said of the model, so that it fits the sizes; returns whether the layers are made up."""
    tensor = max(1, draft.tensor_model_parallel_size)
    heads = draft.num_attention_heads or 8 * tensor
    made = {
        "num_layers": _layers(draft),
        "hidden_size": 64 * heads,
        "seq_length": 256 * tensor * max(1, draft.context_parallel_size),
    }
    if not draft.given("hidden_size"):
        made |= {"num_attention_heads": heads}
    shape = {name: value for name, value in made.items() if not draft.given(name)}
    draft.assign(f"default of {LAYOUT.name}", **shape)
    return "num_layers" in shape


def _settle_batch(draft: Draft) -> None:
    """Micro-batches enough to show how the pipeline runs, where nobody says how many there are."""
    said = ("global_batch_size", "gradient_accumulation_steps", "num_microbatches", "rank_batch_size")
    if all(getattr(draft, name) is None for name in said) and not draft.step_batch_size_schedule:
        enough = max(4, 2 * draft.pipeline_model_parallel_size)
        draft.assign(f"default of {LAYOUT.name}", gradient_accumulation_steps=enough)


def _layers(draft: Draft) -> int:
    """Four for each stage, unless the pipeline's own settings say otherwise."""
    ranks = max(1, draft.pipeline_model_parallel_size)
    virtual = max(1, draft.virtual_pipeline_model_parallel_size or 1)
    each = draft.num_layers_per_virtual_pipeline_stage
    if draft.pipeline_model_parallel_layout is not None:
        try:
            return max(1, "".join(written_stages(draft.pipeline_model_parallel_layout)).count("t"))
        except ValueError:
            # The rule about layouts written out says what is wrong with it.
            return ranks * virtual
    if each is not None and each > 0:
        return int(ranks * each * (virtual if virtual > 1 else 2))
    ends = (draft.decoder_first_pipeline_num_layers, draft.decoder_last_pipeline_num_layers)
    fixed = [count for count in ends if count is not None]
    return int(sum(fixed) + 4 * virtual * max(0, ranks - len(fixed)))
