"""Every rule about experts: words that break it, with the whole sentence, and words that keep it."""

import pytest

from pentatron.settings.model_rules import MOE_RULES
from pentatron.settings.settings import ProcessFacts
from tests.settings.builders import notices, problems, resolved, values

ONE = ProcessFacts(1)
TWO = ProcessFacts(2, 2)

# name of the rule, words that break it, the sentence, words that keep it, facts of both
CASES: list[tuple[str, str, str, str, ProcessFacts]] = [
    ("experts", "--expert-model-parallel-size 3",
     "--expert-model-parallel-size 3 needs experts; give --num-experts", "--expert-model-parallel-size 1", ONE),
    ("experts", "--num-experts 64 --expert-model-parallel-size 3",
     "--num-experts 64 is not divisible by --expert-model-parallel-size 3; use 1, 2, 4, 8, 16, 32 or 64",
     "--num-experts 63 --expert-model-parallel-size 3", ProcessFacts(3, 3)),
    ("experts", "--num-experts 4 --moe-router-topk 8",
     "--moe-router-topk 8 is more than --num-experts 4; use at most 4", "--num-experts 4 --moe-router-topk 4", ONE),
    ("expert_ranks", "--num-experts 64 --expert-model-parallel-size 8 --tp_size 2",
     "2 (data) × 1 (context) × 2 (tensor) = 4 ranks of a stage are no multiple of 8 (expert) × 2 (expert tensor) = 16; "
     "use sizes of which the second divides the first",
     "--num-experts 64 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --tp_size 2", ProcessFacts(4, 4)),
    ("expert_width", "--num-experts 4 --moe-ffn-hidden-size 33 --expert-tensor-parallel-size 2",
     "--moe-ffn-hidden-size 33 is not divisible by --expert-tensor-parallel-size 2; use 34, or another size",
     "--num-experts 4 --moe-ffn-hidden-size 33 --expert-tensor-parallel-size 1", TWO),
    ("shared_expert_width", "--num-experts 4 --tp_size 2 --moe-shared-expert-intermediate-size 33",
     "--moe-shared-expert-intermediate-size 33 is not divisible by --tensor-model-parallel-size 2; use 34",
     "--num-experts 4 --tp_size 2 --moe-shared-expert-intermediate-size 34", TWO),
    ("shared_gate", "--num-experts 4 --moe-shared-expert-gate",
     "--moe-shared-expert-gate needs a shared expert; give --moe-shared-expert-intermediate-size",
     "--num-experts 4 --moe-shared-expert-gate --moe-shared-expert-intermediate-size 32", ONE),
    ("layers_with_experts", "--num-experts 4 --num-layers 4 --moe-layer-freq [0]+[1]*2",
     "--moe-layer-freq [0]+[1]*2 names 3 layers, but --num-layers is 4; use 4 entries",
     "--num-experts 4 --num-layers 4 --moe-layer-freq [0]+[1]*3", ONE),
    ("experts_with_tensor_ranks", "--num-experts 4 --tp_size 2 --no-sequence-parallel",
     "experts with --tensor-model-parallel-size 2 need --sequence-parallel: without it 2 ranks would route the same "
     "tokens; leave --no-sequence-parallel out",
     "--num-experts 4 --tp_size 2", TWO),
    ("groups_of_experts", "--num-experts 8 --moe-router-num-groups 4",
     "--moe-router-num-groups and --moe-router-group-topk go together; give both",
     "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2", ONE),
    ("groups_of_experts", "--num-experts 8 --moe-router-group-topk 2",
     "--moe-router-num-groups and --moe-router-group-topk go together; give both",
     "--num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 2", ONE),
    ("groups_of_experts", "--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 2",
     "--num-experts 8 is not divisible by --moe-router-num-groups 3; use 1, 2, 4 or 8",
     "--num-experts 9 --moe-router-num-groups 3 --moe-router-group-topk 2", ONE),
    ("groups_of_experts", "--num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 4 --moe-router-topk 4",
     "--moe-router-group-topk 4 is more than --moe-router-num-groups 2; use at most 2",
     "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 4 --moe-router-topk 4", ONE),
    ("groups_of_experts", "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 3",
     "--moe-router-topk 3 is not divisible by --moe-router-group-topk 2; use 1 or 3",
     "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4", ONE),
    ("groups_of_experts", "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 6",
     "--moe-router-topk 6 is more than the 2 (--moe-router-group-topk) × 2 (experts per group) = 4 experts a token can use; use at most 4",
     "--num-experts 16 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 6", ONE),
    ("expert_bias", "--num-experts 4 --moe-router-enable-expert-bias",
     "--moe-router-enable-expert-bias needs independent scores; give --moe-router-score-function sigmoid",
     "--num-experts 4 --moe-router-enable-expert-bias --moe-router-score-function sigmoid", ONE),
    ("pre_softmax", "--num-experts 4 --moe-router-topk 1",
     "--moe-router-topk 1 with a softmax over the one selected expert always gives it the weight 1, so the router gets no gradient; give --moe-router-pre-softmax",
     "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax", ONE),
    ("pre_softmax", "--num-experts 4 --moe-router-topk 1 --moe-router-score-function softmax",
     "--moe-router-topk 1 with a softmax over the one selected expert always gives it the weight 1, so the router gets no gradient; give --moe-router-pre-softmax",
     "--num-experts 4 --moe-router-topk 1 --moe-router-score-function sigmoid", ONE),
    ("balancing", "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss aux_loss",
     "--moe-router-load-balancing-type aux_loss seq_aux_loss aux_loss names one kind twice; name each once",
     "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss", ONE),
    ("balancing", "--num-experts 4 --moe-router-load-balancing-type aux_loss none",
     "--moe-router-load-balancing-type aux_loss none: none cannot be combined with another kind; leave it out",
     "--num-experts 4 --moe-router-load-balancing-type none", ONE),
    ("balancing",
     "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.2",
     "--moe-aux-loss-coeff has 2 numbers for 3 kinds of balancing; give one for all, or one for each",
     "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2", ONE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "bad", "sentence", "good", "facts"), CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES]
)
def test_rule(rule: str, bad: str, sentence: str, good: str, facts: ProcessFacts) -> None:
    assert problems(bad, facts) == [sentence]
    assert problems(good, facts) == []


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(MOE_RULES)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--moe-aux-loss-coeff 0.1 -0.5", "--moe-aux-loss-coeff 0.1 -0.5 must be 0 or more"),
        ("--moe-z-loss-coeff -1", "--moe-z-loss-coeff -1.0 must be 0 or more"),
        ("--moe-expert-capacity-factor 0", "--moe-expert-capacity-factor 0.0 must be more than 0"),
        ("--moe-router-num-groups 0", "--moe-router-num-groups 0 must be more than 0"),
    ],
)
def test_limits(words: str, sentence: str) -> None:
    kinds = "--moe-router-load-balancing-type aux_loss seq_aux_loss"
    assert problems(f"--num-experts 4 {kinds} {words}") == [sentence]


def test_settings_derived_from_experts() -> None:
    found = values("--num-experts 4 --ffn-hidden-size 96 --tp_size 2", TWO)
    assert (found["moe_ffn_hidden_size"], found["expert_tensor_parallel_size"]) == (96, 2)
    assert found["sequence_parallel"]
    given = values(
        "--num-experts 4 --moe-ffn-hidden-size 48 --tp_size 2 --expert-tensor-parallel-size 1", TWO
    )
    assert (given["moe_ffn_hidden_size"], given["expert_tensor_parallel_size"]) == (48, 1)
    dense = values("--tp_size 2", TWO)
    assert (dense["moe_ffn_hidden_size"], dense["expert_tensor_parallel_size"]) == (None, None)
    assert not dense["sequence_parallel"]
    # Without experts, --expert-tensor-parallel-size has no effect on the grid.
    assert resolved("--expert-tensor-parallel-size 3", TWO).config.grid.expert_tensor == 1


def test_experts_without_a_bias_are_mentioned() -> None:
    note = "experts have no bias here; the other linear layers have one (--disable-bias-linear removes it there too)"
    assert notices("--num-experts 4") == [note]
    assert notices("--num-experts 4 --disable-bias-linear") == []
    assert notices("") == []
