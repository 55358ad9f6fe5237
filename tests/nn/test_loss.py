"""Compares fused losses and their memory with torch's cross entropy, for whole and split vocabularies."""

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pentatron.errors import UserError
from pentatron.nn import loss as loss_module
from pentatron.nn.linear import OutputLayer
from pentatron.nn.loss import CrossEntropy
from pentatron.ops import cross_entropy
from pentatron.ops.fp8_linear import LinearOptions
from pentatron.ops.linear import DeferredGradients
from pentatron.parallel.axes import TensorAxis
from tests.harness import distributed
from tests.nn.test_tensor_parallel import axis, drawn, stream

ROWS, VOCABULARY, WIDTH, BATCH, LENGTH = 16, 13, 6, 2, 5
LABELS = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
# Every token has another weight; some have weight zero.
WEIGHTS = stream(4, BATCH, LENGTH) * (torch.arange(LENGTH) != 2)
ALONE = TensorAxis()


def head(where: TensorAxis = ALONE, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> OutputLayer:
    made = drawn(OutputLayer(rows, VOCABULARY, WIDTH, where)).to(dtype)
    assert isinstance(made, OutputLayer)
    return made


def computed(
    how: CrossEntropy, layer: OutputLayer, x: Tensor, labels: Tensor = LABELS
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns losses and the gradients of hidden states and weight."""
    x = x.clone().requires_grad_()
    losses = layer(x, lambda head, x: how.from_hidden_states(head, x, labels, VOCABULARY))
    (losses * WEIGHTS).sum().backward()
    assert losses.dtype == torch.float32 and x.grad is not None and layer.weight.grad is not None
    return losses.detach(), x.grad, layer.weight.grad


def torchs(x: Tensor, weight: Tensor, labels: Tensor = LABELS) -> tuple[Tensor, Tensor, Tensor]:
    """Computes torch's cross entropy in fp64, without padding."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    logits = (x @ weight.t())[..., :VOCABULARY]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    (losses * WEIGHTS).sum().backward()
    return losses.detach(), x.grad, weight.grad


def agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


FUSED = CrossEntropy("on", "native")


@pytest.mark.parametrize("chunk", [1, 3, 4, 10, 32768])
def test_losses_and_gradients_are_torchs(chunk: int) -> None:
    layer, x = head(), stream(1, BATCH, LENGTH, WIDTH) * 20
    found = computed(CrossEntropy("on", "native", chunk), layer, x)
    agree(found, torchs(x, layer.weight), 1e-5)
    assert found[2][VOCABULARY:].abs().sum() == 0 and found[1][:, 2].abs().sum() == 0


def test_in_bf16_as_exact_as_the_plain_way() -> None:
    x = (stream(1, BATCH, LENGTH, WIDTH) * 20).bfloat16()
    expected = torchs(x, head(dtype=torch.bfloat16).weight)
    errors = []
    for how in (FUSED, CrossEntropy("off")):
        found = computed(how, head(dtype=torch.bfloat16), x)
        assert found[1].dtype == torch.bfloat16
        errors.append([float((f - e).abs().max()) for f, e in zip(found, expected)])
    assert all(fused <= 1.01 * plain + 1e-6 for fused, plain in zip(*errors))


def test_the_check_sees_a_gradient_without_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a gradient that ignores the weights of losses is noticed."""

    def forgetful(*given: Any) -> None:
        cross_entropy.write_gradient(*given[:4], torch.ones_like(given[4]), *given[5:])

    class Passes:
        row_sums = staticmethod(cross_entropy.row_sums)
        write_gradient = staticmethod(forgetful)

    monkeypatch.setattr(loss_module, "_passes", lambda *given: Passes)
    layer, x = head(), stream(1, BATCH, LENGTH, WIDTH)
    found = computed(FUSED, layer, x)
    agree(found[:1], torchs(x, layer.weight)[:1], 1e-5)
    with pytest.raises(AssertionError):
        agree(found, torchs(x, layer.weight), 1e-5)


def test_labels_that_are_no_words() -> None:
    """-100 has no loss, as in torch; any other invalid label must not give a finite loss."""
    layer, x, labels = head(), stream(1, BATCH, LENGTH, WIDTH), LABELS.clone()
    labels[0, 1] = -100
    agree(computed(FUSED, layer, x, labels), torchs(x, layer.weight, labels), 1e-5)
    for wrong in (VOCABULARY, -1, ROWS + 5):
        labels[0, 1] = wrong
        losses = FUSED.from_hidden_states(layer, x, labels, VOCABULARY)
        assert int(losses.isnan().sum()) == 1 and bool(losses[0, 1].isnan())


def test_minus_infinity_has_no_probability() -> None:
    logits = torch.full((1, 1, 4), -torch.inf)
    logits[..., 2] = 1.0
    assert FUSED.from_logits(logits, torch.tensor([[2]]), 4).item() == 0.0


@distributed(world=2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("rows", [16, 26])
def test_a_split_vocabulary(sequence_parallel: bool, rows: int) -> None:
    """Splits a vocabulary so that a rank has some padding, or nothing but padding."""
    split, x = axis(sequence_parallel), stream(1, BATCH, 4, WIDTH) * 20
    labels, weights = LABELS[:, :4], WEIGHTS[:, :4]
    whole, part = head(rows=rows), head(split, rows=rows)
    expected_x, own_x = x.clone().requires_grad_(), split.own_sequence(x).clone().requires_grad_()
    for chunk in (3, 100):
        expected = FUSED.from_hidden_states(whole, expected_x, labels, VOCABULARY)
        losses = CrossEntropy("on", "native", chunk).from_hidden_states(part, own_x, labels, VOCABULARY)
        assert torch.allclose(losses, expected, atol=1e-5)
        (losses * weights).sum().backward()
        (expected * weights).sum().backward()
    share = rows // 2
    own = slice(split.rank * share, split.rank * share + share)
    assert torch.allclose(part.weight.grad, whole.weight.grad[own], atol=1e-5)
    assert torch.allclose(own_x.grad, split.own_sequence(expected_x.grad), atol=1e-5)


@distributed(world=2)
@pytest.mark.parametrize("fusion", ["on", "off"])
def test_ignored_and_invalid_labels_of_a_split_vocabulary(fusion: Literal["on", "off"]) -> None:
    """-100 has loss 0 and no gradient, as in one process; an invalid label has loss NaN."""
    x, labels = stream(1, BATCH, LENGTH, WIDTH) * 20, LABELS.clone()
    labels[0, 1] = -100
    how, whole, part = CrossEntropy(fusion, "native"), head(), head(axis(False))
    losses, _, weight_gradient = computed(how, part, x, labels)
    expected, _, whole_gradient = torchs(x, whole.weight, labels)
    share = ROWS // 2
    own = slice(part.axis.rank * share, part.axis.rank * share + share)
    agree((losses, weight_gradient), (expected, whole_gradient[own]), 1e-5)
    for invalid in (VOCABULARY, -1):
        labels[0, 1] = invalid
        losses = how.from_hidden_states(part, x, labels, VOCABULARY)
        assert losses.isnan().nonzero().tolist() == [[0, 1]]


def test_the_weights_gradient_may_come_later() -> None:
    """Computes the deferred weight gradient in one matmul for any chunk size.

    The gradients of all logits are kept for it in any case.
    """
    expected, x = head(), stream(1, BATCH, LENGTH, WIDTH)
    wanted = computed(FUSED, expected, x)
    deferred = DeferredGradients()
    layer = head(TensorAxis(linear=LinearOptions(deferred)))
    x.requires_grad_()
    losses = CrossEntropy("on", "native", 3).from_hidden_states(layer, x, LABELS, VOCABULARY)
    with deferred.collect((0, 0)):
        (losses * WEIGHTS).sum().backward()
    assert layer.weight.grad is None and deferred.elements == BATCH * LENGTH * (WIDTH + ROWS)
    deferred.compute((0, 0))
    agree((x.grad, layer.weight.grad), wanted[1:], 1e-6)


def arrived(how: CrossEntropy, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Returns the addresses of the logits of each chunk and of their gradients."""
    logits: list[int] = []
    gradients: list[int] = []
    # Kept alive, so that no other tensor can have the same address.
    alive: list[Tensor] = []
    layer = head()
    apply_weight = layer.apply_weight

    def watched(x: Tensor) -> Tensor:
        made = apply_weight(x)
        logits.append(made.data_ptr())
        alive.append(made.detach())
        if made.requires_grad:
            made.register_hook(lambda gradient: gradients.append(gradient.data_ptr()))
        return made

    monkeypatch.setattr(layer, "apply_weight", watched)
    computed(how, layer, stream(1, BATCH, LENGTH, WIDTH))
    return logits, gradients


def test_the_gradient_takes_the_place_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, gradients = arrived(FUSED, monkeypatch)
    assert len(logits) == 1 and gradients == logits
    logits, gradients = arrived(CrossEntropy("off"), monkeypatch)
    assert len(logits) == 1 and gradients != logits


def test_all_but_the_last_chunk_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, gradients = arrived(CrossEntropy("on", "native", 4), monkeypatch)
    assert len(logits) == 3 + 2 and len(gradients) == 3 and gradients[0] == logits[2]


def test_a_second_backward_is_refused() -> None:
    losses = FUSED.from_hidden_states(head(), stream(1, BATCH, LENGTH, WIDTH), LABELS, VOCABULARY).sum()
    losses.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.backward()


def test_logits_of_others_stay() -> None:
    logits = stream(1, BATCH, LENGTH, ROWS).requires_grad_()
    before = logits.detach().clone()
    FUSED.from_logits(logits, LABELS, VOCABULARY).sum().backward()
    plain = before.clone().requires_grad_()
    CrossEntropy("off").from_logits(plain, LABELS, VOCABULARY).sum().backward()
    assert torch.equal(logits, before)
    agree((logits.grad,), (plain.grad,), 1e-6)


def test_without_gradients_few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_EVALUATION_CHUNK", 4)
    layer, x, sizes = head(), stream(1, BATCH, LENGTH, WIDTH), []
    apply_weight = layer.apply_weight
    monkeypatch.setattr(layer, "apply_weight", lambda x: sizes.append(len(x)) or apply_weight(x))
    with torch.no_grad():
        found = FUSED.from_hidden_states(layer, x, LABELS, VOCABULARY)
    assert sizes == [4, 4, 2]
    agree((found,), torchs(x, layer.weight)[:1], 1e-5)


def test_on_a_cpu_nothing_is_fused_unless_asked_for() -> None:
    x = stream(1, 1, 1, 2)
    assert not CrossEntropy().fuses(x) and FUSED.fuses(x) and not CrossEntropy("off").fuses(x)
    with pytest.raises(UserError, match="no Triton or no GPU"):
        CrossEntropy("on", "te").from_logits(x, torch.zeros(1, 1, dtype=torch.long), 2)


def test_logits_of_users_may_lie_in_any_order() -> None:
    """Accepts logits in any memory order, such as transposed [sequence, batch, vocabulary]."""
    torch.manual_seed(4)
    labels = torch.randint(9, (2, 5))
    found = []
    for loss in (CrossEntropy("on"), CrossEntropy("off")):
        logits = torch.linspace(-3, 3, 90).view(5, 2, 9).clone().requires_grad_()
        losses = loss.from_logits(logits.transpose(0, 1), labels, 9)
        losses.sum().backward()
        found.append((losses.detach(), logits.grad))
    for fused, plain in zip(*found):
        torch.testing.assert_close(fused, plain)
