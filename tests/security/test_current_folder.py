"""Tests that no process of a command imports files of the current folder in place of packages."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

import pentatron.__main__ as program
from pentatron.cli.main import COMMANDS, main
from pentatron.launch.job import Job
from pentatron.launch.scripts import batch_script, node_script
from pentatron.supervise.launcher import run_workers
from pentatron.supervise.processes import environment_of, python_command

PACKAGE = Path(program.__file__).parent
# Modules that Python, the command line and training import early.
MODULES = (
    "pentatron",
    "torch",
    "safetensors",
    "dataclasses",
    "pathlib",
    "socket",
    "multiprocessing",
    "pickle",
)


@pytest.fixture
def hostile(working_directory: Path) -> Path:
    """Writes modules into the current folder that leave a mark when imported; returns its path."""
    mark = working_directory / "mark"
    for name in MODULES:
        (working_directory / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r})\n")
    return mark


def test_modules_run_where_python_puts_the_folder_first(hostile: Path) -> None:
    """Control: `python -m` puts the current folder first, which must not happen in a worker."""
    subprocess.run([sys.executable, "-m", "pentatron", "--version"], capture_output=True, check=False)
    assert hostile.exists()


def test_workers_import_nothing_from_the_current_folder(hostile: Path) -> None:
    words = ["-m", "pentatron", "presets"]
    ended = run_workers(words, 2, None, os.environ, os.getpid())
    assert ended.exit_code == 0 and not hostile.exists()


def test_a_command_typed_with_m_imports_nothing_from_the_current_folder(hostile: Path) -> None:
    """Deletes pentatron.py, which Python would find before the package can change the path."""
    (hostile.parent / "pentatron.py").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "pentatron", "presets"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "llama" in done.stdout and not hostile.exists()


def test_script_imports_from_its_folder_in_workers_too(working_directory: Path) -> None:
    folder = working_directory / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("number = 3\n")
    (folder / "script.py").write_text("import beside\nraise SystemExit(beside.number)\n")
    assert run_workers([str(folder / "script.py")], 1, None, os.environ, os.getpid()).exit_code == 3


def test_which_processes_look_into_the_current_folder() -> None:
    assert python_command(["-m", "pentatron", "train"])[1:] == ["-P", "-m", "pentatron", "train"]
    assert python_command(["-c", "pass"])[1:] == ["-P", "-c", "pass"]
    assert python_command(["train.py", "-m"])[1:] == ["train.py", "-m"]


def test_a_scripts_own_folder_is_not_hidden_by_the_guard_of_its_launcher() -> None:
    inherited = {"PYTHONSAFEPATH": "1", "A": "b"}
    assert environment_of(["train.py"], inherited) == {"A": "b"}
    assert environment_of(["-m", "pentatron"], inherited) == inherited


def test_processes_that_libraries_start_do_not_either(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data workers are new interpreters of `multiprocessing`, started in the user's folder."""

    def prepare(words: Sequence[str]) -> int:
        process = multiprocessing.get_context("spawn").Process(target=abs, args=(1,))
        process.start()
        process.join()
        return process.exitcode or 0

    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setitem(COMMANDS, "prepare", prepare)
    assert main(["prepare"]) == 0 and not hostile.exists()
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setenv("PYTHONSAFEPATH", "x")
    assert main(["--version"]) == 0 and os.environ["PYTHONSAFEPATH"] == "x"


def left(monkeypatch: pytest.MonkeyPatch, path: list[str]) -> list[str]:
    """Returns sys.path after a start with `python -m`, without hooks of an editable installation."""
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    program.leave_current_folder()
    return sys.path


def test_the_path_of_a_command_typed_with_m(monkeypatch: pytest.MonkeyPatch) -> None:
    here, installed = str(Path.cwd()), str(PACKAGE.parent)
    monkeypatch.setenv("PYTHONPATH", "mine")
    assert left(monkeypatch, [here, "mine", installed]) == ["mine", installed]
    assert left(monkeypatch, ["", installed, here]) == [installed, here], "PYTHONPATH of the user counts"
    assert left(monkeypatch, ["bin", installed, here]) == ["bin", installed, here], "an installed command"
    assert os.environ["PYTHONPATH"] == "mine"


def test_a_checkout_that_is_not_installed_is_found_by_workers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = str(PACKAGE.parent)
    monkeypatch.chdir(checkout)
    monkeypatch.delenv("PYTHONPATH")
    assert left(monkeypatch, [checkout, "elsewhere"]) == ["elsewhere", checkout]
    assert os.environ["PYTHONPATH"] == checkout
    monkeypatch.setenv("PYTHONPATH", "mine")
    assert left(monkeypatch, [checkout, "elsewhere"]) == ["elsewhere", checkout]
    assert os.environ["PYTHONPATH"] == f"mine{os.pathsep}{checkout}"


def test_scripts_for_clusters_do_not_import_from_their_folder(working_directory: Path) -> None:
    made = Job(2, 4, True, "python", ("-m", "pentatron", "train"), folder=str(working_directory))
    of_script = Job(2, 4, True, "python", ("pretrain_gpt.py",), folder=str(working_directory))
    of_checkout = Job(2, 4, True, "python", ("-m", "pentatron", "train"), folder=str(PACKAGE.parent))
    for write in (batch_script, node_script):
        for job, is_safe in ((made, True), (of_script, False), (of_checkout, False)):
            text = write(job, ["pentatron", "launch"], "2 nodes")
            assert " -P -m torch.distributed.run " in text
            assert ("export PYTHONSAFEPATH=1" in text) == is_safe
