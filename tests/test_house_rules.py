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
