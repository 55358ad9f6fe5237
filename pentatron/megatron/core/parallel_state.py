"""`mpu`: the groups of this rank, under Megatron's names. Known while a run is under way."""

from typing import Any

from pentatron.errors import UserError
from pentatron.layout.ranks import Axis
from pentatron.megatron.state import current, is_running


def _size(axis: Axis) -> int:
    return current().world.group(axis).size


def _rank(axis: Axis) -> int:
    return current().world.group(axis).rank


def model_parallel_is_initialized() -> bool:
    return is_running()


is_initialized = model_parallel_is_initialized


def initialize_model_parallel(*sizes: Any, **named: Any) -> None:
    """The layout is that of the run's flags."""
    raise UserError(
        "initialize_model_parallel: the layout comes from the flags (--tensor-model-parallel-size and its kin) and is set up by "
        "pretrain() or initialize_megatron(); leave the call out"
    )


def get_tensor_model_parallel_group(check_initialized: bool = True) -> Any:
    return current().process_group("tensor")


def get_tensor_model_parallel_world_size() -> int:
    return _size("tensor")


def get_tensor_model_parallel_rank() -> int:
    return _rank("tensor")


def get_tensor_model_parallel_src_rank() -> int:
    """The first rank of this one's tensor group, among all."""
    world = current().world
    return world.everyone.rank - world.at.tensor


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> Any:
    return current().process_group("pipeline")


def get_pipeline_model_parallel_world_size() -> int:
    return _size("pipeline")


def get_pipeline_model_parallel_rank() -> int:
    return _rank("pipeline")


def get_data_parallel_group(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Any:
    """Ranks that see other samples; with context parallelism, those that see other parts of the same ones as well."""
    return current().process_group("replicas" if with_context_parallel else "data")


get_data_parallel_group_gloo = get_data_parallel_group


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    return _size("replicas" if with_context_parallel else "data")


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    return _rank("replicas" if with_context_parallel else "data")


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """The first rank of this one's data-parallel group, among all."""
    world = current().world
    axis: Axis = "replicas" if with_context_parallel else "data"
    return next(members[0] for members in world.grid.groups(axis) if world.everyone.rank in members)


def get_context_parallel_group(check_initialized: bool = True) -> Any:
    return current().process_group("context")


def get_context_parallel_world_size() -> int:
    return _size("context")


def get_context_parallel_rank() -> int:
    return _rank("context")


def get_expert_model_parallel_group(check_initialized: bool = True) -> Any:
    return current().process_group("expert")


def get_expert_model_parallel_world_size() -> int:
    return _size("expert")


def get_expert_model_parallel_rank() -> int:
    return _rank("expert")


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> Any:
    return current().process_group("expert_tensor")


def get_expert_tensor_parallel_world_size() -> int:
    return _size("expert_tensor")


def get_expert_tensor_parallel_rank() -> int:
    return _rank("expert_tensor")


def get_expert_data_parallel_group(check_initialized: bool = True) -> Any:
    return current().process_group("expert_data")


def get_embedding_group(check_initialized: bool = True) -> Any:
    return current().process_group("embedding")


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Stages on this rank; None where it has but one."""
    count = current().config.virtual_stages
    return count if count > 1 else None


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Which of this rank's stages is built or computed now."""
    return current().virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Which stage questions such as `is_pipeline_last_stage` are about, until one is built or computed."""
    run = current()
    if rank is None:
        run.stage = None
        return
    if not 0 <= rank < len(run.own_stages):
        raise UserError(f"virtual pipeline rank {rank}: this rank has {len(run.own_stages)} stages")
    run.stage = run.own_stages[rank]


def is_pipeline_first_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether the embedding is here: in the stage at work or, ignoring that, on this rank."""
    return 0 in _asked(ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether the loss is here: in the stage at work or, ignoring that, on this rank."""
    return current().config.placement.stages - 1 in _asked(ignore_virtual, vp_stage)


def _asked(ignore_virtual: bool, vp_stage: int | None) -> tuple[int, ...]:
    """The stages that are meant; without one at work, all of this rank."""
    run = current()
    if vp_stage is not None and not ignore_virtual:
        return (run.own_stages[vp_stage],)
    if run.stage is None or ignore_virtual:
        return run.own_stages
    return (run.stage,)
