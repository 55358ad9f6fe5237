"""Runs a few training steps with settings that reveal mistakes, and compares the results of two runs.

Each rank records a `Trajectory`; `gaps` compares those of a layout with that of one process.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pentatron.data.gpt_dataset import SyntheticDataset
from pentatron.data.loader import build_loader
from pentatron.data.sample_index import Boundaries, boundaries_of
from pentatron.nn.init import normal_region
from pentatron.optim.build import AnyOptimizer, build_optimizer
from pentatron.optim.loss_scale import LossScaler
from pentatron.optim.lr_schedules import learning_rate
from pentatron.parallel.sharding import Fragment, region, sharded_parameters
from pentatron.parallel.world import World
from pentatron.settings.run_config import RunConfig
from pentatron.train.model import ParallelModel, build_parallel_model, model_dtype
from pentatron.train.step import evaluate, train_step
from pentatron.train.step_hooks import digest

STEPS = 5
SCALAR_TOLERANCE = 1e-5
GRADIENT_TOLERANCES = {1: 1e-5, STEPS: 1e-4}
WEIGHT_TOLERANCE = 1e-4
# A tensor with a small gradient is judged relative to this share of the norm of the whole gradient.
SMALL_GRADIENT = 1e-3

# A fragment for the process that compares: name, logical shape, start, values.
SentFragment = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]
Tensors = dict[str, Tensor]


@dataclass
class Trajectory:
    """The results of one rank: numbers that are equal on all ranks, and its own fragments of tensors."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    # By kind: "gradients N" of the first and the last step, and "weights". Each kind covers every logical
    # tensor once over all ranks.
    fragments: dict[str, list[SentFragment]] = field(default_factory=dict)
    validation: float = 0.0
    # Digest of the bytes of every region of weights this rank holds, by name, start and shape.
    weight_digests: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Gap:
    """One comparison.

    `ratio` is the difference divided by the tolerance; `tensor` and `kind` are set if a tensor was compared.
    """

    what: str
    ratio: float
    tensor: str = ""
    kind: str = ""

    @property
    def fails(self) -> bool:
        return not self.ratio <= 1.0


def assemble(fragments: Iterable[SentFragment]) -> dict[str, Tensor]:
    """Assembles the logical tensors from the fragments of all ranks; each element must occur exactly once."""
    whole: Tensors = {}
    covered: Tensors = {}
    for name, shape, start, values in fragments:
        if name not in whole:
            whole[name], covered[name] = torch.zeros(shape), torch.zeros(shape, dtype=torch.int32)
        region(whole[name], start, tuple(values.shape)).copy_(values)
        region(covered[name], start, tuple(values.shape)).add_(1)
    for name, count in covered.items():
        assert count.eq(1).all(), f"{name}: some elements are covered {count.min()} to {count.max()} times"
    return whole


def gather_tensors(ranks: Sequence[Trajectory], kind: str) -> dict[str, Tensor]:
    """Assembles the tensors of one kind from all ranks."""
    return assemble(fragment for rank in ranks for fragment in rank.fragments[kind])


def gaps(ranks: Sequence[Trajectory], reference: Trajectory) -> list[Gap]:
    """Compares a run on several ranks with the run on one."""
    result: list[Gap] = []
    for rank, trajectory in enumerate(ranks):
        if trajectory.tokens != reference.tokens:
            result.append(Gap(f"tokens on rank {rank}", math.inf))
        result += _numbers(f"loss on rank {rank}", trajectory.losses, reference.losses)
        result += _numbers(f"gradient norm on rank {rank}", trajectory.norms, reference.norms)
        result += _numbers(f"validation on rank {rank}", [trajectory.validation], [reference.validation])
    last = len(reference.losses)
    for step, tolerance in ((1, GRADIENT_TOLERANCES[1]), (last, GRADIENT_TOLERANCES[STEPS])):
        kind = f"gradients {step}"
        result += _tensors(kind, gather_tensors(ranks, kind), gather_tensors([reference], kind), tolerance)
    weights, expected = gather_tensors(ranks, "weights"), gather_tensors([reference], "weights")
    if weights.keys() != expected.keys():
        result.append(Gap("the set of tensors", math.inf))
    for name in [name for name in expected if name in weights]:
        ratio = float((weights[name] - expected[name]).abs().max()) / WEIGHT_TOLERANCE
        result.append(Gap(name, ratio, _bare(name), "weights"))
    return result


def _numbers(what: str, values: Sequence[float], expected: Sequence[float]) -> Iterator[Gap]:
    for step, (f, e) in enumerate(zip(values, expected, strict=True), 1):
        yield Gap(f"{what}, step {step}", abs(f - e) / (SCALAR_TOLERANCE * abs(e)))


def _tensors(kind: str, tensors: Tensors, expected: Tensors, tolerance: float) -> Iterator[Gap]:
    total_norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    for name, g in expected.items():
        what, ratio = f"{kind}: {_bare(name)} is missing", math.inf
        if name in tensors:
            allowed = tolerance * max(float(g.norm()), SMALL_GRADIENT * total_norm)
            what, ratio = f"{kind} of {_bare(name)}", float((tensors[name] - g).norm()) / allowed
        yield Gap(what, ratio, _bare(name), kind)


def _bare(name: str) -> str:
    """The name of the parameter without the kind of fragment in front of it."""
    return name.partition("/")[2] or name


def gap_size(gap: Gap) -> float:
    return math.inf if math.isnan(gap.ratio) else gap.ratio


class UnevenMasks:
    """Samples with very different numbers of valid tokens, so that a mean of means is not the mean.

    With `boundaries`, most samples have several documents, of one token and more, that end at different
    positions.
    """

    def __init__(self, samples: int, vocabulary: int, length: int, boundaries: Boundaries | None) -> None:
        self.source = SyntheticDataset(samples, vocabulary, length, seed=3)
        self.boundaries = boundaries

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = dict(self.source[index])
        sample["loss_mask"] = mask = sample["loss_mask"].copy()
        mask[: (index * 7) % (len(mask) - 1)] = 0
        if self.boundaries is None:
            return sample
        positions = np.arange(len(mask))
        ends = (positions * positions + 3 * index) % 7 == 1
        sample["tokens"] = np.where(ends, self.boundaries.eod, sample["tokens"])
        return self.boundaries.mark(sample)


def run_trial(config: RunConfig, world: World) -> Trajectory:
    """Trains a new model on this rank of the layout."""
    model = build_parallel_model(config, world)
    perturb_norms_and_biases(model)
    dtype, decision = model_dtype(config), model.decisions.optimizer
    optimizer = build_optimizer(model.stages, world, config.optim, decision, dtype)
    return train_and_record(config, world, model, optimizer)


def perturb_norms_and_biases(model: ParallelModel) -> None:
    """Adds N(0, 0.1) noise to norm weights and biases, because exact ones and zeros hide mistakes."""
    for param in (p for p in sharded_parameters(*model.stages.values()) if not p.decays):
        for shard in param.declared.shards:
            noise, shape = torch.empty(shard.size), param.declared.shape
            normal_region(7, f"{param.tensor} noise", shape, shard.start, shard.size, noise)
            region(param.parameter.data, shard.local, shard.size).add_(0.1 * noise.to(param.parameter))


def train_and_record(
    config: RunConfig, world: World, model: ParallelModel, optimizer: AnyOptimizer, first_step: int = 0
) -> Trajectory:
    """Trains for the length of the run, from `first_step` on, and records the results."""
    trajectory = Trajectory()
    batch, steps = config.train.global_batch_size, config.train.train_iters
    rate, scaler = learning_rate(config), LossScaler(config.precision)
    batches = micro_batches(config, world, first_step * batch)
    for step in range(first_step, first_step + steps):
        if step in (0, steps - 1):
            keep_gradients(optimizer, trajectory, f"gradients {step + 1}")
        chunk, scale = list(itertools.islice(batches, config.accumulation)), scaler.scale
        result = train_step(model, optimizer, chunk, rate(step * batch), step, scale)
        scaler.update(result.updated)
        for _, _, _, gradients in trajectory.fragments.get(f"gradients {step + 1}", ()):
            gradients.div_(scale)
        trajectory.losses.append(result.loss)
        trajectory.norms.append(result.gradient_norm)
        trajectory.tokens.append(result.tokens)
    kept = copy_fragments(optimizer.fragments(owned_only=True))
    trajectory.fragments["weights"] = [s for s in kept if s[0].startswith("weights/")]
    weights = optimizer.model_weights()
    trajectory.weight_digests = {(w.tensor, w.start, (*w.values.shape,)): digest(w.values) for w in weights}
    valid = itertools.islice(micro_batches(config, world, 0), config.accumulation)
    trajectory.validation = evaluate(model, valid, config.accumulation)[0]
    return trajectory


def micro_batches(config: RunConfig, world: World, consumed: int) -> Iterator[Any]:
    vocabulary = config.model.vocab_size
    boundaries = boundaries_of(config.data, lambda: vocabulary - 1)
    count = 2 * STEPS * config.train.global_batch_size
    samples = UnevenMasks(count, vocabulary, config.model.seq_length, boundaries)
    loader = build_loader(samples, consumed, config.train.micro_batch_size, world.data.rank, world.data.size)
    return (batch.to(world.device) for batch in loader)


def keep_gradients(optimizer: AnyOptimizer, trajectory: Trajectory, name: str) -> None:
    """Records the gradients of the next step when their norm is computed: reduced, not yet clipped."""
    take_norm = optimizer.squared_norm

    def also_keep() -> Tensor:
        trajectory.fragments[name] = copy_fragments(optimizer.gradients(owned_only=True))
        del optimizer.squared_norm
        return take_norm()

    optimizer.squared_norm = also_keep  # type: ignore[method-assign]


def copy_fragments(fragments: Iterator[Fragment]) -> list[SentFragment]:
    """Copies fragments to the CPU."""
    return [(f.tensor, f.shape, f.start, f.values.detach().cpu().clone()) for f in fragments]
