"""Tests settings of the architecture: meanings, refusals, and notices without effect."""

import pytest

from pentatron.settings.layer_patterns import window_of_layer, windowed_layers
from pentatron.settings.model_rules import POSITION_RULES
from pentatron.settings.settings import ProcessFacts
from tests.settings.builders import LEAST, about, notices, problems, values

ONE = ProcessFacts(1)
ROPE = "--position-embedding-type rope"
LLAMA3 = f"{ROPE} --rope-scaling-type llama3"
LINEAR = f"{ROPE} --rope-scaling-type linear --rope-scaling-factor 2.0"
LENGTH = "--rope-scaling-original-max-position-embeddings 64"
YARN = f"{ROPE} --rope-scaling-type yarn --rope-scaling-factor 4.0 {LENGTH}"
BOTH_SCALES = "--yarn-mscale 1.0 --yarn-mscale-all-dim 0.5"

# name of the rule, words that break it, the sentence, words that keep it
RULES: list[tuple[str, str, str, str]] = [
    ("rotary", f"{ROPE} --hidden-size 28 --num-attention-heads 4",
     "the rotated part of a head, 7 × 1.0 (--rotary-percent) = 7, must be even; "
     "change --kv-channels or --num-attention-heads",
     f"{ROPE} --hidden-size 32 --num-attention-heads 4"),
    ("factor", f"{ROPE} --rope-scaling-type linear",
     "--rope-scaling-type linear needs a factor; give --rope-scaling-factor", LINEAR),
    ("factor", f"{ROPE} --rope-scaling-type yarn {LENGTH}",
     "--rope-scaling-type yarn needs a factor; give --rope-scaling-factor", YARN),
    ("yarn_original_length", "--position-embedding-type yarn --rope-scaling-factor 4",
     "--rope-scaling-type yarn needs the sequence length of pretraining; give --rope-scaling-original-max-position-embeddings, for example 32768 for Qwen2.5",
     f"--position-embedding-type yarn --rope-scaling-factor 4 {LENGTH}"),
    ("llama3_wavelengths", f"{LLAMA3} --rope-scaling-low-freq-factor 4",
     "--rope-scaling-low-freq-factor 4.0 must be below --rope-scaling-high-freq-factor 4.0: wavelengths between them "
     "are scaled in part; lower the first or raise the second",
     f"{LLAMA3} --rope-scaling-low-freq-factor 3"),
    ("yarn_rotations", f"{YARN} --yarn-beta-slow 32",
     "--yarn-beta-slow 32.0 must be below --yarn-beta-fast 32.0: channel pairs between them are "
     "scaled in part; lower the first or raise the second",
     f"{YARN} --yarn-beta-slow 2"),
    *(("window", f"--window-size {wrong}",
       f"--window-size {wrong} must be LEFT,0, for example 4095,0: a token attends to this many tokens before it, and to none after it",
       "--window-size 4,0") for wrong in ("4,1", "4", "4,0,0")),
    ("layers_with_windows", "--num-layers 3 --window-size 4,0 --window-attn-skip-freq [1,0]",
     "--window-attn-skip-freq [1,0] names 2 layers, but --num-layers is 3; use 3 entries",
     "--num-layers 3 --window-size 4,0 --window-attn-skip-freq [1,0]+[1]"),
    ("layers_with_windows", "--window-size 4,0 --window-attn-skip-freq 0",
     "--window-attn-skip-freq 0 is not a distance between layers; use 1 or more",
     "--window-size 4,0 --window-attn-skip-freq 2"),
    ("layers_with_windows", "--window-size 4,0 --window-attn-skip-freq some",
     "--window-attn-skip-freq some is neither a number nor a list of 0 and 1 such as [1,1,0]",
     "--window-attn-skip-freq some"),
    ("window_dropout", "--window-size 4,0 --attention-backend flash --attention-dropout 0.1",
     "--attention-backend flash does not support dropout with a window; use --attention-backend auto, or "
     "--attention-dropout 0",
     "--window-size 4,0 --attention-dropout 0.1"),
    ("deterministic_attention", "--deterministic-mode --attention-backend cudnn",
     "--deterministic-mode: the backward of cuDNN's attention is nondeterministic; use --attention-backend auto, which then "
     "selects another kernel",
     "--deterministic-mode --attention-backend fused"),
    ("yarn_base", f"{YARN} --rotary-base 1", "--rope-scaling-type yarn needs --rotary-base above 1, not 1.0", YARN),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "bad", "sentence", "good"), RULES, ids=[f"{c[0]}: {c[1]}" for c in RULES])
def test_rule(rule: str, bad: str, sentence: str, good: str) -> None:
    assert problems(bad) == [sentence]
    assert problems(good) == []


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in RULES} == set(POSITION_RULES)


# Setting, words with which it has no effect, words with which it has one
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
    *(
        (name, words, f"{words} --disable-bias-linear")
        for name, words in (
            ("add_qkv_bias", "--add-qkv-bias"),
            ("add_proj_bias", "--add-proj-bias"),
            ("add_mlp_bias", "--add-mlp-bias"),
        )
    ),
    ("window_size", "--window-size 7 0 --seq-length 8", "--window-size 6 0 --seq-length 8"),
    ("window_size", "--window-size 4 0 --window-attn-skip-freq 1", "--window-size 4,0"),
    ("window_attn_skip_freq", "--window-attn-skip-freq 2", "--window-size 4,0 --window-attn-skip-freq 2"),
]


@pytest.mark.parametrize(("name", "idle", "acting"), IDLE, ids=[c[0] for c in IDLE])
def test_idle(name: str, idle: str, acting: str) -> None:
    (line,) = about(name, f"{LEAST} {idle}", ONE)
    flag, reason = line.split(": ", 1)
    assert flag in idle and len(reason.split()) >= 4
    assert about(name, f"{LEAST} {acting}", ONE) == []


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


@pytest.mark.parametrize("written", ["4095,0", "(4095,0)", "4095 0"])
def test_a_window_is_a_pair_of_numbers(written: str) -> None:
    assert values(f"--window-size {written} --seq-length 8192")["window_size"] == (4095, 0)


def test_which_layers_have_a_window() -> None:
    """Layers count from 1 and every N-th has no window, as in Megatron."""
    assert windowed_layers(None, 3) == (True, True, True)
    assert windowed_layers("3", 7) == (True, True, False, True, True, False, True)
    assert windowed_layers("1", 2) == (False, False)
    assert windowed_layers("[0]*1+[1,1]", 3) == (False, True, True)
    assert [window_of_layer((4, 0), "2", 4, number) for number in (1, 2, 3, 4)] == [4, None, 4, None]
    assert window_of_layer((-1, 0), None, 4, 1) is None and window_of_layer((), "2", 4, 1) is None


def test_experts_without_a_bias_are_mentioned_beside_a_bias_of_mlps() -> None:
    words = "--add-mlp-bias --disable-bias-linear --num-experts 4"
    assert notices(words) == [
        "experts have no bias here; --add-mlp-bias applies to MLPs without experts and to shared experts"
    ]


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
