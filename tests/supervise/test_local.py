import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pentatron.errors import UserError
from pentatron.files import lock_scratch_folder, scratch_folder
from pentatron.supervise.launcher import (
    BROKEN_PIPE,
    JobResult,
    listener_for_workers,
    require_descriptors,
)
from pentatron.supervise.signals import WATCHED


def test_a_port_in_use_is_refused_and_a_free_one_is_not() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            listener_for_workers(port)
    with listener_for_workers(port) as ours:
        assert ours.getsockname() == ("127.0.0.1", port)
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            listener_for_workers(port)


def test_temporary_folders_of_killed_commands_are_removed_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, in_use, young, foreign, aimed = (
        tmp_path / name
        for name in ("pentatron-job-a", "pentatron-job-b", "pentatron-job-c", "pentatron-job-d", "aimed")
    )
    for folder in (killed, in_use, young, foreign, aimed):
        folder.mkdir()
    # A rank may hold the lock after the launcher has ended.
    code = (
        "import sys; from pathlib import Path; from pentatron.files import lock_scratch_folder; "
        "lock_scratch_folder(Path(sys.argv[1])); print(1, flush=True); input()"
    )
    words = [sys.executable, "-c", code, str(in_use)]
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"1\n"
    for folder in (killed, young, aimed):
        os.close(lock_scratch_folder(folder))
    (tmp_path / "pentatron-job-link").symlink_to(aimed)
    for folder in (killed, in_use, foreign, aimed):
        os.utime(folder, (1, 1))
    try:
        with scratch_folder("job") as own:
            assert own.parent == tmp_path and own.name.startswith("pentatron-job-")
            left = {path.name for path in tmp_path.iterdir()} - {own.name}
            assert left == {in_use.name, young.name, foreign.name, aimed.name, "pentatron-job-link"}
    finally:
        holder.communicate()
    assert not own.exists()
    with scratch_folder("job"):
        assert not in_use.exists(), "its last owner has ended"


def test_a_limit_of_open_files_is_raised_and_one_that_is_too_low_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[tuple[int, int]] = []
    limits = [(16, 4096), (16, 16), (1024, resource.RLIM_INFINITY), (resource.RLIM_INFINITY,) * 2]
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: raised.append(pair))
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.pop(0))
    require_descriptors(2)
    assert raised == [(4096, 4096)]
    with pytest.raises(
        UserError, match=r"2 processes need 80 open files each, and the limit here is 16 \(ulimit -n\)"
    ):
        require_descriptors(2)
    require_descriptors(2)
    require_descriptors(2)
    assert raised[1:] == [(65536, resource.RLIM_INFINITY)]


def test_a_warning_of_the_cpu_limit_and_a_reader_that_left_are_no_crashes() -> None:
    assert signal.SIGXCPU in WATCHED
    assert JobResult(128 + signal.SIGXCPU).is_explained and JobResult(BROKEN_PIPE).is_explained
