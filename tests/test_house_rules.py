"""Habits that are easy to lose, held by a walk over the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "pentatron").rglob("*.py"))
LONGEST_FILE = 400
# Megatron's functions without arguments (get_args(), mpu.*) need to find the run somewhere: decision 0035.
HOLDS_THE_RUN = ROOT / "pentatron" / "megatron" / "state.py"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_length(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") <= LONGEST_FILE


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_globals_and_no_environment_outside_the_command_line(path: Path) -> None:
    package = path.relative_to(ROOT / "pentatron").parts[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if path != HOLDS_THE_RUN:
            assert not isinstance(node, ast.Global), f"line {node.lineno}: a global"
        if package != "cli" and isinstance(node, ast.Attribute):
            assert node.attr not in ("environ", "getenv"), f"line {node.lineno}: reads the environment"


def test_only_megatrons_names_read_the_run_that_is_global() -> None:
    readers = [p for p in SOURCES if "pentatron.megatron" in p.read_text(encoding="utf-8")]
    assert HOLDS_THE_RUN in readers
    assert all(p.is_relative_to(HOLDS_THE_RUN.parent) for p in readers), "the package below does without"


# Names, and words of a guide that people search for.
CAPITALS = ("Tokenizer not found", "Weights & Biases")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_errors_for_users_begin_small_and_end_without_a_full_stop(path: Path) -> None:
    """They stand after `pentatron: `, inside lists and inside each other."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("UserError", "AgreedError"):
            continue
        text = node.args[0] if node.args else None
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        first, last = (str(p.value) if isinstance(p, ast.Constant) else "" for p in (parts[0], parts[-1]))
        word = first.split(" ")[0]
        assert not word.istitle() or first.startswith(CAPITALS), first
        assert not last.endswith(".") or last.endswith("..."), last
