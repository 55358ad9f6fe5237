"""The head of the log, as Megatron-LM prints it: settings, parallel sizes, parameters and memory of ranks."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pentatron.layout.ranks import ranks_in_words
from pentatron.monitor.memory import memory_figures, memory_line
from pentatron.ops.dispatch import triton_problem
from pentatron.parallel.collectives import gather_objects
from pentatron.parallel.world import World
from pentatron.plan.fit import megatron_estimate_line, planned_memory_line
from pentatron.text import one_line
from pentatron.train.model import ParallelModel
from pentatron.train.output import Output
from pentatron.train.preflight import fp8_notices

_COLUMN = 48
_RULE = "-" * 24


def arguments_block(settings: Mapping[str, Any]) -> str:
    """Formats all settings as Megatron-LM's block of arguments."""
    lines = [f"{_RULE} arguments {_RULE}"]
    for name in sorted(settings, key=str.lower):
        dots = "." * (_COLUMN - len(name))
        lines.append(f"  {name} {dots} {one_line(str(settings[name]))}")
    return "\n".join([*lines, f"{'-' * 20} end of arguments {'-' * 21}"])


def merge_messages(own: Sequence[str], world: World) -> list[str]:
    """Returns the messages of all ranks without duplicates; those of some ranks name them. Collective."""
    ranks_of: dict[str, list[int]] = {}
    for rank, messages in enumerate(gather_objects(list(own), world.all_ranks)):
        for message in dict.fromkeys(messages):
            ranks_of.setdefault(message, []).append(rank)
    size = world.all_ranks.size
    return [m if len(ranks) == size else f"{m} ({ranks_in_words(ranks)})" for m, ranks in ranks_of.items()]


def log_run_header(model: ParallelModel, output: Output) -> None:
    """Logs the head of a run. Collective."""
    config, world, grid = model.config, model.world, model.config.grid
    elements = sum(p.numel() for stage in model.stages.values() for p in stage.parameters())
    by_rank = gather_objects((world.tensor.rank, world.pipeline.rank, elements), world.all_ranks)
    output.note(arguments_block(config.flat()))
    output.note(
        f"using world size: {grid.world_size}, data-parallel size: {grid.data}, context-parallel size: {grid.context}, "
        f"tensor-model-parallel size: {grid.tensor}, pipeline-model-parallel size: {grid.pipeline}"
    )
    for (tensor, pipeline), count in sorted({(t, p): n for t, p, n in by_rank}.items()):
        output.note(
            f" > number of parameters on (tensor, pipeline) model parallel rank ({tensor}, {pipeline}): {count}"
        )
    output.note(megatron_estimate_line(config))
    output.note(planned_memory_line(config, world.device.type == "cuda"))
    # Pipeline stages have different layers, and with them different notes.
    fp8, kernels = fp8_notices(model.decisions.fp8, model.stages.values()), _without_kernels(world)
    notes = [*fp8, *model.compilation.notes, *model.recording.notes, *kernels]
    for note in merge_messages(notes, world):
        output.say(f"note: {note}")
    output.note(f"[before the start of training step] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}")


def _without_kernels(world: World) -> list[str]:
    problem = triton_problem() if world.device.type == "cuda" else ""
    if not problem:
        return []
    return [
        f"Triton kernels cannot run on this machine ({problem}), so slower torch operators are used; install what is missing "
        f"(Triton needs a C compiler and Python's headers too)"
    ]


def log_memory(world: World, steps: int, output: Output) -> None:
    """Logs the memory of each rank of the first data-parallel replica. Collective."""
    by_rank = gather_objects((world.data.rank, memory_figures(world.device)), world.all_ranks)
    for rank, (replica, figures) in enumerate(by_rank):
        if replica == 0:
            output.note(memory_line(rank, steps, figures))
