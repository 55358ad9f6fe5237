"""`pentatron data show` prints what training reads."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pentatron.checkpoint.state import TrainState
from pentatron.cli.configure import prepare
from pentatron.cli.main import main
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.data.loader import build_loader
from pentatron.data.open_data import build_datasets, open_data
from pentatron.data.tokenizer import ByteTokenizer, identify_tokenizer
from pentatron.monitor.display import SilentDisplay
from pentatron.parallel.world import single_process
from pentatron.settings.entry_points import TRAIN
from tests.data.chats import CHATML, tokenizer_folder

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --device cpu --nproc-per-node 1"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedDatasetWriter(tmp_path / "x", "uint16", identify_tokenizer(ByteTokenizer())) as writer:
        for number in range(90):
            writer.add_document([*ByteTokenizer().encode(f"text {number} " * (number % 4)), 256])
    return tmp_path / "x"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"input": "q" * n, "output": "yes"}) + "\n" for n in range(1, 30)))
    return path


def loaded(words: str, folder: Path, part: str, samples: int) -> list[dict[str, Any]]:
    """Returns the first samples that the data loader of a training run yields."""
    config = prepare(f"{words} {SHAPE}".split(), TRAIN).resolved.config
    world = single_process(torch.device("cpu"))
    opened = open_data(config, world, folder, SilentDisplay())
    datasets = build_datasets(opened, config, world, TrainState(), folder, SilentDisplay())
    source = datasets.train if part == "train" else datasets.valid
    assert source is not None
    found = []
    for batch in itertools.islice(build_loader(source, 0, 2, 0, 1), samples // 2):
        for row in range(2):
            names = ("tokens", "labels", "loss_mask", "position_ids")
            sample: dict[str, Any] = {name: getattr(batch, name)[row].tolist() for name in names}
            if batch.documents is not None:
                sample["document_starts"] = list(batch.documents[row])
            found.append({"index": len(found), **sample})
    return found


@pytest.mark.parametrize("part", ["train", "valid"])
@pytest.mark.parametrize(
    "words",
    [
        "--data-path PREFIX --split 80,20 --seq-length 16 --seed 7 --tokenizer-type ByteTokenizer --reset-position-ids "
        "--reset-attention-mask --eod-mask-loss",
        "--data-path 0.3 PREFIX 0.7 PREFIX --split 70,30 --seq-length 12 --vocab-size 257",
        "--sft --sft-packing --data-path CHATS --tokenizer-model MODEL --seq-length 96 --split 60,40",
    ],
)
def test_json_equals_the_samples_of_the_loader(
    words: str, part: str, prefix: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tokenizer_folder(tmp_path / "model", CHATML)
    written = words.replace("PREFIX", str(prefix)).replace("CHATS", str(chats)).replace("MODEL", str(model))
    expected = loaded(
        f"{written} --train-iters 10 --global-batch-size 4 --eval-iters 2", tmp_path / "run", part, 8
    )
    options = "--index 0:8 --train-samples 40 --global-batch-size 4 --eval-iters 2 --json"
    assert main(["data", "show", *f"{written} {options} --part {part}".split()]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    if "--sft" not in words and part == "train":
        # Control: a run of another length reads its samples in another order.
        assert main(["data", "show", *f"{written} --index 0:8 --train-samples 400 --json".split()]) == 0
        assert json.loads(capsys.readouterr().out) != expected


def test_text_marks_tokens_without_loss(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tokenizer_folder(tmp_path / "model", CHATML)
    words = f"--sft --data-path {chats} --tokenizer-model {model} --seq-length 96 --split 1 --index 2".split()
    assert main(["data", "show", *words]) == 0
    text = capsys.readouterr().out
    assert text.startswith("sample 2: 96 tokens, ") and "\n  positions: 0-95\n" in text
    shown = "\n".join(line.removeprefix("  | ") for line in text.splitlines() if line.startswith("  | "))
    question, rest = shown.split("⟧", 1)
    assert question.startswith("⟦<|im_start|>user\nqq") and question.endswith("<|im_start|>assistant\n")
    assert rest.startswith("yes<|im_end|>\n⟦ token 0 × ")


def test_no_more_is_shown_than_the_run_reads(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--dataset-size 5 --vocab-size 9 --seq-length 4 --train-samples 3 --json"
    assert main(["data", "show", *words.split()]) == 0
    assert [sample["index"] for sample in json.loads(capsys.readouterr().out)] == [0, 1, 2]


def test_invalid_sample_range_is_refused(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = f"--data-path {prefix} --seq-length 16 --split 1 --vocab-size 257"
    synthetic = "--dataset-size 5 --vocab-size 9 --seq-length 16 --global-batch-size 4"
    for words, message in (
        (f"{data} --index 8:3", "--index must be samples such as 0:8 or 3, not '8:3'"),
        (f"{data} --index=-1", "--index numbers samples from 0, as in 0:8 or 3, so '-1' is not a sample"),
        (
            f"{data} --index 0:11 --train-samples 10",
            "reads 10 samples, so --index must be from 0 to 9, not '0:11'",
        ),
        (
            f"{synthetic} --index 12 --train-iters 3",
            "reads 12 samples, so --index must be from 0 to 11, not '12'",
        ),
        (f"{data} --split 1,1 --part valid --index 99999", "samples, so --index must be from 0 to "),
        (
            f"{data} --index {10**16}",
            "and this machine has",
        ),
        (f"{data} --train-samples 3 --global-batch-size 4", "fewer than the 4 samples of the first step"),
        (f"{data} --train-samples x", "--train-samples must be a whole number"),
        (f"{data} --part valid", "there are no validation samples"),
        (f"{data} --part test", "there are no test samples; give --split 1 a third share"),
        (f"{data} --part all", "--part must be one of train, valid, test"),
        (f"--data-path {prefix} --vocab-size 7 --seq-length 16", "outside the vocabulary of 7"),
        ("--seq-length 16", "no data is named"),
    ):
        assert main(["data", "show", *words.split()]) == 2
        assert message in capsys.readouterr().err
    (prefix.parent / "config.yaml").touch()
    assert main(["data", "show", str(prefix.parent), "--index", "3"]) == 2
    assert (
        f"to show the samples of that run use --config {prefix.parent}/config.yaml" in capsys.readouterr().err
    )
    assert main(["data", "show"]) == 0 and "usage: pentatron data show" in capsys.readouterr().out
