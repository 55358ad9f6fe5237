"""Tests `--epochs`: counts steps from .idx files before the start, or after the run has tokenized."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pentatron.checkpoint.state import TrainState
from pentatron.cli.configure import Prepared, prepare
from pentatron.cli.main import main
from pentatron.data.gpt_dataset import GPTDataset
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.data.open_data import build_datasets, open_data, resolve_epochs
from pentatron.errors import AgreedError, ConfigError
from pentatron.monitor.display import SilentDisplay
from pentatron.parallel.world import create_groups, single_process
from pentatron.settings.entry_points import TRAIN
from pentatron.settings.settings import ProcessFacts
from tests.data.chats import CHATML, tokenizer_folder
from tests.harness import run_distributed

SHAPE = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 50 --device cpu --nproc-per-node 1"


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[Path, Path]:
    """Writes 20 documents of 10 tokens and 10 of 5 tokens: 24 and 6 sequences of 8 tokens."""
    for name, documents, tokens in (("a", 20, 10), ("b", 10, 5)):
        with IndexedDatasetWriter(tmp_path / name, "uint16") as writer:
            for number in range(documents):
                writer.add_document([number] * tokens)
    return tmp_path / "a", tmp_path / "b"


def prepared(words: str) -> Prepared:
    return prepare(f"{SHAPE} {words}".split(), TRAIN)


def steps(words: str) -> int | None:
    return prepared(words).resolved.config.train.train_iters


def problems(words: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        prepared(words)
    return list(refused.value.problems)


def test_an_epoch_is_the_whole_sequences_of_the_training_share(pairs: tuple[Path, Path]) -> None:
    one, other = pairs
    assert steps(f"--data-path {one} --split 1,0,0 --global-batch-size 4 --epochs 1") == 6
    assert steps(f"--data-path {one} --split 1,0,0 --global-batch-size 5 --epochs 3") == 14, "72 samples"
    assert steps(f"--data-path {one} --split 1,1,0 --global-batch-size 4 --epochs 3") == 9, "12 of a half"
    assert steps(f"--data-path {one} {other} --split 1,0,0 --global-batch-size 4 --epochs 2") == 15
    assert steps(f"--train-data-path {other} --global-batch-size 2 --epochs 2") == 6
    assert steps(f"--data-path 1.0 {one} --split 1,0,0 --global-batch-size 4 --epochs 1") == 6, (
        "one has no share"
    )
    ramp = "--rampup-batch-size 2 2 8 --global-batch-size 4"
    assert steps(f"--data-path {one} --split 1,0,0 {ramp} --epochs 1") == 8, "4 × 2 and 4 × 4 samples"


def test_the_nearer_of_two_limits(pairs: tuple[Path, Path]) -> None:
    words = f"--data-path {pairs[0]} --split 1,0,0 --global-batch-size 4 --epochs 2"
    found = prepared(f"{words} --train-iters 100").resolved
    assert found.config.train.train_iters == 12
    assert "training stops after 12 steps: 2 epochs of 24 samples, before --train-iters 100" in found.notices
    found = prepared(f"{words} --train-iters 5").resolved
    assert found.config.train.train_iters == 5
    assert (
        "training stops after 5 steps: --train-iters ends it before 2 epochs of 24 samples" in found.notices
    )
    assert prepared(words).resolved.sources["train_iters"] == "derived: 2 epochs of 24 samples"
    assert not any("--epochs" in notice for notice in prepared(words).resolved.notices)


def test_every_document_is_read_as_often_as_epochs_say(pairs: tuple[Path, Path], tmp_path: Path) -> None:
    """The shuffled order has exactly the requested epochs, and the run reads all of it."""
    config = prepared(
        f"--data-path {pairs[0]} --split 1,0,0 --global-batch-size 4 --epochs 3 --eval-iters 0"
    ).resolved.config
    world = single_process(torch.device("cpu"))
    opened = open_data(config, world, tmp_path, SilentDisplay())
    train = build_datasets(opened, config, world, TrainState(), tmp_path, SilentDisplay()).train
    assert isinstance(train, GPTDataset)
    assert train.parts[0].epochs == 3 and not train.parts[0].separate_final_epoch
    assert config.schedule_lengths.total == 72 and len(train) == 74, (
        "sequences run on over the ends of epochs"
    )


def test_epochs_that_cannot_be_counted_are_refused(pairs: tuple[Path, Path], tmp_path: Path) -> None:
    one, other = pairs
    words = f"--data-path {one} --split 1,0,0 --global-batch-size 64 --epochs 2"
    assert problems(words) == [
        "--epochs 2: 2 epochs of 24 samples cannot fill the 64 samples of the first step; give more epochs, or a smaller "
        "batch"
    ]
    assert problems(f"--data-path {tmp_path}/none --global-batch-size 4 --epochs 2") == [
        f"no data file {tmp_path}/none.idx; give the prefix of a prepared .bin/.idx pair without its ending"
    ]
    assert problems(f"--data-path 1 {one} 2 {other} --global-batch-size 4 --epochs 2") == [
        "the number of steps of --epochs 2 is unknown: weighted data is sampled by weight, so it has no epochs; give "
        "--train-iters instead"
    ]
    assert problems(f"--data-path {other} --split 1,0,0 --seq-length 64 --epochs 2") == [
        "sequences 0 to 10 hold 50 tokens where 65 are needed; use more data or another --split"
    ]


def test_a_job_for_other_machines_counts_there(tmp_path: Path) -> None:
    """Preparing a job for other machines needs no data here: the steps are counted when it runs."""
    there = ProcessFacts(4, 4, 8, "torchrun", True)
    words = (
        f"{SHAPE.partition(' --nproc')[0]} --data-path {tmp_path / 'none'} --global-batch-size 4 --epochs 2"
    )
    for more, length in (("", None), (" --train-iters 7", 7)):
        made = prepare(f"{words}{more}".split(), TRAIN, there).resolved
        assert made.config.train.train_iters == length
        told = "--epochs 2: the number of steps is known once the run has counted its data"
        assert told in made.notices
    weighed = words.replace("--data-path", "--data-path 0.5 a 0.5")
    with pytest.raises(ConfigError, match="sampled by weight"):
        prepare(weighed.split(), TRAIN, there)


def test_text_data_is_reported_once(tmp_path: Path) -> None:
    told = problems(f"--data-path {tmp_path / 'a.jsonl'} --global-batch-size 4 --epochs 2")
    assert len(told) == 1 and "is text" in told[0]


def under_torchrun(prefix: Path) -> str:
    """Returns the step count that a rank under torchrun resolves, or its error message."""
    words = f"{SHAPE.partition(' --nproc')[0]} --data-path {prefix} --split 1,0,0 --global-batch-size 4 --epochs 2"
    resolved = prepare(words.split(), TRAIN, ProcessFacts(2, 2, 8, "torchrun", True)).resolved
    world = create_groups(resolved.config.grid, dist.get_rank(), dist.get_rank(), torch.device("cpu"))
    try:
        settled = resolve_epochs(resolved, world, prefix.parent, SilentDisplay())
    except AgreedError as error:
        return str(error)
    return f"{settled.config.train.train_iters} steps of {settled.settings.epoch_samples}"


def test_ranks_of_a_launcher_count_together(pairs: tuple[Path, Path], tmp_path: Path) -> None:
    assert run_distributed(under_torchrun, 2, prefix=pairs[0]) == ["12 steps of 24"] * 2
    found = run_distributed(under_torchrun, 2, prefix=tmp_path / "none")
    assert len(set(found)) == 1 and "no data file" in found[0]


def test_data_of_a_program_is_not_counted(tmp_path: Path) -> None:
    words = f"{SHAPE} --data-path {tmp_path / 'none'} --global-batch-size 4 --epochs 2"
    made = prepare(f"{words} --train-iters 7".split(), TRAIN, own_data=True).resolved
    assert made.config.train.train_iters == 7
    assert "--epochs 2: the data is not read here; --train-iters 7 sets the length" in made.notices
    assert resolve_epochs(made, single_process(), tmp_path, SilentDisplay(), own_data=True) is made
    with pytest.raises(ConfigError, match="no data is read; give --train-iters"):
        prepare(words.split(), TRAIN, own_data=True)
    there = prepare(words.split(), TRAIN, ProcessFacts(1, 1, 8, "torchrun", True)).resolved
    with pytest.raises(AgreedError, match="the program supplies its own data; give --train-iters"):
        resolve_epochs(there, single_process(), tmp_path, SilentDisplay(), own_data=True)


def test_a_run_ends_with_its_epochs(pairs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        f"{SHAPE} --data-path {pairs[0]} --split 1,0,0 --global-batch-size 4 --epochs 1 --no-save-checkpoints"
    )
    assert main(["train", *words.split(), "--run-dir", str(pairs[0].parent / "run")]) == 0
    assert "step     6/6" in capsys.readouterr().out


def test_shown_samples_are_those_of_the_epochs(
    pairs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--data-path {pairs[0]} --split 1,0,0 --seq-length 8 --epochs 2"
    assert main(["data", "show", *words.split()]) == 0
    assert "samples of a run of 48 samples" in capsys.readouterr().out


@pytest.fixture
def chats(tmp_path: Path) -> str:
    """Writes 10 conversations and a tokenizer; returns the flags that select them."""
    lines = [{"input": f"what is {n}", "output": f"the answer {n}"} for n in range(10)]
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    model = tokenizer_folder(tmp_path / "model", CHATML)
    return f"--sft --data-path {tmp_path / 'chats.jsonl'} --tokenizer-model {model} --seq-length 64 --split 1"


SMALL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --device cpu --eval-iters 0 --no-save-checkpoints"


def last_step(run: Path) -> int:
    return int(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"])


def test_epochs_of_conversations(chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"train {chats} {SMALL} --nproc-per-node 1 --global-batch-size 2 --epochs 2"
    assert main([*words.split(), "--run-dir", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert last_step(tmp_path / "run") == 10 and "--epochs" not in said
    assert said.count("10 conversations padded to 10 sequences") == 1
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert "train_iters: 10 " in saved and "2 epochs of 10 samples" in saved
    # The learning rate schedule ends with the run.
    assert "lr_decay_iters: 10 " in saved
    assert (
        main([*words.split(), "--sft-packing", "--train-iters", "1", "--run-dir", str(tmp_path / "packed")])
        == 0
    )
    assert "training stops after 1 step: --train-iters ends it before 2 epochs of" in capsys.readouterr().out
    assert main([*words.split(), "--global-batch-size", "64", "--run-dir", str(tmp_path / "large")]) == 2
    assert "2 epochs of 10 samples cannot fill the 64 samples of the first step" in capsys.readouterr().err


def test_ranks_agree_on_the_epochs_of_conversations(chats: str, tmp_path: Path) -> None:
    words = f"train {chats} {SMALL} --nproc-per-node 2 --global-batch-size 4 --epochs 2 --max-restarts 0"
    assert main([*words.split(), "--run-dir", str(tmp_path / "run")]) == 0
    assert last_step(tmp_path / "run") == 5


def test_epochs_of_the_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--epochs` replaces the number of steps of the preset."""
    words = "train --corpus python --corpus-bytes 60000 --vocab-size 300 --seq-length 512 --global-batch-size 16 --epochs 1"
    assert main([*f"{words} {SMALL} --nproc-per-node 1".split(), "--run-dir", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("corpus: Python's standard library") == 1
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert f"train_iters: {last_step(tmp_path / 'run')} " in saved and "1 epoch of" in saved


def test_config_says_that_the_run_will_count(chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *f"{chats} {SMALL} --nproc-per-node 1 --epochs 2".split()]) == 0
    said = capsys.readouterr().out
    assert "note: --epochs 2: the number of steps is known once the run has tokenized its data" in said


def test_conversations_are_shown_with_epochs(chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", *f"{chats} --epochs 2 --index 3".split()]) == 0
    assert "sample 3: 64 tokens" in capsys.readouterr().out
