"""Converters read Pentatron's settings as attributes; string keys are for foreign files only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from pentatron.settings.run_config import all_settings

PACKAGE = Path(__file__).parent.parent / "pentatron"
FORMATS = sorted(path for name in ("hf", "interchange") for path in (PACKAGE / name).rglob("*.py"))
# A config.json and its RoPE section; Megatron-LM's arguments, common.pt and scheduler; and the schedule in a
# Pentatron checkpoint, whose keys are not settings.
FOREIGN = frozenset({"config", "rope", "args", "arguments", "common", "scheduler", "schedule"})


def reads_by_text(source: str) -> Iterator[str]:
    """Yields reads of a mapping by the name of a setting.

    Finds `x["lr"]` and `x.get("lr")`, not `x["lr"] = value`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            of, key = node.value, node.slice
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and node.args:
            assert isinstance(node.func, ast.Attribute)
            of, key = node.func.value, node.args[0]
        else:
            continue
        if isinstance(key, ast.Constant) and key.value in all_settings() and last_name(of) not in FOREIGN:
            yield f"line {node.lineno}: {key.value}"


def last_name(of: ast.expr) -> str:
    return getattr(of, "attr", "") or getattr(of, "id", "")


def test_no_setting_of_ours_is_read_by_text() -> None:
    assert len(FORMATS) > 10
    found = {path: list(reads_by_text(path.read_text(encoding="utf-8"))) for path in FORMATS}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "source, count",
    [
        ('settings["hidden_size"] // settings["num_attention_heads"]', 2),
        ('flat.get("lr")', 1),
        ('self.values["min_lr"]', 1),
        ('settings["hidden_size"] = 4', 0),
        ('config.get("num_attention_heads", int, 4)', 0),
        ('args["hidden_size"] + settings.hidden_size', 0),
    ],
)
def test_reads_by_text_are_found(source: str, count: int) -> None:
    assert len(list(reads_by_text(source))) == count
