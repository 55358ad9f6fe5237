"""Tests, their ranks and their programs run outside the repository and do not depend on its files."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.harness import run_distributed

ROOT = Path(__file__).resolve().parents[1]
AT_IMPORT = Path.cwd()


def is_apart(folder: Path) -> bool:
    return not folder.resolve().is_relative_to(ROOT)


@pytest.fixture(scope="module")
def of_the_module() -> Path:
    return Path.cwd()


def working_directory_of_a_rank() -> Path:
    return Path.cwd()


def test_tests_and_their_ranks_work_in_an_empty_folder_outside_the_repository(of_the_module: Path) -> None:
    here = Path.cwd()
    assert is_apart(here) and list(here.iterdir()) == []
    assert is_apart(AT_IMPORT), "modules are imported outside as well"
    assert is_apart(of_the_module)
    assert run_distributed(working_directory_of_a_rank, 2) == [here, here]
    assert not is_apart(ROOT / "runs"), "control"


@pytest.mark.parametrize("number", [1, 2])
def test_nothing_is_left_for_the_next_test(number: int) -> None:
    assert list(Path.cwd().iterdir()) == []
    Path("runs/demo").mkdir(parents=True)


def test_programs_start_in_the_folder_of_the_test_and_import_this_repository() -> None:
    program = "import os, pentatron; print(os.getcwd(), pentatron.__file__, sep='\\n')"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [str(Path.cwd()), str(ROOT / "pentatron/__init__.py")]


# client.py starts the zygote, which imports tests; whole_runs.py starts pytest, which gives every test its
# own folder.
STARTS_IN_THE_REPOSITORY = {"tests/harness/client.py", "tests/cuda/whole_runs.py"}


def in_the_repository(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Yields the lines that pass the repository's root to `chdir` or as `cwd`."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        given = [word.value for word in node.keywords if word.arg == "cwd"]
        if getattr(node.func, "attr", getattr(node.func, "id", "")) == "chdir":
            given += node.args
        for value in given:
            parts = value.values if isinstance(value, ast.BoolOp) else [value]
            if any(isinstance(part, ast.Name) and part.id in ("ROOT", "REPOSITORY") for part in parts) or (
                "__file__" in ast.unparse(value)
            ):
                yield node.lineno


def test_no_test_goes_back_to_the_repository() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if list(in_the_repository(ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found == STARTS_IN_THE_REPOSITORY
    wrong = "run(cwd=ROOT)\nrun(cwd=cwd or ROOT)\nos.chdir(REPOSITORY)\nrun(cwd=Path(__file__).parents[2])\nrun(cwd=tmp_path)"
    assert list(in_the_repository(ast.walk(ast.parse(wrong)))) == [1, 2, 3, 4], "control"
