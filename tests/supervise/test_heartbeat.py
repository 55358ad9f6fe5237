"""Tests the content of a heartbeat file at any moment."""

from pathlib import Path

from pentatron.parallel.rank_status import RankStatus
from pentatron.supervise.heartbeat import HeartbeatWriter, heartbeat_path, read_heartbeat


def test_the_step_and_where_it_began_are_exact_between_two_beats(tmp_path: Path) -> None:
    """The resumed step is written at once: a rank that is killed right after it has done no step."""
    where = RankStatus()
    heart = HeartbeatWriter(heartbeat_path(tmp_path, 0), 0, "a", where, pause=1000.0)
    heart.start()
    where.run_folder_locked()
    where.begin_at(40)
    found = read_heartbeat(heart.path)
    assert found is not None and (found.step, found.began, found.opened) == (40, 40, True)
    where.step_done(41, 100.0)
    where.step_done(42, 3.0)
    heart.beat()
    found = read_heartbeat(heart.path)
    assert found is not None and (found.step, found.began) == (42, 40)
    assert (found.first_step, found.longest_step) == (100.0, 3.0), "the first compiles, and is told apart"
    heart.close()
    assert not heart.path.exists()


def test_a_step_that_is_left_out_is_not_the_first_one(tmp_path: Path) -> None:
    """The first step that is computed is the one that compiles."""
    where = RankStatus()
    where.begin_at(0)
    where.step_done(1, 0.0)
    assert where.step == 1 and where.first_step == 0.0
    where.step_done(2, 90.0)
    assert (where.first_step, where.longest_step) == (90.0, 0.0)
