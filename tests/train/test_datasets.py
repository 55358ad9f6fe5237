"""From prepared files to samples: the right tokenizer, a vocabulary that is large enough, and no damaged token."""

from pathlib import Path

import pytest
import torch

from pentatron.cli.prepare import prepare
from pentatron.config.entry import TRAIN
from pentatron.data.indexed import IndexedDataset
from pentatron.data.pair_writer import IndexedDatasetWriter
from pentatron.data.tokenizer import ByteTokenizer, identify
from pentatron.monitor.display import open_display
from pentatron.parallel.world import single_process
from pentatron.train.datasets import Datasets, arrange, open_data
from pentatron.train.state import TrainState

TEXT = "What the model sees is what was written. "


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    tokenizer = ByteTokenizer()
    with IndexedDatasetWriter(tmp_path / "x", "uint16", identify(tokenizer)) as writer:
        for number in range(1000):
            writer.add_document([*tokenizer.encode(TEXT * (number % 5)), tokenizer.eod])
    return tmp_path / "x"


def build(prefix: Path, words: str, state: TrainState | None = None) -> Datasets:
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 64 --train-iters 3 --nproc-per-node 1"
    found = prepare(f"--data-path {prefix} {shape} --device cpu --global-batch-size 4 {words}".split(), TRAIN)
    config, world, display = found.resolved.config, single_process(torch.device("cpu")), open_display("off")
    opened = open_data(config, world, prefix.parent, display)
    return arrange(opened, config, world, state or TrainState(), prefix.parent, display)


def test_the_tokenizer_must_be_the_one_that_made_the_data(prefix: Path) -> None:
    datasets = build(prefix, "--tokenizer-type ByteTokenizer")
    assert datasets.tokenizer is not None
    assert "the model sees is what" in datasets.tokenizer.decode(datasets.train[0]["tokens"].tolist() * 2)
    with pytest.raises(ValueError, match="was prepared with another tokenizer"):
        build(prefix, "--tokenizer-type NullTokenizer --vocab-size 300")
    with pytest.raises(ValueError, match="holds token 256, outside the vocabulary of 200"):
        build(prefix, "--vocab-size 200")


def test_damaged_tokens_never_become_a_sample(prefix: Path) -> None:
    binary = Path(f"{prefix}.bin")
    content = bytearray(binary.read_bytes())
    content[100_000] ^= 2
    binary.write_bytes(content)
    # At open, nobody has looked at the tokens yet.
    datasets = build(prefix, "--tokenizer-type ByteTokenizer --split 1 --eval-iters 0 --train-iters 500")
    refused = 0
    for number in range(len(datasets.train)):  # type: ignore[arg-type]
        try:
            assert datasets.train[number]["tokens"].max() <= 256
        except ValueError as error:
            assert "x.bin is damaged between bytes 65536 and 131072" in str(error)
            refused += 1
    assert 0 < refused < len(datasets.train)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="damaged between bytes 65536"):
        IndexedDataset(prefix).compare_all()
