"""Tests hidden dropout: masks are equal in every layout and pass tests of randomness."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import pentatron.nn.dropout as module
from pentatron.nn.dropout import DropoutKeys, dropout_keys, hidden_dropout

CPU = torch.device("cpu")
B, S, D = 8, 96, 130


def keys(
    seed: int = 1234, step: int = 7, first: int = 0, batch: int = B, positions: Tensor | None = None
) -> DropoutKeys:
    return dropout_keys(seed, step, first, batch, torch.arange(S) if positions is None else positions, CPU)


def kept(k: DropoutKeys, site: int = 1, probability: float = 0.5, channels: int = D) -> Tensor:
    """Returns the mask, 1 for kept elements and 0 for dropped ones, [B, S, D]."""
    return (hidden_dropout(torch.ones(*k.rows.shape, channels), k, site, probability) != 0).double()


def test_a_slice_is_dropped_like_the_same_part_of_the_whole() -> None:
    x = torch.randn(B, S, D)
    whole = hidden_dropout(x, keys(), 5, 0.3)
    for first, last in ((0, 1), (1, 3), (3, 8)):
        part = hidden_dropout(x[first:last], keys(first=first, batch=last - first), 5, 0.3)
        assert torch.equal(part, whole[first:last])
    for positions in (torch.arange(20, 40), torch.arange(S - 1, -1, -3), torch.tensor([5])):
        part = hidden_dropout(x[:, positions], keys(positions=positions), 5, 0.3)
        assert torch.equal(part, whole[:, positions])
    moved = hidden_dropout(x[1:3], keys(first=0, batch=2), 5, 0.3)
    assert not torch.equal(moved, whole[1:3]), (
        "control: samples that are numbered wrongly are dropped otherwise"
    )


@pytest.mark.parametrize("block", [1, 1000, 1 << 30])
def test_the_size_of_the_blocks_does_not_matter(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    expected = kept(keys())
    monkeypatch.setattr(module, "_BLOCK_CPU", block)
    assert torch.equal(kept(keys()), expected)


@pytest.mark.parametrize("channels", [1, 2, 69, 70])
def test_channels_count_from_the_first(channels: int) -> None:
    assert torch.equal(kept(keys(), channels=channels), kept(keys())[..., :channels])


def test_the_order_in_memory_does_not_matter() -> None:
    x = torch.randn(D, S, B).permute(2, 1, 0)
    assert not x.is_contiguous()
    assert torch.equal(hidden_dropout(x, keys(), 1, 0.5), hidden_dropout(x.contiguous(), keys(), 1, 0.5))


def test_the_choices_are_these() -> None:
    """Compares masks with recorded bits and with the same hash in exact integers."""
    k = dropout_keys(1234, 7, 3, 2, torch.tensor([0, 5]), CPU)
    mask = kept(k, site=3, channels=24)
    ones = [["".join(str(int(bit)) for bit in row) for row in sample] for sample in mask]
    assert ones == [
        ["001010001110000000100111", "100101011111011100001111"],
        ["110001010001001010100111", "010100111010011011001101"],
    ]

    def nth(start: int, n: int) -> int:
        z = (start + (n + 1) * 0x9E3779B97F4A7C15) % 2**64
        for _ in range(2):
            z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93 % 2**64
        return z ^ (z >> 32)

    for (i, sample), (j, position), channel in itertools.product(
        enumerate((3, 4)), enumerate((0, 5)), range(24)
    ):
        row = nth(nth(nth(nth(0, 1234), 7), sample), position)
        assert int(k.rows[i, j]) % 2**64 == row
        number = nth(nth(row, 3), channel // 2) >> (32 * (channel % 2)) & 0xFFFFFFFF
        # As signed integers, the upper half of the range is below the lower half.
        assert mask[i, j, channel] == ((number ^ 0x80000000) >= 0.5 * 2**32)


def test_seeds_of_any_size() -> None:
    assert torch.equal(keys(seed=-1).rows, keys(seed=2**64 - 1).rows)
    assert len({int(keys(seed=seed).rows[0, 0]) for seed in (-1, 0, 1, 2**63, 2**32, 2**40)}) == 6


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.9])
def test_the_rate_is_right_overall_and_in_every_channel_and_position(probability: float) -> None:
    dropped = 1 - kept(keys(), probability=probability)

    def furthest(counts: Tensor, of: int) -> float:
        spread = math.sqrt(probability * (1 - probability) * of)
        return float(((counts - probability * of) / spread).abs().max())

    assert furthest(dropped.sum(), dropped.numel()) < 4
    # Counts of rare events are skewed: large deviations are more frequent than in a normal distribution.
    limit = 4 if probability > 0.01 else 5.5
    assert furthest(dropped.sum((0, 1)), B * S) < limit, "channels"
    assert furthest(dropped.sum((0, 2)), B * D) < limit, "positions"
    variance = D * probability * (1 - probability)
    squares = (dropped.sum(2) - D * probability) ** 2 / variance
    spread = math.sqrt((2 + (1 - 6 * probability * (1 - probability)) / variance) / (B * S))
    assert abs(float(squares.mean()) - 1) < 4 * spread, "rows differ neither more nor less than chance has it"
    wrong = 1 - kept(keys(), probability=min(0.95, probability * 1.2 + 0.002))
    assert furthest(wrong.sum(), wrong.numel()) > 4, "control: a rate that is somewhat off is noticed"


def neighbours(probability: float) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns pairs of masks whose keys differ in one number or in two."""
    mask = kept(keys(), probability=probability)
    return {
        "seed": (mask, kept(keys(seed=1235), probability=probability)),
        "step": (mask, kept(keys(step=8), probability=probability)),
        "site": (mask, kept(keys(), site=2, probability=probability)),
        "seed and step": (mask, kept(keys(seed=1235, step=6), probability=probability)),
        "step and site": (mask, kept(keys(step=8), site=0, probability=probability)),
        "sample": (mask[1:], mask[:-1]),
        "position": (mask[:, 1:], mask[:, :-1]),
        "sample and position": (mask[1:, :-1], mask[:-1, 1:]),
        "channel": (mask[..., 1:], mask[..., :-1]),
        "halves of a number": (mask[..., 0::2], mask[..., 1::2]),
        "next number": (mask[..., 2:], mask[..., :-2]),
        "position and channel": (mask[:, 1:, :-1], mask[:, :-1, 1:]),
        "position and number": (mask[:, 1:, :-2], mask[:, :-1, 2:]),
    }


def correlation(a: Tensor, b: Tensor) -> float:
    """Returns the correlation in standard deviations."""
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) * math.sqrt(a.numel())


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_neighbours_in_every_direction_have_nothing_in_common(probability: float) -> None:
    found = {name: correlation(a, b) for name, (a, b) in neighbours(probability).items()}
    assert max(map(abs, found.values())) < 4, found


def patterns(probability: float) -> dict[str, Tensor]:
    """Returns eight neighbours along each dimension, in the last dimension."""
    mask = kept(keys(), probability=probability)
    return {
        "channels": mask[..., :128].reshape(-1, 8),
        "positions": mask.transpose(1, 2).reshape(-1, 8),
        "samples": mask.permute(1, 2, 0).reshape(-1, 8),
        "steps": torch.stack([kept(keys(step=n), probability=probability) for n in range(8)], -1),
        "sites": torch.stack([kept(keys(), site=n, probability=probability) for n in range(8)], -1),
        "seeds": torch.stack([kept(keys(seed=n), probability=probability) for n in range(8)], -1),
    }


def surprise(bits: Tensor) -> float:
    """Returns the chi-square of the 256 patterns of eight fair bits, in standard deviations."""
    bits = bits.reshape(-1, 8)
    numbers = (bits.long() << torch.arange(8)).sum(1)
    expected = len(bits) / 256
    chi_square = float(((torch.bincount(numbers, minlength=256) - expected) ** 2 / expected).sum())
    return (chi_square - 255) / math.sqrt(2 * 255)


def test_all_patterns_are_equally_frequent() -> None:
    found = {name: surprise(bits) for name, bits in patterns(0.5).items()}
    assert max(map(abs, found.values())) < 4, found


@pytest.mark.parametrize("weak", [lambda z: z, lambda z: z.mul_(module._FACTOR)], ids=["none", "a product"])
def test_control_numbers_that_are_hardly_scrambled_are_found_out(
    monkeypatch: pytest.MonkeyPatch, weak: Callable[[Tensor], Tensor]
) -> None:
    monkeypatch.setattr(module, "_scramble_", weak)
    correlations = [abs(correlation(a, b)) for a, b in neighbours(0.5).values()]
    assert max(correlations) > 20 and max(map(surprise, patterns(0.5).values())) > 20


def test_every_bit_depends_on_every_bit() -> None:
    torch.manual_seed(0)
    numbers = torch.randint(-(2**63), 2**63 - 1, (1 << 12,))
    scrambled = module._scramble_(numbers.clone())
    for bit in range(64):
        changed = module._scramble_(numbers ^ torch.tensor(1).bitwise_left_shift(bit)) ^ scrambled
        flips = (changed[:, None] >> torch.arange(64) & 1).double().mean(0)
        assert float((flips - 0.5).abs().max()) < 5.5 * 0.5 / 64, f"bit {bit}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kept_elements_are_scaled_up(dtype: torch.dtype) -> None:
    x = torch.randn(B, S, D).to(dtype)
    y = hidden_dropout(x, keys(), 1, 0.2)
    mask = kept(keys(), probability=0.2).bool()
    exact = (x.double() / 0.8).to(dtype)
    assert y.dtype == dtype and not y[~mask].any()
    torch.testing.assert_close(y[mask], exact[mask], rtol=torch.finfo(dtype).eps, atol=0)
    assert abs(float(y.double().sum() - x.double().sum())) < 4 * math.sqrt(0.25 * x.numel())


def test_probability_zero_changes_nothing() -> None:
    x = torch.randn(B, S, D)
    assert hidden_dropout(x, keys(), 1, 0.0) is x


def test_a_rate_close_to_one_drops_all() -> None:
    assert int(kept(keys(), probability=1 - 1e-12).sum()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_drops_what_forward_dropped(dtype: torch.dtype) -> None:
    x = torch.randn(B, S, D).to(dtype).requires_grad_()
    gradient = torch.randn(B, S, D).to(dtype)
    mask, other = (kept(keys(), site).to(dtype) for site in (1, 2))
    y = hidden_dropout(x, keys(), 1, 0.5)
    y.backward(gradient)
    assert x.grad is not None and x.grad.dtype == dtype
    assert torch.equal(y.detach(), 2 * x.detach() * mask)
    assert torch.equal(x.grad, 2 * gradient * mask)
    assert not torch.equal(x.grad, 2 * gradient * other), "control: another site has another mask"
    # The gradient of a sum is expanded and has no memory of its own.
    x.grad = None
    hidden_dropout(x, keys(), 1, 0.5).sum().backward()
    assert torch.equal(x.grad, 2 * mask)


def test_the_gradient_is_that_of_the_function() -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    k = keys(batch=2, positions=torch.arange(3))
    assert torch.autograd.gradcheck(lambda t: hidden_dropout(t, k, 1, 0.4), x)
    assert torch.autograd.gradgradcheck(lambda t: hidden_dropout(t, k, 1, 0.4), x)


def saved_bytes(function: Any, x: Tensor) -> int:
    kept_for_backward: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept_for_backward.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(x).sum().backward()
    return sum(kept_for_backward)


def test_no_mask_is_kept_for_backward() -> None:
    x = torch.randn(B, S, D, requires_grad=True)
    assert saved_bytes(lambda t: hidden_dropout(t, keys(), 1, 0.1), x) == keys().rows.nbytes
    of_torch = saved_bytes(lambda t: torch.nn.functional.dropout(t, 0.1), x)
    assert of_torch >= x.numel(), "control: torch's own dropout keeps its mask, and this would see it"


def test_no_generator_is_touched_or_asked() -> None:
    torch.manual_seed(1)
    before, first = torch.get_rng_state(), kept(keys())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(kept(keys()), first)


def test_keys_of_another_shape_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="keys of"):
        hidden_dropout(torch.ones(B, S + 1, D), keys(), 1, 0.1)


def test_a_compiled_graph_chooses_alike_without_knowing_the_site() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(hidden_dropout, backend=counter, fullgraph=True)
    drawn = [torch.randn(B, S, D, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for number in (0, 5, 6):
        found = []
        for function, place in ((hidden_dropout, number), (compiled, torch.tensor(number))):
            x, stream = (t.clone().requires_grad_() for t in drawn[:2])
            added = function(x, keys(), place, 0.2, stream)
            added.backward(drawn[2])
            found.append((added, x.grad, stream.grad))
        assert all(torch.equal(plain, in_graph) for plain, in_graph in zip(*found, strict=True))
    assert counter.frame_count == 1, "one graph for all sites"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_chooses_alike(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    x = torch.randn(B, S, D).to(dtype)
    on_cpu = hidden_dropout(x, keys(), 9, 0.1)
    cuda = torch.device("cuda")
    k = dropout_keys(1234, 7, 0, B, torch.arange(S), cuda)
    for block in (1000, 1 << 25):
        monkeypatch.setattr(module, "_BLOCK_GPU", block)
        assert torch.equal(hidden_dropout(x.to(cuda), k, 9, 0.1).cpu(), on_cpu)
