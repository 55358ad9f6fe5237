"""Hooks for the whole test suite."""

import gc
import os
import signal

from tests.harness.client import session_zygote


def pytest_configure() -> None:
    # One thread each, here and in the programs that tests start, unless they say otherwise: models are tiny, and threads that wait
    # for each other take the cores from the tests beside them. Torch reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Also where somebody runs the tests under `nohup`: some send that signal.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    # What was imported stays. Without this every collection of garbage, such as the one a command ends with, would walk over the
    # million objects of all libraries, which takes longer than most tests.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    session_zygote().close()
