import torch

from pentatron.models.causal_lm import build_model
from pentatron.models.generate import generate
from tests.support import LLAMA, model_config


def made(temperature: float, seed: int = 0, prompt: tuple[int, ...] = (1, 2, 3), **more: int) -> list[int]:
    model = build_model(model_config(LLAMA), 1, torch.device("cpu")).eval()
    return list(generate(model, prompt, 20, context=16, temperature=temperature, seed=seed, **more))


def test_temperature_zero_takes_the_likeliest_token_of_the_window() -> None:
    model = build_model(model_config(LLAMA), 1, torch.device("cpu")).eval()
    tokens = [1, 2, 3]
    for token in made(0.0):
        window = torch.tensor([tokens[-16:]])
        logits = model(window, torch.arange(window.shape[1])[None])[0, -1, :61]
        assert token == int(logits.argmax())
        tokens.append(token)
    assert len(tokens) == 23, "longer than the context"


def test_one_seed_gives_one_text_and_another_another() -> None:
    assert made(1.0, seed=1) == made(1.0, seed=1) != made(1.0, seed=2)
    assert all(0 <= token < 61 for token in made(5.0)), "padding of the vocabulary is never chosen"


def test_the_stop_token_ends_the_text() -> None:
    everything = made(1.0, seed=4)
    assert made(1.0, seed=4, stop=everything[5]) == everything[: everything.index(everything[5])]


def test_top_k_of_one_is_greedy() -> None:
    assert made(1.0, top_k=1) == made(0.0)
