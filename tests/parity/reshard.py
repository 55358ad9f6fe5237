"""Saves a checkpoint in one layout and resumes in another."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pentatron.checkpoint.load import load_fragments
from pentatron.checkpoint.store import CheckpointStore
from pentatron.compare.trial import SentFragment, copy_fragments, micro_batches, perturb_norms_and_biases
from pentatron.optim.build import AnyOptimizer, build_optimizer
from pentatron.optim.lr_schedules import learning_rate
from pentatron.parallel.sharding import Fragment
from pentatron.parallel.world import World
from pentatron.settings.run_config import RunConfig
from pentatron.train.model import ParallelModel, build_parallel_model, model_dtype
from pentatron.train.step import train_step
from tests.parity.bugs import plant
from tests.parity.cases import BATCH, DUALPIPEV, EIGHT, FAMILIES, LAYOUTS, MIXTURES, NINE, SHAPE, Layout
from tests.parity.mixtures import MIXTURE_LAYOUTS
from tests.parity.trajectory import here
from tests.support import resolved

SAVED_AFTER = 2
# The state is compared bit for bit; the third of the steps that follow depends on two updates of it.
AFTERWARDS = 3


@dataclass
class Continued:
    """The state (owned fragments of this rank), and the losses of the steps that followed."""

    state: list[SentFragment]
    losses: list[float]


def words_of(layout: Layout, family: str) -> str:
    """Returns the flags of a layout with the plain architecture of a family.

    `both` of the layout (dropout, number of layers) is left out, so that all layouts have the same model.
    """
    longer = f"--train-iters {SAVED_AFTER + AFTERWARDS}"
    words = f"{SHAPE} {(FAMILIES | MIXTURES)[family]} {layout.words} {longer}"
    # One micro-batch a step, as schedules and accumulation are not tested here; DualPipeV needs several.
    replicas = resolved(f"{words} --micro-batch-size 1", layout.ranks).config.grid.data
    return f"{words} --micro-batch-size {1 if DUALPIPEV in words else BATCH // replicas}"


def _build(words: str) -> tuple[RunConfig, World, ParallelModel, AnyOptimizer]:
    config = resolved(words, dist.get_world_size() if dist.is_initialized() else 1).config
    world = here(config)
    model = build_parallel_model(config, world)
    perturb_norms_and_biases(model)
    return (
        config,
        world,
        model,
        build_optimizer(model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)),
    )


def _kept(model: ParallelModel, optimizer: AnyOptimizer, owned_only: bool = True) -> Iterator[Fragment]:
    """Returns the fragments that a checkpoint has, as in the training loop."""
    return itertools.chain(optimizer.fragments(owned_only), model.routers.fragments(owned_only))


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
    """Runs two steps, saves a checkpoint, and runs three more steps."""
    config, world, model, optimizer = _build(words)
    _go_on(config, world, model, optimizer, 0, SAVED_AFTER)
    store = CheckpointStore(folder, keep=None)
    store.save(SAVED_AFTER, _kept(model, optimizer), {}, {}, config.nested(), world.all_ranks)
    state = copy_fragments(_kept(model, optimizer))
    return Continued(state, _go_on(config, world, model, optimizer, SAVED_AFTER, AFTERWARDS))


def load_on_a_rank(words: str, folder: Path, bug: str = "") -> Continued:
    """Loads the checkpoint in this layout, copies the state, and runs the same three steps."""
    plant(bug)
    config, world, model, optimizer = _build(words)
    found, complaints = CheckpointStore(folder, keep=None).newest_valid(verify=True, set_aside=False)
    assert found is not None, complaints
    load_fragments(found.folder, found.manifest, _kept(model, optimizer, owned_only=False))
    optimizer.after_load(SAVED_AFTER)
    state = copy_fragments(_kept(model, optimizer))
    return Continued(state, _go_on(config, world, model, optimizer, SAVED_AFTER, AFTERWARDS))


@dataclass(frozen=True)
class Pair:
    family: str
    saved: Layout
    loaded: Layout

    def __str__(self) -> str:
        return f"{self.family}: {self.saved.name} to {self.loaded.name}"


def resharded_layouts(layouts: Sequence[Layout] = LAYOUTS) -> list[Layout]:
    """Returns the layouts that fit the plain architecture.

    Left out are layouts with more stages than it has layers, and those with `same_cut`.
    """
    return [o for o in layouts if EIGHT not in o.both and NINE not in o.both and not o.same_cut]


def random_pairs(
    count: int,
    saves: int,
    seed: int = 11,
    families: Iterable[str] = FAMILIES,
    layouts: Sequence[Layout] = LAYOUTS,
    first: str = "",
) -> list[Pair]:
    """Draws `count` different pairs that start from `saves` saved runs, each of which is made once.

    `first`: flags that the layouts of the saved runs must have.
    """
    generator = random.Random(seed)
    possible = resharded_layouts(layouts)
    origins = [(family, layout) for family in families for layout in possible if first in layout.words]
    generator.shuffle(origins)
    pairs: list[Pair] = []
    while len(pairs) < count:
        family, saved = origins[len(pairs) % saves]
        pair = Pair(family, saved, generator.choice(possible))
        if pair not in pairs and pair.loaded != saved:
            pairs.append(pair)
    return sorted(pairs, key=lambda p: (p.family, p.saved.name))


def pairs_with_experts(count: int, saves: int) -> list[Pair]:
    return random_pairs(count, saves, 12, MIXTURES, MIXTURE_LAYOUTS)


def stale_optimizer_state(state: list[SentFragment]) -> list[SentFragment]:
    """Control: the state after a load that leaves out Adam's moments."""
    return [
        (n, shape, at, v if n.startswith("weights/") else torch.zeros_like(v)) for n, shape, at, v in state
    ]
