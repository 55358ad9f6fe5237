"""How far back the tokens of a layer look, as `--window-size` and `--window-attn-skip-freq` say it."""

from collections.abc import Sequence

from pentatron.config.layer_pattern import layer_pattern

# In place of a number of tokens: all of them.
_NO_LIMIT = -1


def windowed_layers(skip_frequency: str | None, num_layers: int) -> tuple[bool, ...]:
    """For every layer, whether it has a window; the others see everything. Raises ValueError with a sentence.

    As in Megatron, layers count from 1 and every N-th is one without; in a list, 1 stands for a window.
    """
    if skip_frequency is None:
        return (True,) * num_layers
    found = layer_pattern("--window-attn-skip-freq", skip_frequency, num_layers, "[1,1,0]")
    if found == 0:
        raise ValueError("--window-attn-skip-freq 0 is no distance between layers; use 1 or more")
    if isinstance(found, int):
        return tuple(number % found != 0 for number in range(1, num_layers + 1))
    return tuple(bool(entry) for entry in found)


def window_of(
    window_size: Sequence[int], skip_frequency: str | None, num_layers: int, layer_number: int
) -> int | None:
    """How many tokens before its own a token of this layer sees; None: all. `layer_number` counts from 1."""
    if not window_size or window_size[0] == _NO_LIMIT:
        return None
    return window_size[0] if windowed_layers(skip_frequency, num_layers)[layer_number - 1] else None
