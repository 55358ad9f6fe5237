"""One rank: everything in a forked process, from the fork to its report."""

import faulthandler
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tests.harness.messages import Job, Outcome, RankFiles

# Makes a rank dump its Python stack. Not SIGUSR1: training code handles it, and tests send it.
STACK_SIGNAL = signal.SIGQUIT
SEED = 1234
# The process group times out later than the harness, which can show the stack of every rank.
PROCESS_GROUP_MARGIN = 60.0
# Gloo's error messages for a lost peer.
PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "Pair is not connected",
    "Application timeout caused pair closure",
)


def live_as_rank(job: Job, rank: int, directory: Path, doorbell: int) -> NoReturn:
    """Runs the job's function as one rank, writes a report, and then rings the doorbell."""
    files = RankFiles(directory, rank)
    capture_output(files.output)
    dump_stack_on_demand(files.stack)
    outcome = run(job, rank, directory)
    write_report(outcome, files.report)
    os.write(doorbell, b".")
    if not outcome.ok:
        os._exit(1)  # closes the connections, so that peers waiting for this rank fail at once
    # Other ranks may still use this rank's process group, so it waits until the zygote kills it at the end.
    while True:
        signal.pause()


def capture_output(path: Path) -> None:
    """Redirects stdout and stderr, also of C++ code, to one file in the order of writing."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def dump_stack_on_demand(path: Path) -> None:
    """Writes the Python stack of all threads to a file on `STACK_SIGNAL` or a crash."""
    stack = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(stack)
    faulthandler.register(STACK_SIGNAL, stack, all_threads=True)


def run(job: Job, rank: int, directory: Path) -> Outcome:
    try:
        sys.path[:] = job.import_path
        os.chdir(job.working_directory)
        os.environ.clear()
        os.environ.update(job.environment)
        torch.set_num_threads(1)
        if job.process_group:
            join_process_group(job, rank, directory)
        function = find_function(job)
        arguments = pickle.loads(job.arguments)
        # Seeded last, so that random numbers drawn by imports do not matter.
        random.seed(SEED)
        torch.manual_seed(SEED)
        result = pickle.dumps(function(**arguments))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the function did not return
        return failure(error, rank)
    return Outcome(rank, ok=True, at=time.monotonic(), result=result)


def join_process_group(job: Job, rank: int, directory: Path) -> None:
    if "nccl" in job.backend:
        # NCCL refuses two ranks of one host on one GPU, and identifies hosts by this name. The "hosts" are on
        # one machine, so sockets use the loopback interface.
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.cuda.set_device(0)
    dist.init_process_group(
        job.backend,
        store=dist.FileStore(str(directory / "store"), job.world),
        rank=rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout + PROCESS_GROUP_MARGIN),
    )


def find_function(job: Job) -> Callable[..., Any]:
    """Returns the function to call: for a distributed test the undecorated one."""
    module = load_script(job.main_file) if job.main_file else importlib.import_module(job.module)
    found = getattr(module, job.function)
    return getattr(found, "distributed_body", found)


def load_script(path: str) -> ModuleType:
    """Imports the caller's script as `__mp_main__`, as multiprocessing does, to unpickle its classes."""
    spec = importlib.util.spec_from_file_location("__mp_main__", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    spec.loader.exec_module(module)
    return module


def failure(error: BaseException, rank: int) -> Outcome:
    at = time.monotonic()
    if isinstance(error, SystemExit):
        headline = f"exited with code {error.code!r} (sys.exit)"
    else:
        headline = "raised " + traceback.format_exception_only(error)[-1].partition("\n")[0]
    return Outcome(
        rank,
        ok=False,
        at=at,
        headline=headline,
        traceback="".join(traceback.format_exception(error.with_traceback(own_frames_removed(error)))),
        peer_lost=any(
            isinstance(link, RuntimeError) and any(words in str(link) for words in PEER_LOST)
            for link in exception_chain(error)
        ),
    )


def own_frames_removed(error: BaseException) -> Any:
    """Returns the error's traceback from the first frame outside of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames or error.__traceback__


def exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def write_report(outcome: Outcome, path: Path) -> None:
    """Writes a report to a file, which needs no reader; the rename makes it atomic."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(outcome))
    unfinished.rename(path)
