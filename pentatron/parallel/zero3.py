"""Parameters of which every rank keeps a share: torch's `fully_shard`, and everything that knows of it.

A unit is what is gathered at a time: a layer, the experts of a layer (other ranks hold copies of them), and what is
left of a stage (tables, the last norm, the head). Torch gathers a unit in the dtype of the model before it computes and
drops it afterwards; in backward it gathers it again and sums its gradients, in fp32, over the ranks that share it. What
is left of a stage is kept through the step: it is needed at both ends of every pass, so that dropping it in between would
not make the largest moment any smaller.

Between steps a rank holds nothing but its shards: a rectangle of each parameter in fp32, and one of its gradients, to which
every backward pass adds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from pentatron.layout.packing import aligned
from pentatron.layout.ranks import Axis
from pentatron.parallel.collectives import Group, Waits, all_gather_into, reduce_scatter_into
from pentatron.parallel.shards import (
    Fragment,
    Held,
    Piece,
    Shape,
    fragments_in,
    fragments_of,
    held_parameters,
)
from pentatron.parallel.world import World

# The collectives of torch's `fully_shard`, with the time this rank stands still in them counted.
#
# Only on a CPU, where torch waits for each of them. On a GPU it runs them beside the computation, on streams
# of its own, and does not tell how much of it the computation had to wait for.


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


# For each axis of ranks with copies of a parameter: those that divide it between them, and those with the same share.
SHARED_OVER: dict[Axis, tuple[Axis, Axis]] = {
    "replicas": ("shards", "instances"),
    "expert_data": ("expert_shards", "expert_instances"),
}


@dataclass(frozen=True)
class Shard:
    """What this rank keeps of one parameter: the rectangle that begins at `start` in it, and its gradients."""

    held: Held
    start: Shape
    values: Tensor
    gradients: Tensor

    def pieces(self, laid_out_alike: Tensor) -> Iterator[tuple[Piece, Fragment]]:
        return fragments_in(self.held, laid_out_alike, self.start)


class ShardedStage:
    """Takes the parameters of a stage over. `flat` holds the gradients of all shards with copies on the same axis."""

    def __init__(self, stage: nn.Module, world: World, dtype: torch.dtype) -> None:
        self.stage = stage
        # The parameters themselves are not kept: each is freed when its unit is cut.
        told = {held.name: (held.tensor, held.declared) for held in held_parameters(stage)}
        copies = {name: declared.copies for name, (_, declared) in told.items()}
        self.units: list[FSDPModule] = []
        for path, module in _units(stage, copies):
            inside = [axis for name, axis in copies.items() if path == "" or name.startswith(f"{path}.")]
            # A unit around experts holds what is left beside them.
            axis: Axis = "replicas" if path == "" or "replicas" in inside else inside[0]
            self.units.append(_cut(module, _mesh(world, axis), dtype, keep=path == ""))
            if world.device.type == "cpu":
                count_waits(self.units[-1], world.waits)
        helds = [Held(n, t, stage.get_parameter(n), declared) for n, (t, declared) in told.items()]
        self.flat: dict[Axis, Tensor] = {}
        self.shards: list[Shard] = []
        for axis in SHARED_OVER:
            self._lay_out(axis, [held for held in helds if held.declared.copies == axis], world.device)

    def _lay_out(self, axis: Axis, helds: Sequence[Held], device: torch.device) -> None:
        """Gives the gradients of some parameters their places: one after the other, with zeros between them."""
        local = [_local(held.parameter) for held in helds]
        ends = list(_ends(values.numel() for values in local))
        if not ends:
            return
        flat = self.flat[axis] = torch.zeros(ends[-1], dtype=torch.float32, device=device)
        for held, values, end in zip(helds, local, ends):
            room = aligned(values.numel())
            place = flat[end - room : end - room + values.numel()].view(values.shape)
            parameter: Any = held.parameter
            # Torch adds to a gradient that is there, and this one stays there.
            parameter.grad = DTensor.from_local(
                place,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            self.shards.append(Shard(held, _start(parameter), values, place))

    def begin_backward(self, last: bool) -> None:
        """`last`: no other backward follows in this step, so that nothing need be kept any longer."""
        self.units[-1].set_reshard_after_backward(last, recurse=False)

    def drop_gathered(self) -> None:
        """Weights that were gathered earlier, and differ from the shards from now on, are gathered anew."""
        for unit in self.units:
            unit.reshard()

    def whole_weights(self) -> Iterator[tuple[Piece, Fragment]]:
        """Copies of the weights the stage computes with. Every rank must ask, and take one after the other."""
        self.drop_gathered()
        for unit in self.units:
            unit.unshard()
            for shard in self.shards:
                parameter = self.stage.get_parameter(shard.held.name)
                if not isinstance(parameter, DTensor):
                    yield from fragments_of(shard.held, parameter.detach().flatten().clone())
            unit.reshard()


def _units(stage: nn.Module, copies: dict[str, Axis]) -> Iterator[tuple[str, nn.Module]]:
    """Inner ones first: the layers, which models keep in a ModuleDict, experts in them, and the stage itself."""
    for path, module in stage.named_modules():
        if not isinstance(module, nn.ModuleDict):
            continue
        for name, layer in module.items():
            whole = f"{path}.{name}"
            yield from _elsewhere(whole, layer, copies)
            yield whole, layer
    yield "", stage


def _elsewhere(path: str, module: nn.Module, copies: dict[str, Axis]) -> Iterator[tuple[str, nn.Module]]:
    """The largest parts of a layer whose copies are all on another axis than those of the dense parts."""
    axes = {axis for name, axis in copies.items() if name.startswith(f"{path}.")}
    if axes and "replicas" not in axes:
        yield path, module
    elif axes - {"replicas"}:
        for name, child in module.named_children():
            yield from _elsewhere(f"{path}.{name}", child, copies)


def _cut(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, keep: bool) -> FSDPModule:
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        # Activations have the dtype of the model already; angles of positions are fp32 and stay so.
        cast_forward_inputs=False,
    )
    module.register_forward_hook(_in_own_memory)
    unit: FSDPModule = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=not keep,
        shard_placement_fn=lambda parameter: ShardPlacement(_cut_dimension(parameter.shape, mesh.size())),
        mp_policy=policy,
    )
    # The loss is divided by the tokens of the whole step, so gradients are sums. Torch would average.
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_gradient_divide_factor(1.0)
    return unit


def _in_own_memory(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Torch gathers for backward when the gradient of an output comes; of a view, it warns, that could go unnoticed."""
    return output.clone() if isinstance(output, Tensor) and output._base is not None else output


def _cut_dimension(shape: Sequence[int], ranks: int) -> int:
    """Rows, unless there are fewer than ranks: then the first dimension that divides (torch cuts others unevenly only
    along rows)."""
    if not shape or shape[0] >= ranks:
        return 0
    return next((d for d, size in enumerate(shape) if d and size % ranks == 0), 0)


def _mesh(world: World, axis: Axis) -> DeviceMesh:
    group = world.group(SHARED_OVER[axis][0])
    return DeviceMesh.from_group(_process_group(group, world), world.device.type)


def _process_group(group: Group, world: World) -> Any:
    """Also where a rank has no company: torch wants a group of one there."""
    if group.process_group is not None:
        return group.process_group
    return dist.new_group([world.everyone.rank], use_local_synchronization=True)


def _local(parameter: Any) -> Tensor:
    with torch.no_grad():
        local: Tensor = parameter.to_local()
    return local


def _start(parameter: Any) -> Shape:
    mesh = parameter.device_mesh
    start, _ = share_of(tuple(parameter.shape), mesh.get_local_rank(), mesh.size())
    return start


def share_of(shape: Shape, rank: int, ranks: int) -> tuple[Shape, Shape]:
    """The rectangle of a parameter that one of the ranks keeps: (start, size), as torch cuts."""
    cut = _cut_dimension(shape, ranks)
    each = math.ceil(shape[cut] / ranks)
    first = min(rank * each, shape[cut])
    length = min(each, shape[cut] - first)
    start = tuple(first if d == cut else 0 for d in range(len(shape)))
    return start, tuple(length if d == cut else size for d, size in enumerate(shape))


def _ends(sizes: Iterator[int] | Any) -> Iterator[int]:
    end = 0
    for size in sizes:
        end += aligned(size)
        yield end
