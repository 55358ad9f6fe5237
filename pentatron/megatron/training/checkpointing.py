"""Checkpoints of a run whose steps the program calls itself."""

from collections.abc import Mapping
from typing import Any

from pentatron.errors import UserError
from pentatron.megatron.flow import current_flow


def save_checkpoint(
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Mapping[str, Any] | None = None,
    train_data_iterator: Any = None,
    ft_client: Any = None,
    preprocess_common_state_dict_fn: Any = None,
) -> None:
    """Saves the run as it stands, unless that is saved already. Who began where is in it, so iterators add nothing."""
    flow = current_flow()
    flow.require(model=True, data=True)
    step = flow.session.state.step
    if iteration != step:
        raise UserError(
            f"save_checkpoint: the run is at iteration {step}, not {iteration}; give what train() returned"
        )
    trainer = flow.session.trainer
    trainer.save()
    # What the program does next is its own affair: it may change weights, or end.
    trainer.checkpoints.saver.wait_until_copied()
    if trainer.state.step >= trainer.total_steps:
        trainer.checkpoints.settle(wait=True)


def maybe_finalize_async_save(blocking: bool = False) -> None:
    """Commits a save that --async-save has begun, if all ranks have written their part by now; `blocking`: waits for them."""
    flow = current_flow()
    flow.require(model=True, data=True)
    flow.session.trainer.checkpoints.settle(blocking)


class BasicLocalCheckpointManager:
    """Checkpoints on a node's own disk, which are not available."""

    def __init__(self, root_local_ckpt_dir: str) -> None:
        raise RuntimeError(
            "the local checkpoint manager is not integrated; leave --non-persistent-ckpt-type local out, and save to a shared folder"
        )
