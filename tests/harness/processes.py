"""Operations on processes: descendants, process groups of the OS, and descriptions of exit codes."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

# Options of prctl(2).
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Advice of madvise(2), and the size of a huge page.
MADV_COLLAPSE = 25
HUGE_PAGE = 1 << 21


def adopt_orphans() -> None:
    """Makes this process the parent of all orphaned descendants, so that none escapes (Linux)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when `parent`, which has just forked it, dies (Linux)."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def collapse_memory() -> None:
    """Moves this process's memory into huge pages: a fork copies a table entry for every page."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, *_, name = [*line.split(maxsplit=5), ""][:6]
        if access != "rw-p" or name.strip() not in ("", "[heap]"):
            continue
        first, last = (int(address, 16) for address in place.split("-"))
        for start in range(-(-first // HUGE_PAGE) * HUGE_PAGE, last - HUGE_PAGE + 1, HUGE_PAGE):
            madvise(start, HUGE_PAGE, MADV_COLLAPSE)  # an error changes nothing


def child_pids(pid: int) -> list[int]:
    """Returns the children of a process, including zombies; empty without /proc."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie; False without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def open_descriptors(pid: int) -> int:
    """Returns the number of open file descriptors of a process; 0 without /proc."""
    directory = Path(f"/proc/{pid}/fd")
    return len(list(directory.iterdir())) if directory.is_dir() else 0


def thread_count() -> int:
    """Returns the number of threads of this process; without /proc those of Python only."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


def join_group(pid: int, group: int) -> None:
    """Puts a child into a process group. Parent and child both call it, as either may run first."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, group)


def kill_group(group: int) -> None:
    # macOS raises PermissionError when only zombies are left in the group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_and_reap_descendants(group: int) -> None:
    """Kills a process group and all other descendants, and waits until they are gone."""
    kill_group(group)
    while True:
        # A descendant outside the group becomes a child when its parent dies, because of `adopt_orphans`.
        for child in child_pids(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def describe_exit(code: int) -> str:
    """Describes an exit code of `subprocess`, which is negative for a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"
