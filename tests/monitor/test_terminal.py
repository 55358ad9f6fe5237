"""Tests failing standard streams: exit codes of commands, and that their work continues."""

import errno
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pentatron.cli.main import COMMANDS, run_guarded
from pentatron.cli.output import print_error, print_note, say
from pentatron.monitor.display import open_display
from pentatron.monitor.terminal import OutputLost, Stream, append_line, ignore_output_errors, output_error
from pentatron.train import output as output_module
from pentatron.train.output import Output, refuse_pipes
from tests.monitor.test_report import REPORT


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def left() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def hung_up() -> int:
    master, slave = pty.openpty()
    os.close(master)
    return slave


def closed() -> int:
    return -1


# Exit code of a command whose result is its output, for each kind of failing stream.
WAYS = {full: 2, left: 141, hung_up: 2, closed: 2}
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def code_of(action: Callable[[], int], out: Callable[[], int], err: Callable[[], int] | None = None) -> int:
    """Returns the exit code of a process that runs the action as a command with failing streams."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            for descriptor, made in (
                (1, out()),
                (2, err() if err is not None else os.open(os.devnull, os.O_WRONLY)),
            ):
                if made < 0:
                    os.close(descriptor)
                else:
                    os.dup2(made, descriptor)
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # type: ignore[assignment]
            code = run_guarded(action)
            # The interpreter flushes both streams at its exit.
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def work(code: int) -> Callable[[], int]:
    def action() -> int:
        ignore_output_errors()
        print("a library prints this, and flushes nothing")
        say("a line")
        print_error("an error")
        print_note("a note")
        display = open_display("on")
        display.step(REPORT, 62)
        display.say("a line beside the bar")
        time.sleep(0.15)
        display.close()
        assert output_error() is not None
        return code

    return action


@every_way
def test_work_outlives_both_streams_and_ends_with_its_own_code(way: Callable[[], int]) -> None:
    assert code_of(work(16), way, way) == 16
    assert code_of(work(0), way, way) == 0


@every_way
def test_a_command_whose_result_is_its_output_does_not_end_with_0(way: Callable[[], int]) -> None:
    def unflushed() -> int:
        print("a line")
        return 0

    assert code_of(lambda: COMMANDS["presets"]([]), way, way) == WAYS[way]
    assert code_of(unflushed, way) == WAYS[way], "found by the last flush"


def test_exit_code_of_an_unprintable_error() -> None:
    assert code_of(lambda: COMMANDS["config"](["--trian-iters", "3"]), left, left) == 2


def test_an_interpreter_that_cannot_flush_at_its_end_keeps_the_code_of_the_work() -> None:
    """Without handling, Python exits with 120 and prints `Exception ignored`."""
    script = """
import sys
from pentatron.cli.main import run_guarded
from pentatron.monitor.terminal import ignore_output_errors
def action():
    ignore_output_errors()
    print("not flushed")
    return 0
sys.exit(run_guarded(action))
"""
    with Path("/dev/full").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=out, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_left_ends_a_command_quietly_and_a_full_disk_with_a_sentence() -> None:
    ends = {}
    for name, out in (("left", left()), ("full", full())):
        words = [sys.executable, "-m", "pentatron", "presets"]
        done = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
        ends[name] = done.returncode, done.stderr
    assert ends["left"] == (141, "")
    assert ends["full"][0] == 2
    assert ends["full"][1].startswith("pentatron: the output cannot be written (No space left on device);")


def test_a_closed_descriptor_is_not_given_to_the_next_file(tmp_path: Path) -> None:
    """Output to a closed descriptor must not be written into a file that is opened later."""

    def action() -> int:
        ignore_output_errors()
        with (tmp_path / "checkpoint").open("w") as file:
            os.write(1, b"printed by a library in C")
            return 0 if file.fileno() > 2 else 3

    assert code_of(action, closed, closed) == 0
    assert (tmp_path / "checkpoint").read_text() == ""


def test_a_full_disk_may_have_room_again_and_a_reader_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[bytes] = []
    problems = [errno.ENOSPC, 0, errno.EIO, 0]

    def write(descriptor: int, data: memoryview) -> int:
        if problem := problems.pop(0):
            raise OSError(problem, os.strerror(problem))
        written.append(bytes(data))
        return len(data)

    stream = Stream(1, survives=True)
    monkeypatch.setattr(os, "write", write)
    for text in (b"a", b"b"):
        assert stream.write(text) == 1
    assert written == [b"b"] and stream.error is not None
    stream = Stream(1, survives=False)
    for _ in range(2):
        with pytest.raises(OutputLost):
            stream.write(b"c")
    assert problems == [0], "the second time nothing is tried"


def test_a_stream_that_is_not_blocking_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    data = bytes(200_000)
    pid = os.fork()
    if pid == 0:
        got = 0
        while got < len(data):
            got += len(os.read(reader, 1 << 16))
        os._exit(0)
    assert Stream(writer, survives=False).write(data) == len(data)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_full_disk_error_names_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    link = tmp_path / "order.npy"
    link.symlink_to("/dev/full")
    assert run_guarded(lambda: link.write_text("x")) == 2
    assert capsys.readouterr().err.startswith(
        f"pentatron: {link} cannot be written (No space left on device); make room"
    )

    def socket_of_a_library() -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        run_guarded(socket_of_a_library)


def test_the_log_says_once_that_the_terminal_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "train.log").open("w") as log:
        output = Output(open_display("off"), log)
        output.say("first")
        monkeypatch.setattr(output_module, "output_error", lambda: OSError(errno.EIO, "Input/output error"))
        output.say("second")
        output.note("third")
    lost = "warning: standard output cannot be written any more (Input/output error); this log has every line"
    assert (tmp_path / "train.log").read_text().splitlines() == ["first", lost, "second", "third"]


def test_a_fifo_in_the_place_of_a_log_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.log")
    assert append_line(tmp_path / "train.log", "a line") is False
    assert append_line(tmp_path / "other.log", "a line") is True
    assert (tmp_path / "other.log").read_text() == "a line\n"
    with pytest.raises(Exception, match=r"train\.log is a FIFO"):
        refuse_pipes(tmp_path / "other.log", tmp_path / "train.log")
