"""Data parallelism and accumulation against one process: losses, every gradient, weights after five steps."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pentatron.train.step as step_module
from pentatron.data.loader import Batch, build_loader
from pentatron.data.synthetic import SyntheticDataset
from pentatron.layout.ranks import Grid
from pentatron.models.causal_lm import build_model
from pentatron.optim.optimizer import Optimizer
from pentatron.optim.schedule import learning_rate
from pentatron.parallel.world import World, connect, single_process
from pentatron.train.step import train_step, validation_loss
from tests.harness import run_distributed
from tests.support import LLAMA, resolved

STEPS = 5
BATCH = 8
CPU = torch.device("cpu")


class UnevenMasks:
    """Samples whose number of valid tokens differs widely, so that a mean of means is not the mean."""

    def __init__(self) -> None:
        self.source = SyntheticDataset(STEPS * BATCH, 61, 16, seed=3)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = dict(self.source[index])
        mask = sample["loss_mask"].copy()
        mask[: (index * 7) % 15] = 0
        sample["loss_mask"] = mask
        return sample


def trajectory(world: World, micro_batch: int, words: str = LLAMA) -> dict[str, Any]:
    """Five steps; what they computed."""
    config = resolved(f"{words} --micro-batch-size {micro_batch}", world.everyone.size).config
    model = build_model(config.model, config.run.seed, CPU)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    optimizer = Optimizer(model, config.optim, torch.float32, bucket_elements=5000)
    rate = learning_rate(config.optim, BATCH)
    batches = iter(build_loader(UnevenMasks(), 0, micro_batch, world.data.rank, world.data.size))
    found: dict[str, Any] = {"losses": [], "norms": [], "tokens": []}
    for step in range(STEPS):
        chunk: list[Batch] = list(itertools.islice(batches, config.accumulation))
        result = train_step(model, optimizer, chunk, rate(step * BATCH), world.data)
        found["losses"].append(result.loss)
        found["norms"].append(result.gradient_norm)
        found["tokens"].append(result.tokens)
        if step in (0, STEPS - 1):
            # Clipped gradients, which the norms above tell apart from unclipped ones.
            views = [b.views(b.gradients) for b in optimizer.buffers]
            found[f"gradients {step + 1}"] = {n: g.clone() for view in views for n, g in view.items()}
    found["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    valid = itertools.islice(
        iter(build_loader(UnevenMasks(), 0, micro_batch, world.data.rank, world.data.size)), 2
    )
    found["validation"] = (
        validation_loss(model, valid, world.data) if micro_batch * world.data.size == BATCH else None
    )
    return found


def on_ranks(micro_batch: int, words: str = LLAMA, bug: str = "") -> dict[str, Any]:
    plant(bug)
    rank, size = dist.get_rank(), dist.get_world_size()
    return trajectory(connect(Grid(data=size), rank, rank, CPU), micro_batch, words)


def plant(bug: str) -> None:
    """Breaks the step in this process, to see that the comparison notices."""
    if bug == "local count":
        step_module.count_valid = lambda batches, data: torch.stack([b.valid_tokens for b in batches]).sum()  # type: ignore[assignment]
    if bug == "no reduction":
        Optimizer.reduce_gradients = lambda self, group: None  # type: ignore[method-assign]
    if bug == "half the buckets":
        whole: Callable[..., None] = Optimizer.reduce_gradients
        Optimizer.reduce_gradients = lambda self, group: self.buffers[0].reduce_gradients(group, 5000)  # type: ignore[method-assign]
        assert whole is not Optimizer.reduce_gradients


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["tokens"] == expected["tokens"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for step, tolerance in ((1, 1e-5), (STEPS, 1e-4)):
        reference = expected[f"gradients {step}"]
        everything = torch.stack([g.norm() for g in reference.values()]).norm()
        for name, gradient in found[f"gradients {step}"].items():
            gap = (gradient - reference[name]).norm()
            assert gap <= tolerance * max(reference[name].norm(), 1e-3 * everything), f"step {step}: {name}"
    for name, weight in found["weights"].items():
        assert (weight - expected["weights"][name]).abs().max() <= 1e-4, name


LAYOUTS = [(1, 1), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1), (8, 1)]


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    return trajectory(single_process(), BATCH)


@pytest.mark.parametrize(("ranks", "micro_batch"), LAYOUTS)
def test_every_cut_of_the_batch_gives_the_same_numbers(
    one_process: dict[str, Any], ranks: int, micro_batch: int
) -> None:
    for found in run_distributed(on_ranks, ranks, micro_batch=micro_batch):
        assert_same(found, one_process)


def test_ranks_stay_bitwise_equal() -> None:
    first, second = run_distributed(on_ranks, 2, micro_batch=2)
    assert all(torch.equal(w, second["weights"][n]) for n, w in first["weights"].items())


def test_clipping_was_active(one_process: dict[str, Any]) -> None:
    assert min(one_process["norms"]) > 0.5


def test_masks_were_uneven(one_process: dict[str, Any]) -> None:
    counts = [int(UnevenMasks()[i]["loss_mask"].sum()) for i in range(BATCH)]
    assert len(set(counts)) > 3 and one_process["tokens"][0] == sum(counts)


def test_gpt_family_agrees_too() -> None:
    expected = trajectory(single_process(), BATCH, words="")
    for found in run_distributed(on_ranks, 2, micro_batch=2, words=""):
        assert_same(found, expected)


@pytest.mark.parametrize("bug", ["local count", "no reduction", "half the buckets"])
def test_planted_bugs_are_caught(one_process: dict[str, Any], bug: str) -> None:
    found = run_distributed(on_ranks, 2, micro_batch=2, bug=bug)
    with pytest.raises(AssertionError):
        for rank in found:
            assert_same(rank, one_process)


def test_validation_loss_does_not_depend_on_the_ranks(one_process: dict[str, Any]) -> None:
    for found in run_distributed(on_ranks, 4, micro_batch=2):
        assert found["validation"] == pytest.approx(one_process["validation"], rel=1e-5)
