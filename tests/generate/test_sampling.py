"""Compares the probabilities of sampling with those of `transformers`."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pentatron.generate.generate import Choice, Sampling, choose_tokens, probabilities

LOGITS = torch.tensor([0.3, 2.0, -1.0, 2.0, 1.1, 0.3, -4.0, 1.9])
# No two of these are equal: of equal logits at the cutoff of top-k or top-p, either may stay.
UNEQUAL = LOGITS + 0.01 * torch.arange(8)


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> Choice:
    (found,) = choose_tokens(logits[None], sampling, [generator])
    assert found is not None
    return found


def theirs(sampling: Sampling) -> torch.Tensor:
    scores = UNEQUAL[None].double()
    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (3, 1.0), (5, 1.0), (99, 1.0), (0, 0.2), (0, 0.5), (0, 0.9), (4, 0.6)]
)
def test_probabilities(temperature: float, top_k: int, top_p: float) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    torch.testing.assert_close(probabilities(UNEQUAL, sampling), theirs(sampling))


def test_by_hand() -> None:
    """The probabilities are 1/2, 1/4, 1/8 and 1/8: the second token reaches 0.6."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert probabilities(logits, Sampling(1.0, top_p=0.6)).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert probabilities(logits, Sampling(1.0, top_p=0.4)).tolist() == [1, 0, 0, 0]
    assert probabilities(logits, Sampling(1.0, top_k=3)).tolist() == pytest.approx([0.5, 0.25, 0.125, 0.125])
    # Logits divided by this temperature would overflow.
    assert probabilities(logits, Sampling(1e-320, top_k=3, top_p=0.9)).tolist() == [1, 0, 0, 0]


def test_sampled_tokens_follow_the_probabilities() -> None:
    sampling = Sampling(1.3, top_k=6, top_p=0.9)
    generator, draws = sampling.generator(0), 1500
    drawn = torch.tensor([choose(LOGITS, sampling, generator).token for _ in range(draws)])
    expected = probabilities(LOGITS, sampling) * draws
    found = drawn.bincount(minlength=len(LOGITS)).double()
    assert torch.equal(found == 0, expected == 0), "what is left out is never drawn, what is not, is"
    assert ((found - expected).abs() <= 4 * expected.sqrt()).all()


def test_the_likeliest_token_and_the_models_own_probability() -> None:
    choice = choose(LOGITS, Sampling(), Sampling().generator(0))
    assert choice.token == 1, "the first of two equals"
    assert choice.logprob == pytest.approx(float(LOGITS.log_softmax(0)[1]))
    cold = Sampling(0.01, top_k=1)
    alike = choose(LOGITS, cold, cold.generator(0))
    assert alike.logprob == pytest.approx(choice.logprob, abs=1e-6), "before temperature and top-k"
    assert choose(LOGITS[:2], cold, cold.generator(0)).token == 1


def test_rounding_of_the_logits_does_not_reorder_the_draws() -> None:
    """A seed draws the same tokens although layouts round logits differently."""
    sampling = Sampling(1.0, seed=7)
    noise = 1e-6 * torch.randn(8, generator=torch.Generator().manual_seed(1))

    def drawn(logits: torch.Tensor) -> list[int]:
        generator = sampling.generator(0)
        return [choose(logits, sampling, generator).token for _ in range(200)]

    assert drawn(LOGITS) == drawn(LOGITS + noise)
    assert drawn(LOGITS) != drawn(LOGITS.flip(0))


def test_the_likeliest_of_a_whole_vocabulary_is_as_probable_as_in_fp64() -> None:
    logits = 5 * torch.randn(3, 150_000, generator=torch.Generator().manual_seed(2))
    exact = logits.double().log_softmax(1)
    found = choose_tokens(logits, Sampling(), [Sampling().generator(row) for row in range(3)])
    assert [choice and choice.token for choice in found] == exact.argmax(1).tolist()
    assert [choice and choice.logprob for choice in found] == pytest.approx(exact.amax(1).tolist(), abs=1e-6)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=4)])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_row_with_nan_or_inf_has_no_choice(sampling: Sampling, wrong: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 5] = wrong
    found = choose_tokens(logits, sampling, [sampling.generator(0) for _ in range(3)])
    assert found[1] is None
    assert found[0] == found[2] == choose(LOGITS, sampling, sampling.generator(0))
