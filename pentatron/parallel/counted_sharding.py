"""The collectives of torch's `fully_shard`, with the time this rank stands still in them counted.

Only on a CPU, where torch waits for each of them. On a GPU it runs them beside the computation, on streams of its own,
and does not tell how much of it the computation had to wait for.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from pentatron.parallel.collectives import Group, all_gather_into, reduce_scatter_into
from pentatron.parallel.waiting import Waits


def count_waits(unit: FSDPModule, waits: Waits) -> None:
    unit.set_custom_all_gather(_Gather(waits))  # type: ignore[arg-type]
    unit.set_custom_reduce_scatter(_ReduceScatter(waits))  # type: ignore[arg-type]


class _Counted:
    """What torch asks of a collective of one's own; it does the same by itself."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _group(self, process_group: Any) -> Group:
        return Group(
            process_group.rank(), process_group.size(), process_group, waits=self.waits, name="the shards"
        )


class _Gather(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        all_gather_into(output_tensor, input_tensor, self._group(group))


class _ReduceScatter(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, f"gradients are sums here, torch asks for {op}"
        reduce_scatter_into(output_tensor, input_tensor, self._group(group))
