"""A worker whose launcher is gone."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pentatron.cli import supervised
from pentatron.cli.supervised import Supervised, _is_of_job, _Orphan
from pentatron.launch.hang import Limits
from pentatron.launch.local import JOB
from pentatron.parallel.whereabouts import Whereabouts


class Ended(Exception):
    """Instead of ending this process and others."""


def stuck_for(seconds: float, where: Whereabouts, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a rank without a launcher gives up by then."""

    def end_all(self: _Orphan) -> None:
        raise Ended

    now = 100.0
    monkeypatch.setattr(_Orphan, "_end_all", end_all)
    monkeypatch.setattr(supervised.time, "monotonic", lambda: now)
    # Also with --heartbeat-timeout 0, which is about launchers that live.
    orphan = _Orphan(Supervised(Path("/nowhere"), 1, 0, 0), where, Limits(0.0, 600.0))
    orphan.end_if_stuck()
    now += seconds
    try:
        orphan.end_if_stuck()
    except Ended:
        return True
    return False


def test_a_rank_without_a_launcher_may_save_and_compile_as_long_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = Whereabouts()
    where.begin_at(0)
    where.phase = "step"
    assert not stuck_for(500, where, monkeypatch), "the first step compiles"
    where.step_done(1, 5.0)
    assert stuck_for(61, where, monkeypatch)
    with where.doing("saving"):
        assert not stuck_for(500, where, monkeypatch), "what it saves is what would be lost"
        assert stuck_for(601, where, monkeypatch)


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")
def test_a_process_of_another_job_is_not_taken_for_a_rank(tmp_path: Path) -> None:
    for job, expected in ((tmp_path, True), (tmp_path / "another", False)):
        process = subprocess.Popen(["sleep", "100"], env={**os.environ, JOB: str(job)})
        try:
            time.sleep(0.1)
            assert _is_of_job(process.pid, tmp_path) is expected
        finally:
            process.kill()
            process.wait()
    assert not _is_of_job(process.pid, tmp_path), "it is gone"
