"""Tests what a job requests from the cluster: times, names, and settings that are refused."""

import dataclasses
from typing import Any

import pytest

from pentatron.launch.job import Job, job_problems, parse_time_limit

SOUND = Job(2, 8, True, "python", ("-m", "pentatron", "train"), time="12:00:00")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("5:30", 330),
        ("12:00:00", 43200),
        ("2-00", 172800),
        ("1-02:03", 93780),
        ("1-02:03:04", 93784),
        ("", None),
        ("12h", None),
        ("1:2:3:4", None),
        ("-5", None),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert parse_time_limit(text) == seconds


def test_a_sound_job_has_no_problem() -> None:
    assert job_problems(SOUND) == []
    assert (
        job_problems(dataclasses.replace(SOUND, sbatch="--exclusive --nice=10", output="logs/%x-%j.out"))
        == []
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nodes": 0}, "--nodes 0 must be at least 1"),
        ({"processes": -1}, "--gpus-per-node -1 must be at least 1"),
        ({"time": "tomorrow"}, "--time tomorrow must look like 12:00:00"),
        (
            {"time": "5"},
            "leaves nothing to train: the job is asked to save --grace 300 seconds before its end",
        ),
        ({"grace": -1}, "--grace -1 must not be negative"),
        ({"master_port": 80}, "--master-port 80 must lie between 1024 and 65535"),
        ({"max_restarts": -1}, "--max-restarts -1 must not be negative"),
        ({"partition": "gpu; rm -rf x"}, "--partition 'gpu; rm -rf x' must be one word"),
        ({"job_name": "a\n#SBATCH --nodes=9"}, "must be one word"),
        ({"container_mounts": "/data:/data"}, "add --container-image"),
        ({"sbatch": "--nodes=4"}, "--sbatch: --nodes is set by the script itself"),
        ({"sbatch": "exclusive"}, "'exclusive' must be an option of sbatch in one word"),
        ({"sbatch": "--comment='a"}, "cannot be split into words"),
    ],
)
def test_problems(change: dict[str, Any], sentence: str) -> None:
    [problem] = job_problems(dataclasses.replace(SOUND, **change))
    assert sentence in problem
