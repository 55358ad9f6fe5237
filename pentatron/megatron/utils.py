"""Small functions for programs: printing, batches, masks, models, and hooks without effect."""

import enum
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.cli.output import say
from pentatron.errors import UserError
from pentatron.megatron.state import current_run, is_running
from pentatron.monitor.recorder import STARTED, append_event
from pentatron.parallel.collectives import all_reduce_

_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


# Model types with Megatron's names. Only `encoder_or_decoder` is available.
ModelType = enum.Enum("ModelType", "encoder_or_decoder encoder_and_decoder retro_encoder retro_decoder")
# Actions of NVIDIA's fault-tolerance package.
StateMachineActions = enum.Enum(
    "StateMachineActions", "NONE TRAIN_HEARTBEAT EVAL_HEARTBEAT SAVE_CHECKPOINT UPDATE_TIMEOUT", start=0
)


# --- printing ---


def print_rank_0(message: str) -> None:
    """Prints on rank 0."""
    if is_running():
        current_run().display.say(str(message))
    elif not dist.is_initialized() or dist.get_rank() == 0:
        say(str(message))


def is_last_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    if is_last_rank():
        say(str(message))


def print_datetime(string: str) -> None:
    print_rank_0(f"[{string}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S} ")


def append_to_progress_log(string: str, barrier: bool = True) -> None:
    """Appends a line to progress.txt in the checkpoint folder."""
    run = current_run()
    folder = run.config.checkpoint.save
    # The session writes the line of the start itself.
    if run.world.is_first and folder is not None and string != STARTED:
        path = Path(folder) / "progress.txt"
        append_event(path, run.config.launch.job_id or "", run.world.all_ranks.size, string)


# --- losses, batches and masks ---


def average_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Returns the mean of each loss over the data-parallel ranks, for a report."""
    data = current_run().world.data
    return all_reduce_(torch.stack([loss.detach().reshape(()) for loss in losses]), data) / data.size


def get_batch_on_this_tp_rank(data_iterator: Iterator[dict[str, Tensor]]) -> dict[str, Tensor | None]:
    """Copies the next micro-batch to this rank's device. Attention is causal, so there is no mask."""
    device = current_run().world.device
    data = next(data_iterator)
    return {key: data[key].to(device, non_blocking=True) if key in data else None for key in _KEYS}


def get_batch_on_this_cp_rank(batch: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Returns this rank's part of each sequence.

    Tensors of a data iterator are that part already and are not changed.
    """
    run = current_run()
    context, length = run.groups.axes.context, run.config.model.seq_length
    whole = {k: v for k, v in batch.items() if v is not None and v.dim() == 2 and v.shape[1] == length}
    return batch | {key: context.own_sequence(value) for key, value in whole.items()}


def get_ltor_masks_and_position_ids(
    data: Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    *,
    pad_token: int | None = None,
    pad_mask_loss: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the attention mask (True: hidden), the loss mask and the positions of tokens [B, S].

    Documents end at `eod_token`. `pad_mask_loss` excludes `pad_token` from the loss.
    """
    if pad_mask_loss and pad_token is None:
        raise UserError("get_ltor_masks_and_position_ids: pad_mask_loss needs to know pad_token; pass it")
    batch, length = data.shape
    index = torch.arange(length, device=data.device)
    ends = data == eod_token
    # Index of the first token of each token's document: one after the last end before it.
    next_start = torch.where(ends, index + 1, 0).cummax(1).values
    start = torch.cat((next_start.new_zeros(batch, 1), next_start[:, :-1]), dim=1)
    positions = index - start if reset_position_ids else index.expand(batch, length).clone()
    hidden = (index > index[:, None])[None, None]
    if reset_attention_mask:
        hidden = hidden | (index < start[:, :, None])[:, None]
    padding = data == pad_token if pad_mask_loss else torch.zeros_like(ends)
    loss_mask = torch.where((ends & eod_mask_loss) | padding, 0.0, 1.0)
    return hidden, loss_mask, positions


# --- models ---


def get_model_config(model: Any) -> Any:
    """Returns the configuration the model was built from."""
    return model.config


@overload
def unwrap_model(model: Sequence[Any]) -> list[Any]: ...
@overload
def unwrap_model(model: Any) -> Any: ...
def unwrap_model(model: Any) -> Any:
    """Returns the models unchanged: they are not wrapped here."""
    return list(model) if isinstance(model, list | tuple) else model


def divide(numerator: int, denominator: int) -> int:
    """Returns the quotient of a division without remainder."""
    if numerator % denominator:
        raise UserError(f"{numerator} is not divisible by {denominator}; choose numbers that divide evenly")
    return numerator // denominator


def set_jit_fusion_options() -> None:
    """Does nothing: PyTorch needs no options for fusion."""


# --- fault tolerance and one_logger, which are not used ---


def get_rank_monitor_client(action: StateMachineActions = StateMachineActions.NONE) -> None:
    """Returns None, as Megatron does without the fault-tolerance package."""


def get_timestamp_in_ms() -> int:
    return round(time.time() * 1000)


def on_pretrain_start() -> None:
    """Does nothing."""


def track_config_flags(*flags: Any, **named: Any) -> None:
    """Does nothing."""


def finish() -> None:
    """Does nothing."""
