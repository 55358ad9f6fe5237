"""Batch arithmetic: samples of one step = micro-batch × data-parallel ranks × accumulation."""

from pentatron.layout.divisors import divisors, either


def accumulation_steps(global_batch: int, micro_batch: int, data_parallel: int) -> int:
    """Micro-batches each data-parallel rank runs in one step."""
    steps, rest = divmod(global_batch, micro_batch * data_parallel)
    if rest:
        raise ValueError(batch_problem(global_batch, micro_batch, data_parallel))
    return steps


def batch_problem(global_batch: int, micro_batch: int, data_parallel: int) -> str | None:
    """Why these sizes do not fit together, or None."""
    chunk = micro_batch * data_parallel
    if global_batch % chunk == 0:
        return None
    message = (
        f"global batch size ({global_batch}) is not divisible by micro batch size ({micro_batch}) "
        f"times data parallel size ({data_parallel}) = {chunk}"
    )
    if global_batch % data_parallel == 0:
        sizes = either(divisors(global_batch // data_parallel))
        return f"{message}; use --micro-batch-size {sizes}"
    above = -(-global_batch // chunk) * chunk
    return f"{message}; use --global-batch-size {above} or another number of processes"
