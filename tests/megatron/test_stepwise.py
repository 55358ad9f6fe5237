"""A program that calls the steps itself gets the errors, exit codes and notes of `pretrain()`."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from gpt_builders import gpt_builder
from model_provider import model_provider
from pentatron.cli.environment import RankInfo
from pentatron.cli.worker_errors import report_error
from pentatron.errors import AgreedError, NonFiniteError, UserError
from pentatron.megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from pentatron.megatron.core.enums import ModelType
from pentatron.megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from pentatron.megatron.core.utils import divide
from pentatron.megatron.timers import Timers
from pentatron.megatron.training import get_tokenizer, initialize_megatron
from pentatron.megatron.training.training import (
    build_train_valid_test_data_iterators,
    setup_model_and_optimizer,
    train,
)
from pentatron.megatron.training.utils import get_ltor_masks_and_position_ids
from pentatron.monitor.metrics import read_metrics
from pentatron.parallel.collectives import Group
from pentatron.parallel.timers import Timers as LoopTimers
from pentatron.parallel.world import single_process
from pentatron.train.session import run_training
from tests.harness import run_distributed
from tests.megatron.test_programs import RUN, write_corpus
from tests.megatron.test_user_code import program
from tests.support import DEFAULT, resolved

ROOT = Path(__file__).parent.parent.parent
PROVIDER = partial(model_provider, gpt_builder)
FAILING = """
from pentatron.megatron.core.enums import ModelType
from pentatron.megatron.training.initialize import initialize_megatron
from pentatron.megatron.training.training import setup_model_and_optimizer

def provider(pre_process=True, post_process=True):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")

initialize_megatron()
setup_model_and_optimizer(provider, ModelType.encoder_or_decoder)
"""


def test_an_error_in_a_step_is_a_sentence_with_the_exit_code_of_pretrain(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(FAILING)
    words = f"{DEFAULT} {RUN} --mock-data --run-dir {tmp_path}/run --device cpu".split()
    shown = subprocess.run(
        [sys.executable, str(script), *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NCCL_DEBUG": "INFO"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 2 and "Traceback" not in shown.stderr, shown.stderr
    assert shown.stderr.startswith("pentatron: ") and "memory" in shown.stderr
    assert "NCCL_DEBUG=INFO" in shown.stdout, "what the environment says is noted"


@pytest.mark.parametrize(
    ("error", "rank", "code", "said"),
    [
        (UserError("give it"), 1, 2, "pentatron: rank 1: give it\n"),
        (AgreedError("all of us"), 1, 2, ""),
        (NonFiniteError("no number", NonFiniteError.REPRODUCIBLE), 0, 16, "pentatron: no number\n"),
        (RuntimeError("Connection reset by peer"), 1, 1, "lost contact with another rank"),
        (RuntimeError("of the program's own"), 0, None, ""),
        (KeyError("of the program's own"), 0, None, ""),
    ],
)
def test_exit_code_and_message_of_an_error(
    error: Exception, rank: int, code: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(error, resolved().config, RankInfo(rank, 2, rank, 2, "torchrun")) == code
    shown = capsys.readouterr().err
    assert said in shown and bool(said) == bool(shown)


class Own:
    """A dataset that the program makes itself, without data flags."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": [index % 250] * 16, "labels": [index % 250] * 16}


def steps(folder: Path, samples: int, words: str) -> str:
    """Runs a program; returns the error that ends it, or an empty string."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    flags = f"{DEFAULT} {RUN} --mock-data --eval-interval 0 --save {folder} --load {folder} --device cpu --lr-decay-iters 4 {words}"
    sys.argv = ["my_script.py", *flags.split()]
    initialize_megatron()
    assert get_tokenizer() is get_tokenizer(), "read once"

    def datasets(sizes: Sequence[int]) -> Any:
        return Own(samples), None, None

    try:
        model, optimizer, schedule = setup_model_and_optimizer(PROVIDER, ModelType.encoder_or_decoder)
        iterator, _, _ = build_train_valid_test_data_iterators(datasets)
        train(pretrain_gpt.forward_step, model, optimizer, schedule, iterator, None)
    except UserError as error:
        return str(error)
    return ""


def test_data_of_a_provider_that_changed_is_noticed(tmp_path: Path) -> None:
    run = partial(run_distributed, steps, 1, folder=tmp_path)
    assert run(samples=40, words="--train-iters 1") == [""]
    refused = run(samples=41, words="--train-iters 2")[0]
    assert "the data is not what" in refused and "its fingerprint was 'Own 40', is 'Own 41'" in refused
    assert run(samples=40, words="--train-iters 2") == [""], "the same data goes on"
    assert run(samples=41, words="--train-iters 3 --allow-changed-data") == [""]
    assert run(samples=41, words="--train-iters 4") == [""], "and is the run's data from then on"


def test_misuse_is_a_user_error_instead_of_an_assertion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="10 is not divisible by 4"):
        divide(10, 4)
    with pytest.raises(UserError, match=r"label_smoothing=0\.1 is not available"):
        vocab_parallel_cross_entropy(torch.zeros(1, 2, 4), torch.zeros(1, 2), 0.1)

    def outside(data_iterator: Any, model: Any) -> Any:
        builder: Any = BlendedMegatronDatasetBuilder
        return builder(None, [], lambda: True, None).build()

    write_corpus(tmp_path / "corpus")
    with pytest.raises(UserError, match="knows its data only inside the dataset provider"):
        config = resolved(f"{RUN} --data-path {tmp_path}/corpus --run-dir {tmp_path}/run")
        run_training(config, single_process(), True, program=program(forward_step=outside))
    with pytest.raises(ImportError, match=r"schedules are run by train_step\(\)"):
        from pentatron.megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: F401
    with pytest.raises(ImportError, match="the loop and train_step"):
        from pentatron.megatron.core.distributed import DistributedDataParallel  # noqa: F401


def test_padding_is_masked_where_that_is_asked() -> None:
    tokens = torch.tensor([[5, 0, 6, 9, 0]])
    masks = partial(get_ltor_masks_and_position_ids, tokens, 9, False, False, True)
    assert masks()[1].tolist() == [[1, 1, 1, 0, 1]]
    assert masks(pad_token=0)[1].tolist() == [[1, 1, 1, 0, 1]]
    assert masks(pad_token=0, pad_mask_loss=True)[1].tolist() == [[1, 0, 1, 0, 0]]
    with pytest.raises(UserError, match="pad_mask_loss needs to know pad_token"):
        masks(pad_mask_loss=True)


def on_the_second_rank() -> str:
    """Returns this rank's output of a timer."""
    said: list[str] = []
    timers = Timers(0, Group(dist.get_rank(), 2, dist.group.WORLD), said.append)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        timers("work").start()
        timers("work").stop()
        timers.log(rank=1, barrier=True)
        with pytest.raises(UserError, match="there is no rank 2 of 2"):
            timers.log(rank=2)
    return "".join(said) + printed.getvalue()


def test_timers_are_printed_where_they_are_asked_for() -> None:
    first, second = run_distributed(on_the_second_rank, 2)
    assert first == "" and "work ...." in second


def test_batches_that_a_program_times_are_in_the_loops_lines() -> None:
    alone = Group(0, 1)
    loop = LoopTimers(2)
    timers = Timers(2, alone, lambda text: None)
    timers.loop = loop
    with loop("forward-compute", 2):
        timers("batch-generator", log_level=2).start()
        timers("batch-generator").stop()
        timers("other", log_level=2).start()
        timers("other").stop()
    block = loop.block(alone)
    assert block is not None and "batch-generator ...." in block and "other" not in block


@pytest.mark.parametrize(
    ("uneven", "words", "said"),
    [(True, "", 1), (False, "", 0), (True, "--calculate-per-token-loss", 0)],
)
def test_uneven_counts_of_tokens_are_remarked_upon(
    uneven: bool, words: str, said: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = iter(range(10**6))

    def step(data_iterator: Any, model: Any) -> Any:
        output, _ = pretrain_gpt.forward_step(data_iterator, model)
        keep = torch.arange(output.shape[1]) > (next(calls) if uneven else 1)
        return output, lambda losses: ((losses * keep).sum(), keep.sum() * len(losses))

    write_corpus(tmp_path / "corpus")
    config = resolved(f"{RUN} --data-path {tmp_path}/corpus --run-dir {tmp_path}/own {words}")
    run_training(config, single_process(), True, program=program(forward_step=step))
    sentence = "Megatron-LM without --calculate-per-token-loss would weigh every micro-batch the same"
    assert capsys.readouterr().out.count(sentence) == said


def test_every_name_that_is_reported_is_written(tmp_path: Path) -> None:
    """Writes every reported value to log, metrics and TensorBoard.

    A number is averaged over micro-batches, a pair is a sum and a count. A name may first appear in a later
    step.
    """
    steps = iter(range(10**6))

    def more(data_iterator: Any, model: Any) -> Any:
        output, loss_function = pretrain_gpt.forward_step(data_iterator, model)

        def reporting(losses: Any) -> Any:
            loss, tokens, report = loss_function(losses)
            late = {"late": 7.0} if next(steps) > 0 else {}
            return loss, tokens, {**report, "twice": (2 * loss.detach(), tokens), "three": 3, **late}

        return output, reporting

    write_corpus(tmp_path / "corpus")
    words = f"{RUN} --data-path {tmp_path}/corpus --run-dir {tmp_path}/own --log-interval 1 --tensorboard-dir {tmp_path}/tb"
    run_training(resolved(words), single_process(), True, program=program(forward_step=more))
    rows = list(read_metrics(tmp_path / "own" / "metrics.jsonl"))
    for row in rows:
        found = row["reported"]
        assert found["lm loss"] == pytest.approx(row["loss"], rel=1e-6)
        assert found["twice"] == pytest.approx(2 * row["loss"], rel=1e-6) and found["three"] == 3
    assert rows[-1]["reported"]["late"] == 7
    lines = [x for x in (tmp_path / "own" / "train.log").read_text().splitlines() if "consumed samples" in x]
    assert all(
        "| twice: " in x and "| three: 3.000000E+00 |" in x and x.count("lm loss:") == 1 for x in lines
    )
    assert "| late: 7.000000E+00 |" in lines[-1]
    assert "twice value: " in (tmp_path / "own" / "train.log").read_text(), "of the validation"
    events = b"".join(file.read_bytes() for file in (tmp_path / "tb").glob("events*"))
    assert b"twice vs samples" in events and b"late" in events
