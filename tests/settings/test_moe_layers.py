"""Parses `--moe-layer-freq`, which selects the layers with experts."""

import pytest

from pentatron.settings.model import moe_layers
from pentatron.settings.model_sizes import costs_of
from tests.settings.builders import resolved


@pytest.mark.parametrize(
    ("written", "layers", "expected"),
    [
        ("1", 3, "111"),
        ("2", 5, "10101"),
        ("9", 4, "1000"),
        (" 2 ", 2, "10"),
        ("[0,1,1]", 3, "011"),
        ("[1,0]*2", 4, "1010"),
        ("[0]*1+[1]*3", 4, "0111"),
        ("([0]+[1])*2", 4, "0101"),
        ("[1]*2+[0]*0", 2, "11"),
    ],
)
def test_written(written: str, layers: int, expected: str) -> None:
    assert moe_layers(written, layers) == tuple(mark == "1" for mark in expected)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("0", "--moe-layer-freq 0 leaves no layer with experts; use 1 or more"),
        *(
            (
                written,
                f"--moe-layer-freq {written} is neither a number nor a list of 0 and 1 such as [0]*1+[1]*26",
            )
            for written in (
                "often",
                "-1",
                "1.5",
                "",
                "[0",
                "[2]*4",
                "[-1]*4",
                "[True]*4",
                "['1']*4",
                "[[1]]*4",
                "4*[1]",
                "[1]-[0]",
                "[1]*[4]",
                "[1]+1",
                "[1]*9**9",
                "(1,1,1,1)",
                "[1 for x in y]",
                "__import__('os')",
            )
        ),
        ("[1]*5", "--moe-layer-freq [1]*5 names 5 layers, but --num-layers is 4; use 4 entries"),
        ("[]", "--moe-layer-freq [] names 0 layers, but --num-layers is 4; use 4 entries"),
        ("[0]*4", "--moe-layer-freq [0]*4 leaves no layer with experts; use 1 for layers with experts"),
        (
            "[1]*10000*10000*10000",
            "--moe-layer-freq [1]*10000*10000*10000 names more than 10000 layers, but --num-layers is 4; use 4 entries",
        ),
    ],
)
def test_invalid_moe_layer_freq_is_refused(written: str, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        moe_layers(written, 4)
    assert str(error.value) == sentence


def test_layers_of_a_configuration() -> None:
    words = "--num-layers 4 --num-experts 4 --moe-layer-freq"
    assert resolved(f"{words} 2").config.layers_with_experts == (0, 2)
    assert resolved(f"{words} [0]+[1]*3").config.layers_with_experts == (1, 2, 3)
    assert resolved("--num-layers 4").config.layers_with_experts == ()


def test_stages_are_divided_by_cost_per_token() -> None:
    """Counts only the experts that a token uses.

    Two experts of 100 and a shared one of 50 in half of the layers, and an MLP of 1000 in the others, cost as
    much as an MLP of 625 in all layers.
    """
    experts = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 100 --moe-shared-expert-intermediate-size 50"
    words = f"--num-layers 4 --hidden-size 64 --ffn-hidden-size 1000 {experts} --moe-layer-freq 2"
    mixed = costs_of(resolved(words).config.settings).layer
    plain = costs_of(resolved("--num-layers 4 --hidden-size 64 --ffn-hidden-size 625").config.settings).layer
    assert mixed == plain
