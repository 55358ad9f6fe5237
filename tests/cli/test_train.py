"""Runs the commands as a user does, with real processes and real signals."""

import dataclasses
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pentatron.cli.configure import prepare
from pentatron.cli.main import main, run_guarded
from pentatron.cli.train import _print_next_commands
from pentatron.settings.entry_points import TRAIN
from pentatron.train.run_folder import RunFolder
from tests.harness import distributed, run_distributed
from tests.harness.forked import Command

ROOT = Path(__file__).parents[2]
TINY = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --num-query-groups 1 --seq-length 32 --vocab-size 400 "
    "--corpus-bytes 300000 --micro-batch-size 2 --global-batch-size 4 --train-iters 60 --eval-interval 20 --eval-iters 1 "
    "--save-interval 25 --sample-tokens 10 --nproc-per-node 2 --tensor-model-parallel-size 1 --threads-per-process 1"
).split()


def environment() -> dict[str, str]:
    """Returns the environment without variables of a launcher or the harness, and without GPUs."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    own = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return {k: v for k, v in os.environ.items() if k not in hidden} | own


def start(*words: str, cwd: Path | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_forked(*words: str, fork_workers: bool = True) -> Command:
    """Starts a command in a forked process, without the seconds that imports take.

    Only for tests with `process_group=False`.
    """
    return Command.start(*words, cwd=Path.cwd(), environment=environment(), fork_workers=fork_workers)


def finish_forked(words: Sequence[str], fork_workers: bool) -> tuple[int, str, str]:
    return finish(start_forked(*words, fork_workers=fork_workers))


def forked(*words: str, fork_workers: bool = True) -> tuple[int, str, str]:
    """Runs `python WORDS...` in a forked process to its end."""
    named = {"words": words, "fork_workers": fork_workers}
    [ended] = run_distributed(finish_forked, 1, timeout=150.0, process_group=False, **named)
    return ended


def finish(process: "subprocess.Popen[str] | Command") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def train(*words: str) -> tuple[int, str, str]:
    return finish(start("-m", "pentatron", "train", *words))


def losses(folder: Path) -> list[tuple[int, float]]:
    return [
        (r["step"], r["loss"]) for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    ]


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and len(
            (folder / "metrics.jsonl").read_text().splitlines()
        ) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a smaller demo: two workers, one corpus, one sample."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    code, out, err = train(*TINY, "--run-dir", str(folder))
    assert code == 0, err
    (folder / "stdout").write_text(out)
    return folder


def test_files_of_the_demo(demo: Path) -> None:
    expected = {
        "app_metrics.json",
        "config.yaml",
        "train.log",
        "metrics.jsonl",
        "checkpoints",
        "loss.svg",
        "sample.txt",
        "data",
    }
    assert expected <= {p.name for p in demo.iterdir()}
    shown = (demo / "stdout").read_text()
    assert "2 processes (2 data parallel)" in shown
    assert "finished: loss" in shown and "next steps:" in shown and "pentatron generate" in shown
    assert {p.suffix for p in (demo / "data").iterdir()} >= {".bin", ".idx", ".json"}
    assert [step for step, _ in losses(demo)] == list(range(1, 61))


def test_generate_continues_a_prompt(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("generate", str(demo), "import ", "--max-tokens", "5", "--seed", "3")
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("import ") and len(out) > len("import \n")
    assert main(words) == 0
    assert capsys.readouterr().out == out, "one seed, one text"


def test_commands_to_copy_hold_any_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a run" / "checkpoints").mkdir(parents=True)
    words = [
        "--run-dir",
        "a run",
        *"--vocab-size 50 --corpus python --train-iters 1 --nproc-per-node 1".split(),
    ]
    config = prepare(words, TRAIN).resolved.config
    _print_next_commands(config, RunFolder(Path("a run")))
    assert "export" not in capsys.readouterr().out, "there is no step, as after --skip-train from another run"
    monkeypatch.setattr("pentatron.cli.train._saved_step", lambda config: 1)
    _print_next_commands(config, RunFolder(Path("a run")))
    said = capsys.readouterr().out
    assert "export 'a run/checkpoints' 'exported/a run' " in said and "--run-dir 'a run-wide' " in said
    (tmp_path / "a run" / "sample.txt").touch()
    _print_next_commands(config, RunFolder(Path("a run")))
    assert "generate 'a run' \"import \"" in capsys.readouterr().out
    model = dataclasses.replace(config.model, spec=("my_layers", "layer_spec"))
    _print_next_commands(dataclasses.replace(config, model=model), RunFolder(Path("a run")))
    said = capsys.readouterr().out
    assert "generate 'a run' \"import \" --spec my_layers layer_spec " in said, (
        "such layers are never guessed"
    )
    (tmp_path / "a run" / "sample.txt").unlink()
    _print_next_commands(dataclasses.replace(config, model=model), RunFolder(Path("a run")))
    assert "export" not in capsys.readouterr().out, "it would be refused"


def test_ctrl_c_prints_one_line_and_a_resume_gives_the_same_losses(demo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = ["-m", "pentatron", "train", *TINY, "--run-dir", str(folder)]
    process = start(*command)
    wait_for_step(folder, 2)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130
    last = losses(folder)[-1][0]
    assert f"stopped by Ctrl-C after step {last}; its checkpoint is saved" in out
    assert err == "Ctrl-C: stopping after this step; press again to stop immediately\n", err
    assert len(losses(folder)) < 60, "too fast to interrupt: make the run longer"
    code, out, err = forked(*command)
    assert code == 0, err
    assert "resuming at step" in out
    assert losses(folder) == losses(demo)


@distributed(world=1, timeout=150, process_group=False)
def test_a_killed_rank_is_named_and_nothing_is_left_running(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = "--train-iters 5000 --max-restarts 0".split()
    process = start_forked("-m", "pentatron", "train", *TINY, *words, "--run-dir", str(folder))
    wait_for_step(folder, 4)
    workers = children(process.pid)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    assert "rank 1 of 2 was killed by SIGKILL" in err and err.count("\n") == 2, err
    assert "not started again (--max-restarts 0). No checkpoint had been saved yet" in err
    assert not any(Path(f"/proc/{p}").exists() for p in workers)


def children(pid: int) -> list[int]:
    """Returns the pids of child processes in the order of their starts, which is that of the ranks."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_torchrun_workers_train_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = "--vocab_size 100 --hidden_size 32 --num_layers 1 --batch_size 2 --max_seq_len 16 --max_steps 4".split()
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    code, out, err = finish(start(*launcher, str(ROOT / "train.py"), *words, "--run-dir", str(folder)))
    assert code == 0, err
    assert "4 × 16 tokens a step" in out, "--batch_size is per rank here"
    assert len(losses(folder)) == 4


NO_EXTRAS = "import runpy, sys; sys.modules.update(dict.fromkeys({missing})); sys.argv = {argv}; runpy.run_path({argv}[0], run_name='__main__')"


def test_the_example_needs_torch_and_numpy_only(tmp_path: Path) -> None:
    """Runs without torch._dynamo too, whose import takes half as long as all other imports."""
    missing = ["rich", "tokenizers", "safetensors", "yaml", "matplotlib", "wandb", "torch._dynamo"]
    words = "--num-layers=1 --hidden-size=32 --seq-length=16 --vocab-size=50 --batch-size=4 --train-steps=5 --dataset-size=20"
    argv = [
        str(ROOT / "megatron_core_training_example.py"),
        *words.split(),
        "--nproc-per-node=1",
        "--threads-per-process=1",
        f"--run-dir={tmp_path / 'run'}",
    ]
    code, out, err = finish(start("-c", NO_EXTRAS.format(missing=missing, argv=argv)))
    assert code == 0, err
    assert "finished: loss" in out and len(losses(tmp_path / "run")) == 5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--hiden-size", "32"], "unknown flag --hiden-size"),
        (["--config", "nowhere.yaml"], "configuration file nowhere.yaml does not exist"),
        (["--run-dir", "/proc/run"], "the run folder /proc/run cannot be written"),
        (["--batch-size", "4"], "--batch-size is ambiguous here"),
        (["--tensor-model-parallel-size", "4", "--nproc-per-node", "2"], "2 processes are too few"),
        (
            ["--nproc-per-node", "2", "--world-size", "8"],
            "--world-size 8 does not match the 2 started process(es)",
        ),
    ],
    ids=["typo", "config", "folder", "ambiguous", "too-few", "world-size"],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words: list[str], sentence: str) -> None:
    code, out, err = train(*words)
    assert code == 2, (out, err)
    assert sentence in err
    assert "Traceback" not in err
    if "problems" not in err:
        assert len(err.strip().splitlines()) == 1, err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--data-path nowhere/corpus --vocab-size 50 --train-iters 2", "nowhere/corpus"),
        ("--device cuda", "torch finds no GPU"),
    ],
    ids=["data", "device"],
)
def test_problem_found_by_a_worker_is_one_line(
    words: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Runs in this process, which has imported torch already."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    place = f"--nproc-per-node 1 --threads-per-process 1 --run-dir {tmp_path / 'run'}"
    assert main(["train", *words.split(), *place.split()]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert sentence in said


def test_missing_gpu_is_reported_once_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("pentatron.supervise.launcher.run_workers", None)
    words = ["train", "--device", "cuda", "--nproc-per-node", "4", "--run-dir", str(tmp_path / "run")]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert err.count("torch finds no GPU") == 1 and "starting" not in out
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = train("--master-port", str(port), "--run-dir", str(tmp_path / "run"))
    assert code == 2
    assert f"port {port} cannot be used for the rendezvous" in err and "--master-port" in err


@distributed(world=1, timeout=150, process_group=False)
def test_an_error_in_our_own_code_shows_its_traceback_once_with_the_rank(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import os, sys\n"
        "import pentatron.train.trainer as trainer\n"
        "def train_step(*args):\n"
        "    raise RuntimeError('a bug') if os.environ['RANK'] == '1' else SystemExit(0)\n"
        "trainer.train_step = train_step\n"
        "from pentatron.cli.main import run_entry\n"
        "from pentatron.settings.entry_points import STANDARD\n"
        "run_entry(STANDARD)\n"
    )
    words = "--vocab_size 50 --hidden_size 32 --num_layers 1 --max_seq_len 16 --max_steps 2 --nproc-per-node 2".split()
    code, _, err = finish(start_forked(str(broken), *words, "--run-dir", str(tmp_path / "run")))
    assert code == 1
    assert err.count("RuntimeError: a bug") == 1
    assert "rank 1 of 2 failed with exit code 1 before its first step was done:\nTraceback" in err
    assert "not started again: a failure before the first step would repeat" in err


@pytest.mark.parametrize(
    ("number", "sentence"),
    [(errno.ENOSPC, "train.log cannot be written (No space left on device); make room"), (errno.EACCES, "train.log cannot be opened (Permission denied)")],
)  # fmt: skip
def test_a_file_that_cannot_be_written_is_one_sentence(
    number: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> int:
        raise OSError(number, os.strerror(number), "train.log")

    assert run_guarded(fails) == 2
    assert sentence in capsys.readouterr().err
    with pytest.raises(OSError, match="Input/output error"):
        run_guarded(lambda: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x" * 4090, "is too long"),
        ("x" * 300, "is too long"),
        (os.fsdecode(b"bad\xff"), r"'bad\udcff' is not UTF-8"),
    ],
)
@pytest.mark.parametrize("flag", ["--run-dir", "--save"])
def test_a_folder_that_cannot_have_its_name_is_refused(
    capsys: pytest.CaptureFixture[str], flag: str, name: str, said: str
) -> None:
    assert main(["train", "--train-iters", "1", flag, name]) == 2
    shown = capsys.readouterr().err
    assert f"pentatron: {flag} " in shown and said in shown and len(shown) < 300
    assert not list(Path().iterdir())
