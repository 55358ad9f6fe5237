"""One training step, and one validation: the part of the loop that computes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pentatron.data.loader import Batch
from pentatron.models.causal_lm import CausalLM
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.collectives import Group, all_reduce_


@dataclass(frozen=True)
class StepResult:
    loss: float
    gradient_norm: float
    tokens: int


def train_step(
    model: CausalLM, optimizer: Optimizer, batches: Sequence[Batch], learning_rate: float, data: Group
) -> StepResult:
    """Forward and backward over every micro-batch, one reduction, one update.

    The valid tokens of the whole step are counted before the first backward and every loss is divided by that one
    number: how the step is cut into ranks and micro-batches then changes nothing.
    """
    valid = count_valid(batches, data)
    optimizer.zero_gradients()
    total = torch.zeros((), device=valid.device)
    for batch in batches:
        loss = summed_loss(model, batch) / valid
        loss.backward()
        total += loss.detach()
    optimizer.reduce_gradients(data)
    mean_loss = float(all_reduce_(total, data))
    # With a loss that is no number the weights are left alone, as the optimizer does for such a gradient norm.
    norm = optimizer.step(learning_rate) if math.isfinite(mean_loss) else math.nan
    return StepResult(mean_loss, norm, int(valid))


def count_valid(batches: Sequence[Batch], data: Group) -> Tensor:
    """Labels that count in the loss, over all micro-batches and data-parallel ranks; at least 1."""
    local = torch.stack([batch.valid_tokens.double() for batch in batches]).sum()
    return all_reduce_(local, data).clamp(min=1).float()


def summed_loss(model: CausalLM, batch: Batch) -> Tensor:
    return (model(batch.tokens, batch.position_ids, batch.labels) * batch.loss_mask).sum()


@torch.no_grad()
def validation_loss(model: CausalLM, batches: Iterable[Batch], data: Group) -> float:
    """The mean loss per valid token over all batches of all data-parallel ranks."""
    totals = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for batch in batches:
        totals += torch.stack((summed_loss(model, batch).double(), batch.valid_tokens.double())).to(totals)
    model.train()
    loss, valid = all_reduce_(totals, data).tolist()
    return float(loss / max(valid, 1.0))
