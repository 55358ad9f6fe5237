"""Continuing a text, token by token."""

from collections.abc import Iterator, Sequence

import torch

from pentatron.models.causal_lm import CausalLM


@torch.no_grad()
def generate(
    model: CausalLM,
    prompt: Sequence[int],
    max_tokens: int,
    context: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yields the tokens that follow the prompt; temperature 0 takes the likeliest one each time."""
    device = next(model.parameters()).device
    # Drawn on the CPU, so that a seed gives the same text on every device.
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(max_tokens):
        window = torch.tensor([tokens[-context:]], device=device)
        positions = torch.arange(window.shape[1], device=device)[None]
        logits = model(window, positions)[0, -1, : model.vocab_size].float().cpu()
        token = _choose(logits, temperature, top_k, generator)
        if token == stop:
            return
        tokens.append(token)
        yield token


def _choose(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    values, ids = logits.topk(min(top_k, logits.numel()))
    return int(ids[torch.multinomial(torch.softmax(values / temperature, 0), 1, generator=generator)])
