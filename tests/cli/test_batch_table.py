"""Tables of changing batch sizes in `pentatron config` and `pentatron layout`."""

import json

import pytest

from pentatron.cli.main import main

RAMP = "--global-batch-size 1536 --rampup-batch-size 16 16 5859375 --seq-length 2048"


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words.split()) == 0
    return capsys.readouterr().out


def test_the_sizes_of_the_175b_script(capsys: pytest.CaptureFixture[str]) -> None:
    least = "config --mock-data --vocab-size 100 --micro-batch-size 1"
    text = shown(f"{least} {RAMP} --train-iters 500000", capsys)
    table = text[text.index("  iteration") :].splitlines()
    assert [line.split() for line in table[:4]] == [
        ["iteration", "samples", "batch", "size", "micro-batches"],
        ["0", "0", "16", "16"],
        ["3855", "61680", "32", "32"],
        ["5783", "123376", "48", "48"],
    ]
    assert "        ...  88 more sizes" in table
    assert any(line.split() == ["19802", "5859424", "1536", "1536"] for line in table)
    # A run that ends within the ramp-up has fewer rows, and one without a ramp-up no table.
    assert "more sizes" not in shown(f"{least} {RAMP} --train-iters 8000", capsys)
    assert "batch size" not in shown(f"{least} --train-iters 8", capsys)


def test_a_size_that_does_not_fit_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"layout --data-parallel-size 12 --micro-batch-size 4 {RAMP}"
    text = shown(words, capsys)
    assert (
        "16  does not fit: 16 is not divisible by micro batch size (4) times data parallel size (12) = 48"
        in text
    )
    sizes = json.loads(shown(f"{words} --json", capsys))["schedule"]["batch_sizes"]
    assert [s["micro_batches"] for s in sizes[:4]] == [None, None, 1, None] and len(sizes) == 96
