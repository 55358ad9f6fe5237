"""Tests data prefixes, weights and splits, which mean the same in flags and files."""

import json
from pathlib import Path

import pytest

from pentatron.settings.data_paths import Blend
from pentatron.settings.entry_points import TRAIN
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.settings import ProcessFacts
from pentatron.settings.training import DataConfig

LEAST = "--vocab-size 100 --train-iters 3"
EXAMPLE = "0.7 dataset1_text_document 0.2 dataset2_text_document 0.1 dataset3_text_document"


def data_of(words: str) -> DataConfig:
    return resolve(gather(f"{LEAST} {words}".split(), TRAIN), ProcessFacts(1)).config.data


def problem_of(words: str) -> str:
    with pytest.raises(ValueError) as caught:
        data_of(words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        ("a", "a", None),
        ("a b", "a b", None),
        ("a b c", "a b c", None),
        ("1 a 2 b", "a b", (1.0, 2.0)),
        ("30 a", "a", (30.0,)),
        # An odd number of words is a list of prefixes, even if some look like numbers.
        ("1 a 2", "1 a 2", None),
        (EXAMPLE, "dataset1_text_document dataset2_text_document dataset3_text_document", (0.7, 0.2, 0.1)),
    ],
)
def test_words(words: str, prefixes: str, weights: tuple[float, ...] | None) -> None:
    assert Blend.parse(words.split()) == Blend(tuple(prefixes.split()), weights)
    assert Blend.parse(data_of(f"--data-path {words}").data_path) == Blend.parse(words.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("1 a b c", "mixes prefixes with and without weights ('b' is not a weight"),
        ("1 a nan b", "the weight nan must be more than 0"),
        ("1 a -2 b", "the weight -2 must be more than 0"),
        ("1 a inf b", "the weight inf must be more than 0"),
    ],
)
def test_words_that_mean_nothing_are_refused(words: str, sentence: str) -> None:
    assert sentence in problem_of(f"--data-path {words}")


def test_a_file_of_words(tmp_path: Path) -> None:
    (tmp_path / "args").write_text("0.7 a\n  0.3\tb\n")
    data = data_of(f"--data-args-path {tmp_path / 'args'}")
    assert data.data_path == ("0.7", "a", "0.3", "b")
    # A saved configuration has both flags, which is accepted if the data is the same.
    assert data_of(f"--data-args-path {tmp_path / 'args'} --data-path 0.7 a 0.3 b") == data
    assert "name different data; choose one" in problem_of(
        f"--data-args-path {tmp_path / 'args'} --data-path c"
    )


def test_a_file_of_splits(tmp_path: Path) -> None:
    path = tmp_path / "splits.json"
    path.write_text(json.dumps({"train": ["1", "a", "2", "b"], "valid": "c d", "test": None}))
    data = data_of(f"--per-split-data-args-path {path}")
    assert (data.train_data_path, data.valid_data_path) == (("1", "a", "2", "b"), ("c", "d"))
    assert data == data_of(
        f"--train-data-path 1 a 2 b --valid-data-path c d --per-split-data-args-path {path}"
    )
    path.write_text('{"train": "a", "validation": "b"}')
    assert "must hold the keys train, valid and test" in problem_of(f"--per-split-data-args-path {path}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {weight: 0.7, path: a}\n- {weight: 0.3, path: b}\n", "--data-path 0.7 a 0.3 b"),
        ("- a\n- b\n", "--data-path a b"),
        ("0.7 a 0.3 b", "--data-path 0.7 a 0.3 b"),
        (
            "train:\n- weight: 2\n  path: a\n- weight: 1\n  path: b\nvalid:\n- path: c\n",
            "--train-data-path 2 a 1 b --valid-data-path c",
        ),
    ],
)
def test_a_blend_in_yaml(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "data_blend.yaml"
    path.write_text(text)
    written, named = data_of(f"--data-path-config {path}"), data_of(words)
    for split in ("data_path", "train_data_path", "valid_data_path"):
        assert getattr(written, split) == getattr(named, split)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is not YAML"),
        ("a: b", "must be a list of prefixes"),
        ("- {weight: 1}", "is not an entry"),
        ("- {weight: 1, path: a}\n- {path: b}", "mixes entries with and without a weight"),
        ("", "must be a list of prefixes"),
        ("[]", "names no data"),
        (None, "does not exist; check the path"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "data_blend.yaml"
    if text is not None:
        path.write_text(text)
    problem = problem_of(f"--data-path-config {path}")
    assert sentence in problem and str(path) in problem


def test_given_data_files_replace_the_demo(tmp_path: Path) -> None:
    (tmp_path / "args").write_text("a")
    draft = gather(["--data-args-path", str(tmp_path / "args")], TRAIN)
    assert draft.preset is None and draft.data_path == ("a",)
