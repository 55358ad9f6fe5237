"""A forked command ends, prints and handles signals like one that is started with `python`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import run_distributed
from tests.harness.forked import Command

SCRIPT = """
import atexit, os, sys, threading, time
import beside
print(sys.argv[1:], os.environ["WORD"], os.getcwd(), os.getppid() == int(os.environ["PARENT"]), beside.__name__)
print("told", file=sys.stderr)
if sys.argv[1] == "raise":
    raise LookupError("a bug")
if sys.argv[1] == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
if sys.argv[1] == "interrupt":
    raise KeyboardInterrupt
if sys.argv[1] == "late":
    atexit.register(lambda: print("at the end", file=sys.stderr))
    threading.Thread(target=lambda: (time.sleep(0.2), print("after a while", file=sys.stderr))).start()
if sys.argv[1] == "closed":
    sys.stdout.close()
sys.exit({"number": 3, "text": "why", "pair": (1, 2)}.get(sys.argv[1]))
"""


def both(folder: Path, how: str) -> list[tuple[int, str, str]]:
    """Returns exit code, stdout and stderr of the script, first started, then forked."""
    script = str(folder / "script.py")
    environment = {**os.environ, "WORD": "a word", "PARENT": str(os.getpid())}
    started = subprocess.run(
        [sys.executable, script, how],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    forked = Command.start(script, how, cwd=folder, environment=environment)
    out, err = forked.communicate(60)
    assert forked.returncode is not None
    return [(started.returncode, started.stdout, started.stderr), (forked.returncode, out, err)]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        *(("number", 3), ("text", 1), ("pair", 1), ("nothing", 0), ("raise", 1), ("late", 0), ("closed", 0)),
        *(("kill", -signal.SIGKILL), ("interrupt", -signal.SIGINT)),
    ],
)
def test_it_ends_and_speaks_alike(how: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("")
    [[started, forked]] = run_distributed(both, 1, process_group=False, folder=tmp_path, how=how)
    assert started[0] == forked[0] == code
    assert started[1] == forked[1] == f"['{how}'] a word {tmp_path} True beside\n"
    if how in ("raise", "interrupt"):
        assert all(err.count("Traceback") == 1 for _, _, err in (started, forked))
    else:
        assert started[2] == forked[2]
