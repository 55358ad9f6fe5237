"""Fine-tunes with the guide's flags, resumes, and starts from weights of another run."""

import json
from pathlib import Path

import pytest

from pentatron.cli.main import main
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.data.tokenizer import FileTokenizer, identify_tokenizer
from tests.data.chats import CHATML, tokenizer_folder

SHAPE = "--num-layers 1 --hidden-size 16 --num-attention-heads 2"
RUN = "--seq-length 64 --global-batch-size 2 --eval-iters 0 --split 1 --lr 1e-2 --lr-decay-style constant --device cpu --nproc-per-node 1 --progress-bar off"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tokenizer_folder(tmp_path / "model", CHATML)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(run: Path, words: str) -> list[float]:
    assert main(["train", *f"{words} {RUN} --run-dir {run}".split()]) == 0
    return losses(run)


def test_conversations_train_resume_and_follow_pretraining(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = tmp_path / "sft_data.jsonl"
    lines = [{"input": f"what is {n}", "output": f"the answer {n}"} for n in range(9)]
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    tokenizer = FileTokenizer(model)
    with IndexedDatasetWriter(tmp_path / "text", "uint16", identify_tokenizer(tokenizer)) as writer:
        for n in range(40):
            writer.add_document([*tokenizer.encode(f"hello what is the answer of {n}"), tokenizer.eod])
    pretraining = f"--data-path {tmp_path / 'text'} --tokenizer-model {model}"
    conversations = f"--sft --sft-packing --data-path {chats} --tokenizer-model {model}"

    base = train(tmp_path / "base", f"{pretraining} {SHAPE} --train-iters 2")
    whole = train(tmp_path / "whole", f"{conversations} {SHAPE} --train-iters 4")
    assert "9 conversations packed into" in capsys.readouterr().out
    train(tmp_path / "parts", f"{conversations} {SHAPE} --train-iters 2")
    # Resuming with the same command, in the second epoch too, gives bitwise equal losses.
    assert train(tmp_path / "parts", f"{conversations} {SHAPE} --train-iters 4") == whole

    weights = f"--load {tmp_path / 'base'} --finetune"
    tuned = train(tmp_path / "tuned", f"{conversations} {weights} --train-iters 2")
    assert tuned[0] != whole[0], "the weights are those that were trained before"
    again = train(tmp_path / "again", f"{pretraining} --load {tmp_path / 'tuned'} --finetune --train-iters 2")
    assert again[0] < base[0]

    chats.write_text(chats.read_text().replace("answer 3", "answer 4"), encoding="utf-8")
    capsys.readouterr()
    assert (
        main(
            [
                "train",
                *f"{conversations} {SHAPE} --train-iters 5 {RUN} --run-dir {tmp_path / 'parts'}".split(),
            ]
        )
        == 2
    )
    assert "data" in capsys.readouterr().err
