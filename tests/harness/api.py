"""The interface for tests and benches: `distributed` and `run_distributed`."""

import functools
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.harness.client import rank_environment, session_zygote
from tests.harness.messages import Job
from tests.harness.report import RanksFailed, failure_text

DEFAULT_TIMEOUT = 60.0
LARGEST_WORLD = 8
# Backends of a test's process group. With NCCL, tensors on the CPU still use gloo.
GLOO, NCCL = "gloo", "cpu:gloo,cuda:nccl"


def distributed(
    world: int, timeout: float = DEFAULT_TIMEOUT, process_group: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test function run on `world` ranks, each with a fresh gloo process group.

    The function may take parametrised values and fixtures that can be pickled. Fixtures run once, in the test
    process, so all ranks share one `tmp_path`. The test fails if any rank fails or if it takes longer than
    `timeout` seconds. With `process_group=False` a rank can fork (`tests/harness/forked.py`).
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        _require_module_level(body)

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            try:
                _run(body, world, timeout, arguments, process_group)
            except RanksFailed as failed:
                # The text has the tracebacks of the ranks; that of this process would only show the harness.
                raise pytest.fail.Exception(str(failed), pytrace=False) from None

        test.distributed_body = body  # type: ignore[attr-defined]  # what the ranks call
        return test

    return decorate


def run_distributed(
    function: Callable[..., Any],
    world: int,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    process_group: bool = True,
    backend: str = GLOO,
    **arguments: Any,
) -> list[Any]:
    """Calls a module-level function on `world` ranks and returns the return values in rank order.

    Raises `RanksFailed` if a rank fails. `backend` is `GLOO`, or `NCCL` for ranks that share one GPU and
    communicate over NCCL.
    """
    return _run(function, world, timeout, arguments, process_group, backend)


def _run(
    function: Callable[..., Any],
    world: int,
    timeout: float,
    arguments: Mapping[str, Any],
    process_group: bool,
    backend: str = GLOO,
) -> list[Any]:
    __tracebackhide__ = True
    outcomes = session_zygote().run(_job(function, world, timeout, arguments, process_group, backend))
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailed(failure_text(outcomes))
    return [pickle.loads(outcome.result) for outcome in outcomes]


def _job(
    function: Callable[..., Any],
    world: int,
    timeout: float,
    arguments: Mapping[str, Any],
    process_group: bool,
    backend: str,
) -> Job:
    if not 1 <= world <= LARGEST_WORLD:
        raise ValueError(f"world must be 1 to {LARGEST_WORLD}, not {world}")
    if not function.__qualname__.isidentifier():
        raise ValueError(
            f"ranks find a function by its name, so {function.__qualname__} must be at module level"
        )
    main_file = sys.modules["__main__"].__file__ if function.__module__ == "__main__" else None
    return Job(
        module=function.__module__,
        main_file=main_file,
        function=function.__name__,
        arguments=_pickled(arguments),
        world=world,
        timeout=timeout,
        import_path=list(sys.path),
        working_directory=str(Path.cwd()),
        environment=rank_environment(),
        process_group=process_group,
        backend=backend,
    )


def _require_module_level(function: Callable[..., Any]) -> None:
    if not function.__qualname__.isidentifier():
        raise ValueError(
            f"ranks find a function by its name, so {function.__qualname__} must be at module level"
        )


def _pickled(arguments: Mapping[str, Any]) -> bytes:
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise ValueError(
                f"argument {name!r} cannot be sent to the ranks ({error}); pass plain data and build it from that there"
            ) from None
    return pickle.dumps(dict(arguments))
