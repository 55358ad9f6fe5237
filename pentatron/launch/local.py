"""Workers on this machine, started and watched by torch's elastic agent."""

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from pentatron.config.errors import UserError

_GRACE_SECONDS = 120


@dataclass(frozen=True)
class Ended:
    """How the workers ended; `failed_rank` is the one that failed first."""

    exit_code: int
    failed_rank: int | None = None
    stopped_by: signal.Signals | None = None


def refuse_used_port(port: int) -> None:
    """Says so at once when the meeting point is taken, instead of waiting for a time-out."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used as the meeting point ({error.strerror}); choose another with --master-port, "
                f"or leave it out to take a free one"
            ) from None


def _quieten_the_agent() -> None:
    """Its own account of failures and signals repeats what the workers and we say; each module has its own level."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _let_a_second_signal_end_it() -> None:
    """The agent waits for its workers as long as they take; a user who asks twice wants out.

    Its handler is looked up when workers start, so it can be replaced before; there is no public way to do so.
    """
    from torch.distributed.elastic.multiprocessing import api

    first = api._terminate_process_handler
    asked: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        if asked:
            for worker in _children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker, signal.SIGKILL)
            sys.stderr.write("pentatron: stopped at once; checkpoints that were saved before are intact\n")
            sys.stderr.flush()
            os._exit(128 + signum)
        asked.append(signum)
        first(signum, frame)

    api._terminate_process_handler = handler


def _children() -> list[int]:
    """This process's children, each the leader of its own group; where the system does not tell, none."""
    try:
        return [
            int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        ]
    except OSError:
        return []


def run_workers(python_words: Sequence[str], processes: int, port: int | None) -> Ended:
    """Runs `python WORDS...` once per process until all end; a failing one takes the others down with it."""
    if port is not None:
        refuse_used_port(port)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quieten_the_agent()
    _let_a_second_signal_end_it()
    options: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": processes,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": f"localhost:{port or 0}",
        "max_restarts": 0,
        # Workers meet on this machine, whatever its name resolves to.
        "local_addr": "localhost",
        "shutdown_timeout": _GRACE_SECONDS,
        "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGUSR1,SIGUSR2",
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    config = LaunchConfig(**{name: value for name, value in options.items() if name in known})
    try:
        elastic_launch(config, sys.executable)(*python_words)
    except SignalException as interrupted:
        return Ended(128 + interrupted.sigval, stopped_by=interrupted.sigval)
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        return Ended(first.exitcode, failed_rank=rank)
    return Ended(0)
