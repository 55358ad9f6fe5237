"""One training step in any layout, compared with what `transformers` computed. Without `transformers`: ranks import this."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.cli.loaded import learn_from_loaded
from pentatron.config.draft import Facts
from pentatron.config.entry import TRAIN
from pentatron.config.resolve import gather, resolve
from pentatron.config.run import RunConfig
from pentatron.data.loader import Batch
from pentatron.hf.folder import open_folder
from pentatron.hf.weights import load_weights
from pentatron.optim.build import AnyOptimizer, build_optimizer
from pentatron.parallel.pieces import region
from pentatron.parallel.world import World
from pentatron.train.comparison import Trajectory
from pentatron.train.parallel_model import ParallelModel, build_parallel_model, model_dtype
from pentatron.train.step import train_step
from pentatron.train.trial import keep_gradients
from tests.parity.trajectory import here

WORDS, LENGTH, SAMPLES = 61, 16, 2
RATE, DECAY, EPSILON, CLIP = 1e-2, 0.1, 1e-6, 0.5
EXPECTED = "expected.pt"
RUN = (
    f"--dataset-size 64 --seq-length {LENGTH} --global-batch-size {SAMPLES} --eval-interval 0 --train-iters 20 "
    f"--adam-eps {EPSILON} --weight-decay {DECAY} --clip-grad {CLIP} --adam-beta1 0.9 --adam-beta2 0.95 "
    "--hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by 1"
)


@dataclass
class Findings:
    """How far a rank was from what was expected, over the elements that are its own."""

    loss: float
    logits: dict[int, float] = field(default_factory=dict)
    squared_errors: dict[str, float] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)


def draw_batch(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of one step, the same everywhere."""
    tokens, labels = torch.randint(
        0, WORDS, (2, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    return tokens, labels


def in_layout(folder: Path, words: str) -> tuple[RunConfig, World, ParallelModel, AnyOptimizer]:
    """The model of a folder on this rank, as training would begin with it."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    draft, facts = (
        gather(f"{RUN} --hf {folder} --run-dir {folder} {words}".split(), TRAIN),
        Facts(size, size, 1),
    )
    learn_from_loaded(draft, facts, True)
    config = resolve(draft, facts).config
    world = here(config)
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(model.stages, world, config.optim, config.parallel, model_dtype(config))
    prefix = "weights/"
    wanted = (f for f in optimizer.fragments(owned_only=False) if f.tensor.startswith(prefix))
    with open_folder(folder) as opened:
        load_weights(
            opened,
            config.model,
            config.moe,
            [replace(f, tensor=f.tensor.removeprefix(prefix)) for f in wanted],
        )
    optimizer.loaded(0)
    return config, world, model, optimizer


def own_batches(config: RunConfig, world: World, seed: int) -> list[Batch]:
    """This rank's micro-batches of a step."""
    tokens, labels = draw_batch(seed)
    size = config.train.micro_batch_size
    assert size is not None
    parts = [
        Batch(of_tokens, of_labels, torch.ones(of_tokens.shape), torch.arange(LENGTH).expand_as(of_tokens))
        for of_tokens, of_labels in zip(tokens.split(size), labels.split(size))
    ]
    return parts[world.data.rank :: world.data.size]


@contextmanager
def logits_kept(model: ParallelModel) -> Iterator[list[tuple[Tensor, int]]]:
    """What the head of this rank, if it has one, makes: a part of the logits and the first word of it."""
    kept: list[tuple[Tensor, int]] = []
    for stage in model.stages.values():
        made = stage._logits

        def also_keep(x_BSD: Tensor, made: object = made) -> tuple[Tensor, int]:
            assert callable(made)
            logits, first = made(x_BSD)
            kept.append((logits.detach().clone(), first))
            return logits, first

        stage._logits = also_keep  # type: ignore[method-assign]
    yield kept


def step_on_a_rank(folders: dict[str, Path], words: dict[str, str]) -> dict[str, Findings]:
    return {name: compared_step(folder, words[name]) for name, folder in folders.items()}


def compared_step(folder: Path, words: str) -> Findings:
    """Logits and gradients of one step against those saved beside the model."""
    expected = torch.load(folder / EXPECTED)
    config, world, model, optimizer = in_layout(folder, words)
    trajectory = Trajectory()
    keep_gradients(optimizer, trajectory, "gradients")
    batches = own_batches(config, world, 0)
    with logits_kept(model) as kept:
        found = Findings(train_step(model, optimizer, batches, RATE, 0).loss)
    samples = torch.arange(SAMPLES).split(batches[0].tokens.shape[0])[world.data.rank :: world.data.size]
    positions = model.own_tokens(batches)[0].position_ids[0]
    for (logits, first), of_batch in zip(kept, samples, strict=bool(kept)):
        # Beyond the vocabulary there is padding.
        wanted = expected["logits"][of_batch][:, positions, first : first + logits.shape[-1]]
        worst = (logits[..., : wanted.shape[-1]] - wanted).abs().max() / expected["logits"].abs().max()
        found.logits[first] = max(worst.item(), found.logits.get(first, 0.0))
    for name, _, start, values in trajectory.fragments["gradients"]:
        tensor = name.removeprefix("gradients/")
        error = (values - region(expected["gradients"][tensor], start, tuple(values.shape))).double()
        found.squared_errors[tensor] = found.squared_errors.get(tensor, 0.0) + error.square().sum().item()
        found.elements[tensor] = found.elements.get(tensor, 0) + values.numel()
    return found
