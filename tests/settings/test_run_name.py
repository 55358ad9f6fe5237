"""Tests the default name of a run folder."""

import pytest

from pentatron.settings.entry_points import PRETRAIN_GPT, TRAIN
from pentatron.settings.resolve import gather


def folder(words: str) -> str:
    found: str = gather(words.split(), TRAIN).run_dir
    return found


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "demo"),
        ("--hidden-size 64", "demo"),
        ("--load models/Qwen3-0.6B --sft --data-path my/chats.jsonl", "qwen3-0.6b-chats"),
        ("--load Qwen/Qwen3-0.6B --data-path d/wiki_text_document", "qwen3-0.6b-wiki"),
        (
            f"--load /c/models--Qwen--Qwen3-0.6B/snapshots/{'a' * 40} --data-path d/wiki_text_document",
            "qwen3-0.6b-wiki",
        ),
        ("--load runs/a/checkpoints/step-00000004 --data-path b", "a-b"),
        ("--load runs/a/checkpoints --mock-data", "a-mock"),
        ("--preset llama3-8b --data-path 0.3 x/one 0.7 two", "llama3-8b-one-and-1-more"),
        ("--num-layers 2 --hidden-size 64 --dataset-size 8", "2l-64h-synthetic"),
        ("--num-layers 2 --hidden-size 64 --num-experts 4 --train-data-path a/b", "2l-64h-4e-b"),
    ],
)
def test_a_run_is_named_after_its_model_and_data(words: str, name: str) -> None:
    assert folder(words) == folder(words) == f"runs/{name}"


def test_a_name_is_one_short_word() -> None:
    name = folder(f"--load /m/..$(rm)--{'x' * 90}/checkpoints --data-path a;b&c").removeprefix("runs/")
    assert name.startswith("rm-xxx") and name.endswith("-a-b-c") and len(name) < 90
    assert not set(name) & set("/$();& ")


def test_a_script_keeps_its_own_folder() -> None:
    assert gather("--mock-data --hidden-size 64".split(), PRETRAIN_GPT).run_dir == "runs/pretrain_gpt"
