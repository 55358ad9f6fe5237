"""Saving in one layout and going on in another."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pentatron.checkpoint.load import load_fragments
from pentatron.checkpoint.store import CheckpointStore
from pentatron.config.run import RunConfig
from pentatron.optim.build import AnyOptimizer, build_optimizer
from pentatron.optim.schedule import learning_rate
from pentatron.parallel.world import World
from pentatron.train.comparison import STEPS, Sent
from pentatron.train.parallel_model import ParallelModel, build_parallel_model, model_dtype
from pentatron.train.step import train_step
from pentatron.train.trial import micro_batches, reveal, sent
from tests.parity.bugs import plant
from tests.parity.cases import BATCH, DUALPIPEV, EIGHT, FAMILIES, LAYOUTS, NINE, SHAPE, Layout
from tests.parity.trajectory import here
from tests.support import resolved

SAVED_AFTER = 2


@dataclass
class Continued:
    """The state as this rank holds it (owned fragments), and the losses of the steps that followed."""

    state: list[Sent]
    losses: list[float]


def words_of(layout: Layout, family: str) -> str:
    """Layouts differ in what both runs share (dropout, number of layers); here all have the plain architecture."""
    longer = f"--train-iters {SAVED_AFTER + STEPS}"
    words = f"{SHAPE} {FAMILIES[family]} {layout.words} {longer}"
    # One micro-batch a step: schedules and accumulation are not what is tested here. One schedule needs several.
    replicas = resolved(f"{words} --micro-batch-size 1", layout.ranks).config.grid.data
    return f"{words} --micro-batch-size {1 if DUALPIPEV in words else BATCH // replicas}"


def _build(words: str) -> tuple[RunConfig, World, ParallelModel, AnyOptimizer]:
    config = resolved(words, dist.get_world_size() if dist.is_initialized() else 1).config
    world = here(config)
    model = build_parallel_model(config, world)
    reveal(model)
    return (
        config,
        world,
        model,
        build_optimizer(model.stages, world, config.optim, config.parallel, model_dtype(config)),
    )


def _go_on(
    config: RunConfig, world: World, model: ParallelModel, optimizer: AnyOptimizer, first: int, steps: int
) -> list[float]:
    rate = learning_rate(config)
    batches = micro_batches(config, world, first * BATCH)
    losses = []
    for step in range(first, first + steps):
        chunk = [next(batches) for _ in range(config.accumulation)]
        losses.append(train_step(model, optimizer, chunk, rate(step * BATCH), step).loss)
    return losses


def save_on_a_rank(words: str, folder: Path) -> Continued:
    """Two steps, a checkpoint, and five steps more."""
    config, world, model, optimizer = _build(words)
    _go_on(config, world, model, optimizer, 0, SAVED_AFTER)
    fragments = optimizer.fragments(owned_only=True)
    CheckpointStore(folder, keep=None).save(SAVED_AFTER, fragments, {}, {}, config.nested(), world.everyone)
    state = sent(optimizer.fragments(owned_only=True))
    return Continued(state, _go_on(config, world, model, optimizer, SAVED_AFTER, STEPS))


def load_on_a_rank(words: str, folder: Path, bug: str = "") -> Continued:
    """The checkpoint in this layout, as it arrives, and the same five steps."""
    plant(bug)
    config, world, model, optimizer = _build(words)
    found, complaints = CheckpointStore(folder, keep=None).newest_valid(verify=True, set_aside=False)
    assert found is not None, complaints
    load_fragments(found.folder, found.manifest, optimizer.fragments(owned_only=False))
    optimizer.loaded(SAVED_AFTER)
    state = sent(optimizer.fragments(owned_only=True))
    return Continued(state, _go_on(config, world, model, optimizer, SAVED_AFTER, STEPS))


@dataclass(frozen=True)
class Pair:
    family: str
    saved: Layout
    loaded: Layout

    def __str__(self) -> str:
        return f"{self.family}: {self.saved.name} to {self.loaded.name}"


def resharded_layouts() -> list[Layout]:
    """All but those with more stages than the plain architecture has layers."""
    return [layout for layout in LAYOUTS if EIGHT not in layout.both and NINE not in layout.both]


def random_pairs(count: int, saves: int, seed: int = 11) -> list[Pair]:
    """`count` different pairs that start from `saves` saved runs, so that each of those is made once."""
    generator = random.Random(seed)
    origins = [(family, layout) for family in FAMILIES for layout in resharded_layouts()]
    generator.shuffle(origins)
    pairs: list[Pair] = []
    while len(pairs) < count:
        family, saved = origins[len(pairs) % saves]
        pair = Pair(family, saved, generator.choice(resharded_layouts()))
        if pair not in pairs and pair.loaded != saved:
            pairs.append(pair)
    return sorted(pairs, key=lambda p: (p.family, p.saved.name))


def stale_optimizer_state(state: list[Sent]) -> list[Sent]:
    """A control: what a loader that forgets Adam's moments would have."""
    return [
        (n, shape, at, v if n.startswith("weights/") else torch.zeros_like(v)) for n, shape, at, v in state
    ]
