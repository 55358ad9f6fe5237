"""Counts what a rank keeps in one training step: storages that autograd saves, and optimizer state.

Memory is counted once for each storage, however many tensors share it, from its first holder to its last.
Weights are not counted among activations.
"""

import dataclasses
import itertools
import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pentatron.compare.trial import micro_batches
from pentatron.ops.linear import DeferredGradients, Product
from pentatron.optim.build import build_optimizer
from pentatron.train import model as model_module
from pentatron.train.model import ParallelModel, build_parallel_model, model_dtype
from pentatron.train.step import train_step
from tests.parity.trajectory import here
from tests.support import resolved


class Ledger:
    """Counts the bytes of storages while they have a holder; `peak` is the maximum."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def keep(self, tensor: Tensor, holder: object) -> None:
        """Counts the tensor's storage as long as `holder` is alive."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if not storage.nbytes():
            return
        if place not in self.holders:
            self.holders[place], self.sizes[place] = 0, storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self.holders[place] += 1
        weakref.finalize(holder, self._let_go, place).atexit = False

    def _let_go(self, place: int) -> None:
        self.holders[place] -= 1
        if not self.holders[place]:
            del self.holders[place]
            self.now -= self.sizes.pop(place)


class Kept:
    """Placeholder of a saved tensor in autograd's graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Watch:
    """Counts in a ledger what a model keeps between forward and backward."""

    def __init__(self, model: ParallelModel) -> None:
        self.ledger = Ledger()
        self.weights: Counter[int] = Counter()
        self._entered: dict[int, list[list[int]]] = {}
        for stage in model.stages.values():
            for module in stage.modules():
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave)
            if stage.rope is not None:
                stage.rope.register_forward_hook(self._angles)
        self._follow_messages()
        self._follow_deferred()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        """Excludes weights while a module runs, because ZeRO 3 gathers them only for that time."""
        found = _places(module)
        self._entered.setdefault(id(module), []).append(found)
        self.weights.update(found)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # The storages recorded before forward, because the weights may be shards again.
        self.weights.subtract(self._entered[id(module)].pop())

    def _angles(self, module: nn.Module, inputs: Any, angles: tuple[Tensor, Tensor]) -> None:
        """Counts arguments of recomputed layers, such as rotary angles, which are kept outside autograd."""
        for angle in angles:
            self.ledger.keep(angle, angle)

    def _follow_messages(self) -> None:
        """Counts the received input of a stage, which is kept until its backward."""
        forward = model_module.MicroBatches.forward

        def following(program: Any, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
            if received is not None:
                self.ledger.keep(received, received)
            return forward(program, stage, micro_batch, received)

        model_module.MicroBatches.forward = following  # type: ignore[method-assign]

    def _follow_deferred(self) -> None:
        take = DeferredGradients.take

        def following(deferred: DeferredGradients, product: Product) -> bool:
            taken = take(deferred, product)
            if taken:
                self.ledger.keep(product.inputs, product)
                self.ledger.keep(product.gradient, product)
            return taken

        DeferredGradients.take = following  # type: ignore[method-assign]

    def pack(self, tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        if self.weights[tensor.untyped_storage().data_ptr()] <= 0:
            self.ledger.keep(tensor, kept)
        return kept

    def unpack(self, kept: Kept) -> Tensor:
        return kept.tensor


def _places(module: nn.Module) -> list[int]:
    """Returns the storages of the unsharded weights of a module and its children."""
    return [p.untyped_storage().data_ptr() for p in module.parameters() if not isinstance(p, DTensor)]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int
    host: int
    activations: int


def measured_on_a_rank(words: str) -> Measured:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config = resolved(words, world_size).config
    world = here(config)
    model = build_parallel_model(config, world)
    dtype = model_dtype(config)
    offload, options = config.parallel.optimizer_cpu_offload, model.decisions.optimizer
    if offload:
        # On a CPU the optimizer offloads only if `in_host_memory` is set as on a GPU.
        options = dataclasses.replace(options, in_host_memory=True)
    optimizer = build_optimizer(model.stages, world, config.optim, options, dtype)
    chunk = list(itertools.islice(micro_batches(config, world, 0), config.accumulation))
    watch = Watch(model)
    with torch.autograd.graph.saved_tensors_hooks(watch.pack, watch.unpack):
        train_step(model, optimizer, chunk, 1e-3, step=0)
    assert watch.ledger.now <= sum(b.tokens.numel() for b in chunk) * 64, "something outlives the step"
    held = optimizer.bytes()
    state = held["master"] + held["moments"]
    return Measured(
        held["parameters"],
        held["gradients"],
        0 if offload else state,
        state if offload else 0,
        watch.ledger.peak,
    )
