"""The batch sizes of a run as a short table."""

from typing import Any

from pentatron.config.batch_sizes import size_problem
from pentatron.config.run import RunConfig
from pentatron.layout.batch_plan import Stretch

_FIRST, _LAST = 5, 3


def batch_sizes(config: RunConfig, steps: int | None = None) -> list[dict[str, Any]]:
    """Every size the batch has in so many steps (in all of the plan, if nobody says), and from which step on."""
    return [_row(config, stretch) for stretch in config.batch_plan.sizes(steps)]


def _row(config: RunConfig, stretch: Stretch) -> dict[str, Any]:
    problem = size_problem(config, stretch.size)
    return {
        "iteration": stretch.first_step,
        "samples": stretch.first_sample,
        "batch_size": stretch.size,
        "micro_batches": None if problem is not None else config.accumulation_of(stretch.size),
        "problem": problem,
    }


def batch_table(config: RunConfig, steps: int | None = None) -> str:
    """Empty where every step has the same size."""
    rows = batch_sizes(config, steps)
    if config.batch_plan.is_constant:
        return ""
    cut = len(rows) > _FIRST + _LAST + 1
    lines = ["Batch sizes, and after which iteration they begin", ""]
    lines.append("  iteration       samples  batch size  micro-batches")
    lines += [_line(row) for row in (rows[:_FIRST] if cut else rows)]
    if cut:
        lines.append(f"        ...  {len(rows) - _FIRST - _LAST} more sizes")
        lines += [_line(row) for row in rows[-_LAST:]]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    begins = f"  {row['iteration']:>9}  {row['samples']:>12}  {row['batch_size']:>10}"
    return (
        f"{begins}  does not fit: {row['problem']}"
        if row["problem"]
        else f"{begins}  {row['micro_batches']:>13}"
    )
