"""Restarts a job whose rank dies; its losses equal those of an undisturbed run."""

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pentatron.cli import train as train_module
from pentatron.cli.main import main
from tests.cli.test_train import finish, losses, start_forked
from tests.harness import distributed
from tests.support import resolved

SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 50 --dataset-size 100 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 10 --save-interval 3 --eval-interval 0 --threads-per-process 1 "
    "--device cpu"
).split()

# Breaks rank 1 in the step after step 7, in the first start only.
BROKEN = """
import os, signal
import pentatron.train.trainer as trainer
from pentatron.cli.main import run_entry
from pentatron.settings.entry_points import TRAIN

healthy = trainer.train_step

def train_step(model, optimizer, drawn, rate, step, *others):
    if step == 7 and os.environ.get("RANK") == "1" and os.environ["PENTATRON_RESTART"] == "0":
        {how}
    return healthy(model, optimizer, drawn, rate, step, *others)

trainer.train_step = train_step
run_entry(TRAIN)
"""


def broken(folder: Path, how: str) -> str:
    path = folder / "broken.py"
    path.write_text(BROKEN.format(how=how))
    return str(path)


@distributed(world=1, timeout=150, process_group=False)
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    """`--fresh` applies to the first start only, so that the restart resumes."""
    script = broken(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    folder = tmp_path / "run"
    words = [*SMALL, "--nproc-per-node", "2", "--run-dir", str(folder), "--fresh"]
    code, out, err = finish(start_forked(script, *words))
    assert code == 0, err
    first, second = err.splitlines()
    assert first.startswith("pentatron: rank 1 of 2 was killed by SIGKILL") and "after step 7" in first
    assert second == "pentatron: restarting from step 6 (1 of 3); 1 step is lost"
    assert "resuming at step 6 of 10" in out
    assert [step for step, _ in losses(folder)] == list(range(1, 11))
    (row,) = map(json.loads, (folder / "restarts.jsonl").read_text().splitlines())
    assert row["steps_lost"] == 1
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(["monitor", str(folder), "--once"]) == 0
    assert "restarts      1, 1 step lost; the last: rank 1 was killed by SIGKILL" in shown.getvalue()
    undisturbed = tmp_path / "undisturbed"
    code, _, err = finish(start_forked("-m", "pentatron", "train", *words, "--run-dir", str(undisturbed)))
    assert code == 0, err
    assert losses(folder) == losses(undisturbed)


@distributed(world=1, timeout=150, process_group=False)
def test_traceback_is_printed_once_and_those_of_other_ranks_are_kept(tmp_path: Path) -> None:
    script = broken(tmp_path, "raise LookupError('a bug')")
    folder = tmp_path / "run"
    code, _, err = finish(start_forked(script, *SMALL, "--nproc-per-node", "2", "--run-dir", str(folder)))
    assert code == 0, err
    assert err.count("Traceback") == 1 and err.count("LookupError: a bug") == 1
    assert err.startswith("pentatron: rank 1 of 2 failed with exit code 1 after step 7:\nTraceback")
    assert "LookupError: a bug" in (folder / "ranks" / "rank-00001.log").read_text()
    other = (folder / "ranks" / "rank-00000.log").read_text()
    assert "lost contact with another rank" in other


def test_the_last_step_is_read_by_another_process_where_torch_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reads the last step in another process, so that the launcher does not import torch.

    A launcher that holds torch would be the next process that the OOM killer ends.
    """
    config = resolved(f"--save {tmp_path}").config
    answers = {"None\n": None, "a note of a library\n40\n": 40}

    def answer(words: Sequence[str], **named: Any) -> Any:
        monkeypatch.setattr(sys, "argv", ["-c", words[-1]])
        exec(words[words.index("-c") + 1], {})
        assert capsys.readouterr().out == "None\n", "no step is there"
        return SimpleNamespace(returncode=0, stdout=next(iter(answers)))

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(train_module.subprocess, "run", answer)
    while answers:
        expected = next(iter(answers.values()))
        assert train_module._saved_step(config) == expected
        answers.pop(next(iter(answers)))
