"""Resumes a run with more or fewer processes: the batch size, samples and losses stay the same."""

from pathlib import Path

import pytest

from pentatron.cli.configure import prepare
from pentatron.errors import UserError
from pentatron.parallel.world import single_process
from pentatron.settings.entry_points import PRETRAIN_GPT, STANDARD
from pentatron.settings.resolve import Resolved
from pentatron.settings.settings import ProcessFacts
from pentatron.train.session import run_training
from tests.cli.test_train import forked, losses

TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 61 --dataset-size 64 --lr 1e-2 --device cpu"
# A script with the flag names and defaults of pretrain_gpt.py.
ENTRY = "from pentatron.cli.main import run_entry\nfrom pentatron.settings.entry_points import PRETRAIN_GPT\nrun_entry(PRETRAIN_GPT)\n"
RUN = f"{TINY} --train-iters 6 --eval-interval 0 --sample-tokens 0"


def on(processes: int, folder: Path, words: str) -> Resolved:
    said = [*f"{RUN} {words}".split(), "--save", str(folder), "--load", str(folder)]
    return prepare(said, PRETRAIN_GPT, ProcessFacts(processes, processes, 1)).resolved


def batch(resolved: Resolved) -> tuple[int | None, int | None, int]:
    """Returns the global batch size, the micro-batch size, and the micro-batches of a rank in a step."""
    config = resolved.config
    return config.train.global_batch_size, config.train.micro_batch_size, config.accumulation


def alone(folder: Path, words: str) -> None:
    run_training(on(1, folder, words), single_process(), True)


def test_the_batch_of_a_run_is_kept_on_any_number_of_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resumes a run of two ranks on one rank with the global batch size of the checkpoint.

    The command gives only the micro-batch size, from which one rank alone would derive a smaller global batch
    size.
    """
    words = "--micro-batch-size 2 --lr-decay-style constant"
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    script = tmp_path / "pretrain.py"
    script.write_text(ENTRY)
    spread = (
        f"{script} {RUN} --nproc-per-node 2 --threads-per-process 1 --save {cut} {words} --exit-interval 3"
    )
    code, _, err = forked(*spread.split())
    assert code == 0, err
    alone(whole, "--global-batch-size 4 --lr-decay-style constant")
    capsys.readouterr()
    alone(cut, words)
    shown = capsys.readouterr().out
    kept = "the run keeps its global batch size of 4 from 2 data-parallel ranks; on 1, its batch settings per rank would give 2"
    assert kept in shown
    assert (
        "the checkpoint was made on 1 tensor × 1 pipeline × 1 context × 2 data ranks; it resumes on" in shown
    )
    assert losses(cut) == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in losses(whole)]
    # The last start had one process. The batch size is still kept, on one and on two.
    assert batch(on(1, cut, words)) == (4, 2, 2) and batch(on(2, cut, words)) == (4, 2, 1)
    # Another micro-batch or global batch size on the command line replaces the kept one. A batch that the
    # ranks cannot divide is refused with the equation.
    assert batch(on(1, cut, "--micro-batch-size 1"))[0] == 1
    assert batch(on(1, cut, f"{words} --global-batch-size 6"))[0] == 6
    equation = r"global batch size \(4\) is not divisible by micro batch size \(2\) times data parallel size"
    with pytest.raises(
        UserError, match=rf"{equation} \(3\) = 6; use --global-batch-size 6 or another number"
    ):
        on(3, cut, words)
    with pytest.raises(UserError, match=rf"{equation} \(4\) = 8; use --micro-batch-size 1$"):
        on(4, cut, words)


def test_batch_size_per_rank_keeps_the_global_batch_on_more_ranks(tmp_path: Path) -> None:
    """The guides' `--batch_size` counts samples of one rank; more ranks keep the global batch size."""
    folder = tmp_path / "a"
    said = f"{TINY} --train-iters 2 --batch_size 4 --sample-tokens 0 --save {folder} --load {folder}".split()
    run_training(prepare(said, STANDARD, ProcessFacts(1, 1, 1)).resolved, single_process(), True)
    now = prepare(said, STANDARD, ProcessFacts(2, 2, 1)).resolved
    assert batch(now) == (
        4,
        2,
        1,
    ) and "from 1 data-parallel rank; on 2, its batch settings per rank would give 8" in " ".join(now.notices)
