"""Which layers are of a kind: every N-th, or a list written with + and *, such as [0]*1+[1]*26."""

import ast
from collections.abc import Sequence


def layer_pattern(flag: str, written: str, num_layers: int, example: str) -> "int | list[int]":
    """The N, or the entry of every layer. Raises ValueError with a sentence for what cannot be read."""
    if written.strip().isdecimal():
        return int(written)
    try:
        if len(written) > _LONGEST_TEXT:
            raise OverflowError
        found = _value(ast.parse(written.strip(), mode="eval").body)
    except OverflowError:
        raise ValueError(
            f"{flag} {written:.200} names more than {_LONGEST} layers, but --num-layers is {num_layers}; "
            f"use {num_layers} entries"
        ) from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = None
    if not isinstance(found, list) or any(entry not in (0, 1) for entry in found):
        raise ValueError(f"{flag} {written:.200} is neither a number nor a list of 0 and 1 such as {example}")
    if len(found) != num_layers:
        raise ValueError(
            f"{flag} {written:.200} names {len(found)} layers, but --num-layers is {num_layers}; use {num_layers} entries"
        )
    return found


def _value(node: ast.expr) -> "int | list[int]":
    """The value of a list expression: only integers, lists, + and * are known."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        entries = [_value(entry) for entry in node.elts]
        if all(isinstance(entry, int) for entry in entries):
            return [entry for entry in entries if isinstance(entry, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            if len(left) + len(right) > _LONGEST:
                raise OverflowError
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            # A slip of the keyboard must not fill the memory.
            if len(left) * right > _LONGEST:
                raise OverflowError
            return left * right
    raise ValueError


_LONGEST = 10_000
# A list of so many layers with commas and blanks.
_LONGEST_TEXT = 4 * _LONGEST


# How far back the tokens of a layer look, as `--window-size` and `--window-attn-skip-freq` say it.


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
