"""Layers and functions for tensor parallelism, with Megatron's arguments."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pentatron.errors import UserError
from pentatron.megatron.state import current_run, is_running
from pentatron.nn import linear
from pentatron.nn.linear import Rows, even_rows
from pentatron.nn.loss import cross_entropy_of
from pentatron.parallel.axes import TensorAxis
from pentatron.parallel.collectives import Group
from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide


class _SingleShard(TensorAxis):
    """One rank of a tensor axis whose other ranks do not exist: computes its shard without communication."""

    def enter(self, x_BSD: Tensor) -> Tensor:
        return x_BSD


class ColumnParallelLinear(linear.ColumnParallelLinear):
    """A linear layer split by rows of its weight, in the slot of a spec or by itself.

    By itself, `ColumnParallelLinear(in_features, out_features, tp_size)` is one shard: this rank's if the run
    has `tp_size` tensor ranks, otherwise the first one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp_size: int | Sequence[Rows] = 1,
        bias: bool = False,
        axis: TensorAxis | None = None,
    ) -> None:
        if not isinstance(tp_size, int):
            assert axis is not None, "layers pass the rows together with the axis"
            super().__init__(in_features, out_features, tp_size, bias, axis)
        else:
            if tp_size < 1 or out_features % tp_size:
                raise UserError(
                    f"ColumnParallelLinear: {out_features} outputs cannot be shared by {tp_size} tensor ranks; use a size that divides them"
                )
            shard: TensorAxis = _SingleShard(Group(0, tp_size))
            if is_running() and current_run().groups.axes.tensor.size == tp_size:
                shard = current_run().groups.axes.tensor
            super().__init__(in_features, out_features, even_rows(out_features, shard), bias, shard)
            torch.nn.init.normal_(self.weight, std=0.02)
            if self.bias is not None:
                torch.nn.init.zeros_(self.bias)
        self.tp_size = self.axis.size
        self.out_per_partition = self.weight.shape[0]


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Returns the loss of every token, equal on all tensor ranks, from this rank's shard of the logits."""
    if label_smoothing:
        raise UserError(f"vocab_parallel_cross_entropy: {label_smoothing=} is not available; leave it out")
    run = current_run()
    axis, vocabulary = run.groups.axes.tensor, run.config.model.vocab_size
    assert vocabulary is not None
    first = axis.rank * vocab_parallel_logits.shape[-1]
    cross_entropy = cross_entropy_of(decide(run.config, DeviceFacts(vocab_parallel_logits.device.type)).loss)
    return cross_entropy.from_logits(vocab_parallel_logits, target, vocabulary, first, axis.group)


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor], datatype: torch.dtype
) -> dict[str, Tensor]:
    """Copies the tensors to this rank's device without a broadcast: every rank reads its own batches."""
    device = current_run().world.device
    return {key: data[key].to(device=device, dtype=datatype) for key in keys}
