"""`mpu`: ranks, sizes and process groups of the parallel axes. They are available inside a run."""

from collections.abc import Callable
from typing import Any

from pentatron.errors import UserError
from pentatron.layout.ranks import Axis
from pentatron.megatron.state import current_run, is_running

# The name of an axis in `get_{name}_group()`, `get_{name}_world_size()` and `get_{name}_rank()`.
_NAMED_AXES: dict[str, Axis] = {
    "tensor_model_parallel": "tensor",
    "pipeline_model_parallel": "pipeline",
    "context_parallel": "context",
    "expert_model_parallel": "expert",
    "expert_tensor_parallel": "expert_tensor",
    "expert_data_parallel": "expert_data",
}


def _functions_of(axis: Axis) -> tuple[Callable[..., Any], ...]:
    """Returns the functions of an axis, named by what follows the axis in their names."""

    def group(check_initialized: bool = True) -> Any:
        return current_run().process_group(axis)

    def world_size() -> int:
        return current_run().world.group(axis).size

    def rank() -> int:
        return current_run().world.group(axis).rank

    return group, world_size, rank


for _name, _axis in _NAMED_AXES.items():
    for _function in _functions_of(_axis):
        _function.__name__ = _function.__qualname__ = f"get_{_name}_{_function.__name__}"
        globals()[_function.__name__] = _function


def model_parallel_is_initialized() -> bool:
    return is_running()


is_initialized = model_parallel_is_initialized


def initialize_model_parallel(*sizes: Any, **named: Any) -> None:
    """Raises: the flags of the run set the layout."""
    raise UserError(
        "initialize_model_parallel: the layout comes from the flags (--tensor-model-parallel-size and the like) and is set up by "
        "pretrain() or initialize_megatron(); leave the call out"
    )


def get_embedding_group(check_initialized: bool = True) -> Any:
    return current_run().process_group("embedding")


def get_tensor_model_parallel_src_rank() -> int:
    """Returns the global rank of the first rank of this tensor group."""
    world = current_run().world
    return world.all_ranks.rank - world.at.tensor


def _data_axis(with_context_parallel: bool) -> Axis:
    return "replicas" if with_context_parallel else "data"


def get_data_parallel_group(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Any:
    """Returns the data-parallel group, optionally with the context-parallel ranks."""
    return current_run().process_group(_data_axis(with_context_parallel))


get_data_parallel_group_gloo = get_data_parallel_group


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    return current_run().world.group(_data_axis(with_context_parallel)).size


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    return current_run().world.group(_data_axis(with_context_parallel)).rank


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Returns the global rank of the first rank of this data-parallel group."""
    world = current_run().world
    groups = world.grid.groups(_data_axis(with_context_parallel))
    return next(members[0] for members in groups if world.all_ranks.rank in members)


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Returns the number of stages on this rank; None for a single stage."""
    count = current_run().config.virtual_stages
    return count if count > 1 else None


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Returns the index of the stage that is being built or computed."""
    return current_run().virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Selects the stage for `is_pipeline_last_stage` and the like, until the run builds or computes one."""
    run = current_run()
    if rank is not None and not 0 <= rank < len(run.local_stages):
        raise UserError(f"virtual pipeline rank {rank}: this rank has {len(run.local_stages)} stages")
    run.stage = None if rank is None else run.local_stages[rank]


def is_pipeline_first_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether the embedding is in the active stage, or with `ignore_virtual` on this rank."""
    return 0 in _selected(ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether the loss is computed in the active stage, or with `ignore_virtual` on this rank."""
    return current_run().config.placement.stages - 1 in _selected(ignore_virtual, vp_stage)


def _selected(ignore_virtual: bool, vp_stage: int | None) -> tuple[int, ...]:
    """The stage of `vp_stage` or the active one; otherwise, or with `ignore_virtual`, all local stages."""
    run = current_run()
    if vp_stage is not None and not ignore_virtual:
        return (run.local_stages[vp_stage],)
    return run.local_stages if run.stage is None or ignore_virtual else (run.stage,)
