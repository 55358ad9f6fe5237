"""The zygote: imports everything heavy once, then forks the ranks of one test after the other.

It runs no tensor operation and starts no thread. A thread does not survive the fork, but its locks do: ranks
forked after a multi-threaded operation hang in their first one.
"""

import contextlib
import gc
import importlib
import os
import pkgutil
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import pytest

from tests.harness import processes
from tests.harness.messages import Job, Outcome, Ready
from tests.harness.rank import live_as_rank
from tests.harness.supervisor import ClientGone, Ranks

# Torch imports each of these lazily, deep in some call, which would cost seconds in every rank.
HEAVY_MODULES = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed._functional_collectives",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.fx.experimental.proxy_tensor",
)
PROJECT = "pentatron"
# Test modules that most ranks import.
SUPPORT = ("tests.support", "tests.parity.trajectory", "tests.parity.reshard")


def main(client_descriptor: int, scratch: Path) -> None:
    os.set_inheritable(client_descriptor, False)  # programs started by ranks must not inherit it
    client = Connection(client_descriptor)
    processes.adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a rank that crashes leaves no core file behind
    preload()
    rewrite_asserts_from_now_on()
    # Garbage collection in ranks would otherwise write to, and so copy, every page of imported objects.
    gc.collect()
    gc.freeze()
    processes.collapse_memory()
    doorbell = Doorbell.install()
    try:
        client.send(Ready())
        while True:
            client.send(run_job(client.recv(), scratch, client, doorbell))
    except (EOFError, BrokenPipeError, ConnectionResetError, ClientGone):
        pass  # the test process is done
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def preload() -> None:
    for name in HEAVY_MODULES:
        importlib.import_module(name)
    refuse_threads("torch")
    for name in (*project_modules(), *SUPPORT):
        # A module that cannot be imported fails the tests that import it, with its own error.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
        refuse_threads(name)
    with contextlib.suppress(Exception):
        # The tables of settings are built at first use.
        sys.modules["tests.support"].resolved()


def project_modules() -> Iterator[str]:
    package = importlib.import_module(PROJECT)
    for module in pkgutil.walk_packages(package.__path__, f"{PROJECT}.", onerror=lambda name: None):
        if module.name.rpartition(".")[2] != "__main__":
            yield module.name


def refuse_threads(imported: str) -> None:
    if processes.thread_count() > 1:
        raise RuntimeError(
            f"importing {imported} started a thread, so no rank can be forked safely; start it at first use instead"
        )


def rewrite_asserts_from_now_on() -> None:
    """Installs pytest's import hook, so that failed asserts show values in ranks as well."""
    pytest.Config.fromdictargs({}, ["--noconftest", "--capture=no"])


@dataclass(frozen=True)
class Doorbell:
    """A pipe that wakes the zygote: a rank writes to it after its report, Python when a child exits."""

    read_end: int
    write_end: int

    @classmethod
    def install(cls) -> Self:
        doorbell = cls(*os.pipe())
        os.set_blocking(doorbell.write_end, False)
        signal.set_wakeup_fd(doorbell.write_end)
        # The wakeup descriptor is written only for signals that have a Python handler.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return doorbell

    def leave_to_zygote(self) -> None:
        """Keeps only the write end; called in a rank."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self.read_end)


def run_job(job: Job, scratch: Path, client: Connection, doorbell: Doorbell) -> list[Outcome]:
    directory = scratch / "test"
    directory.mkdir()
    try:
        ranks = Ranks(job, directory, fork_ranks(job, directory, client, doorbell))
        return ranks.finish(doorbell.read_end, client)
    finally:
        shutil.rmtree(directory)


def fork_ranks(job: Job, directory: Path, client: Connection, doorbell: Doorbell) -> list[int]:
    """Forks the ranks, all into the OS process group of rank 0."""
    zygote = os.getpid()
    pids: list[int] = []
    for rank in range(job.world):
        pid = os.fork()
        if pid == 0:
            try:
                processes.join_group(0, pids[0] if pids else 0)
                processes.die_with_parent(zygote)
                client.close()
                doorbell.leave_to_zygote()
                live_as_rank(job, rank, directory, doorbell.write_end)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)  # a rank must never continue as a second zygote
        pids.append(pid)
        processes.join_group(pid, pids[0])
    return pids


if __name__ == "__main__":
    main(client_descriptor=int(sys.argv[1]), scratch=Path(sys.argv[2]))
