"""Which layers are of a kind: every N-th, or a list written with + and *, such as [0]*1+[1]*26."""

import ast


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
