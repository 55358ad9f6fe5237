"""Compares the architecture of a loaded model with the given settings."""

from typing import Any

import pytest

from pentatron.errors import ConfigError
from pentatron.settings.loaded_architecture import adopt_architecture
from pentatron.settings.resolve import resolve
from pentatron.settings.settings import Draft, ProcessFacts
from tests.settings.builders import draft, values

SAVED = values("--num-layers 3 --position-embedding-type rope --add-qkv-bias --disable-bias-linear")


def adopted(words: str, **changes: Any) -> Draft:
    found = draft(f"--mock-data --train-iters 10 {words}")
    adopt_architecture(found, ProcessFacts(1), {**SAVED, **changes}, "there", "or load another model")
    return found


def test_no_notice_without_differences() -> None:
    found = adopted(
        "--vocab-size 100 --num-layers 3 --position-embedding-type rope --add-qkv-bias --disable-bias-linear"
    )
    assert not found.notices and not found.wrong and found.source("hidden_size") == "default"


def test_setting_missing_in_the_checkpoint_has_its_default() -> None:
    older = {name: value for name, value in SAVED.items() if name not in ("rotary_base", "num_experts")}
    found = draft("--mock-data --train-iters 10 --rotary-base 5e5")
    adopt_architecture(found, ProcessFacts(1), older, "there", "or load another model")
    assert list(found.wrong) == ["rotary_base"] and found.num_experts is None


def test_a_default_preset_gives_way_but_a_named_one_must_agree() -> None:
    underneath = draft("--train-iters 10")
    adopt_architecture(underneath, ProcessFacts(1), SAVED, "there", "or load another model")
    assert (underneath.num_layers, underneath.normalization) == (
        3,
        "LayerNorm",
    ) and not underneath.wrong
    assert "num_layers" in adopted("--preset demo").wrong


def test_code_is_never_taken_from_a_file() -> None:
    found = adopted("", spec=["layers", "mine"])
    assert found.spec == ()
    assert (
        found.wrong["spec"]
        == "there was trained with --spec layers mine; give that flag again, because code is never loaded from files"
    )
    assert not adopted("--spec layers mine", spec=["layers", "mine"]).wrong
    assert "spec" in adopted("--spec layers other", spec=["layers", "mine"]).wrong


def test_a_tokenizer_may_have_fewer_ids_than_the_model_but_not_more() -> None:
    for ids, wrong in ((90, []), (101, ["tokenizer_model"])):
        found = draft("--mock-data --train-iters 10 --tokenizer-model some.json")
        found.derive("tokenizer some.json", vocab_size=ids)
        adopt_architecture(found, ProcessFacts(1), SAVED, "there", "or load another model")
        assert list(found.wrong) == wrong and found.vocab_size == 100
    assert found.wrong["tokenizer_model"].startswith(
        "tokenizer some.json has 101 ids, but the model of there has 100;"
    )


def test_learned_positions_cannot_be_made_more() -> None:
    """Refuses a sequence that is longer than the learned positions; RoPE has no such limit."""
    for kind in ("learned_absolute", "rope"):
        found = adopted("--seq-length 128", position_embedding_type=kind, max_position_embeddings=64)
        assert ("seq_length" in found.wrong) == (kind == "learned_absolute")
    found = adopted(
        "--vocab-size 100 --seq-length 128",
        position_embedding_type="learned_absolute",
        max_position_embeddings=64,
    )
    with pytest.raises(ConfigError) as error:
        resolve(found, ProcessFacts(1))
    assert error.value.problems == [
        "--seq-length 128 is longer than the 64 learned positions of there; give a shorter one, or load another model"
    ]
