"""Tests that the failing disk and the power cut act as real ones, and that the journal is complete."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adversary import shim
from tests.adversary.disk import Disk, Model
from tests.adversary.shim import Mode, Op, read_journal
from tests.faults.page import added_sections, write_matrix, write_section

needs_the_shim = pytest.mark.skipif(shim.missing() is not None, reason=str(shim.missing()))

# Makes a folder, writes and syncs a file under a temporary name, renames it, appends to it unsynced, creates
# another one and removes the first.
PROGRAM = """
import os, sys
from tests.adversary.shim import arm
folder, journal, call, mode = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
arm(folder, journal, "", call, mode)
def attempt(name, action):
    try:
        print(name, action())
    except OSError as error:
        print(name, os.strerror(error.errno))
os.chdir(folder)
attempt("mkdir", lambda: os.mkdir("a"))                                              # call 1
fd = os.open("a/x.tmp", os.O_CREAT | os.O_WRONLY)                                    # 2
attempt("write", lambda: os.write(fd, b"synced"))                                    # 3
attempt("fsync", lambda: os.fsync(fd))                                               # 4
attempt("rename", lambda: os.rename("a/x.tmp", "a/x"))                               # 5
parent = os.open("a", os.O_RDONLY)
attempt("fsync of the folder", lambda: os.fsync(parent))                             # 6
attempt("writev", lambda: os.writev(fd, [b" and ", b"not"]))                         # 7
attempt("open", lambda: os.close(os.open("b", os.O_CREAT | os.O_WRONLY)))            # 8
attempt("unlink", lambda: os.unlink(b"a/x"))                                         # 9
"""


def run_program(tmp_path: Path, call: int = 0, mode: Mode = Mode.NONE) -> tuple[int, list[str]]:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder, tmp_path / "journal", str(call), str(int(mode))],
        env={**os.environ, "LD_PRELOAD": str(shim.built()), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@needs_the_shim
@pytest.mark.parametrize(
    ("call", "mode", "fails", "works"),
    [
        (4, Mode.EIO_ONCE, ["fsync Input/output"], ["rename None", "writev 8"]),
        (3, Mode.EIO_ALWAYS, ["write Input/output", "rename Input/output", "open Input/output"], ["mkdir None"]),
        (7, Mode.ENOSPC_ALWAYS, ["writev No space", "open No space"], ["fsync None", "rename None", "unlink None"]),
        (3, Mode.HALF_WRITE, ["writev No space", "open No space"], ["write 3", "unlink None"]),
        (5, Mode.EROFS_ALWAYS, ["rename Read-only", "fsync of the folder Input/output", "open Read-only"], ["fsync None"]),
    ],
    ids=lambda value: value.name if isinstance(value, Mode) else "",
)  # fmt: skip
def test_a_call_fails_as_on_a_real_disk(
    call: int, mode: Mode, fails: list[str], works: list[str], tmp_path: Path
) -> None:
    code, lines = run_program(tmp_path, call, mode)
    assert code == 0
    for wanted in (*fails, *works):
        assert any(line.startswith(wanted) for line in lines), (wanted, lines)


@needs_the_shim
def test_the_process_dies_before_the_call_is_made(tmp_path: Path) -> None:
    code, _ = run_program(tmp_path, 5, Mode.KILL)
    assert code == -9 and (tmp_path / "disk" / "a" / "x.tmp").read_bytes() == b"synced"


@needs_the_shim
def test_a_power_cut_keeps_what_its_model_says(tmp_path: Path) -> None:
    run_program(tmp_path)
    records = [r for r in read_journal(tmp_path / "journal") if r.op is not Op.OUTPUT]
    assert [r.number for r in records] == list(range(1, 10))

    def after(call: int) -> dict[Model | None, dict[str, bytes | None]]:
        disk = Disk(tmp_path / "disk")
        disk.play(records, call)
        return {model: disk.files(model) for model in (None, *Model)}

    # The folder's own name was never synced, so a strict disk has none of it.
    assert after(7)[Model.STRICT] == {}
    named = {"a": None}
    assert after(3)[Model.ENTRIES] == {**named, "a/x.tmp": b""}
    assert after(3)[Model.HALF] == {**named, "a/x.tmp": b"syn"}
    assert after(3)[Model.ZEROS] == {**named, "a/x.tmp": bytes(6)}
    for model in (Model.ENTRIES, Model.HALF, Model.ZEROS):
        assert after(6)[model] == {**named, "a/x": b"synced"}
    assert after(7)[Model.ENTRIES] == {**named, "a/x": b"synced"}
    assert after(7)[Model.HALF] == {**named, "a/x": b"synced and"}
    assert after(7)[Model.ZEROS] == {**named, "a/x": b"synced" + bytes(8)}
    assert after(9)[None] == {**named, "b": b""}


def test_two_commands_write_one_page(tmp_path: Path) -> None:
    page = tmp_path / "faults.md"
    write_matrix("# The fault matrix\n\n## Other\n\nrows\n", page)
    write_section("## The adversary", "first table\n", page)
    write_matrix("# The fault matrix\n\n## Other\n\nnew rows\n", page)
    assert (
        page.read_text() == "# The fault matrix\n\n## Other\n\nnew rows\n\n## The adversary\n\nfirst table\n"
    )
    write_section("## The adversary", "second table\n", page)
    assert added_sections(page.read_text()) == "## The adversary\n\nsecond table\n"
    assert page.read_text().count("new rows") == 1
