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
    # Programs that tests start import this repository from any folder.
    further = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in further if path not in ("", str(REPOSITORY))]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *others])
    # One thread each, here and in the programs that tests start, unless they say otherwise: models are tiny,
    # and threads that wait for each other take the cores from the tests beside them. Torch reads this when it
    # is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Also where somebody runs the tests under `nohup`: some send that signal.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    # From here on, for imports of test modules and fixtures of whole modules too, nothing is read from or
    # left in the repository by a relative path. Not before: pytest has to find its arguments, and xdist
    # starts its workers where the controller is.
    if session.config.pluginmanager.hasplugin("dsession"):
        return  # the controller of xdist, which collects nothing
    folders = Path(tempfile.mkdtemp(prefix="pentatron-tests-")).resolve()
    session.config.stash[_FOLDERS] = folders
    os.chdir(tempfile.mkdtemp(dir=folders))


@pytest.fixture(autouse=True)
def working_directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty folder of its own for every test, which ranks and programs that it starts inherit."""
    before = Path.cwd()
    folder = Path(tempfile.mkdtemp(dir=request.config.stash[_FOLDERS]))
    os.chdir(folder)
    yield folder
    os.chdir(before)
    shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_finish() -> None:
    # What was imported stays. Without this every collection of garbage, such as the one a command ends with,
    # would walk over the million objects of all libraries, which takes longer than most tests.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    session_zygote().close()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _FOLDERS in config.stash:
        os.chdir(config.invocation_params.dir)
        shutil.rmtree(config.stash[_FOLDERS], ignore_errors=True)
