"""Every setting in Megatron's form, for the head of the log."""

from collections.abc import Mapping
from typing import Any

from pentatron.text import one_line

_COLUMN = 48
_RULE = "-" * 24


def arguments_block(settings: Mapping[str, Any]) -> str:
    lines = [f"{_RULE} arguments {_RULE}"]
    for name in sorted(settings, key=str.lower):
        dots = "." * (_COLUMN - len(name))
        lines.append(f"  {name} {dots} {one_line(str(settings[name]))}")
    return "\n".join([*lines, f"{'-' * 20} end of arguments {'-' * 21}"])
