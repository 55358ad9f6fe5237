"""Tests hang detection: names a frozen or looping rank, writes the stacks and ends the job."""

from pathlib import Path

import pytest

from tests.cli.test_restarts import SMALL, broken
from tests.cli.test_train import finish, start, start_forked
from tests.harness import distributed

STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
LOOPING = "while True: pass"
SKIPPING = "return healthy(model, optimizer, drawn, rate, step, *others) if True else None"


def run(folder: Path, how: str) -> tuple[int, str, str, Path]:
    script, place = broken(folder, how), folder / "run"
    words = "--nproc-per-node 2 --heartbeat-timeout 4 --max-restarts 1".split()
    code, out, err = finish(start_forked(script, *SMALL, *words, "--run-dir", str(place)))
    return code, out, err, place


@distributed(world=1, timeout=150, process_group=False)
def test_stopped_rank_is_named_and_the_job_restarts(tmp_path: Path) -> None:
    code, _, err, folder = run(tmp_path, STOPPED)
    assert code == 0, err
    first, second = err.splitlines()
    assert "after step 7 rank 1 of 2 is frozen (its process is stopped, e.g. by SIGSTOP)" in first
    assert "and rank 0 waits in the all-reduce" in first
    assert second == "pentatron: restarting from step 6 (1 of 1); 1 step is lost"
    dump = (folder / "hang-7.txt").read_text()
    assert "rank 1 (process" in dump and "<- the others wait for this one" in dump
    assert "stacks of rank 0" in dump and "train_step" in dump, "the rank that waits tells where"
    assert "(no response)" in dump


@pytest.mark.sweep
@distributed(world=1, timeout=150, process_group=False)
def test_a_rank_in_an_endless_loop_is_named_with_its_stack(tmp_path: Path) -> None:
    code, _, err, folder = run(tmp_path, LOOPING)
    assert code == 0, err
    assert "after step 7 rank 1 of 2 hangs: for" in err and "it computes in step 8, and rank 0 waits" in err
    dump = (folder / "hang-7.txt").read_text()
    assert "broken.py" in dump.partition("stacks of rank 1")[2], "where it loops"


@pytest.mark.sweep
def test_under_torchrun_the_ranks_notice_themselves_and_torchrun_sees_a_failure(tmp_path: Path) -> None:
    script = broken(tmp_path, LOOPING)
    Path(script).write_text(
        Path(script).read_text().replace('os.environ["PENTATRON_RESTART"] == "0"', "True")
    )
    folder = tmp_path / "run"
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2".split()
    words = [*SMALL, "--heartbeat-timeout", "4", "--run-dir", str(folder)]
    code, _, err = finish(start(*torchrun, script, *words))
    assert code == 1
    assert err.count("after step 7 rank 1 of 2 hangs: for") == 1, err
    assert "it computes in step 8, and rank 0 waits in the all-reduce" in err
    assert "<- the others wait for this one" in (folder / "hang-7.txt").read_text()
    assert "broken.py" in (folder / "ranks" / "rank-00001.log").read_text()
