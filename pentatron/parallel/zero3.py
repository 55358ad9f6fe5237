"""ZeRO 3 on torch's `fully_shard` (FSDP2): every rank keeps a shard of each parameter.

An FSDP unit is a layer, the experts of a layer (their replicas are other ranks), or the rest of a stage
(embeddings, final norm, head). Torch all-gathers a unit in the model's dtype before its forward and frees it
afterwards; backward gathers it again and reduce-scatters its gradients in fp32. The rest of a stage stays
gathered during a step: it is needed at both ends of every pass, so freeing it in between would not reduce
peak memory.

Between steps a rank holds only its shards in fp32 and their gradients, to which every backward pass adds.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from pentatron.layout.packing import align_up
from pentatron.layout.ranks import Axis
from pentatron.parallel.collectives import Group, WaitTimer, all_gather_into, reduce_scatter_into
from pentatron.parallel.sharding import (
    Fragment,
    Shape,
    Shard,
    ShardedParameter,
    fragments_in,
    fragments_of,
    sharded_parameters,
)
from pentatron.parallel.world import World

_SUM = dist.ReduceOp.SUM


class _TimedCollective:
    """A collective of FSDP with the default behaviour that measures its wait time.

    Only for CPUs, where torch waits for each collective. On a GPU torch overlaps them with computation on its
    own streams and does not report how long the computation had to wait.
    """

    def __init__(self, collective: Callable[[Tensor, Tensor, Group], None], waits: WaitTimer) -> None:
        self.collective = collective
        self.waits = waits

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any = _SUM, async_op: bool = False
    ) -> None:
        assert op == _SUM, f"gradients are sums here, torch asks for {op}"
        shards = Group(group.rank(), group.size(), group, waits=self.waits, name="the shards")
        self.collective(output_tensor, input_tensor, shards)


# By axis of replicas: the axis of the ranks that shard, and that of the ranks with equal shards.
SHARD_AXES: dict[Axis, tuple[Axis, Axis]] = {
    "replicas": ("shards", "instances"),
    "expert_data": ("expert_shards", "expert_instances"),
}


@dataclass(frozen=True)
class Zero3Shard:
    """This rank's shard of one parameter, the rectangle that begins at `start`, and its gradients."""

    param: ShardedParameter
    start: Shape
    values: Tensor
    gradients: Tensor

    def fragments(self, laid_out_alike: Tensor) -> Iterator[tuple[Shard, Fragment]]:
        return fragments_in(self.param, laid_out_alike, self.start)


class ShardedStage:
    """Shards the parameters of a stage.

    `flat` holds the gradients of the shards, by axis of their replicas.
    """

    def __init__(self, stage: nn.Module, world: World, dtype: torch.dtype) -> None:
        self.stage = stage
        # Keep no reference to the parameters: each must be freed when its unit is sharded.
        declarations = {param.name: (param.tensor, param.declared) for param in sharded_parameters(stage)}
        replica_axes = {name: declared.replica_axis for name, (_, declared) in declarations.items()}
        self.units: list[FSDPModule] = []
        for path, module in _units(stage, replica_axes):
            inside = [axis for name, axis in replica_axes.items() if not path or name.startswith(f"{path}.")]
            # A layer with experts is the unit of its dense parameters: its experts are units already.
            axis: Axis = "replicas" if path == "" or "replicas" in inside else inside[0]
            unit = _shard_unit(module, _mesh(world, axis), dtype, keep=path == "")
            if world.device.type == "cpu":
                unit.set_custom_all_gather(_TimedCollective(all_gather_into, world.waits))  # type: ignore[arg-type]
                unit.set_custom_reduce_scatter(_TimedCollective(reduce_scatter_into, world.waits))  # type: ignore[arg-type]
            self.units.append(unit)
        self.flat: dict[Axis, Tensor] = {}
        self.shards: list[Zero3Shard] = []
        for axis in SHARD_AXES:
            params = [
                ShardedParameter(name, tensor, stage.get_parameter(name), declared)
                for name, (tensor, declared) in declarations.items()
                if declared.replica_axis == axis
            ]
            if params:
                self._allocate_gradients(axis, params, world.device)

    def _allocate_gradients(
        self, axis: Axis, parameters: Sequence[ShardedParameter], device: torch.device
    ) -> None:
        """Allocates the gradients of some parameters in one flat tensor, aligned, with zeros in between."""
        with torch.no_grad():
            local: list[Tensor] = [cast(Any, param.parameter).to_local() for param in parameters]
        ends = list(itertools.accumulate(align_up(values.numel()) for values in local))
        flat = self.flat[axis] = torch.zeros(ends[-1], dtype=torch.float32, device=device)
        for param, values, end in zip(parameters, local, ends):
            room = align_up(values.numel())
            gradients = flat[end - room : end - room + values.numel()].view(values.shape)
            parameter: Any = param.parameter
            mesh = parameter.device_mesh
            options = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
            # Torch accumulates into an existing gradient, so this one stays in place.
            parameter.grad = DTensor.from_local(gradients, mesh, parameter.placements, **options)
            start, _ = shard_bounds(tuple(parameter.shape), mesh.get_local_rank(), mesh.size())
            self.shards.append(Zero3Shard(param, start, values, gradients))

    def begin_backward(self, last: bool) -> None:
        """Called before a backward. After the `last` one of a step the rest of the stage is freed too."""
        self.units[-1].set_reshard_after_backward(last, recurse=False)

    def reshard(self) -> None:
        """Frees gathered weights after the shards have changed, so that they are gathered again."""
        for unit in self.units:
            unit.reshard()

    def full_weights(self) -> Iterator[Fragment]:
        """Yields copies of the gathered weights, unit by unit; collective, so every rank must exhaust it."""
        self.reshard()
        for unit in self.units:
            unit.unshard()
            for shard in self.shards:
                parameter = self.stage.get_parameter(shard.param.name)
                if not isinstance(parameter, DTensor):
                    values = parameter.detach().flatten().clone()
                    yield from (fragment for _, fragment in fragments_of(shard.param, values))
            unit.reshard()


def _units(stage: nn.Module, replica_axes: dict[str, Axis]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the units of a stage, inner ones first: experts, layers (in a ModuleDict), the stage."""
    for path, module in stage.named_modules():
        if not isinstance(module, nn.ModuleDict):
            continue
        for name, layer in module.items():
            whole = f"{path}.{name}"
            yield from _expert_units(whole, layer, replica_axes)
            yield whole, layer
    yield "", stage


def _expert_units(
    path: str, module: nn.Module, replica_axes: dict[str, Axis]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the largest submodules whose parameters all have other replicas than dense parameters."""
    axes = {axis for name, axis in replica_axes.items() if name.startswith(f"{path}.")}
    if axes and "replicas" not in axes:
        yield path, module
    elif axes - {"replicas"}:
        for name, child in module.named_children():
            yield from _expert_units(f"{path}.{name}", child, replica_axes)


def _shard_unit(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, keep: bool) -> FSDPModule:
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        # Activations already have the model's dtype; rotary angles must stay in fp32.
        cast_forward_inputs=False,
    )
    module.register_forward_hook(_clone_view)
    unit: FSDPModule = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=not keep,
        shard_placement_fn=lambda parameter: ShardPlacement(_shard_dimension(parameter.shape, mesh.size())),
        mp_policy=policy,
    )
    # The loss is divided by the tokens of the whole step, so gradients are summed, not averaged.
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_gradient_divide_factor(1.0)
    return unit


def _clone_view(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Forward hook that clones an output that is a view.

    FSDP triggers the all-gather for backward with a hook on the output, which, as torch warns, may not run
    for views.
    """
    return output.clone() if isinstance(output, Tensor) and output._base is not None else output


def _shard_dimension(shape: Sequence[int], ranks: int) -> int:
    """Returns the dimension to shard: 0 (rows), or with fewer rows than ranks the first that divides evenly.

    Torch supports uneven shards only along rows.
    """
    if not shape or shape[0] >= ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % ranks == 0), 0)


def _mesh(world: World, axis: Axis) -> DeviceMesh:
    process_group = world.group(SHARD_AXES[axis][0]).process_group
    if process_group is None:
        # The mesh needs a process group even for one rank.
        process_group = dist.new_group([world.all_ranks.rank], use_local_synchronization=True)
    return DeviceMesh.from_group(process_group, world.device.type)


def shard_bounds(shape: Shape, rank: int, ranks: int) -> tuple[Shape, Shape]:
    """Returns (start, size) of a rank's shard of a parameter, as `fully_shard` cuts it."""
    dim = _shard_dimension(shape, ranks)
    rows = math.ceil(shape[dim] / ranks)
    first = min(rank * rows, shape[dim])
    length = min(rows, shape[dim] - first)
    start = tuple(first if d == dim else 0 for d in range(len(shape)))
    return start, tuple(length if d == dim else size for d, size in enumerate(shape))
