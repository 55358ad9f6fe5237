"""Which layers have experts, as `--moe-layer-freq` says it: every N-th, or a list written with + and *."""

import ast


def moe_layers(frequency: str, num_layers: int) -> tuple[bool, ...]:
    """For every layer, whether it has experts. Raises ValueError with a sentence for what cannot be read."""
    written = frequency.strip()
    if written.isdigit():
        every = int(written)
        if every == 0:
            raise ValueError("--moe-layer-freq 0 gives no layer experts; use 1 or more")
        return tuple(number % every == 0 for number in range(num_layers))
    try:
        found = _value(ast.parse(written, mode="eval").body)
    except OverflowError:
        raise ValueError(
            f"--moe-layer-freq {frequency} names more than {_LONGEST} layers, but --num-layers is {num_layers}; "
            f"use {num_layers} entries"
        ) from None
    except (SyntaxError, ValueError):
        found = None
    if not isinstance(found, list) or any(entry not in (0, 1) for entry in found):
        raise ValueError(
            f"--moe-layer-freq {frequency} is neither a number nor a list of 0 and 1 such as [0]*1+[1]*26"
        )
    if len(found) != num_layers:
        raise ValueError(
            f"--moe-layer-freq {frequency} names {len(found)} layers, but --num-layers is {num_layers}; use {num_layers} entries"
        )
    if not any(found):
        raise ValueError(
            f"--moe-layer-freq {frequency} gives no layer experts; write a 1 for each that has them"
        )
    return tuple(bool(entry) for entry in found)


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
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            # A slip of the keyboard must not fill the memory.
            if len(left) * right > _LONGEST:
                raise OverflowError
            return left * right
    raise ValueError


_LONGEST = 10_000
