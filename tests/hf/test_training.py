"""Training steps of every family beside those of `transformers`: one process for 20 steps, four layouts for one."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.hf.links import links_of, logical_shapes
from pentatron.parallel.pieces import region
from pentatron.train.step import train_step
from tests.harness import run_distributed
from tests.hf.on_ranks import (
    CLIP,
    DECAY,
    EPSILON,
    EXPECTED,
    RATE,
    draw_batch,
    in_layout,
    own_batches,
    step_on_a_rank,
)
from tests.hf.support import ours_from, save, theirs
from tests.hf.test_oracle import CASES

# One of each family, with a vocabulary that nothing divides; between them biases, windows, ties, heads of their own width.
FAMILIES = (
    "gpt2",
    "llama-biases",
    "mistral-window",
    "qwen2-tied",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)
LAYOUTS = {
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline": "--pipeline-model-parallel-size 2 --micro-batch-size 1",
    "context": "--context-parallel-size 2",
    "shards": "--zero-stage 3",
    "experts": "--expert-model-parallel-size 2 --zero-stage 1",
}


def as_ours(
    model_type: str, model: TransformerConfig, moe: MoEConfig, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors of theirs by our names."""
    found = {name: torch.full(shape, torch.nan) for name, shape in logical_shapes(model, moe).items()}
    for link in links_of(model_type, model, moe, tensors):
        values = region(tensors[link.theirs], link.start, link.their_size)
        region(found[link.ours], link.at, link.size).copy_(link.to_ours(values, link.size))
    return found


def their_loss(model: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    tokens, labels = draw_batch(seed)
    logits = model(tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each family, and beside it what `transformers` computes with it."""
    found = {}
    for case in FAMILIES:
        model_type, config = CASES[case]
        their = theirs(model_type, **config)
        found[case] = save(their, tmp_path_factory.mktemp(case))
        _, model, moe = ours_from(found[case])
        loss, logits = their_loss(their, 0)
        loss.backward()
        expected = as_ours(model_type, model, moe, gradients(their))
        computed = {"loss": loss.item(), "logits": logits.detach(), "gradients": expected}
        torch.save(computed, found[case] / EXPECTED)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_gradients_in_layouts(layout: str, folders: dict[str, Path]) -> None:
    chosen = {case: folder for case, folder in folders.items() if layout != "experts" or "moe" in case}
    words = dict.fromkeys(chosen, LAYOUTS[layout])
    ranks = run_distributed(step_on_a_rank, 2, folders=chosen, words=words)
    for case, folder in chosen.items():
        expected = torch.load(folder / EXPECTED)
        found = [rank[case] for rank in ranks]
        assert [rank.loss for rank in found] == pytest.approx([expected["loss"]] * 2, rel=1e-5)
        gaps = [gap for rank in found for gap in rank.logits.values()]
        assert len(gaps) == (1 if layout == "pipeline" else 2) and max(gaps) < 1e-5, (case, gaps)
        for name, wanted in expected["gradients"].items():
            assert sum(rank.elements.get(name, 0) for rank in found) == wanted.numel(), (case, name)
            error = math.sqrt(sum(rank.squared_errors.get(name, 0.0) for rank in found))
            assert error <= 1e-5 * wanted.norm(), (case, name)


@pytest.mark.parametrize("case", FAMILIES)
def test_twenty_steps_side_by_side(case: str, folders: dict[str, Path]) -> None:
    model_type, changes = CASES[case]
    their = theirs(model_type, **changes)
    parameters = list(their.parameters())
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=RATE,
        betas=(0.9, 0.95),
        eps=EPSILON,
    )
    config, world, model, optimizer = in_layout(folders[case], "")
    for step in range(20):
        adam.zero_grad()
        loss, _ = their_loss(their, step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, CLIP)
        adam.step()
        found = train_step(model, optimizer, own_batches(config, world, step), RATE, step)
        assert found.loss == pytest.approx(loss.item(), rel=1e-4), step
        assert found.gradient_norm == pytest.approx(norm.item(), rel=1e-4), step
    expected = as_ours(
        model_type, config.model, config.moe, {n: p.detach() for n, p in their.named_parameters()}
    )
    for fragment in optimizer.model_weights():
        wanted = region(expected[fragment.tensor], fragment.start, tuple(fragment.values.shape))
        assert (fragment.values - wanted).norm() <= 1e-4 * wanted.norm(), fragment.tensor
