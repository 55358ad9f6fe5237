"""Tests the sample order against megatron-core: random splits, seeds, lengths, epochs and blends."""

import gc
import random
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from pentatron.data.blending import BlendedDataset, BlendMember, SampleRecipe, build_blend
from pentatron.data.gpt_dataset import GPTDataset, mock_sequences, split_documents
from pentatron.data.indexed import IndexedDataset
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.data.sample_index import parse_split, split_ranges

with warnings.catch_warnings():
    # megatron-core warns on import about missing kernels.
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.datasets.helpers_cpp")
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset as TheirDataset
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset

gc.freeze()
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
VOCABULARY = 1000
TOKENIZER = SimpleNamespace(
    vocab_size=VOCABULARY,
    eod=VOCABULARY - 1,
    pad=VOCABULARY,
    unique_identifiers={"kind": "none"},
    special_tokens_dict={},
)
NO_SIZE = [None, None, None]


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    # Index files are not synced either: no case reads them again.
    with mock.patch("gc.collect"), mock.patch("numpy.save"):
        yield


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Writes five corpora of many or few, short or long documents."""
    folder = tmp_path_factory.mktemp("corpora")
    draw = np.random.default_rng(3)
    for number, (count, longest) in enumerate([(300, 20), (40, 300), (12, 60), (150, 90), (7, 30)]):
        with IndexedDatasetWriter(folder / f"c{number}", "uint16") as writer:
            for _ in range(count):
                writer.add_document(draw.integers(0, VOCABULARY - 1, size=draw.integers(1, longest)))
    return [str(folder / f"c{number}") for number in range(5)]


def theirs(
    sizes: list[int | None], seed: int, length: int, kind: Any = TheirDataset, **blend: Any
) -> list[Any]:
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=length,
        tokenizer=TOKENIZER,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **blend,
    )
    built: list[Any] = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    return built


def check(ours: GPTDataset | BlendedDataset, other: Any, draw: random.Random) -> None:
    if isinstance(ours, BlendedDataset):
        size = len(other)
        assert np.array_equal(ours.order[:size], other.dataset_index)
        assert np.array_equal(ours.places[:size], other.dataset_sample_index)
        pairs = list(zip(ours.datasets, other.datasets, strict=True))
    else:
        size = len(other)
        assert len(ours) == size
        pairs = [(ours, other)]
    for own, foreign in pairs:
        assert np.array_equal(own.parts[0].documents, foreign.document_index)
        assert np.array_equal(own.parts[0].starts, foreign.sample_index)
        assert np.array_equal(own.parts[0].shuffle, foreign.shuffle_index)
    for i in draw.sample(range(size), min(4, size)):
        found, expected = ours[i], other[i]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert np.array_equal(found[name], expected[name].numpy()), (i, name)


def random_blend(draw: random.Random, corpora: list[str]) -> tuple[list[str], list[float] | None]:
    prefixes = draw.choices(corpora, k=draw.randint(1, 4))
    if draw.random() < 0.4:
        return prefixes, None
    return prefixes, [
        draw.choice([1, 0.5, 30, draw.random() + 0.01, draw.random() ** 4 + 0.01]) for _ in prefixes
    ]


def members(prefixes: list[str], split: str | None, which: int) -> list[BlendMember] | None:
    found = []
    for prefix in prefixes:
        source = IndexedDataset(prefix)
        documents = range(len(source)) if split is None else split_documents(source, split)[which]
        if documents is None or len(documents) < 3:
            return None
        found.append(BlendMember(source, documents))
    return found


def test_blends_of_all_splits(corpora: list[str]) -> None:
    """Two hundred random cases, most of which need several epochs."""
    draw, checked = random.Random(1), dict.fromkeys(("one", "weights", "lengths", "refused there"), 0)
    for case in range(200):
        prefixes, weights = random_blend(draw, corpora)
        if case % 3 == 0:
            prefixes, weights = prefixes[:1], None
        split = f"{draw.choice(['70,20,10', '1,1', '8,1,1', f'{draw.random()},{draw.random()},0.3', '1'])}"
        length, seed = draw.randint(2, 40), draw.randrange(2**32)
        which, number = draw.randrange(2), draw.randint(1, draw.choice([20, 200, 2000]))
        chosen = members(prefixes, split, which)
        if chosen is None:
            continue
        ours = build_blend(chosen, weights, [number], SampleRecipe(length, seed))
        # megatron-core also builds the other splits, which fails if they are too small.
        with mock.patch.object(GPTDatasetConfig, "__post_init__", _only(which)):
            try:
                other = theirs([number] * 3, seed, length, blend=(prefixes, weights), split=split)[which]
            except IndexError as error:
                assert "oversamples" in str(error)
                assert ours[len(ours) - 1]["tokens"].shape == (length,)
                checked["refused there"] += 1
                continue
        check(ours, other, draw)
        kind = "one" if isinstance(ours, GPTDataset) else "weights" if weights else "lengths"
        checked[kind] += 1
    assert min(checked["one"], checked["weights"], checked["lengths"]) >= 25, checked


def _only(which: int) -> Any:
    """Returns megatron-core's configuration with one split and the same documents."""
    complete = GPTDatasetConfig.__post_init__

    def restricted(config: Any) -> None:
        complete(config)
        config.split_matrix = [span if at == which else None for at, span in enumerate(config.split_matrix)]

    return restricted


def test_blends_of_each_split(corpora: list[str]) -> None:
    draw, checked = random.Random(2), 0
    for _ in range(60):
        length, seed, number = draw.randint(2, 40), draw.randrange(2**32), draw.randint(1, 500)
        blends = [random_blend(draw, corpora), random_blend(draw, corpora), None]
        try:
            built = theirs([number, number // 3 + 1, 0], seed, length, blend_per_split=blends)
        except IndexError:
            continue
        for blend, other, size in zip(blends, built, (number, number // 3 + 1), strict=False):
            assert blend is not None
            prefixes, weights = blend
            chosen = members(prefixes, None, 0)
            assert chosen is not None
            ours = build_blend(
                chosen, weights if len(prefixes) > 1 else None, [size], SampleRecipe(length, seed)
            )
            check(ours, other, draw)
            checked += 1
    assert checked >= 60


def test_every_sample_once(corpora: list[str]) -> None:
    draw = random.Random(4)
    for _ in range(20):
        prefixes, length, seed = (
            draw.sample(corpora, draw.randint(1, 5)),
            draw.randint(2, 30),
            draw.randrange(99),
        )
        other = theirs(NO_SIZE, seed, length, blend=(prefixes, None), split="1")[0]
        chosen = members(prefixes, "1", 0)
        assert chosen is not None
        check(build_blend(chosen, None, None, SampleRecipe(length, seed)), other, draw)


def test_mock_data() -> None:
    other = theirs([300, 40, 0], 5, 512, kind=MockGPTDataset)
    source = mock_sequences(VOCABULARY)
    for which, number in ((0, 300), (1, 40)):
        documents = split_ranges(parse_split("1,1,1"), len(source))[which]
        assert documents is not None
        ours = build_blend([BlendMember(source, documents)], None, [number], SampleRecipe(512, 5))
        check(ours, other[which], random.Random(which))


def test_splits_end_at_the_same_documents() -> None:
    draw = random.Random(6)
    for _ in range(300):
        text = ",".join(
            str(draw.choice([draw.randint(0, 999), draw.random()])) for _ in range(draw.randint(1, 3))
        )
        try:
            shares = parse_split(text)
        except ValueError:
            continue
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
        count = draw.randint(1, 10**6)
        expected = [
            None if span is None else range(round(span[0] * float(count)), round(span[1] * float(count)))
            for span in matrix
        ]
        assert list(split_ranges(shares, count)) == expected, text
