"""Hooks for the whole test suite."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.client import REPOSITORY, session_zygote

_FOLDERS = pytest.StashKey[Path]()


def pytest_configure() -> None:
    # Programs started by tests import this repository from any working directory.
    further = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in further if path not in ("", str(REPOSITORY))]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *others])
    # One OpenMP thread per process, unless the environment sets another number: models are tiny, and threads
    # that wait for each other occupy the cores of tests that run in parallel. Torch reads this variable when
    # it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Reverts `nohup`, which ignores SIGHUP: some tests send that signal.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    # From here on the working directory is a temporary folder, also for imports of test modules and for
    # module fixtures, so that no relative path reads or writes the repository. Not earlier: pytest has to
    # find its arguments, and xdist starts its workers in the directory of the controller.
    if session.config.pluginmanager.hasplugin("dsession"):
        return  # the controller of xdist, which collects nothing
    folders = Path(tempfile.mkdtemp(prefix="pentatron-tests-")).resolve()
    session.config.stash[_FOLDERS] = folders
    os.chdir(tempfile.mkdtemp(dir=folders))


@pytest.fixture(autouse=True)
def working_directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Gives every test its own empty working directory, which its ranks and programs inherit."""
    before = Path.cwd()
    folder = Path(tempfile.mkdtemp(dir=request.config.stash[_FOLDERS]))
    os.chdir(folder)
    yield folder
    os.chdir(before)
    shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_finish() -> None:
    # Imported modules are never freed. Without `freeze`, every garbage collection, such as the one at the end
    # of a command, would traverse the million objects of all libraries, which takes longer than most tests.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    session_zygote().close()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _FOLDERS in config.stash:
        os.chdir(config.invocation_params.dir)
        shutil.rmtree(config.stash[_FOLDERS], ignore_errors=True)
