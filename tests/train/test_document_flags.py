"""Tests what the document-boundary flags do to samples, and where the end-of-document id comes from."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from pentatron.checkpoint.state import TrainState
from pentatron.data.gpt_dataset import GPTDataset
from pentatron.data.indexed import TokenizerIdentity, sidecar_path
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.data.open_data import build_datasets, open_data
from pentatron.data.sample_index import DOCUMENT_STARTS, Boundaries
from pentatron.errors import UserError
from pentatron.monitor.display import SilentDisplay
from pentatron.parallel.world import single_process
from tests.support import resolved

FLAGS = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
EOD = 256


def write(prefix: Path, tokenizer: TokenizerIdentity | None = None) -> None:
    with IndexedDatasetWriter(prefix, np.uint16, tokenizer) as writer:
        for length in range(2, 12):
            writer.add_document([*range(length), EOD])


def train_samples(words: str, folder: Path) -> GPTDataset:
    config = resolved(f"--vocab-size 257 --eval-interval 0 {words}").config
    world = single_process(torch.device("cpu"))
    opened = open_data(config, world, folder, SilentDisplay())
    train = build_datasets(opened, config, world, TrainState(), folder, SilentDisplay()).train
    assert isinstance(train, GPTDataset)
    return train


@pytest.mark.parametrize("wishes", list(itertools.product((False, True), repeat=3)))
def test_each_flag_reaches_the_samples(tmp_path: Path, wishes: tuple[bool, ...]) -> None:
    write(tmp_path / "x")
    given = " ".join(flag for flag, wish in zip(FLAGS, wishes) if wish)
    words = f"--data-path {tmp_path / 'x'} --split 1 --tokenizer-type ByteTokenizer {given}"
    sample = train_samples(words, tmp_path)[0]
    assert bool(sample["position_ids"].max() < 15) == wishes[0]
    assert (DOCUMENT_STARTS in sample) == wishes[1]
    assert bool(sample["loss_mask"].min() == 0) == wishes[2]


def test_end_of_document_token_comes_from_the_data(tmp_path: Path) -> None:
    words = f"--data-path {tmp_path / 'x'} --split 1 --eod-mask-loss"
    write(tmp_path / "x", TokenizerIdentity("ByteTokenizer", "", 257, EOD))
    assert train_samples(words, tmp_path).boundaries == Boundaries(EOD, mask_loss=True)
    sidecar_path(tmp_path / "x").unlink()
    with pytest.raises(UserError, match=r"the end-of-document token of .* name the tokenizer"):
        train_samples(words, tmp_path)


def test_mock_data_has_ends(tmp_path: Path) -> None:
    samples = train_samples("--mock-data --eod-mask-loss --seq-length 4096", tmp_path)
    assert 0 < sum(int((samples[number]["loss_mask"] == 0).sum()) for number in range(4)) < 100
