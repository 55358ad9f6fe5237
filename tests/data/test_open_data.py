"""Tests opening prepared files: tokenizer and vocabulary checks, damaged tokens, splits."""

from pathlib import Path

import pytest
import torch

from pentatron.checkpoint.state import TrainState
from pentatron.cli.configure import prepare
from pentatron.data.indexed import IndexedDataset
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.data.open_data import Datasets, OpenedData, OrderSizes, build_datasets, open_data
from pentatron.data.sample_index import IndexCache
from pentatron.data.tokenizer import ByteTokenizer, identify_tokenizer
from pentatron.errors import UserError
from pentatron.monitor.display import open_display
from pentatron.parallel.world import single_process
from pentatron.settings.entry_points import TRAIN
from tests.data.splits import open_splits

TEXT = "What the model sees is what was written. "


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    tokenizer = ByteTokenizer()
    with IndexedDatasetWriter(tmp_path / "x", "uint16", identify_tokenizer(tokenizer)) as writer:
        for number in range(1000):
            writer.add_document([*tokenizer.encode(TEXT * (number % 5)), tokenizer.eod])
    return tmp_path / "x"


def build(prefix: Path, words: str, state: TrainState | None = None) -> Datasets:
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 64 --train-iters 3 --nproc-per-node 1"
    found = prepare(f"--data-path {prefix} {shape} --device cpu --global-batch-size 4 {words}".split(), TRAIN)
    config, world, display = found.resolved.config, single_process(torch.device("cpu")), open_display("off")
    opened = open_data(config, world, prefix.parent, display)
    return build_datasets(opened, config, world, state or TrainState(), prefix.parent, display)


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
    # Tokens are not verified at open.
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
        IndexedDataset(prefix).verify_checksums()


def test_the_test_set_is_the_tail_of_the_files(prefix: Path) -> None:
    """Compares with the third split of `open_splits`, which other tests compare with Megatron-LM."""
    datasets = build(prefix, "--vocab-size 257 --split 8,1,1 --eval-iters 5")
    expected = open_splits(prefix, "8,1,1", (12, 20, 20), 64, 1234)
    for found, wanted in zip((datasets.train, datasets.valid, datasets.test), expected, strict=True):
        assert found is not None and wanted is not None
        for number in range(12):
            assert found[number]["tokens"].tolist() == wanted[number]["tokens"].tolist()
    assert datasets.no_test == ""
    # The default test share is too small for a document: training runs without a test set.
    small = prefix.parent / "small"
    with IndexedDatasetWriter(small, "uint16") as writer:
        for _ in range(40):
            writer.add_document([1] * 70)
    without = build(small, "--vocab-size 257")
    assert without.test is None and without.valid is not None
    assert without.no_test == f"--split 969,30,1 leaves 0 tokens of {small} to test with, and 1 are needed"
    for words in ("--split 8,2", "--split 8,1,1 --eval-iters 0", "--split 8,1,1 --eval-interval 0"):
        assert build(prefix, f"--vocab-size 257 {words}").test is None
    # Corpora without weights are weighted by their samples: too few test tokens in all of them is no error.
    blended = build(Path(f"{prefix} {prefix}"), "--vocab-size 257 --split 900,99,1 --seq-length 512")
    assert blended.test is None and "and 513 are needed" in blended.no_test


def test_files_of_its_own_to_test_with(prefix: Path) -> None:
    other = prefix.parent / "other"
    with IndexedDatasetWriter(other, "uint16") as writer:
        writer.add_document([7] * 700)

    def opened(words: str) -> OpenedData:
        shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 64 --train-iters 3 --nproc-per-node 1"
        named = (
            f"--train-data-path {prefix} --vocab-size 257 --global-batch-size 4 --device cpu {shape} {words}"
        )
        config = prepare(named.split(), TRAIN).resolved.config
        return open_data(config, single_process(torch.device("cpu")), prefix.parent, open_display("off"))

    found = opened(f"--test-data-path {other}").order(OrderSizes([12], [6]), IndexCache())
    assert found.test is not None and set(found.test[39]["tokens"].tolist()) == {7}
    assert found.valid is None
    # The test set may change on resume.
    assert opened("").identity == opened(f"--test-data-path {other}").identity
    with pytest.raises(UserError, match=r"no data file .*absent"):
        opened("--test-data-path absent")
    with IndexedDatasetWriter(prefix.parent / "empty", "uint16"):
        pass
    with pytest.raises(UserError, match=r"empty has no tokens; prepare it again"):
        opened(f"--train-data-path {prefix.parent / 'empty'} --valid-data-path {prefix}")
    with pytest.raises(UserError, match="--test-data-path needs --train-data-path"):
        opened(f"--test-data-path {other} --data-path {prefix} --train-data-path=")


@pytest.mark.parametrize("words", ["--mock-data", "--dataset-size 30"])
def test_made_up_data_has_a_test_set_of_its_own(tmp_path: Path, words: str) -> None:
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --train-iters 3 --nproc-per-node 1"
    named = f"{words} --vocab-size 97 --global-batch-size 4 --device cpu {shape} --eval-iters 2"
    config = prepare(named.split(), TRAIN).resolved.config
    opened = open_data(config, single_process(torch.device("cpu")), tmp_path, open_display("off"))
    parts = opened.order(OrderSizes([12], [6]), IndexCache())
    assert parts.test is not None and parts.valid is not None
    seen = {tuple(part[i]["tokens"].tolist()) for part in (parts.valid, parts.test) for i in range(8)}
    assert len(seen) == 16
