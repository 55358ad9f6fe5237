"""Where numbers first cease to be numbers: a step computed once more, watched module by module on every rank."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.data.loader import Batch
from pentatron.optim.build import AnyOptimizer
from pentatron.parallel.collectives import gather_objects
from pentatron.parallel.pieces import Shape
from pentatron.parallel.values import sendable
from pentatron.parallel.world import World
from pentatron.train.parallel_model import MicroBatches, ParallelModel
from pentatron.train.step import Computed, compute_gradients


@sendable
@dataclass(frozen=True, order=True)
class Place:
    """Where it was first met on one rank; the smallest place of all ranks is the origin.

    A bad weight comes before what it does in a forward, that before what follows in a backward, which runs from the last stage to
    the first. Ranks that share a layer run the same modules: who met it at an earlier one had it first.
    """

    phase: int
    stage: int
    micro_batch: int
    order: int
    rank: int
    what: str

    def sentence(self) -> str:
        where = f"{self.what} on rank {self.rank}"
        if self.phase in (_FORWARD, _BACKWARD):
            where += f", stage {abs(self.stage)}"
        return where if self.micro_batch < 0 else f"{where}, micro-batch {self.micro_batch}"


_WEIGHT, _FORWARD, _BACKWARD, _REDUCED = range(4)


@dataclass(frozen=True)
class Diagnosis:
    """What the repeated step gave, and the place its bad numbers come from, if it had any."""

    again: Computed
    origin: Place | None

    @property
    def repeats(self) -> bool:
        return not (math.isfinite(self.again.loss) and math.isfinite(self.again.norm))


def bad_gradient(optimizer: AnyOptimizer) -> str | None:
    """The first parameter of this rank, in the order it keeps them, of whose summed gradient some element is no number."""
    for fragment in optimizer.gradients(owned_only=False):
        if not _is_finite(fragment.values):
            return fragment.tensor.removeprefix("gradients/")
    return None


def compute_again(
    model: ParallelModel, optimizer: AnyOptimizer, batches: Sequence[Batch], step: int, scale: float
) -> Diagnosis:
    """Every rank must ask. The gradients of the first time are gone afterwards."""
    watch = _Watch(model)
    with watch.installed(), model.compilation.off():
        again = compute_gradients(model, optimizer, batches, step, scale, watch.around)
    place = _bad_weight(optimizer, model.world) or watch.place
    if place is None and (name := bad_gradient(optimizer)) is not None:
        place = Place(_REDUCED, 0, -1, 0, model.world.everyone.rank, f"the gradient of {name}")
    places = [p for p in gather_objects(place, model.world.everyone) if p is not None]
    return Diagnosis(again, min(places, default=None))


def _bad_weight(optimizer: AnyOptimizer, world: World) -> Place | None:
    found = None
    # All of them, whatever is found: other ranks ask for all.
    for number, fragment in enumerate(optimizer.model_weights()):
        if found is None and not _is_finite(fragment.values):
            found = Place(_WEIGHT, 0, -1, number, world.everyone.rank, f"the weight {fragment.tensor}")
    return found


class _Watch:
    """Notes the first module whose output, and the first parameter whose gradient, is not all numbers."""

    def __init__(self, model: ParallelModel) -> None:
        self.model, self.rank = model, model.world.everyone.rank
        self.place: Place | None = None
        self._cell: tuple[int, int] | None = None
        self._order = 0
        self._gradients = 0

    def around(self, program: MicroBatches) -> "_WatchedProgram":
        return _WatchedProgram(program, self)

    @contextmanager
    def installed(self) -> Iterator[None]:
        handles: list[Any] = []
        for number, stage in self.model.stages.items():
            for name, module in stage.named_modules():
                handles.append(module.register_forward_hook(self._after(name or "the stage")))
            for name, parameter in stage.named_parameters():
                if parameter.requires_grad and type(parameter) is nn.Parameter:
                    handles.append(parameter.register_hook(self._gradient(number, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def in_forward(self, stage: int, micro_batch: int) -> Iterator[None]:
        self._cell, self._order = (stage, micro_batch), 0
        try:
            yield
        finally:
            # What runs again in a backward has been seen.
            self._cell = None

    def received(self, values: Tensor | None) -> None:
        """What an earlier stage made is its matter: nothing that follows from it is met first here."""
        if values is not None and not _is_finite(values):
            self._cell = None

    def made_loss(self, loss: Tensor) -> None:
        self._note(loss, "the loss")

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            self._note(output, f"the output of {name}")

        return hook

    def _note(self, output: Any, what: str) -> None:
        if self._cell is None:
            return
        self._order += 1
        tensors = output if isinstance(output, tuple | list) else (output,)
        if all(_is_finite(t) for t in tensors if isinstance(t, Tensor)):
            return
        self._keep(Place(_FORWARD, *self._cell, self._order, self.rank, what))
        self._cell = None

    def _gradient(self, stage: int, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            self._gradients += 1
            if not _is_finite(gradient):
                # A backward runs from the last stage to the first.
                what = f"the gradient of {name} before it was summed,"
                self._keep(Place(_BACKWARD, -stage, -1, self._gradients, self.rank, what))

        return hook

    def _keep(self, place: Place) -> None:
        self.place = place if self.place is None else min(self.place, place)


@dataclass(frozen=True)
class _WatchedProgram:
    program: MicroBatches
    watch: _Watch

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        with self.watch.in_forward(stage, micro_batch):
            self.watch.received(received)
            made = self.program.forward(stage, micro_batch, received)
            if stage == self.program.model.config.placement.stages - 1:
                self.watch.made_loss(made)
            return made

    def message_shape(self, stage: int, micro_batch: int) -> Shape:
        return self.program.message_shape(stage, micro_batch)


def _is_finite(values: Tensor) -> bool:
    """Integers always are."""
    return not values.is_floating_point() or bool(torch.isfinite(values.detach()).all())
