"""Detects restarts of a job from the environment variables of its launcher."""

from pathlib import Path

import pytest

from pentatron.cli.worker import current_attempt
from pentatron.supervise.attempts import JOB_FILE, Attempt, write_job
from pentatron.supervise.launcher import JOB_FOLDER, LAUNCHER_PID, RESTART_COUNT


def elastic(agent: str, restarts: int, **others: str) -> dict[str, str]:
    """Returns the environment variables that torchrun sets on one machine."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    errors = f"/tmp/torchelastic_x/{agent}/attempt_{restarts}/0/error.json"
    counted = {"TORCHELASTIC_ERROR_FILE": errors, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    return {**place, **counted, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **others}


def slurm(job: str, restarts: int) -> dict[str, str]:
    return {"SLURM_JOB_ID": job, **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})}


def began(folder: Path, environment: dict[str, str]) -> Attempt:
    """Records a start that got as far as writing its job file into the run folder."""
    attempt = current_attempt(environment, folder)
    write_job(folder, attempt, ())
    return attempt


@pytest.mark.parametrize("launched", [elastic, slurm])
def test_a_restart_is_one_of_the_job_that_used_the_folder(launched: object, tmp_path: Path) -> None:
    start = elastic if launched is elastic else slurm
    assert not began(tmp_path, start("a", 0)).restarted
    assert current_attempt(start("a", 1), tmp_path).restarted
    assert not current_attempt(start("b", 1), tmp_path).restarted, "another job's run is there"
    assert began(tmp_path, start("a", 1)).restarted
    assert not current_attempt(start("a", 1), tmp_path).restarted, "another command of the same start"
    assert current_attempt(start("a", 2), tmp_path).restarted
    assert (
        not current_attempt({}, tmp_path).restarted and not current_attempt(start("a", 0), tmp_path).restarted
    )


def test_folder_without_job_record_is_resumed(tmp_path: Path) -> None:
    assert current_attempt(slurm("1", 1), tmp_path).restarted
    (tmp_path / JOB_FILE).write_text("not JSON")
    assert current_attempt(slurm("1", 1), tmp_path).restarted
    began(tmp_path, {})
    assert not current_attempt(slurm("1", 1), tmp_path).restarted, "typed by hand, outside any job"
    assert current_attempt({"SLURM_RESTART_COUNT": "1"}, tmp_path).restarted, "a job without a name"


def test_requeued_slurm_job_resumes_under_a_new_torchrun(tmp_path: Path) -> None:
    began(tmp_path, {**slurm("7", 0), **elastic("a", 0)})
    assert current_attempt({**slurm("7", 1), **elastic("b", 0)}, tmp_path).restarted
    assert not current_attempt({**slurm("8", 1), **elastic("b", 0)}, tmp_path).restarted


def test_over_several_machines_the_name_of_the_job_counts(tmp_path: Path) -> None:
    over = {"LOCAL_WORLD_SIZE": "1"}
    began(tmp_path, elastic("a", 0, **over, TORCHELASTIC_RUN_ID="one"))
    assert current_attempt(elastic("b", 1, **over, TORCHELASTIC_RUN_ID="one"), tmp_path).restarted
    assert not current_attempt(elastic("a", 1, **over, TORCHELASTIC_RUN_ID="two"), tmp_path).restarted


def test_our_own_launcher_says_so_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began(tmp_path, {})
    for restarts in (0, 1):
        for name, value in {
            LAUNCHER_PID: "1",
            JOB_FOLDER: str(tmp_path),
            RESTART_COUNT: str(restarts),
            "RANK": "0",
        }.items():
            monkeypatch.setenv(name, value)
        assert current_attempt({}, tmp_path).restarted is (restarts == 1)
