"""What the log says before the first step, in Megatron's words: settings, sizes, and who holds how much."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pentatron.layout.ranks import ranks_in_words
from pentatron.monitor.memory import memory_figures, memory_line
from pentatron.ops.dispatch import triton_problem
from pentatron.parallel.collectives import gather_objects
from pentatron.parallel.world import World
from pentatron.plan.fit import footprint_line, planned_line
from pentatron.settings.run import RunConfig
from pentatron.text import one_line
from pentatron.train.model import ParallelModel
from pentatron.train.output import Output
from pentatron.train.preflight import left_in_bf16

# Every setting in Megatron's form, for the head of the log.


_COLUMN = 48
_RULE = "-" * 24


def arguments_block(settings: Mapping[str, Any]) -> str:
    lines = [f"{_RULE} arguments {_RULE}"]
    for name in sorted(settings, key=str.lower):
        dots = "." * (_COLUMN - len(name))
        lines.append(f"  {name} {dots} {one_line(str(settings[name]))}")
    return "\n".join([*lines, f"{'-' * 20} end of arguments {'-' * 21}"])


# What ranks have to say, each sentence once.


def of_all_ranks(own: Sequence[str], world: World) -> list[str]:
    """The sentences of every rank, with the ranks that say it where not all do; every rank must ask."""
    by: dict[str, list[int]] = {}
    for rank, sentences in enumerate(gather_objects(list(own), world.everyone)):
        for sentence in dict.fromkeys(sentences):
            by.setdefault(sentence, []).append(rank)
    everyone = world.everyone.size
    return [s if len(ranks) == everyone else f"{s} ({ranks_in_words(ranks)})" for s, ranks in by.items()]


def introduce(config: RunConfig, world: World, model: ParallelModel, output: Output) -> None:
    """Every rank must call it; the first one speaks."""
    held = sum(p.numel() for stage in model.stages.values() for p in stage.parameters())
    everyone = gather_objects((world.tensor.rank, world.pipeline.rank, held), world.everyone)
    grid = config.grid
    output.note(arguments_block(config.flat()))
    output.note(
        f"using world size: {grid.world_size}, data-parallel size: {grid.data}, context-parallel size: {grid.context}, "
        f"tensor-model-parallel size: {grid.tensor}, pipeline-model-parallel size: {grid.pipeline}"
    )
    for (tensor, pipeline), count in sorted({(t, p): n for t, p, n in everyone}.items()):
        output.note(
            f" > number of parameters on (tensor, pipeline) model parallel rank ({tensor}, {pipeline}): {count}"
        )
    output.note(footprint_line(config))
    output.note(planned_line(config, world.device.type == "cuda"))
    # Stages of a pipeline may differ by what they hold.
    own = [
        *left_in_bf16(model.decisions.fp8, model.stages.values()),
        *model.compilation.notes,
        *model.recording.notes,
    ]
    for note in of_all_ranks([*own, *_without_kernels(world)], world):
        output.say(f"note: {note}")
    output.note(f"[before the start of training step] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}")


def _without_kernels(world: World) -> list[str]:
    problem = triton_problem() if world.device.type == "cuda" else ""
    if not problem:
        return []
    return [
        f"Triton's kernels cannot run here ({problem}), so torch's own operations take their place, which are slower; install what is missing "
        f"(Triton wants a C compiler and Python's headers too)"
    ]


def tell_memory(world: World, steps: int, output: Output) -> None:
    """One line for each rank of the first replica; every rank must call it."""
    figures = gather_objects((world.data.rank, memory_figures(world.device)), world.everyone)
    for rank, (replica, of_rank) in enumerate(figures):
        if replica == 0:
            output.note(memory_line(rank, steps, of_rank))
