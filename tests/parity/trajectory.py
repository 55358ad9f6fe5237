"""Five training steps on one rank of a layout, and everything they computed."""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.config.run import RunConfig
from pentatron.data.loader import build_loader
from pentatron.nn.init import normal_region
from pentatron.optim.optimizer import Optimizer
from pentatron.optim.schedule import learning_rate
from pentatron.parallel.pieces import Fragment, held_parameters, region
from pentatron.parallel.world import World, connect, single_process
from pentatron.train.continue_text import weight_fragments
from pentatron.train.parallel_model import ParallelModel, build_parallel_model, model_dtype
from pentatron.train.step import train_step, validation_loss
from tests.parity.bugs import plant
from tests.parity.cases import BATCH, SEQUENCE, STEPS, VOCABULARY
from tests.parity.data import UnevenMasks
from tests.support import resolved

# What a fragment becomes on its way to the process that compares: name, logical shape, start, values.
Sent = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]


@dataclass
class Trajectory:
    """What one rank saw of the run: the same numbers everywhere, and its own fragments of tensors."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    # "gradients 1", "gradients 5", "weights": fragments that cover each logical tensor once over the world.
    fragments: dict[str, list[Sent]] = field(default_factory=dict)
    validation: float = 0.0
    # Of every weight rectangle this rank holds, owned or not: where it is, and a digest of its bytes.
    held: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = field(default_factory=dict)


def here(config: RunConfig, device: str = "cpu") -> World:
    """Ranks share a GPU, over gloo."""
    if config.grid.world_size == 1:
        return single_process(torch.device(device))
    return connect(config.grid, dist.get_rank(), dist.get_rank(), torch.device(device))


def on_a_rank(words: str, bug: str = "", device: str = "cpu") -> Trajectory:
    """The body of a distributed run."""
    plant(bug)
    return run(words, dist.get_world_size(), device)


def run(words: str, world_size: int, device: str = "cpu") -> Trajectory:
    config = resolved(words, world_size).config
    world = here(config, device)
    model = build_parallel_model(config, world)
    reveal(model)
    optimizer = Optimizer(model.stages, world, config.optim, config.parallel, model_dtype(config))
    return follow(config, world, model, optimizer)


def reveal(model: ParallelModel) -> None:
    """Norm weights of 1 + N(0, 0.1) and biases of N(0, 0.1): exact ones and zeros hide mistakes about them."""
    for stage in model.stages.values():
        for held in held_parameters(stage):
            if held.decays:
                continue
            for piece in held.declared.pieces:
                noise = torch.empty(piece.size)
                shape = held.declared.shape
                normal_region(7, f"{held.tensor} noise", shape, piece.start, piece.size, noise)
                region(held.parameter.data, piece.local, piece.size).add_(0.1 * noise.to(held.parameter))


def follow(
    config: RunConfig, world: World, model: ParallelModel, optimizer: Optimizer, first_step: int = 0
) -> Trajectory:
    """Trains `STEPS` steps from `first_step` on."""
    found = Trajectory()
    rate = learning_rate(config.optim, BATCH)
    batches = micro_batches(config, world, first_step * BATCH)
    for step in range(first_step, first_step + STEPS):
        if step in (0, STEPS - 1):
            keep_gradients(optimizer, found, f"gradients {step + 1}")
        chunk = list(itertools.islice(batches, config.accumulation))
        result = train_step(model, optimizer, chunk, rate(step * BATCH), step)
        found.losses.append(result.loss)
        found.norms.append(result.gradient_norm)
        found.tokens.append(result.tokens)
    found.fragments["weights"] = [
        s for s in sent(optimizer.fragments(owned_only=True)) if s[0].startswith("weights/")
    ]
    optimizer.wait_for_weights()
    found.held = {
        (f.tensor, f.start, tuple(f.values.shape)): _digest(f.values)
        for stage in model.stages.values()
        for f in weight_fragments(stage)
    }
    valid = itertools.islice(micro_batches(config, world, 0), config.accumulation)
    found.validation = validation_loss(model, valid, config.accumulation)
    return found


def micro_batches(config: RunConfig, world: World, consumed: int) -> Iterator[Any]:
    samples = UnevenMasks(2 * STEPS * BATCH, VOCABULARY, SEQUENCE)
    assert config.train.micro_batch_size
    loader = build_loader(samples, consumed, config.train.micro_batch_size, world.data.rank, world.data.size)
    return (batch.to(world.device) for batch in loader)


def keep_gradients(optimizer: Optimizer, found: Trajectory, name: str) -> None:
    """Copies the gradients of the next step when they are complete and not yet clipped: as their norm is taken."""
    take_norm = optimizer.squared_norm

    def also_keep() -> Tensor:
        found.fragments[name] = sent(optimizer.gradients(owned_only=True))
        del optimizer.squared_norm  # type: ignore[method-assign]
        return take_norm()

    optimizer.squared_norm = also_keep  # type: ignore[method-assign]


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def sent(fragments: Iterator[Fragment]) -> list[Sent]:
    return [(f.tensor, f.shape, f.start, f.values.detach().cpu().clone()) for f in fragments]
