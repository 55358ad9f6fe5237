"""Compares a `transformers` model in one process with ours in some layout, on the same batches.

Compares the logits of a batch, the loss and every gradient of the first step, and the losses and weights of
all steps. Gradients and weights pass through the links of import and export, so that a wrong link shows too.
"""

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pentatron.compare.trial import (
    SentFragment,
    Trajectory,
    UnevenMasks,
    assemble,
    copy_fragments,
    keep_gradients,
)
from pentatron.data.loader import Batch, build_loader
from pentatron.hf.folder import open_folder
from pentatron.hf.model_config import settings_from_config
from pentatron.hf.tensor_names import load_weights, tensor_links
from pentatron.optim.build import build_optimizer
from pentatron.parallel.sharding import Fragment, fragments_of, region, sharded_parameters
from pentatron.settings.entry_points import PRETRAIN_GPT
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import ProcessFacts
from pentatron.train.model import MicroBatches, ParallelModel, build_parallel_model, model_dtype
from pentatron.train.step import train_step
from tests.harness import run_distributed
from tests.hf.families import Case, their_model
from tests.parity.trajectory import here

STEPS = 20
BATCH, LENGTH = 4, 16
RATE, BETAS, EPSILON, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-6, 0.1, 0.5
TRAINING = (
    f"--dataset-size 8 --train-iters {STEPS} --seq-length {LENGTH} --global-batch-size {BATCH} --lr {RATE} --min-lr {RATE} "
    f"--lr-decay-style constant --adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPSILON} "
    f"--weight-decay {DECAY} --clip-grad {CLIP} --make-vocab-size-divisible-by 1"
)


@dataclass(frozen=True)
class Theirs:
    """Results of `transformers`; tensors by parameter name."""

    folder: Path
    logits: Tensor
    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass
class Ours:
    """Results of one rank."""

    losses: list[float] = field(default_factory=list)
    # (first sample, positions, first id, logits) of every local part of the logits.
    logits: list[tuple[int, Tensor, int, Tensor]] = field(default_factory=list)
    gradients: list[SentFragment] = field(default_factory=list)
    weights: list[SentFragment] = field(default_factory=list)


def batches(vocabulary: int, micro_batch: int, rank: int, ranks: int) -> Iterator[Batch]:
    samples = UnevenMasks(STEPS * BATCH, vocabulary, LENGTH, None)
    return iter(build_loader(samples, 0, micro_batch, rank, ranks))


@functools.cache
def folder_of(case: Case) -> Path:
    """Saves a case with `transformers` and returns its folder, which is removed when the process exits."""
    folder = Path(tempfile.mkdtemp(prefix="family-"))
    atexit.register(_remove, folder, os.getpid())
    their_model(case).save_pretrained(folder)
    return folder


def _remove(folder: Path, owner: int) -> None:
    """Removes the folder in the process that created it, not in forked ones."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def theirs(case: Case, device: str = "cpu") -> Theirs:
    torch.manual_seed(0)
    model = their_model(case).to(device)
    trained = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in trained.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=RATE,
        betas=BETAS,
        eps=EPSILON,
    )
    losses: list[float] = []
    first_logits, gradients = torch.empty(0), {}
    source = batches(model.config.vocab_size, BATCH, 0, 1)
    for step, batch in zip(range(STEPS), (batch.to(torch.device(device)) for batch in source)):
        logits = model(batch.tokens).logits
        each = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        loss = (each * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            first_logits = logits.detach().cpu().clone()
            gradients = {name: p.grad.cpu().clone() for name, p in trained.items() if p.grad is not None}
        nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
    weights = {name: p.detach().cpu().clone() for name, p in trained.items()}
    return Theirs(folder_of(case), first_logits, losses, gradients, weights)


def configured(folder: Path, words: str, world_size: int) -> RunConfig:
    draft = gather(f"{TRAINING} {words}".split(), PRETRAIN_GPT)
    with open_folder(folder) as opened:
        found = settings_from_config(opened.config)
    for name, value in found.items():
        if not draft.given(name):
            draft.assign(f"folder {folder}", **{name: value})
    return resolve(draft, ProcessFacts(world_size, world_size, 1)).config


def ours(folder: Path, words: str, steps: int = STEPS, device: str = "cpu") -> Ours:
    """Runs one layout; called on each of its ranks."""
    config = configured(folder, words, dist.get_world_size() if dist.is_initialized() else 1)
    world = here(config, device)
    model = build_parallel_model(config, world)
    with open_folder(folder) as opened:
        load_weights(opened, config.model, config.moe, _own_weights(model))
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    assert config.train.micro_batch_size and config.model.vocab_size
    source = batches(config.model.vocab_size, config.train.micro_batch_size, world.data.rank, world.data.size)
    steps_of = [[next(source).to(world.device) for _ in range(config.accumulation)] for _ in range(steps)]
    seen, kept = Ours(), Trajectory()
    seen.logits = _logits(model, steps_of[0])
    keep_gradients(optimizer, kept, "gradients")
    for step, chunk in enumerate(steps_of):
        seen.losses.append(train_step(model, optimizer, chunk, RATE, step).loss)
    seen.gradients = kept.fragments["gradients"]
    seen.weights = [
        s for s in copy_fragments(optimizer.fragments(owned_only=True)) if s[0].startswith("weights/")
    ]
    return seen


def _own_weights(model: ParallelModel) -> Iterator[Fragment]:
    for param in sharded_parameters(*model.stages.values()):
        for _, fragment in fragments_of(param, param.parameter.data.view(-1)):
            yield fragment


@torch.no_grad()
def _logits(model: ParallelModel, chunk: list[Batch]) -> list[tuple[int, Tensor, int, Tensor]]:
    found: list[tuple[int, Tensor, int, Tensor]] = []
    last = model.config.placement.stages - 1

    class Program(MicroBatches):
        def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
            batch = self.batches[micro_batch]
            made: Tensor = model.stages[stage](batch.tokens, batch.position_ids, None, received, None)
            if stage < last:
                return made
            samples = len(batch.tokens)
            first = (micro_batch * model.world.data.size + model.world.data.rank) * samples
            part = model.stages[stage]
            table = part.head if part.head is not None else part.embedding.word  # type: ignore[union-attr]
            found.append((first, batch.position_ids[0].cpu(), table.first, made.cpu().clone()))
            return made.new_zeros(())

    own = model.local_tokens(chunk)
    program = Program(model, own, [None] * len(own), lambda: torch.ones((), device=model.world.device))
    model.train(False)
    model.executor.evaluate(model.config.forward_schedule(len(own)), program)
    model.train()
    return found


def run(case: Case, words: str, ranks: int, steps: int = STEPS, device: str = "cpu") -> list[Ours]:
    folder = folder_of(case)
    if ranks == 1:
        return [ours(folder, words, steps, device)]
    return run_distributed(ours, ranks, timeout=120.0, folder=folder, words=words, steps=steps, device=device)


# Logits relative to the largest one, losses and gradients relative to themselves, weights absolute.
ALLOWED = {"logits": 1e-5, "gradients": 1e-5, "losses": 1e-4, "weights": 1e-4}
# The difference of a small gradient is divided by this share of the norm of all gradients.
SMALL = 1e-3


@dataclass(frozen=True)
class Gaps:
    """Differences between both results; `worst` has the largest relative difference of gradients."""

    logits: float
    gradients: float
    losses: float
    weights: float
    worst: str

    @property
    def shares(self) -> dict[str, float]:
        """Returns the differences as multiples of the tolerances."""
        return {name: getattr(self, name) / allowed for name, allowed in ALLOWED.items()}

    @property
    def failures(self) -> list[str]:
        return [
            f"{name}: {share:.3g} times what is allowed (worst gradient: {self.worst})"
            for name, share in self.shares.items()
            if not share <= 1
        ]


def compare(case: Case, found: list[Ours], device: str = "cpu") -> Gaps:
    expected = theirs(case, device)
    gradients = in_their_names(case, (s for rank in found for s in rank.gradients), expected.gradients)
    weights = in_their_names(case, (s for rank in found for s in rank.weights), expected.weights)
    everything = float(torch.stack([g.square().sum() for g in expected.gradients.values()]).sum().sqrt())
    by_name = {
        name: _largest(gradients[name] - g, norm=True) / max(float(g.norm()), SMALL * everything)
        for name, g in expected.gradients.items()
    }
    worst = max(by_name, key=lambda name: by_name[name])
    losses = [abs(f - e) / abs(e) for rank in found for f, e in zip(rank.losses, expected.losses)]
    return Gaps(
        logits=_largest(whole_logits(found, expected.logits) - expected.logits)
        / float(expected.logits.abs().max()),
        # The loss of the first step, before any update, must be as near as its gradients.
        gradients=max(by_name[worst], max(abs(rank.losses[0] / expected.losses[0] - 1) for rank in found)),
        losses=max(losses),
        weights=max(_largest(weights[name] - w) for name, w in expected.weights.items()),
        worst=worst,
    )


def _largest(difference: Tensor, norm: bool = False) -> float:
    """Returns the largest difference; NaN counts as infinite."""
    size = difference.norm() if norm else difference.abs().max()
    return float(size.nan_to_num(torch.inf))


def whole_logits(found: list[Ours], like: Tensor) -> Tensor:
    """Assembles the logits of all ranks: samples, positions, vocabulary."""
    logits = torch.full_like(like, torch.nan)
    for first, positions, word, part in (each for rank in found for each in rank.logits):
        width = min(part.shape[-1], logits.shape[-1] - word)
        for number, sample in enumerate(part[..., : max(width, 0)], first):
            logits[number, positions, word : word + sample.shape[-1]] = sample
    return logits


def in_their_names(
    case: Case, fragments: Iterable[SentFragment], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Converts our logical tensors to the names and shapes of `transformers`."""
    own = {name.partition("/")[2] or name: values for name, values in assemble(fragments).items()}
    config = configured(folder_of(case), "", 1)
    made = {name: torch.full_like(values, torch.nan) for name, values in like.items()}
    for link in tensor_links(case.model_type, config.model, config.moe, made.keys()):
        values = link.to_theirs(region(own[link.ours], link.at, link.size))
        region(made[link.theirs], link.start, link.their_size).copy_(values)
    return made
