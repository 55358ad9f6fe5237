"""Runs batch scripts under stubs of Slurm's commands: what starts on each node, and warnings.

`make slurm` runs the same scripts under a real Slurm.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pentatron.launch.job import Job
from pentatron.launch.scripts import batch_script, node_script
from tests.cli.test_train import ROOT
from tests.launch.stub_cluster import StubCluster

TEMPLATES = {
    "example": (2, 4, "megatron_core_training_example.py --tensor-model-parallel-size=2 --pipeline-model-parallel-size=2 "
                "--batch-size=16 --epochs=3 --train-steps=1000 --init-method=tcp://first:29500 --world-size=8 --fp16"),
    "qwen": (2, 8, "pretrain_gpt.py --bf16"),
    "parallel_3d": (4, 8, "train_3d_parallel.py --tp_size 2 --pp_size 2"),
}  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> StubCluster:
    folder = tmp_path / "stub"
    folder.mkdir()
    return StubCluster(folder)


def launcher(processes: int, nodes: int, node: int, rest: str, port: int = 29500) -> str:
    return (
        f"-m torch.distributed.run --nproc_per_node={processes} --nnodes={nodes} --node_rank={node} --master_addr=first "
        f"--master_port={port} {rest}"
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_starts_one_launcher_on_every_node(
    name: str, cluster: StubCluster, tmp_path: Path
) -> None:
    nodes, processes, words = TEMPLATES[name]
    script = ROOT / "examples" / "slurm" / f"{name}.sbatch"
    assert os.access(script, os.X_OK)
    assert cluster.run(script, "--a", "b c", cwd=tmp_path, ALL_ARGS="--bf16") == 0
    expected = [(node, launcher(processes, nodes, node, f"{words} --a b c")) for node in range(nodes)]
    assert cluster.started() == expected
    text = script.read_text()
    assert 'SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"' in text and "#SBATCH --cpus-per-task=" in text
    assert any("--container-image=nvcr.io/nvidia/pytorch:25.01-py3" in c for c in cluster.calls("srun")) == (
        name == "qwen"
    )


def test_the_guides_number_of_tasks_would_start_too_many(cluster: StubCluster, tmp_path: Path) -> None:
    """Control: with eight tasks a node, as in two guides, every node starts eight launchers."""
    script = tmp_path / "wrong.sbatch"
    right = (ROOT / "examples/slurm/parallel_3d.sbatch").read_text()
    script.write_text(right.replace("--ntasks-per-node=1", "--ntasks-per-node=8"))
    assert cluster.run(script, cwd=tmp_path) == 0
    assert [node for node, _ in cluster.started()] == [0] * 8 + [1] * 8 + [2] * 8 + [3] * 8


def job(cluster: StubCluster, **changes: object) -> Job:
    words = ("-m", "pentatron", "train", "--data-path", "a file", "--bf16")
    values: dict[str, object] = {"cpus_per_task": 8, "folder": str(cluster.folder), "grace": 60, **changes}
    return Job(2, 4, True, str(cluster.folder / "python"), words, **values)  # type: ignore[arg-type]


def written(cluster: StubCluster, **changes: object) -> Path:
    script = cluster.folder / "job.sbatch"
    script.write_text(batch_script(job(cluster, **changes), ["pentatron", "launch"], "2 nodes × 4"))
    return script


def test_the_written_script_starts_one_launcher_on_every_node(cluster: StubCluster) -> None:
    assert cluster.run(written(cluster), cwd=Path("/")) == 0
    # Without these, a warning by SIGUSR1 would end torchrun itself.
    signals = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
    words = f"-P -m torch.distributed.run --nnodes=2 --nproc_per_node=4 {signals} --node_rank={{}} --master_addr=first --master_port=22345"
    assert cluster.started() == [
        (node, f"{words.format(node)} -m pentatron train --data-path a file --bf16") for node in range(2)
    ]
    assert cluster.calls("scontrol requeue") == []


def test_all_nodes_get_one_secret_that_the_script_does_not_hold(cluster: StubCluster) -> None:
    script = written(cluster)
    for _ in range(2):
        assert cluster.run(script, cwd=Path("/")) == 0
    first, second = cluster.secrets()[:2], cluster.secrets()[2:]
    assert first[0] == first[1] and second[0] == second[1] and first != second
    assert re.fullmatch("[0-9a-f]{64}", first[0]) and first[0] not in script.read_text()
    assert cluster.run(script, cwd=Path("/"), PENTATRON_JOB_SECRET="of the user") == 0
    assert cluster.secrets()[4:] == ["of the user"] * 2


def test_restarts_meet_in_a_way_that_can_be_repeated(cluster: StubCluster) -> None:
    assert (
        cluster.run(written(cluster, max_restarts=2, master_addr="head", master_port=6000), cwd=Path("/"))
        == 0
    )
    assert (
        "--rdzv_backend=c10d --rdzv_endpoint=head:6000 --rdzv_id=12345-0 --max_restarts=2"
        in cluster.started()[1][1]
    )
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in written(cluster, max_restarts=2).read_text()


def test_a_warning_makes_every_node_save_and_the_job_queue_again(cluster: StubCluster) -> None:
    code, out = cluster.warn(cluster.start(written(cluster), cwd=Path("/"), WORKS="yes"), tasks=2)
    assert cluster.ended() == ["0 saved", "1 saved"], out
    assert cluster.calls("scancel") == ["scancel --signal=TERM 12345"]
    assert cluster.calls("scontrol requeue") == ["scontrol requeue 12345"]
    assert code == 1 and "stopped on request" in out


@pytest.mark.parametrize(
    ("changes", "variables", "requeued"),
    [
        ({}, {"ENDS_WITH": "3"}, False),
        ({}, {"ENDS_WITH": "3", "PREEMPTED": "2026-01-01T00:00:00"}, True),
        ({}, {"ENDS_WITH": "0", "PREEMPTED": "2026-01-01T00:00:00"}, False),
        ({"no_requeue": True}, {"ENDS_WITH": "3", "PREEMPTED": "2026-01-01T00:00:00"}, False),
    ],
    ids=["failed", "preempted", "finished meanwhile", "not wanted"],
)
def test_only_interrupted_jobs_are_requeued(
    changes: dict[str, object], variables: dict[str, str], requeued: bool, cluster: StubCluster
) -> None:
    code = cluster.run(written(cluster, **changes), cwd=Path("/"), **variables)
    assert code == int(variables["ENDS_WITH"])
    assert bool(cluster.calls("scontrol requeue")) == requeued


@pytest.mark.parametrize("kind", [batch_script, node_script])
def test_setup_may_read_unset_variables(
    kind: Callable[[Job, list[str], str], str], cluster: StubCluster
) -> None:
    """Scripts of conda and modules read unset variables; only a last line that fails ends the job."""

    def run(setup: str) -> tuple[int, str]:
        script = cluster.folder / "job.sbatch"
        text = kind(job(cluster, setup=setup, master_addr="head"), ["x"], "=")
        script.write_text("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" + text)
        process = cluster.start(script, "0", cwd=Path("/"), SLURM_NODEID="0")
        out, _ = process.communicate(timeout=30)
        return process.returncode, out

    assert run('false\nCONDA="$NEVER_SET/bin"') == (0, "")
    code, out = run("module_that_is_not_there load cuda")
    assert code == 2 and "the last line of --setup failed (127): fix it" in out


def test_the_users_variables_win_over_those_of_the_script(cluster: StubCluster) -> None:
    from pentatron.launch.job import Variable

    script = written(cluster, variables=(Variable("NCCL_DEBUG", "WARN", "why"),))
    (cluster.folder / "python").write_text('#!/bin/sh\necho "$SLURM_NODEID $NCCL_DEBUG" >> "$STUB/started"\n')
    assert cluster.run(script, cwd=Path("/")) == 0
    assert cluster.run(script, cwd=Path("/"), NCCL_DEBUG="INFO") == 0
    assert sorted(words for node, words in cluster.started() if node == 1) == ["INFO", "WARN"]


def test_the_torchrun_script_wants_to_know_its_machine(cluster: StubCluster) -> None:
    script = cluster.folder / "job.sh"
    script.write_text(
        "#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=1\n"
        + node_script(job(cluster, master_addr="head"), ["x"], "=")
    )
    process = cluster.start(script, cwd=Path("/"))
    out, _ = process.communicate(timeout=30)
    assert process.returncode != 0 and "give the number of this machine, 0 to 1" in out
    assert cluster.run(script, "2", cwd=Path("/")) == 2
    assert cluster.run(script, "1", "--lr", "1", cwd=Path("/"), SLURM_NODEID="0") == 0
    expected = "--node_rank=1 --master_addr=head --master_port=29500 -m pentatron train"
    assert expected in cluster.started()[0][1] and cluster.started()[0][1].endswith("--bf16 --lr 1")
