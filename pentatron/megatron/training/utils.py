"""Printing, batches and masks, as programs for Megatron call them."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.cli.output import say
from pentatron.errors import UserError
from pentatron.megatron.core.utils import unwrap_model
from pentatron.megatron.state import current, is_running
from pentatron.monitor.recorder import STARTED, append_event
from pentatron.parallel.collectives import all_reduce_

_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def print_rank_0(message: str) -> None:
    """Once for the whole run."""
    if is_running():
        current().display.say(str(message))
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
    """A line of progress.txt beside the checkpoints. That the job starts is noted there by the session itself."""
    run = current()
    folder = run.config.checkpoint.save
    if run.world.is_first and folder is not None and string != STARTED:
        path = Path(folder) / "progress.txt"
        append_event(path, run.config.launch.job_id or "", run.world.everyone.size, string)


def average_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """The mean of each over the data-parallel ranks, for a report."""
    data = current().world.data
    return all_reduce_(torch.stack([loss.detach().reshape(()) for loss in losses]), data) / data.size


def get_batch_on_this_tp_rank(data_iterator: Iterator[dict[str, Tensor]]) -> dict[str, Tensor | None]:
    """The next micro-batch on this rank's device. Attention is causal, so there is no mask."""
    device = current().world.device
    data = next(data_iterator)
    return {key: data[key].to(device, non_blocking=True) if key in data else None for key in _KEYS}


def get_batch_on_this_cp_rank(batch: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """This rank's part of each sequence. What comes from the data iterator is that part already and stays as it is."""
    run = current()
    context, whole = run.groups.axes.context, run.config.model.seq_length
    if context.size == 1:
        return batch

    def own(value: Tensor | None) -> Tensor | None:
        is_whole = value is not None and value.dim() == 2 and value.shape[1] == whole
        return context.own_sequence(value) if is_whole and value is not None else value

    return {key: own(value) for key, value in batch.items()}


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
    """Of tokens [B, S]: the mask (True: hidden), the loss mask and the positions, with documents ending at `eod_token`.

    `pad_mask_loss`: a `pad_token` does not count in the loss.
    """
    if pad_mask_loss and pad_token is None:
        raise UserError("get_ltor_masks_and_position_ids: pad_mask_loss needs to know pad_token; give it")
    batch, length = data.shape
    place = torch.arange(length, device=data.device)
    ends = data == eod_token
    # The first place of the document a token belongs to: one after the last end before it.
    began = torch.where(ends, place + 1, 0).cummax(1).values
    first = torch.cat((began.new_zeros(batch, 1), began[:, :-1]), dim=1)
    positions = place - first if reset_position_ids else place.expand(batch, length).clone()
    hidden = (place > place[:, None])[None, None]
    if reset_attention_mask:
        hidden = hidden | (place < first[:, :, None])[:, None]
    padding = data == pad_token if pad_mask_loss else torch.zeros_like(ends)
    loss_mask = torch.where((ends & eod_mask_loss) | padding, 0.0, 1.0)
    return hidden, loss_mask, positions


__all__ = [
    "append_to_progress_log",
    "average_losses_across_data_parallel_group",
    "get_batch_on_this_cp_rank",
    "get_batch_on_this_tp_rank",
    "get_ltor_masks_and_position_ids",
    "is_last_rank",
    "print_datetime",
    "print_rank_0",
    "print_rank_last",
    "unwrap_model",
]
