"""Parses layer patterns: every N-th layer, or a list such as [0]*1+[1]*26. Used for windows and experts."""

import ast
from collections.abc import Sequence

_MAX_LAYERS = 10_000
# Enough for that many entries with commas and spaces.
_MAX_CHARACTERS = 4 * _MAX_LAYERS
# In --window-size, stands for all tokens.
_UNLIMITED = -1


def layer_pattern(flag: str, written: str, num_layers: int, example: str) -> "int | list[int]":
    """Returns N, or the entry of every layer. Raises `ValueError` with a message for an invalid pattern."""
    if written.strip().isdecimal():
        return int(written)
    given, needed = f"{flag} {written:.200}", f"but --num-layers is {num_layers}; use {num_layers} entries"
    try:
        if len(written) > _MAX_CHARACTERS:
            raise OverflowError
        pattern = _evaluate(ast.parse(written.strip(), mode="eval").body)
    except OverflowError:
        raise ValueError(f"{given} names more than {_MAX_LAYERS} layers, {needed}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pattern = None
    if not isinstance(pattern, list) or any(entry not in (0, 1) for entry in pattern):
        raise ValueError(f"{given} is neither a number nor a list of 0 and 1 such as {example}")
    if len(pattern) != num_layers:
        raise ValueError(f"{given} names {len(pattern)} layers, {needed}")
    return pattern


def _evaluate(node: ast.expr) -> "int | list[int]":
    """Evaluates a list expression of integers, lists, + and *, and nothing else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        entries = [_evaluate(entry) for entry in node.elts]
        if all(isinstance(entry, int) for entry in entries):
            return [entry for entry in entries if isinstance(entry, int)]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            if len(left) + len(right) > _MAX_LAYERS:
                raise OverflowError
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            # A mistyped factor must not exhaust the memory.
            if len(left) * right > _MAX_LAYERS:
                raise OverflowError
            return left * right
    raise ValueError


def windowed_layers(skip_frequency: str | None, num_layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has a window. Raises `ValueError` with a message for an invalid pattern.

    As in Megatron, layers count from 1 and every N-th has none; in a list, 1 stands for a window.
    """
    if skip_frequency is None:
        return (True,) * num_layers
    pattern = layer_pattern("--window-attn-skip-freq", skip_frequency, num_layers, "[1,1,0]")
    if pattern == 0:
        raise ValueError("--window-attn-skip-freq 0 is not a distance between layers; use 1 or more")
    if isinstance(pattern, int):
        return tuple(number % pattern != 0 for number in range(1, num_layers + 1))
    return tuple(bool(entry) for entry in pattern)


def window_of_layer(
    window_size: Sequence[int], skip_frequency: str | None, num_layers: int, layer_number: int
) -> int | None:
    """Returns the number of preceding tokens that a token attends to, None for all.

    `layer_number` counts from 1.
    """
    if not window_size or window_size[0] == _UNLIMITED:
        return None
    return window_size[0] if windowed_layers(skip_frequency, num_layers)[layer_number - 1] else None
