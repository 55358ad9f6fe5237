"""Tests the treatment of document boundaries inside samples."""

import itertools
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from pentatron.data.gpt_dataset import next_token_sample
from pentatron.data.loader import Batch, build_loader, collate
from pentatron.data.sample_index import DOCUMENT_STARTS, Boundaries

EOD = 9
TOKENS = np.array([1, EOD, EOD, 4, 5, 6, EOD, 8, EOD])
WISHES = list(itertools.product((False, True), repeat=3))


def test_each_wish_by_itself() -> None:
    """Boundaries follow end tokens in the inputs, not the labels; an end token ends its own document."""
    plain = next_token_sample(TOKENS)
    positions = next_token_sample(TOKENS, Boundaries(EOD, reset_positions=True))
    attention = next_token_sample(TOKENS, Boundaries(EOD, reset_attention=True))
    loss = next_token_sample(TOKENS, Boundaries(EOD, mask_loss=True))
    assert positions["position_ids"].tolist() == [0, 1, 0, 0, 1, 2, 3, 0]
    assert loss["loss_mask"].tolist() == [1, 0, 0, 1, 1, 1, 0, 1]
    assert attention[DOCUMENT_STARTS].tolist() == [0, 2, 3, 7]
    for changed, name in ((positions, "position_ids"), (loss, "loss_mask"), (attention, DOCUMENT_STARTS)):
        others = {key: value.tolist() for key, value in changed.items() if key != name}
        assert others == {key: value.tolist() for key, value in plain.items() if key != name}


@pytest.mark.parametrize(
    ("tokens", "starts"),
    [([1, 2, 3, EOD], [0]), ([EOD, 1, 2, 3], [0, 1]), ([1, 2, EOD, 3], [0]), ([EOD] * 4, [0, 1, 2])],
)
def test_an_end_at_the_end_begins_nothing(tokens: list[int], starts: list[int]) -> None:
    sample = next_token_sample(np.array(tokens), Boundaries(EOD, True, True, True))
    assert sample[DOCUMENT_STARTS].tolist() == starts


def test_samples_drawn_at_random_agree_with_megatron_core() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs: Any = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    draw = random.Random(5)
    for case in range(200):
        tokens = np.array(
            [draw.randint(EOD - draw.choice((1, 3, 9)), EOD) for _ in range(draw.randint(3, 40))]
        )
        wishes = WISHES[case % len(WISHES)]
        sample = next_token_sample(tokens, Boundaries(EOD, *wishes))
        masked, loss_mask, position_ids = theirs._get_ltor_masks_and_position_ids(
            torch.from_numpy(sample["tokens"]), EOD, *wishes, True
        )
        assert sample["loss_mask"].tolist() == loss_mask.tolist()
        assert sample["position_ids"].tolist() == position_ids.tolist()
        place = np.arange(len(tokens) - 1)
        document = np.searchsorted(sample.get(DOCUMENT_STARTS, np.array([0])), place, side="right")
        seen = (place[:, None] >= place) & (document[:, None] == document)
        assert np.array_equal(seen, ~masked[0].numpy())


def test_a_batch_keeps_documents_whole_and_on_the_host() -> None:
    samples = [next_token_sample(np.roll(TOKENS, by), Boundaries(EOD, reset_attention=True)) for by in (0, 1)]
    for workers in (0, 1):
        batch = next(iter(build_loader(samples, 0, 2, 0, 1, num_workers=workers)))
        assert batch.documents == ((0, 2, 3, 7), (0, 1, 3, 4))
    assert collate([next_token_sample(TOKENS), samples[1]]).documents == ((0,), (0, 1, 3, 4))
    half = batch.to("meta").map(lambda tensor: tensor[:, :4])
    assert half.tokens.shape == (2, 4) and half.documents == batch.documents
    assert Batch(batch.tokens, batch.labels, batch.loss_mask, batch.position_ids).documents is None
