"""Whether a layout can take every batch size that a run has on its way."""

from pentatron.config.run import RunConfig
from pentatron.layout.batch import batch_problem
from pentatron.layout.divisors import divisors, either
from pentatron.layout.schedules import schedule_problem


def size_problem(config: RunConfig, size: int) -> str | None:
    """Why a step of that many samples cannot run in this layout, or None."""
    micro, replicas, ranks = config.train.micro_batch_size, config.grid.data, config.grid.pipeline
    if batch_problem(size, micro, replicas) is not None:
        return (
            f"{size} is not divisible by micro batch size ({micro}) times data parallel size ({replicas}) = "
            f"{micro * replicas}"
        )
    if ranks == 1:
        return None
    count = config.accumulation_of(size)
    return schedule_problem(config.parallel.pipeline_schedule, ranks, config.virtual_stages, count)


def sizes_problem(config: RunConfig, consumed_samples: int = 0, steps_taken: int = 0) -> str | None:
    """The first batch size from here to the end of the run that cannot run, with the way out; or None."""
    plan, left = config.batch_plan, config.train.train_iters - steps_taken
    for stretch in plan.sizes(left, consumed_samples) if left > 0 else ():
        problem = size_problem(config, stretch.size)
        if problem is not None:
            return (
                f"the batch of {stretch.size} samples at step {steps_taken + stretch.first_step + 1} does not fit: {problem}; "
                f"{_way_out(config)}"
            )
    return None


def _way_out(config: RunConfig) -> str:
    common, replicas = config.batch_plan.common_divisor, config.grid.data
    chunk = (config.train.micro_batch_size or 1) * replicas
    if common % chunk == 0:
        return "begin with larger batches, or use another --pipeline-schedule"
    multiples = f"use batch sizes that are multiples of {chunk}"
    if common % replicas == 0:
        return f"{multiples}, or --micro-batch-size {either(divisors(common // replicas))}"
    return f"{multiples}, or a number of data-parallel ranks that divides {common}"
