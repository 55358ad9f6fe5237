"""Forks training processes from one that has imported everything, each in tenths of a second.

Reads requests from standard input, one JSON object a line, and reports every start and end on standard
output. Like the harness's zygote, it computes nothing and starts no thread.
"""

import atexit
import ctypes
import gc
import json
import os
import selectors
import shutil
import signal
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.faults.entry import RESTART, take_arguments
from tests.harness import processes
from tests.harness.zygote import preload

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_CAPABILITY_VERSION_3 = 0x20080522
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18


class _InChild(Exception):
    """Unwinds a forked process out of the zygote's loop."""


def main(live: "Callable[[Mapping[str, Any]], int] | None" = None) -> None:
    """`live`: runs in the forked process with its request; the default trains."""
    with warnings.catch_warnings():
        # Hides the warning that megatron-core is installed as well.
        warnings.simplefilter("ignore")
        preload()
    import pentatron.cli.train  # noqa: F401 - every child needs it

    # Collections in children would otherwise touch, and so copy, every page of the objects imported here.
    gc.collect()
    gc.freeze()
    processes.collapse_memory()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        _serve(reader)
    except _InChild as child:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _end(live or _live, child.args[0])


def _end(live: Callable[[Mapping[str, Any]], int], request: Mapping[str, Any]) -> NoReturn:
    """Ends the process as the interpreter does, but skips freeing the imported modules, which is slow."""
    code = 1
    try:
        code = live(request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(doorbell: int) -> None:
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    selector.register(doorbell, selectors.EVENT_READ)
    numbers: dict[int, int] = {}
    unread = b""
    while True:
        for key, _ in selector.select():
            if key.fd == doorbell:
                os.read(doorbell, 4096)
                continue
            received = os.read(sys.stdin.fileno(), 1 << 16)
            if not received:
                return
            *lines, unread = (unread + received).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    raise _InChild(request)
                numbers[pid] = request["number"]
                _tell({"number": request["number"], "pid": pid})
        while numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            _tell({"number": numbers.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def _tell(message: Mapping[str, Any]) -> None:
    os.write(sys.__stdout__.fileno(), (json.dumps(message) + "\n").encode())  # type: ignore[union-attr]


def _live(request: Mapping[str, Any]) -> int:
    from pentatron.cli.main import train_program
    from pentatron.settings.entry_points import TRAIN

    processes.die_with_parent(os.getppid())
    null = os.open(os.devnull, os.O_RDONLY)
    out, err = (
        os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for name in ("out", "err")
    )
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for place in request["mounts"]:
        _mount(**place)
    if request["plain"]:
        _give_up_rights()
    sys.argv = ["pentatron", *request["faults"], "--", *request["words"]]
    code = train_program(take_arguments, TRAIN, RESTART)
    if request["rescue"]:
        # A private file system disappears with its process.
        shutil.copytree(*request["rescue"], dirs_exist_ok=True)
    return code


def _give_up_rights() -> None:
    """Drops all capabilities, as permissions do not apply to root with them."""
    header, none = struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    if ctypes.CDLL(None, use_errno=True).capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")


def _mount(at: str, kib: int | None) -> None:
    """Mounts a tmpfs of `kib` KiB for this process only; None mounts the folder itself read-only."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()

    def call(name: str, *given: Any) -> None:
        if getattr(libc, name)(*given) != 0:
            raise OSError(ctypes.get_errno(), f"{name} failed")

    call("unshare", _CLONE_NEWNS | (_CLONE_NEWUSER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    place = at.encode()
    call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    if kib is not None:
        call("mount", b"tmpfs", place, b"tmpfs", 0, f"size={kib}k".encode())
    else:
        call("mount", place, place, None, _MS_BIND, None)
        call("mount", place, place, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY, None)


if __name__ == "__main__":
    main()
