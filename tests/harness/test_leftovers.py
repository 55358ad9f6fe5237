"""Nothing outlives a distributed test: no program started by a rank, no zygote, no file.

This also holds if the zygote or the test process is killed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from tests.harness import RanksFailed, run_distributed
from tests.harness.client import REPOSITORY, session_zygote
from tests.harness.processes import is_running


def start_programs() -> list[int]:
    """Starts one program in the process group of the ranks, and one outside of it."""
    return [subprocess.Popen(["sleep", "600"], start_new_session=apart).pid for apart in (False, True)]


def test_programs_started_by_ranks_end_with_the_test() -> None:
    pids = [pid for started in run_distributed(start_programs, 2) for pid in started]
    assert len(pids) == 4
    assert not any(is_running(pid) for pid in pids)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def note_family_then(action: Callable[[], None], directory: Path) -> None:
    pids = [os.getpid(), os.getppid(), subprocess.Popen(["sleep", "600"]).pid]
    scratch = Path("/proc/self/fd/1").readlink().parents[1]
    note = directory / f"rank{dist.get_rank()}.json"
    note.with_suffix(".part").write_text(json.dumps({"pids": pids, "scratch": str(scratch)}))
    note.with_suffix(".part").rename(note)
    dist.barrier()
    action()


def own_rank() -> int:
    return dist.get_rank()


def kill_zygote() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(600)


def assert_all_gone(directory: Path) -> None:
    notes = [json.loads(note.read_text()) for note in directory.glob("*.json")]
    assert len(notes) == 2
    pids = [pid for note in notes for pid in note["pids"]]
    wait_until(lambda: not any(is_running(pid) for pid in pids))
    wait_until(lambda: not any(Path(note["scratch"]).exists() for note in notes))


def test_a_killed_zygote_is_reported_and_replaced(tmp_path: Path) -> None:
    killed = session_zygote().zygote().pid
    with pytest.raises(
        RanksFailed, match=rf"^the zygote \(process {killed}\) was killed by SIGKILL while running "
    ):
        run_distributed(note_family_then, 2, action=kill_zygote, directory=tmp_path)
    assert_all_gone(tmp_path)
    assert run_distributed(own_rank, 2) == [0, 1]
    assert session_zygote().zygote().pid != killed


def test_when_the_test_process_is_killed_everything_ends(tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.harness import run_distributed\n"
        "def body(directory):\n"
        "    from tests.harness.test_leftovers import note_family_then, sleep_for_ever\n"
        "    note_family_then(sleep_for_ever, directory)\n"
        "if __name__ == '__main__':\n"
        "    run_distributed(body, 2, directory=Path(sys.argv[1]))\n"
    )
    client = subprocess.Popen(
        [sys.executable, script, tmp_path], env=os.environ | {"PYTHONPATH": str(REPOSITORY)}
    )
    wait_until(lambda: len(list(tmp_path.glob("*.json"))) == 2, seconds=60)
    client.kill()
    client.wait()
    assert_all_gone(tmp_path)


def test_rank_dies_with_its_zygote(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from tests.harness.processes import die_with_parent\n"
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    die_with_parent(parent)\n"
        "    Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        "    os.kill(parent, signal.SIGKILL)\n"
        "time.sleep(30)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, note]).returncode == -signal.SIGKILL
    wait_until(lambda: not is_running(int(note.read_text())), seconds=10)
