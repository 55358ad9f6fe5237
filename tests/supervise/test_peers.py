"""Tests ranks that watch each other, under a launcher of another program."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pentatron.parallel.rank_status import RankStatus
from pentatron.supervise import hang
from pentatron.supervise.hang import HangLimits, PeerWatchdog


class Left(Exception):
    """Raised in place of `os._exit`."""


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerWatchdog]:
    """Watchdog of a single rank that hangs after step 7, with a report of an earlier hang there."""

    def leave(code: int) -> None:
        raise Left

    monkeypatch.setattr(hang.os, "_exit", leave)
    (tmp_path / "hang-7.txt").write_text("an earlier attempt's")
    where = RankStatus()
    where.step, where.phase = 7, "step"
    made = PeerWatchdog(where, 0, 1, tmp_path, HangLimits(1000.0, 1000.0), print)
    made.start()
    where.step_done(7, 1.0)
    yield made
    made.close()


def look(watch: PeerWatchdog, times: int = 6) -> None:
    """Checks `times` times, as if the rank had hung for long."""
    for _ in range(times):
        watch.on_beat()
        watch._since = time.monotonic() - 5000


def test_second_hang_at_the_same_step_is_reported(watch: PeerWatchdog) -> None:
    said: list[str] = []
    watch.print_line = said.append
    with pytest.raises(Left):
        look(watch)
    (line,) = said
    assert str(watch.folder / "hang-7-2.txt") in line
    assert (watch.folder / "hang-7.txt").read_text() == "an earlier attempt's"
    # A second rank of this attempt finds the report and prints nothing.
    with pytest.raises(Left):
        look(watch)
    assert len(said) == 1


def test_rank_that_cannot_write_heartbeats_reports_no_hang(watch: PeerWatchdog) -> None:
    """On a full disk no rank can write heartbeats, so that old ones are no evidence of a hang."""
    assert watch.writer is not None
    watch.writer._file = os.open("/dev/full", os.O_RDWR)
    watch.writer.beat()
    look(watch)
    assert sorted(path.name for path in watch.folder.glob("hang*")) == ["hang-7.txt"]
