"""Compares generation with a KV cache with the plain model, which reads all tokens each time."""

import pytest
import torch

from pentatron.errors import UserError
from pentatron.generate import generate as generation
from pentatron.generate.generate import (
    GeneratedToken,
    GenerationModel,
    Sampling,
    build_generation_model,
    generate,
)
from pentatron.models.causal_lm import CausalLM, build_model
from pentatron.nn import attention, kv_cache
from pentatron.parallel.world import single_process
from tests.support import LLAMA, resolved

CPU = torch.device("cpu")
GREEDY = Sampling()
UNTIED = "--untie-embeddings-and-output-weights --init-method-std 0.3 --max-position-embeddings 40"
FAMILIES = {
    "gpt2": "",
    "llama": f"{LLAMA} --group-query-attention --num-query-groups 2",
    "half rotated": f"{LLAMA} --rotary-percent 0.5 --rotary-interleaved --group-query-attention --num-query-groups 1",
    "qk norm, wide heads": f"{LLAMA} --qk-layernorm --kv-channels 24 --add-qkv-bias",
    "window": f"{LLAMA} --window-size 4 0",
    "window in one layer": f"{LLAMA} --window-size 2 0 --window-attn-skip-freq 2 --num-query-groups 2 --group-query-attention",
    "llama3 rope": f"{LLAMA} --use-rope-scaling",
    "experts": f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16",
}
RAGGED = ((1, 2, 3), (17, 8, 45, 10, 11, 60, 13, 5, 9), (5,), (7, 7, 30, 2, 19))


def built(words: str) -> GenerationModel:
    config = resolved(f"{words} {UNTIED}").config
    model = build_model(config.model, 1, CPU, moe=config.moe).eval()
    assert config.model.max_position_embeddings == 40
    assert config.model.vocab_size == model.vocab_size
    return build_generation_model({0: model}, config.model, single_process(CPU))


def collected(events: list[GeneratedToken], count: int) -> tuple[list[list[int]], list[list[float]]]:
    of_each = [[e.choice for e in events if e.number == n and e.choice is not None] for n in range(count)]
    return [[c.token for c in each] for each in of_each], [[c.logprob for c in each] for each in of_each]


def whole_model(model: GenerationModel) -> CausalLM:
    return model.stages[0]


@torch.no_grad()
def reread(model: GenerationModel, prompt: tuple[int, ...], made: list[int]) -> torch.Tensor:
    """Returns log probabilities after the prompt and each token, without a cache: [tokens, V]."""
    tokens = torch.tensor([[*prompt, *made]])
    logits = whole_model(model)(tokens, torch.arange(tokens.shape[1])[None])[0, len(prompt) - 1 : -1, :61]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("at_once", [1024, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_any_length_together_are_as_each_alone_without_a_cache(
    family: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "READ_AT_ONCE", at_once)
    model = built(FAMILIES[family])
    tokens, logprobs = collected(list(generate(model, RAGGED, 12, GREEDY)), len(RAGGED))
    assert len({token for text in tokens for token in text}) > 8, "a model that repeats itself shows little"
    for prompt, found, given in zip(RAGGED, tokens, logprobs):
        expected = reread(model, prompt, found)
        assert found == expected.argmax(-1).tolist() and len(found) == 12
        assert given == pytest.approx(expected.amax(-1).tolist(), abs=2e-5)


@pytest.mark.parametrize("mistake", ["sees the filling", "positions of the longest"])
def test_filling_that_is_seen_would_show(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(FAMILIES["llama"])
    right = collected(list(generate(model, RAGGED, 12, GREEDY)), len(RAGGED))
    if mistake == "sees the filling":
        plain = kv_cache._visible
        monkeypatch.setattr(kv_cache, "_visible", lambda *given: torch.ones_like(plain(*given)))
    else:
        monkeypatch.setattr(
            kv_cache.ForwardPass,
            "positions",
            lambda p, device: torch.arange(p.end - p.length, p.end).expand(4, -1),
        )
    wrong = collected(list(generate(model, RAGGED, 12, GREEDY)), len(RAGGED))
    assert wrong[1][1] == pytest.approx(right[1][1], abs=2e-5), "the longest prompt has no filling"
    for number in (0, 2, 3):
        assert max(abs(a - b) for a, b in zip(wrong[1][number], right[1][number])) > 1e-3


def test_a_window_that_is_forgotten_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(FAMILIES["window"])
    right = collected(list(generate(model, RAGGED, 12, GREEDY)), len(RAGGED))
    plain = kv_cache.attend_to_cache
    monkeypatch.setattr(attention, "attend_to_cache", lambda q, k, v, now, window: plain(q, k, v, now))
    wrong = collected(list(generate(model, RAGGED, 12, GREEDY)), len(RAGGED))
    assert all(max(abs(a - b) for a, b in zip(*pair)) > 1e-3 for pair in zip(wrong[1], right[1]))


def test_masks_are_made_once_for_all_layers_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(f"{FAMILIES['window in one layer']} --num-layers 6")
    made: list[tuple[int, int | None]] = []
    plain = kv_cache._visible

    def counted(
        now: kv_cache.ForwardPass, first: int, window: int | None, device: torch.device
    ) -> torch.Tensor:
        made.append((now.end, window))
        return plain(now, first, window, device)

    monkeypatch.setattr(kv_cache, "_visible", counted)
    list(generate(model, RAGGED, 4, GREEDY))
    # The first token comes from reading the prompts, which uses the attention of the layers.
    assert sorted(made, key=str) == sorted(((end, w) for end in (10, 11, 12) for w in (2, None)), key=str)
    made.clear()
    list(generate(model, [RAGGED[1]] * 2, 4, GREEDY))
    assert made == [], "sequences at the same position hide nothing"


def test_a_draw_depends_on_seed_and_number_and_on_no_neighbour() -> None:
    model, hot = built(LLAMA), Sampling(1.5, seed=3)
    together, _ = collected(list(generate(model, RAGGED, 12, hot)), 4)
    for number, prompt in enumerate(RAGGED):
        events = list(generate(model, [prompt], 12, hot, first_number=number))
        assert [e.choice.token for e in events if e.choice] == together[number]
        assert {e.number for e in events} == {number}
    same = collected(list(generate(model, [RAGGED[0]] * 2, 12, hot)), 2)[0]
    assert same[0] == together[0] != same[1]
    assert collected(list(generate(model, RAGGED, 12, Sampling(1.5, seed=9))), 4)[0] != together


def test_a_text_ends_at_a_stop_token_while_others_go_on() -> None:
    model = built(FAMILIES["llama"])
    free, _ = collected(list(generate(model, RAGGED, 12, GREEDY)), 4)
    stop = {free[1][5]}
    events = list(generate(model, RAGGED, 12, GREEDY, stop))
    found, _ = collected(events, 4)
    for number, text in enumerate(free):
        places = [place for place, token in enumerate(text) if token in stop]
        assert found[number] == text[: places[0]] if places else text
    ends = {e.number: e.end for e in events if e.end is not None}
    assert ends[1] == "stop" and set(ends.values()) == {"stop", "length"}


def test_a_text_ends_where_the_model_has_no_more_positions() -> None:
    model = built("")
    events = list(generate(model, [(1, 2), tuple(range(35))], 30, GREEDY))
    found, logprobs = collected(events, 2)
    assert [len(text) for text in found] == [30, 5]
    assert [(e.number, e.end) for e in events if e.end] == [(1, "positions"), (0, "length")]
    expected = reread(model, tuple(range(35)), found[1])
    assert logprobs[1] == pytest.approx(expected.amax(-1).tolist(), abs=2e-5)


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ([()], "the prompt has no token"),
        ([(1,), tuple([0] * 40)], "prompt 2 has 40 tokens, but the model has 40 positions"),
        ([(61,)], "token 61, but the model has the tokens 0 to 60"),
    ],
)
def test_invalid_prompts_are_refused(prompts: list[tuple[int, ...]], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        list(generate(built(""), prompts, 3, GREEDY))


def test_nan_logits_are_an_error() -> None:
    model = built("")
    with torch.no_grad():
        whole_model(model).layers["1"].mlp_norm.weight[3] = torch.nan
    with pytest.raises(UserError, match="logits are NaN or inf"):
        list(generate(model, [(1, 2)], 3, GREEDY))


def test_custom_attention_generates_without_a_cache() -> None:
    class Nearby(attention.DotProductAttention):
        """An attention whose keys depend on neighbouring tokens, so that it cannot use a cache."""

        def forward(self, q_BNSH: torch.Tensor, k_BKSH: torch.Tensor, v_BKSH: torch.Tensor) -> torch.Tensor:
            return super().forward(q_BNSH, k_BKSH.cumsum(2), v_BKSH)

    model = built(FAMILIES["llama"])
    before, _ = collected(list(generate(model, RAGGED, 12, GREEDY)), 4)
    whole_model(model).layers["1"].attention.core_attention.__class__ = Nearby
    found, logprobs = collected(list(generate(model, RAGGED, 12, GREEDY)), 4)
    assert found != before
    for prompt, text, given in zip(RAGGED, found, logprobs):
        expected = reread(model, prompt, text)
        assert text == expected.argmax(-1).tolist()
        assert given == pytest.approx(expected.amax(-1).tolist(), abs=2e-5)


def test_logits_are_copied_to_the_host_for_lots_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy decoding stays on the device; sampling copies the logits to the host."""
    copied: list[torch.Size] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor.shape)
        return tensor

    monkeypatch.setattr(torch.Tensor, "cpu", copy)
    model = built("")
    list(generate(model, [(1, 2, 3), (4, 5)], 3, Sampling()))
    assert copied == []
    list(generate(model, [(1, 2, 3), (4, 5)], 3, Sampling(1.0)))
    assert copied == [torch.Size((2, model.settings.vocab_size))] * 3
