"""Settings of the architecture: what each stands for, when it is refused, and when it is told to be idle."""

import pytest

from pentatron.config.draft import Facts
from pentatron.config.model_notices import IDLE_OF_THE_MODEL
from pentatron.config.position_rules import POSITION_RULES
from tests.config.builders import LEAST, about, notices, problems, values

ONE = Facts(1)
ROPE = "--position-embedding-type rope"
LLAMA3 = f"{ROPE} --rope-scaling-type llama3"
LINEAR = f"{ROPE} --rope-scaling-type linear --rope-scaling-factor 2.0"
LENGTH = "--rope-scaling-original-max-position-embeddings 64"
YARN = f"{ROPE} --rope-scaling-type yarn --rope-scaling-factor 4.0 {LENGTH}"
BOTH_SCALES = "--yarn-mscale 1.0 --yarn-mscale-all-dim 0.5"

# name of the rule, words that break it, the sentence, words that keep it
RULES: list[tuple[str, str, str, str]] = [
    ("_rotary", f"{ROPE} --hidden-size 28 --num-attention-heads 4",
     "the rotated part of a head, 7 × 1.0 (--rotary-percent) = 7, must be even; "
     "change --kv-channels or --num-attention-heads",
     f"{ROPE} --hidden-size 32 --num-attention-heads 4"),
    ("_factor", f"{ROPE} --rope-scaling-type linear",
     "--rope-scaling-type linear needs to know how far to stretch; give --rope-scaling-factor", LINEAR),
    ("_factor", f"{ROPE} --rope-scaling-type yarn {LENGTH}",
     "--rope-scaling-type yarn needs to know how far to stretch; give --rope-scaling-factor", YARN),
    ("_first_length", "--position-embedding-type yarn --rope-scaling-factor 4",
     "--rope-scaling-type yarn needs the length the model was first trained on; "
     "give --rope-scaling-original-max-position-embeddings, for example 32768 for Qwen2.5",
     f"--position-embedding-type yarn --rope-scaling-factor 4 {LENGTH}"),
    ("_waves", f"{LLAMA3} --rope-scaling-low-freq-factor 4",
     "--rope-scaling-low-freq-factor 4.0 must be below --rope-scaling-high-freq-factor 4.0: what lies between them is "
     "stretched in part; lower the first or raise the second",
     f"{LLAMA3} --rope-scaling-low-freq-factor 3"),
    ("_turns", f"{YARN} --yarn-beta-slow 32",
     "--yarn-beta-slow 32.0 must be below --yarn-beta-fast 32.0: what lies between them is stretched in part; lower the "
     "first or raise the second",
     f"{YARN} --yarn-beta-slow 2"),
    ("_base", f"{YARN} --rotary-base 1", "--rope-scaling-type yarn needs --rotary-base above 1, not 1.0", YARN),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "bad", "sentence", "good"), RULES, ids=[f"{c[0]}: {c[1]}" for c in RULES])
def test_rule(rule: str, bad: str, sentence: str, good: str) -> None:
    assert problems(bad) == [sentence]
    assert problems(good) == []


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in RULES} == {rule.__name__ for rule in POSITION_RULES}


# setting, words it is idle with, words it acts with
IDLE: list[tuple[str, str, str]] = [
    *(
        (name, words, f"{words} {ROPE}")
        for name, words in (
            ("rotary_base", "--rotary-base 3.0"),
            ("rotary_percent", "--rotary-percent 0.5"),
            ("rotary_interleaved", "--rotary-interleaved"),
            ("rope_scaling_type", "--rope-scaling-type llama3"),
            ("rotary_seq_len_interpolation_factor", "--rotary-seq-len-interpolation-factor 2.0"),
        )
    ),
    *(
        (name, f"{words} {idle}", f"{words} {acting}")
        for name, words, idle, acting in (
            ("rope_scaling_factor", "--rope-scaling-factor 3.0", ROPE, f"{ROPE} --use-rope-scaling"),
            ("rope_scaling_original_max_position_embeddings", LENGTH, LINEAR, LLAMA3),
            ("rope_scaling_low_freq_factor", "--rope-scaling-low-freq-factor 2.0", YARN, LLAMA3),
            ("rope_scaling_high_freq_factor", "--rope-scaling-high-freq-factor 9.0", ROPE, LLAMA3),
            ("yarn_beta_fast", "--yarn-beta-fast 20.0", LLAMA3, YARN),
            ("yarn_beta_slow", "--yarn-beta-slow 2.0", LLAMA3, YARN),
            ("yarn_attention_factor", "--yarn-attention-factor 1.5", LLAMA3, YARN),
            ("yarn_truncate", "--no-yarn-truncate", "", YARN),
            ("yarn_mscale", BOTH_SCALES, f"{YARN} --yarn-attention-factor 2", YARN),
            ("yarn_mscale", "--yarn-mscale 1.0", YARN, f"{YARN} --yarn-mscale-all-dim 1"),
            ("yarn_mscale_all_dim", BOTH_SCALES, LLAMA3, YARN),
        )
    ),
    ("add_qkv_bias", "--add-qkv-bias", "--add-qkv-bias --disable-bias-linear"),
]


@pytest.mark.parametrize(("name", "idle", "acting"), IDLE, ids=[c[0] for c in IDLE])
def test_idle(name: str, idle: str, acting: str) -> None:
    (line,) = about(name, f"{LEAST} {idle}", ONE)
    flag, reason = line.split(": ", 1)
    assert flag in idle and len(reason.split()) >= 4
    assert about(name, f"{LEAST} {acting}", ONE) == []


def test_every_idle_reason_has_a_case() -> None:
    assert set(IDLE_OF_THE_MODEL) == {case[0] for case in IDLE}


def scaling(words: str) -> tuple[object, ...]:
    found = values(words)
    names = "position_embedding_type rope_scaling_type rope_scaling_factor rope_scaling_original_max_position_embeddings"
    return tuple(found[name] for name in names.split())


def test_megatrons_words_for_long_sequences() -> None:
    assert scaling(f"{ROPE} --use-rope-scaling") == ("rope", "llama3", 8.0, 8192)
    assert scaling(f"{ROPE} --use-rope-scaling --rope-scaling-factor 32") == ("rope", "llama3", 32.0, 8192)
    yarn = "--yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64"
    assert scaling(f"--position-embedding-type yarn {yarn}") == ("rope", "yarn", 4.0, 64)
    assert scaling(f"{ROPE} --rotary-seq-len-interpolation-factor 3") == ("rope", "linear", 3.0, None)
    assert scaling(ROPE) == ("rope", None, None, None)
    assert notices(f"--position-embedding-type yarn {yarn}") == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (f"--position-embedding-type yarn --use-rope-scaling {LENGTH}",
         "--position-embedding-type yarn means --rope-scaling-type yarn, but --rope-scaling-type llama3 is given; leave one "
         "of them out"),
        (f"{LINEAR} --rotary-seq-len-interpolation-factor 3",
         "--rotary-seq-len-interpolation-factor 3.0 means --rope-scaling-factor 3.0, but --rope-scaling-factor 2.0 is given; "
         "leave one of them out"),
        (f"{LLAMA3} --rope-scaling-factor 0.5", "--rope-scaling-factor 0.5 must be 1 or more"),
    ],
)  # fmt: skip
def test_contradictions(words: str, sentence: str) -> None:
    assert problems(words) == [sentence]
