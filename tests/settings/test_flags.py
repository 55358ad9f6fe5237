"""Parses flags: dashes or underscores, blank or `=`, and all mistakes at once with suggestions."""

import pytest

from pentatron.errors import ConfigError
from pentatron.settings.command_line import did_you_mean, is_flag, normalize_flag, parse_flags
from pentatron.settings.entry_points import EXAMPLE, PARALLEL_3D, PRETRAIN_GPT, TRAIN, EntryPoint
from pentatron.settings.settings import Assigned


def parsed(words: str, entry: EntryPoint = TRAIN) -> dict[str, object]:
    return {name: assigned.value for name, assigned in parse_flags(words.split(), entry).values.items()}


def complaints(words: str | list[str], entry: EntryPoint = TRAIN) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_flags(words.split() if isinstance(words, str) else words, entry)
    return error.value.problems


@pytest.mark.parametrize(
    "words",
    [
        "--num-layers 3",
        "--num_layers 3",
        "--num-layers=3",
        "--num_layers=3",
        "--num-layers 3.0",
        "--NUM-LAYERS 3",
    ],
)
def test_every_way_to_write_a_flag(words: str) -> None:
    assert parsed(words) == {"num_layers": 3}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--bf16", True),
        ("--no-bf16", False),
        ("--bf16=true", True),
        ("--bf16=off", False),
        ("--no-bf16=true", False),
        ("--no_bf16=0", True),
        ("--bf16 true", True),
        ("--bf16 FALSE", False),
        ("--bf16 --no-bf16", False),
    ],
)
def test_switches(words: str, value: bool) -> None:
    assert parsed(words) == {"bf16": value}


def test_a_switch_does_not_swallow_a_flag() -> None:
    assert parsed("--bf16 --lr 1 --mock-data") == {"bf16": True, "lr": 1.0, "mock_data": True}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--lr 1e-5", {"lr": 1e-5}),
        ("--lr .5", {"lr": 0.5}),
        ("--min-lr -1", {"min_lr": -1.0}),
        ("--lr -1e-3 --bf16", {"lr": -1e-3, "bf16": True}),
        ("--train-iters 1e4", {"train_iters": 10000}),
        ("--train-iters 20_000", {"train_iters": 20000}),
        ("--seed 12345678901234567890", {"seed": 12345678901234567890}),
        ("--keep-checkpoints none", {"keep_checkpoints": None}),
        ("--keep-checkpoints=None", {"keep_checkpoints": None}),
        ("--position-embedding-type none", {"position_embedding_type": "none"}),
        ("--data-path a b c --lr 1", {"data_path": ("a", "b", "c"), "lr": 1.0}),
        ("--data-path -1 a", {"data_path": ("-1", "a")}),
        ("--rampup-batch-size 16 16 100", {"rampup_batch_size": (16, 16, 100)}),
    ],
)
def test_values(words: str, expected: dict[str, object]) -> None:
    assert parsed(words) == expected


def test_a_quoted_list_after_an_equals_sign() -> None:
    assert parse_flags(["--data-path=0.7 a 0.3 b"], TRAIN).values["data_path"].value == (
        "0.7",
        "a",
        "0.3",
        "b",
    )


def test_a_value_keeps_its_blanks_and_equals_signs() -> None:
    values = parse_flags(["--sample-prompt", "x = 1", "--run-dir=a=b"], TRAIN).values
    assert values["sample_prompt"].value == "x = 1"
    assert values["run_dir"].value == "a=b"


def test_the_source_is_the_flag_as_typed() -> None:
    assert parse_flags(["--tp_size=2"], TRAIN).values == {
        "tensor_model_parallel_size": Assigned(2, "flag --tp_size")
    }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--num-layers x", "--num-layers must be a whole number, not 'x'"),
        ("--num_layers 2.5", "--num_layers must be a whole number, not '2.5'"),
        ("--num-layers true", "--num-layers must be a whole number, not 'true'"),
        ("--num-layers inf", "--num-layers must be a whole number, not 'inf'"),
        ("--lr fast", "--lr must be a number, not 'fast'"),
        ("--lr nan", "--lr must be a number, not 'nan'"),
        ("--lr=inf", "--lr must be a number, not 'inf'"),
        ("--lr=", "--lr needs a value"),
        ("--lr", "--lr needs a value"),
        ("--lr --bf16", "--lr needs a value"),
        ("--data-path --bf16", "--data-path needs a value"),
        ("--bf16=maybe", "--bf16 must be true or false, not 'maybe'"),
        ("--use-distributed-optimizer=2", "--use-distributed-optimizer takes no value"),
        ("--normalization rms", "--normalization must be one of LayerNorm, RMSNorm, not 'rms'"),
        ("--corpus c", "--corpus must be python, not 'c'"),
        ("--zero-stage 4", "--zero-stage must be one of 0, 1, 2, 3, not '4'"),
        ("--recompute-modules core_attn mlpp",
         "--recompute-modules must be one of core_attn, moe_act, layernorm, mlp, moe, shared_experts, not 'mlpp'"),
        ("train", "'train' is not a flag; write --name value (a value with spaces needs quotes)"),
        ("llama3-8b", "'llama3-8b' is not a flag; write --preset llama3-8b"),
        ("lr=3", "'lr=3' is not a flag; write --lr=3"),
        ("\u2014lr 3", "'\u2014lr' begins with the Unicode dash U+2014 instead of '-'; write --lr"),
        ("\u2013-lr 3", "'\u2013-lr' begins with the Unicode dash U+2013 instead of '-'; write --lr"),
        ("--lr 1 2", "'2' is not a flag; write --name value (a value with spaces needs quotes)"),
        ("--sample-prompt -x", "--sample-prompt needs a value; a value that starts with '-' is written --sample-prompt=-x"),
    ],
)  # fmt: skip
def test_wrong_values(words: str, sentence: str) -> None:
    assert sentence in complaints(words)


def test_an_empty_word_is_no_value() -> None:
    assert complaints(["--save", ""]) == ["--save needs a value"]
    assert complaints([""]) == ["'' is not a flag; write --name value (a value with spaces needs quotes)"]


def test_typographic_dash_is_one_complaint() -> None:
    assert len(complaints("\u2014lr 3")) == 1


@pytest.mark.parametrize(
    ("flag", "guess"),
    [
        ("--num-layer", "--num-layers"),
        ("--nun_layers", "--num-layers"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--learning-rat", "--learning-rate"),
        ("--tp-siz", "--tp-size"),
        ("--heads", "--num-attention-heads"),
        ("--micro-batchsize=3", "--micro-batch-size"),
    ],
)
def test_a_typo_gets_a_suggestion(flag: str, guess: str) -> None:
    typed = flag.split("=")[0]
    assert complaints(f"{flag} 3") == [
        f"unknown flag {typed} (did you mean {guess}?); pentatron train --help lists them all"
    ]


def test_a_word_unlike_any_flag_gets_no_suggestion() -> None:
    assert complaints("--zzz 3 4", EXAMPLE) == [
        "unknown flag --zzz; megatron_core_training_example.py --help lists them all"
    ]


def test_all_mistakes_are_reported_at_once() -> None:
    assert len(complaints("--num-layer 3 --lr x --bf16 stray --seed 1.5")) == 4


def test_several_problems_are_numbered() -> None:
    with pytest.raises(ConfigError) as error:
        parse_flags("--lr x --seed y".split(), TRAIN)
    assert str(error.value) == (
        "2 problems in the configuration:\n  1. --lr must be a number, not 'x'\n  2. --seed must be a whole number, not 'y'"
    )
    assert str(ConfigError(["one thing"])) == "one thing"


def test_the_last_of_two_wins_and_says_so() -> None:
    found = parse_flags("--lr 1 --learning_rate=2 --bf16 --bf16".split(), TRAIN)
    assert found.values["lr"] == Assigned(2.0, "flag --learning_rate")
    assert found.notices == ["--lr 1.0 has no effect: the later --learning_rate 2.0 replaces it"]


def test_batch_size_depends_on_the_entry_point() -> None:
    assert parsed("--batch-size 16", EXAMPLE) == {"global_batch_size": 16}
    assert parsed("--batch_size 16", PARALLEL_3D) == {"rank_batch_size": 16}
    assert complaints("--batch-size 16", TRAIN) == [
        "--batch-size is ambiguous here: use --micro-batch-size (samples per micro-batch) or "
        "--global-batch-size instead"
    ]
    assert complaints("--batch_size=16", PRETRAIN_GPT) == [
        "--batch_size is ambiguous here: use --micro-batch-size or --global-batch-size instead, as in Megatron"
    ]


@pytest.mark.parametrize(
    ("word", "flag"),
    [("--x", True), ("-x", True), ("--", True), ("-", False), ("-1", False), ("-1e-3", False), ("-.5", False), ("x", False)],
)  # fmt: skip
def test_is_flag(word: str, flag: bool) -> None:
    assert is_flag(word) is flag


def test_small_helpers() -> None:
    assert normalize_flag("--Tp_size=a-b=C") == "tp-size"
    assert did_you_mean("trian", ["train", "config"]) == " (did you mean train?)"
    assert did_you_mean("heads", ["num_attention_heads", "other"]) == " (did you mean num_attention_heads?)"
    assert did_you_mean("xyz", ["train", "config"]) == ""
