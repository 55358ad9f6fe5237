"""A few training steps under settings that reveal mistakes, and everything they computed."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pentatron.config.run import RunConfig
from pentatron.data.boundaries import Boundaries, boundaries_of
from pentatron.data.loader import build_loader
from pentatron.data.synthetic import SyntheticDataset
from pentatron.nn.init import normal_region
from pentatron.optim.build import AnyOptimizer, build_optimizer
from pentatron.optim.loss_scale import LossScaler
from pentatron.optim.schedule import learning_rate
from pentatron.parallel.pieces import Fragment, held_parameters, region
from pentatron.parallel.world import World
from pentatron.train.comparison import STEPS, Sent, Trajectory
from pentatron.train.parallel_model import ParallelModel, build_parallel_model, model_dtype
from pentatron.train.replicas import digest
from pentatron.train.step import train_step, validation_loss


class UnevenMasks:
    """Samples whose number of valid tokens differs widely, so that a mean of means is not the mean.

    With `boundaries`, most have several documents: of one token and more, and ending in other places in every sample.
    """

    def __init__(
        self, samples: int, vocabulary: int, length: int, boundaries: Boundaries | None = None
    ) -> None:
        self.source = SyntheticDataset(samples, vocabulary, length, seed=3)
        self.boundaries = boundaries

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = dict(self.source[index])
        mask = sample["loss_mask"].copy()
        mask[: (index * 7) % (len(mask) - 1)] = 0
        sample["loss_mask"] = mask
        if self.boundaries is None:
            return sample
        places = np.arange(len(mask))
        ends = (places * places + 3 * index) % 7 == 1
        sample["tokens"] = np.where(ends, self.boundaries.eod, sample["tokens"])
        return self.boundaries.mark(sample)


def run_trial(config: RunConfig, world: World) -> Trajectory:
    """Trains a new model, on this rank of the layout."""
    model = build_parallel_model(config, world)
    reveal(model)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
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
    config: RunConfig, world: World, model: ParallelModel, optimizer: AnyOptimizer, first_step: int = 0
) -> Trajectory:
    """Trains as many steps as the run is long, from `first_step` on."""
    found = Trajectory()
    batch, steps = config.train.global_batch_size, config.train.train_iters
    assert batch is not None and steps is not None
    rate, scaler = learning_rate(config), LossScaler(config.precision)
    batches = micro_batches(config, world, first_step * batch)
    for step in range(first_step, first_step + steps):
        if step in (0, steps - 1):
            keep_gradients(optimizer, found, f"gradients {step + 1}")
        chunk = list(itertools.islice(batches, config.accumulation))
        scale = scaler.scale
        result = train_step(model, optimizer, chunk, rate(step * batch), step, scale)
        scaler.settle(result.updated)
        for _, _, _, gradients in found.fragments.get(f"gradients {step + 1}", ()):
            gradients.div_(scale)
        found.losses.append(result.loss)
        found.norms.append(result.gradient_norm)
        found.tokens.append(result.tokens)
    found.fragments["weights"] = [
        s for s in sent(optimizer.fragments(owned_only=True)) if s[0].startswith("weights/")
    ]
    found.held = {
        (f.tensor, f.start, tuple(f.values.shape)): digest(f.values) for f in optimizer.model_weights()
    }
    valid = itertools.islice(micro_batches(config, world, 0), config.accumulation)
    found.validation = validation_loss(model, valid, config.accumulation)
    return found


def micro_batches(config: RunConfig, world: World, consumed: int) -> Iterator[Any]:
    vocabulary = config.model.vocab_size
    boundaries = boundaries_of(config.data, lambda: vocabulary - 1)
    samples = UnevenMasks(
        2 * STEPS * config.train.global_batch_size, vocabulary, config.model.seq_length, boundaries
    )
    loader = build_loader(samples, consumed, config.train.micro_batch_size, world.data.rank, world.data.size)
    return (batch.to(world.device) for batch in loader)


def keep_gradients(optimizer: AnyOptimizer, found: Trajectory, name: str) -> None:
    """Copies the gradients of the next step when they are complete and not yet clipped: as their norm is taken."""
    take_norm = optimizer.squared_norm

    def also_keep() -> Tensor:
        found.fragments[name] = sent(optimizer.gradients(owned_only=True))
        del optimizer.squared_norm
        return take_norm()

    optimizer.squared_norm = also_keep  # type: ignore[method-assign]


def sent(fragments: Iterator[Fragment]) -> list[Sent]:
    return [(f.tensor, f.shape, f.start, f.values.detach().cpu().clone()) for f in fragments]
