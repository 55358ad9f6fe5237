"""Tests the batch scripts of `pentatron launch` under a real Slurm: two nodes on this machine.

Each node has torchrun, with TP 2 × PP 2. One run is warned before the end of its time, one is preempted by a
job of higher priority, one is cancelled. Each must save. The first two are requeued and must end with the
losses of an undisturbed run. Then the templates of the guides run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from slurm_cluster import PROGRAMS, Cluster, find_program, free_ports

ROOT = Path(__file__).resolve().parents[1]
STEPS = 120
SMALL = (
    "--nodes 2 --gpus-per-node 2 --device cpu --tp 2 --pp 2 --cpus-per-task 4 --grace 60 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 2 --seq-length 16 --vocab-size 50 --dataset-size 100 --micro-batch-size 2 --global-batch-size 8 "
    f"--train-iters {STEPS} --eval-interval 0 --threads-per-process 1"
).split()
# The guides' templates on two nodes with two processes each, and a smaller model.
_TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 50 --dataset-size 100 --device cpu"
TEMPLATES = {
    "example": f"{_TINY} --train-steps 3 --no-fp16",
    "qwen": f"{_TINY} --train-iters 3 --micro-batch-size 2 --tensor-model-parallel-size 2",
    "parallel_3d": f"{_TINY} --max_steps 3",
}


class Trial:
    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.environment = {**cluster.environment, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}

    def submit(self, name: str) -> str:
        """Submits the batch script of `pentatron launch`; returns the number of its job."""
        words = [
            "launch",
            "slurm",
            *SMALL,
            "--job-name",
            name,
            "--run-dir",
            str(self.folder / name),
            "--submit",
        ]
        return self._handed([sys.executable, "-m", "pentatron", *words])

    def submit_template(self, name: str) -> str:
        """Submits a file of examples/slurm without requesting GPUs; returns the number of its job."""
        options = ["--nodes=2", "--gres=none", "--gpus-per-node=0", "--cpus-per-task=4", f"--chdir={ROOT}"]
        script = ROOT / "examples" / "slurm" / f"{name}.sbatch"
        words = ["sbatch", *options, f"--job-name={name}", f"--output={self.folder}/%x-%j.out", str(script)]
        own = {
            "GPUS_PER_NODE": "2",
            "PYTHON": sys.executable,
            "CONTAINER_IMAGE": "",
            "MASTER_PORT": str(free_ports(1)[0]),
        }
        run_dir = f"--run-dir={self.folder / name}"
        return self._handed([*words, *TEMPLATES[name].split(), run_dir], own)

    def _handed(self, words: list[str], own: dict[str, str] | None = None) -> str:
        environment = {**self.environment, **(own or {})}
        done = subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        number = re.search(r"Submitted batch job (\d+)", done.stdout)
        assert number, f"not submitted: {done.stdout} {done.stderr}"
        return number[1]

    def output(self, name: str, job: str) -> str:
        file = self.folder / f"{name}-{job}.out"
        return file.read_text() if file.exists() else ""

    def losses(self, name: str) -> list[tuple[int, float]]:
        file = self.folder / name / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [(row["step"], row["loss"]) for row in rows]

    def until(self, holds: Callable[[], bool], what: str, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"after {seconds:.0f} s still not so: {what}"
            time.sleep(0.3)

    def until_state(self, job: str, *states: str) -> None:
        self.until(lambda: self.cluster.job(job)["JobState"] in states, f"job {job} is {' or '.join(states)}")

    def begun(self, name: str) -> str:
        """Submits a job and waits until it has made some steps."""
        job = self.submit(name)
        self.until(lambda: len(self.losses(name)) >= 20, f"{name} reaches step 20")
        return job

    def saved_at(self, name: str, job: str) -> int:
        """Returns the step that the stopped run reports as saved, and checks its checkpoint."""
        said = re.search(
            r"stopped by SIGTERM after step (\d+); its checkpoint is saved", self.output(name, job)
        )
        assert said, f"{name} did not save:\n{self.output(name, job)[-3000:]}"
        step = int(said[1])
        assert (self.folder / name / "checkpoints" / f"step-{step:08d}").is_dir()
        assert step < STEPS, "too fast to disturb: raise STEPS"
        return step

    def goes_on(self, name: str, job: str, expected: list[tuple[int, float]]) -> str:
        """Waits for the restart and compares every loss with those of the undisturbed run."""
        self.until(lambda: self.cluster.job(job)["Restarts"] == "1", f"{name} is back in the queue")
        step = self.saved_at(name, job)
        self.until_state(job, "PENDING")
        # Slurm delays a requeued job by two minutes. Less is enough, but without a delay the nodes still
        # refuse its old credential.
        time.sleep(10)
        self.cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
        self.until_state(job, "COMPLETED", "FAILED")
        assert self.cluster.job(job)["JobState"] == "COMPLETED", self.output(name, job)[-3000:]
        assert f"resuming at step {step} of {STEPS}" in self.output(name, job)
        assert self.losses(name) == expected, f"{name}: other losses than the undisturbed run"
        return f"saved at step {step}, went on, every loss equal"


def trial(cluster: Cluster, folder: Path) -> None:
    run = Trial(cluster, folder)
    began = time.monotonic()

    def passed(what: str, how: str) -> None:
        print(f"PASS  {what:<34} {how}  ({time.monotonic() - began:.0f} s)", flush=True)

    job = run.submit("undisturbed")
    run.until_state(job, "COMPLETED", "FAILED")
    expected = run.losses("undisturbed")
    assert [step for step, _ in expected] == list(range(1, STEPS + 1)), run.output("undisturbed", job)
    passed("an uninterrupted run", f"{STEPS} steps, loss {expected[0][1]:.4f} to {expected[-1][1]:.4f}")

    job = run.begun("warned")
    cluster.ask("scancel", "--batch", "--signal=USR1", job)
    passed("warned before the end of its time", run.goes_on("warned", job, expected))

    job = run.begun("preempted")
    cluster.ask(
        *(
            "sbatch",
            "--partition=high",
            "--nodes=2",
            "--exclusive",
            f"--output={folder}/high.out",
            "--wrap=sleep 2",
        )
    )
    passed("preempted by a higher priority", run.goes_on("preempted", job, expected))

    job = run.begun("cancelled")
    cluster.ask("scancel", job)
    run.until_state(job, "CANCELLED")
    run.until(
        lambda: "its checkpoint is saved" in run.output("cancelled", job), "the cancelled run saves", 60
    )
    assert cluster.job(job)["Restarts"] == "0", "who cancels does not want it back"
    passed("cancelled by its user", f"saved at step {run.saved_at('cancelled', job)}, stays cancelled")

    for name in TEMPLATES:
        job = run.submit_template(name)
        run.until_state(job, "COMPLETED", "FAILED")
        assert [step for step, _ in run.losses(name)] == [1, 2, 3], run.output(name, job)[-3000:]
        passed(f"examples/slurm/{name}.sbatch", "2 nodes × 2 processes, 3 steps")


def main() -> int:
    missing = [name for name in PROGRAMS if find_program(name) is None]
    if missing:
        print(
            f"make slurm needs a Slurm to try the scripts on, and {', '.join(missing)} cannot be found; on Debian or Ubuntu: "
            f"apt-get install slurm-wlm munge",
            file=sys.stderr,
        )
        return 2
    folder = Path(tempfile.mkdtemp(prefix="pentatron-slurm-"))
    try:
        with Cluster(folder) as cluster:
            trial(cluster, folder)
    except (AssertionError, RuntimeError) as error:
        print(f"FAIL  {error}\nlogs and outputs are kept in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    print("the cluster is gone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
