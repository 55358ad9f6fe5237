"""Runs the quick commands of the guides as typed, and tests the check that all commands go through."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from guides import Command, load_commands, make_workplace, page, problems, run  # noqa: E402  (scripts/ is not a package)

QUICK = [command for command in load_commands() if command.quick]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guides")
    make_workplace(folder)
    return folder


@pytest.mark.parametrize("command", QUICK, ids=lambda command: f"{command.guide} {command.shows}")
def test_a_command_of_a_guide(command: Command, workplace: Path) -> None:
    outcome = run(command, workplace, port=29611)
    assert not outcome.problems, f"{outcome.problems}\n{outcome.output[-2000:]}"


def test_every_guide_has_commands() -> None:
    assert {command.guide for command in load_commands()} == {"000", "001", "002", "003", "004"}


def test_problems_of_a_command_are_found(tmp_path: Path) -> None:
    command = Command("000", "all checks", "true", says=["hello"], leaves=["file"], steps={"run": 2}, exits=2)
    found = problems(command, 0, '  File "/x/pentatron/cli/main.py", line 3', tmp_path)
    assert found == [
        "exit code 0 instead of 2",
        "a refusal came with a traceback",
        "does not say 'hello'",
        "no file",
        "run has 0 steps instead of 2",
    ]
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"loss": 1.0}\n{"loss": 0.5}\n')
    assert problems(command, 2, "hello", tmp_path) == []
    assert "did not end" in problems(command, None, "", tmp_path)[0]


def test_the_page_has_the_commands_of_the_file() -> None:
    written = (ROOT / "docs/guides/README.md").read_text(encoding="utf-8")
    for command in load_commands():
        assert f"| {command.guide} | {command.shows} | `" in written, "run `make guides`"
    assert page([], []).splitlines()[0] == "# The guides' commands"
