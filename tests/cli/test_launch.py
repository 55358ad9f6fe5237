"""Tests `pentatron launch`: refusals, written scripts, and one that trains on two machines."""

import subprocess
from pathlib import Path

import pytest

from pentatron.cli.main import main
from tests.cli.test_parallel_commands import free_port, layout_of
from tests.cli.test_train import environment, finish, losses

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 50 --dataset-size 100 "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 3 --eval-interval 0 --threads-per-process 1"
).split()
CLUSTER = ["--nodes", "2", "--gpus-per-node", "4"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        ([*CLUSTER, "--tp", "3"],
         ["8 processes cannot be divided into copies of the model of 3 (tensor) × 1 (pipeline) × 1 (context) = 3"]),
        ([*CLUSTER, "--tp", "4", "--pp", "4"],
         ["8 processes are too few: one copy of the model needs 4 (tensor) × 4 (pipeline) × 1 (context) = 16"]),
        ([*CLUSTER, "--world-size", "16"], ["--world-size 16 does not match the 8 started process(es)"]),
        ([*CLUSTER, "--hiden-size", "8"], ["unknown flag --hiden-size"]),
        (["--nodes", "2"], ["--gpus-per-node is missing; give --gpus-per-node G"]),
        (["--nodes", "0", "--gpus-per-node", "4", "--time", "soon"],
         ["--nodes 0 must be at least 1", "--time soon must look like"]),
        ([*CLUSTER, "--sbatch", "--time=5 --exclusive --gres=gpu:1"],
         ["--sbatch: --time=5 would bypass the checks", "--sbatch: --gres=gpu:1 would bypass"]),
        ([*CLUSTER, "--script", "nowhere.py"], ["--script nowhere.py does not exist"]),
    ],
)  # fmt: skip
def test_impossible_job_is_refused_and_nothing_is_written(
    words: list[str], sentences: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", *words, *MODEL]) == 2
    said = capsys.readouterr().err
    assert all(sentence in said for sentence in sentences), said
    assert list(here.iterdir()) == []


def test_options_of_the_other_kind_and_other_kinds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "torchrun", *CLUSTER, "--partition", "gpu", *MODEL]) == 2
    assert "--partition is a Slurm option" in capsys.readouterr().err
    assert main(["launch", "slum"]) == 2
    assert "(did you mean slurm?)" in capsys.readouterr().err


def test_batch_script_has_the_given_options(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "--time 1-00:00:00 --partition gpu --account us --qos high --constraint h100 --mem 0 --cpus-per-task 32 --grace 120 "
        "--container-image image:1 --container-mounts /data:/data --output logs/%j.out --job-name try"
    )
    words = [
        *CLUSTER,
        *asked.split(),
        "--sbatch",
        "--mail-type=END --exclusive",
        "--setup",
        "module load cuda",
    ]
    assert main(["launch", "slurm", *words, "--tp", "2", "--pp", "2", *MODEL, "--", "--my-own", "flag"]) == 0
    out = capsys.readouterr().out
    assert "try.sbatch: 2 nodes × 4 = 8 processes = 2 tensor × 2 pipeline × 1 context × 2 data" in out
    assert "submit it with: sbatch try.sbatch" in out
    assert (
        "variables it sets unless exported: OMP_NUM_THREADS=8, CUDA_DEVICE_MAX_CONNECTIONS=1, NCCL_DEBUG=WARN"
        in out
    )
    script = (here / "try.sbatch").read_text()
    lines = script.splitlines()
    for line in (
        "--job-name=try --nodes=2 --ntasks-per-node=1 --cpus-per-task=32 --gres=gpu:4 --mem=0 --time=1-00:00:00 "
        "--partition=gpu --account=us --qos=high --constraint=h100 --output=logs/%j.out --signal=B:USR1@120 --requeue "
        "--mail-type=END --exclusive"
    ).split():
        assert f"#SBATCH {line}" in lines, line
    assert "module load cuda" in lines and "    --my-own flag" in lines
    assert (
        '--container-image=image:1 --container-mounts=/data:/data,"$PWD:$PWD" --container-workdir="$PWD"'
        in script
    )
    assert 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"' in lines
    assert 'export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"' in lines
    assert subprocess.run(["bash", "-n", "try.sbatch"], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--nodes 2 --master-addr host", "on every machine: bash job.sh 0 and bash job.sh 1\n"),
        ("--nodes 4 --master-addr host", "on every machine: bash job.sh 0, ..., bash job.sh 3\n"),
        ("--nodes 2", "with MASTER_ADDR exported as the address of the first: bash job.sh 0 and"),
    ],
)
def test_start_command_is_printed_in_full(
    here: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    """Prints the complete start command, because the script refuses to run without an address."""
    asked = f"torchrun {words} --gpus-per-node 2 --write job.sh"
    assert main(["launch", *asked.split(), *MODEL]) == 0
    assert sentence in capsys.readouterr().out


def test_a_container_sees_the_folder_it_works_in(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "slurm", *CLUSTER, "--container-image", "image:1", *MODEL]
    assert main(words) == 0
    assert (
        '--container-mounts="$PWD:$PWD" --container-workdir="$PWD"' in (here / "pentatron.sbatch").read_text()
    )
    assert f"only {here} is mounted in the container" in capsys.readouterr().out
    assert main([*words, "--container-mounts", f"{here.parent}:{here.parent}"]) == 0
    assert '"$PWD:$PWD"' not in (here / "pentatron.sbatch").read_text(), "seen already"


def test_on_cpus_no_gpu_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", *CLUSTER, "--device", "cpu", "--write", "-", *MODEL]) == 0
    script = capsys.readouterr().out
    assert "gres" not in script and "CUDA" not in script and "NCCL" not in script


def test_tensor_groups_over_nodes_and_one_core_are_remarked_upon(capsys: pytest.CaptureFixture[str]) -> None:
    one_head_each = ["--num-attention-heads", "8", "--tp", "8"]
    assert main(["launch", "slurm", *CLUSTER, *MODEL, *one_head_each]) == 0
    said = capsys.readouterr().out
    assert "note: tensor groups of 8 span several nodes of 4" in said
    assert "without --cpus-per-task Slurm may give all 4 workers of a node one core" in said


def test_a_job_that_saves_nothing_and_may_start_again_is_remarked_upon(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "pretrain_gpt.py").write_text("")
    words = ["--script", "pretrain_gpt.py", *MODEL]
    said = "note: no checkpoint is saved, so a restarted job begins at step 0"
    assert main(["launch", "slurm", *CLUSTER, *words]) == 0
    assert said in capsys.readouterr().out
    for other in (["--save", "out"], ["--no-requeue"]):
        assert main(["launch", "slurm", *CLUSTER, *words, *other]) == 0
        assert said not in capsys.readouterr().out


def test_a_file_of_others_is_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["launch", "torchrun", *CLUSTER, *MODEL]) == 0, "our own may be written again"
    (here / "pentatron.sh").write_text("echo mine\n")
    assert main(["launch", "torchrun", *CLUSTER, *MODEL]) == 2
    assert "pentatron.sh exists and was not written by pentatron launch" in capsys.readouterr().err


def test_submitting_needs_sbatch(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--submit` prints the answer of sbatch, whether it succeeds or fails."""
    tools = here / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    words = ["launch", "slurm", *CLUSTER, *MODEL, "--submit"]
    assert main(words) == 2
    assert (
        "pentatron.sbatch is written, but sbatch is not installed on this machine" in capsys.readouterr().err
    )
    (tools / "sbatch").write_text('#!/bin/sh\necho "Submitted batch job 7 of $1"\n')
    (tools / "sbatch").chmod(0o755)
    assert main(words) == 0
    assert "Submitted batch job 7 of pentatron.sbatch" in capsys.readouterr().out
    (tools / "sbatch").write_text('#!/bin/sh\necho "error: invalid partition" >&2; exit 1\n')
    assert main(words) == 2
    assert "sbatch rejected pentatron.sbatch (error: invalid partition)" in capsys.readouterr().err


OF_THE_GUIDES = {
    "NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1", "NCCL_NET_GDR_LEVEL": "5", "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_NTHREADS": "1",
}  # fmt: skip


def test_the_written_script_trains_on_two_machines(here: Path) -> None:
    """Runs two launchers over loopback with one pipeline stage each; NCCL variables reach the workers."""
    place = f"--nodes 2 --gpus-per-node 1 --device cpu --pp 2 --master-addr 127.0.0.1 --master-port {free_port()}".split()
    assert main(["launch", "torchrun", *place, *MODEL, "--run-dir", str(here / "run")]) == 0
    machines = [
        subprocess.Popen(
            ["bash", "pentatron.sh", str(number)],
            env={**environment(), **OF_THE_GUIDES, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    ended = [finish(machine) for machine in machines]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert layout_of(here / "run") == (1, 2)
    assert [step for step, _ in losses(here / "run")] == [1, 2, 3]
    # The environment of the test machine may have further NCCL variables.
    everything = {n: v for n, v in environment().items() if n.startswith("NCCL_")} | OF_THE_GUIDES
    given = ", ".join(f"{name}={value}" for name, value in sorted(everything.items()))
    said = ended[0][1]
    assert f"note: {given}: messages go through gloo here, not through NCCL, so this has no effect" in said
    assert "note: CUDA_DEVICE_MAX_CONNECTIONS=1: this machine has no GPU" in said


def test_words_of_several_lines_stay_in_the_comment_and_a_path_stays_one_word(here: Path) -> None:
    words = ["launch", "slurm", "--nodes", "2", "--gpus-per-node", "1", "--device", "cpu", "--time", "10:00"]
    words += ["--setup", "module load cuda\necho ready", "--python", "/opt/my env/bin/python"]
    assert main([*words, *MODEL]) == 0
    script = (here / "pentatron.sbatch").read_text()
    subprocess.run(["bash", "-n", "pentatron.sbatch"], check=True)
    lines = script.splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last])
    assert "'/opt/my env/bin/python'" in script and "\necho ready\n" in script


def test_a_name_cannot_leave_its_place(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["launch", "torchrun", "--nodes", "2", "--gpus-per-node", "1", "--job-name", "a}b", *MODEL]) == 2
    )
    assert "--job-name 'a}b' must be one word" in capsys.readouterr().err
