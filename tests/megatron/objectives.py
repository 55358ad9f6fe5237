"""Runs a step with users' loss functions, in a layout and as a plain torch loop."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_builders import gpt_builder
from model_provider import model_provider
from pentatron.compare.trial import Trajectory, copy_fragments, micro_batches, perturb_norms_and_biases
from pentatron.megatron import losses
from pentatron.megatron import program as program_module
from pentatron.megatron.core import mpu
from pentatron.megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from pentatron.megatron.losses import LossResult
from pentatron.megatron.program import UserProgram
from pentatron.monitor.display import SilentDisplay
from pentatron.optim.build import build_optimizer
from pentatron.parallel.sharding import sharded_parameters
from pentatron.parallel.world import World, create_groups, single_process
from pentatron.settings.resolve import Resolved
from pentatron.train.model import Objective, build_parallel_model, model_dtype
from pentatron.train.step import train_step
from tests.support import LLAMA, resolved

BATCH = 8
# Weights of samples, selected by the last token of each.
WEIGHTS = torch.tensor([0.0, 1.0, 100.0, -1.0])
WORDS = f"{LLAMA} --num-layers 2 --global-batch-size {BATCH} --clip-grad 0 --train-iters 1 --vocab-size 60 --make-vocab-size-divisible-by 64 --compile off"

# The sum that a loss function computes from losses or logits, mask, labels, model and sample weights, and the
# count that divides it in the forms with a count.
Made = tuple[Tensor, Tensor]
# The name of a loss, and the form in which it is returned.
Case = tuple[str, str]


def weighted(output: Tensor, mask: Tensor, labels: Tensor, model: nn.Module, weights: Tensor) -> Made:
    return (output * mask * weights[:, None]).sum(), mask.sum()


def own_mask(output: Tensor, mask: Tensor, labels: Tensor, model: nn.Module, weights: Tensor) -> Made:
    """Excludes further tokens from the sum and from the count."""
    kept = mask * (labels % 3 != 0)
    return (output * kept).sum(), kept.sum()


def regularised(output: Tensor, mask: Tensor, labels: Tensor, model: nn.Module, weights: Tensor) -> Made:
    """Adds a term of weights, which does not pass through the output.

    Every layout has these weights on its last stage.
    """
    norm = model.final_norm
    assert isinstance(norm, nn.Module)
    return (output * mask).sum() + 50 * sum(p.square().sum() for p in norm.parameters()), mask.sum()


def focal(output: Tensor, mask: Tensor, labels: Tensor, model: nn.Module, weights: Tensor) -> Made:
    return ((1 - torch.exp(-output)) ** 2 * output * mask).sum(), mask.sum()


def factor(output: Tensor, mask: Tensor, labels: Tensor, model: nn.Module, weights: Tensor) -> Made:
    return 0.001 * (output * mask).sum(), mask.sum()


LOSSES: dict[str, Callable[..., Made]] = {
    f.__name__: f for f in (weighted, own_mask, regularised, focal, factor)
}


CASES: list[Case] = [
    *((name, "sum, count, report") for name in LOSSES),
    ("regularised", "loss, report"),
    ("weighted", "loss, report"),
    ("weighted", "reduced over data"),
    ("weighted", "reduced over context"),
]

# Ranks, flags, and the context ranks that share a sequence.
LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2", 1),
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel", 1),
    "pp2": (2, "--pipeline-model-parallel-size 2", 1),
    "dp2": (2, "", 1),
    "dp2 zero2": (2, "--zero-stage 2", 1),
    "cp2": (2, "--context-parallel-size 2", 2),
    "pp2 dp2": (4, "--pipeline-model-parallel-size 2", 1),
}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest ‖Δg‖ of a tensor, relative to its norm or to 1e-3 of the whole gradient's."""
    whole = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert found.keys() >= expected.keys()
    return max(
        float((found[name] - g[: len(found[name])]).norm()) / max(float(g.norm()), 1e-3 * whole)
        for name, g in expected.items()
    )


def in_form(form: str, made: Made) -> Any:
    total, count = made
    mean = total / count.clamp(min=1)
    report = {"objective": total.detach() / count.clamp(min=1), "pair": torch.stack((total.detach(), count))}
    return {
        "sum, count, report": (total, count.int(), report),
        "sum, count": (total, count.int()),
        "loss, report": (mean, report),
        "reduced over data": None,
        "reduced over context": None,
    }[form] or _reduced(total, count, form)


def _reduced(total: Tensor, count: Tensor, form: str) -> Any:
    """All-reduces sum and count in place.

    Guide 004 reduces over data-parallel ranks. Megatron reduces over context-parallel ranks and multiplies
    the sum by their number.
    """
    both = torch.stack((total, count))
    if form == "reduced over data":
        dist.all_reduce(both, group=mpu.get_data_parallel_group())
        return both[0].clone(), both[1].detach().int()
    dist.all_reduce(both, group=mpu.get_context_parallel_group())
    return both[0] * mpu.get_context_parallel_world_size(), both[1].detach().int()


def forward_step(name: str, form: str, of_logits: bool, chosen: Callable[[Tensor], Tensor]) -> Any:
    def step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        labels, mask = batch["labels"], batch["loss_mask"]
        weights = chosen(batch["tokens"])
        output = model(batch["tokens"], batch["position_ids"], None, labels=None if of_logits else labels)

        def loss_func(output: Tensor) -> Any:
            found = token_losses(output, labels) if of_logits else output
            return in_form(form, LOSSES[name](found, mask, labels, model, weights))

        return output, loss_func

    return step


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes losses from a shard of the vocabulary, or with torch's function from the whole one."""
    if mpu.get_tensor_model_parallel_world_size() > 1:
        return vocab_parallel_cross_entropy(logits, labels)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view_as(labels)


def by_last_tokens(tokens: Tensor) -> Tensor:
    return WEIGHTS.to(tokens.device)[_agreed(tokens[:, -1])]


def _agreed(numbers: Tensor) -> Tensor:
    """Sums a value over the ranks with parts of the same sequences."""
    numbers = numbers.clone()
    group = mpu.get_context_parallel_group()
    if dist.get_world_size(group) > 1:
        dist.all_reduce(numbers, group=group)
    return numbers % len(WEIGHTS)


@contextmanager
def _open(words: str, world_size: int, program: UserProgram, device: str) -> Iterator[tuple[Resolved, World]]:
    found = resolved(words, world_size)
    world = (
        create_groups(found.config.grid, dist.get_rank(), dist.get_rank(), torch.device(device))
        if world_size > 1
        else single_process(torch.device(device))
    )
    with program.running(found, world, SilentDisplay()):
        yield found, world


def stepped(
    words: str, name: str, form: str, of_logits: bool = False, bug: str = "", device: str = "cpu"
) -> tuple[Trajectory, float, dict[str, float]]:
    """Returns this rank's gradients of one step as applied, the objective and the reported values."""
    plant(bug)
    size = dist.get_world_size() if dist.is_initialized() else 1
    program = UserProgram(
        None, partial(model_provider, gpt_builder), forward_step(name, form, of_logits, by_last_tokens), {}
    )
    with _open(f"{WORDS} {words}", size, program, device) as (found, world):
        config = found.config
        model = build_parallel_model(config, world, program)
        perturb_norms_and_biases(model)
        optimizer = build_optimizer(
            model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
        )
        drawn = list(itertools.islice(micro_batches(config, world, 0), config.accumulation))
        seen = Trajectory()
        take_norm = optimizer.squared_norm

        def also_keep() -> Tensor:
            """Keeps the gradients; a step may be computed twice, and the last result counts."""
            seen.fragments["gradients 1"] = copy_fragments(optimizer.gradients(owned_only=True))
            return take_norm()

        optimizer.squared_norm = also_keep  # type: ignore[method-assign]
        result = train_step(model, optimizer, drawn, 1e-3, 0)
        for *_, values in seen.fragments["gradients 1"]:
            values.div_(result.gradient_scale)
        seen.norms.append(result.gradient_norm)
        return seen, result.loss, dict(result.reported)


def several(words: str, cases: Sequence[Case], device: str = "cpu") -> list[Any]:
    """Runs the steps of a rank, one case after the other."""
    return [stepped(words, *case, device=device) for case in cases]


@functools.cache
def plain_loop(
    micro_batch: int,
    name: str,
    form: str,
    context: int = 1,
    of_logits: bool = False,
    more: str = "",
    device: str = "cpu",
) -> Any:
    """Runs the step as a plain loop: one model, one micro-batch after the other, one backward."""
    program = UserProgram(None, partial(model_provider, gpt_builder), lambda *_: None, {})
    with _open(f"{WORDS} --micro-batch-size {micro_batch} {more}", 1, program, device) as (found, world):
        config = found.config
        model = build_parallel_model(config, world, program)
        perturb_norms_and_biases(model)
        (module,) = model.stages.values()
        model.routers.begin_step(config.accumulation)
        sums: list[Tensor] = []
        counts: list[Tensor] = []
        for batch in itertools.islice(micro_batches(config, world, 0), config.accumulation):
            last = sum(cut(batch.tokens, rank, context)[:, -1] for rank in range(context))
            weights = WEIGHTS.to(last.device)[last % len(WEIGHTS)]
            output = module(
                batch.tokens, batch.position_ids, None, labels=None if of_logits else batch.labels
            )
            if of_logits:
                output = token_losses(output[..., : config.model.vocab_size], batch.labels)
            for rank in range(context):
                parts = (cut(x, rank, context) for x in (output, batch.loss_mask, batch.labels))
                total, count = LOSSES[name](*parts, module, weights)
                sums.append(total)
                counts.append(count)
        if form == "loss, report":
            objective = torch.stack([t / c.clamp(min=1) for t, c in zip(sums, counts)]).mean()
        else:
            objective = torch.stack(sums).sum() / torch.stack(counts).sum()
        objective.backward()  # type: ignore[no-untyped-call]
        gradients = {
            f"gradients/{h.tensor}": h.parameter.grad.detach().cpu().clone()
            for h in sharded_parameters(module)
            if h.parameter.grad is not None
        }
        means = [float(t.detach() / c.clamp(min=1)) for t, c in zip(sums, counts)]
        return gradients, float(objective.detach()), sum(means) / len(means)


def cut(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns a context-parallel rank's part of each sequence: an early and a late chunk."""
    if ranks == 1:
        return whole
    chunks = whole.chunk(2 * ranks, dim=1)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim=1)


def plant(bug: str) -> None:
    """Planted bug: gradients of each token's loss only, scaled to the valid tokens of the micro-batch."""
    if not bug:
        return

    def normalised(returned: LossResult, objective: Objective) -> Tensor:
        return objective.share_of_sum(returned.loss)

    def weights_alone(loss_function: Any, output: Tensor, context: Any) -> LossResult:
        leaf = output.detach().requires_grad_()
        loss = losses._parsed(loss_function(leaf.view_as(leaf))).loss
        (found,) = torch.autograd.grad(loss.sum(), leaf)
        return LossResult((output * found * (output.numel() / found.sum())).sum(), None, {})

    program_module.call_loss_function = weights_alone  # type: ignore[assignment]
    program_module.objective_share = normalised
