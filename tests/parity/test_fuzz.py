"""Random cases: drawing, judging, shrinking and counting, and a short run of fixed cases."""

import math
import shlex
import sys
import time
from pathlib import Path

import pytest
import torch

import tests.parity.fuzzing as fuzzing
from pentatron.errors import UserError
from pentatron.settings.run_config import RunConfig
from tests.parity import fuzz_log
from tests.parity.fuzzing import Campaign, Margins, Tally, judged, replay_command, shrunk
from tests.parity.random_cases import Case, draw, read_case
from tests.parity.random_choice import available

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from fuzz import run_many  # noqa: E402  (scripts/ is not a package)

SEED, DRAWS, SECONDS = 20, 300, 10.0


def test_the_same_seed_draws_the_same_cases() -> None:
    assert [draw(3, n) for n in range(20)] == [draw(3, n) for n in range(20)]
    assert len({draw(3, n) for n in range(20)} | {draw(4, n) for n in range(20)}) == 40


def traits(config: RunConfig) -> set[tuple[str, object]]:
    """Returns what a case exercises, read from its resolved configuration."""
    grid, parallel, memory, moe = config.grid, config.parallel, config.memory, config.moe
    found: dict[tuple[str, object], bool] = {
        ("pipeline_schedule", parallel.pipeline_schedule): grid.pipeline > 1,
        ("zero_stage", parallel.zero_stage): grid.data * grid.context > 1,
        ("cp_comm_type", parallel.cp_comm_type): grid.context > 1,
        ("recompute_granularity", memory.recompute_granularity): True,
        ("recompute_method", memory.recompute_method): True,
        **{("recompute_modules", m): True for m in memory.recompute_modules},
        ("position_embedding_type", config.model.position_embedding_type): True,
        ("position_embedding_type", "yarn"): config.model.rope_scaling_type == "yarn",
        ("rope_scaling_type", config.model.rope_scaling_type): True,
        ("window", bool(config.model.window_size)): grid.context > 1,
        ("documents", config.data.reset_attention_mask): grid.context > 1,
        ("bias of the projection", config.model.add_proj_bias): grid.tensor > 1,
        ("bias of MLPs", config.model.add_mlp_bias): grid.tensor > 1,
        ("normalization", config.model.normalization): True,
        ("sequence_parallel", parallel.sequence_parallel): grid.tensor > 1,
        ("tied", not config.model.untie_embeddings_and_output_weights): grid.pipeline > 1,
        ("uneven", len({len(part.layers) for part in config.stages}) > 1): True,
        ("written out", parallel.pipeline_model_parallel_layout is not None): True,
        ("ranks", grid.world_size): True,
    }
    if moe.num_experts is not None:
        found |= {
            ("moe_token_dispatcher_type", moe.moe_token_dispatcher_type): grid.expert > 1,
            **{("moe_router_load_balancing_type", k): True for k in moe.moe_router_load_balancing_type},
            ("several kinds of balancing", len(moe.moe_router_load_balancing_type) > 1): True,
            ("moe_router_score_function", moe.moe_router_score_function): True,
            ("moe_router_dtype", moe.moe_router_dtype): True,
            ("experts cut otherwise", grid.expert_tensor != grid.tensor): True,
            ("capacity", moe.moe_expert_capacity_factor is not None): True,
            ("moe_token_drop_policy", moe.moe_token_drop_policy): moe.moe_expert_capacity_factor is not None,
            ("expert bias", moe.moe_router_enable_expert_bias): True,
            ("groups of experts", moe.moe_router_num_groups is not None): True,
            ("shared expert", moe.moe_shared_expert_intermediate_size is not None): True,
            ("gate", moe.moe_shared_expert_gate): True,
        }
    return {trait for trait, present in found.items() if present}


def test_a_few_hundred_draws_cover_everything_and_few_are_refused() -> None:
    seen: set[tuple[str, object]] = set()
    refused, started = [], time.monotonic()
    for number in range(DRAWS):
        try:
            seen |= traits(draw(SEED, number).config())
        except UserError as error:
            refused.append(str(error))
    assert len(refused) < DRAWS / 4 and all(refused)
    assert time.monotonic() - started < 0.2 * DRAWS, "a refusal is cheap"
    settings = (
        "pipeline_schedule zero_stage cp_comm_type recompute_granularity recompute_method recompute_modules "
        "position_embedding_type rope_scaling_type normalization moe_token_dispatcher_type moe_router_load_balancing_type "
        "moe_router_score_function moe_router_dtype moe_token_drop_policy"
    ).split()
    assert {(name, value) for name in settings for value in available(name)} <= seen
    switches = (
        "window|documents|bias of the projection|bias of MLPs|sequence_parallel|tied|uneven|written out|several kinds of balancing|experts cut otherwise|capacity|expert bias|"
        "groups of experts|shared expert|gate"
    ).split("|")
    assert {(name, on) for name in switches for on in (True, False)} <= seen
    assert {("ranks", n) for n in range(1, 9)} <= seen


def printed_case(command: str) -> Case:
    *_, ranks, flags = shlex.split(command)
    return read_case(int(ranks), flags.removeprefix("--case="))


def test_a_printed_case_is_the_same_case() -> None:
    for number in range(30):
        case = draw(SEED, number)
        again = printed_case(replay_command(case))
        assert again.command == case.command
        try:
            assert again.config() == case.config()
        except UserError:
            continue
        assert again.reference().split() == case.reference().split()


EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 8 --moe-token-dispatcher-type allgather --expert-model-parallel-size 2"


@pytest.mark.parametrize(
    ("words", "micro_batch"),
    [
        ("--zero-stage 1 --recompute-granularity full", 8),
        (f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1", 8),
        (f"{EXPERTS} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1", 2),
        (f"{EXPERTS} --moe-expert-capacity-factor 1.0", 2),
    ],
)
def test_one_process_keeps_the_model_alone(words: str, micro_batch: int) -> None:
    """One process takes the whole batch at once, unless results depend on the micro-batches."""
    case = read_case(2, f"--num-layers 3 {words} --micro-batch-size 2 --global-batch-size 8")
    reference = case.reference()
    assert f"--micro-batch-size {micro_batch}" in reference and "--num-layers 3" in reference
    for flag in ("zero", "recompute", "parallel", "dispatcher"):
        assert flag not in reference


# --- judging ---


def test_random_cases_agree_with_one_process() -> None:
    tally = Tally()
    Campaign(SEED, wanted=10_000, seconds=SECONDS, keep_going=True).run(tally, lambda tally, passed: None)
    assert tally.run > 0
    assert [(replay_command(case), outcome.failed[:3]) for _, case, outcome in tally.failures] == []


def test_a_planted_bug_is_reported_with_its_replay(capsys: pytest.CaptureFixture[str]) -> None:
    """With this seed the first case is on two ranks, and the bug acts on it."""
    campaign = Campaign(
        159, wanted=20, only="--tensor-model-parallel-size 2", bug="column input gradient not summed"
    )
    assert run_many(campaign, shrink_seconds=0, book=None) == 1
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.startswith("again: ")]
    case = printed_case(line)
    assert judged(case, campaign.bug).failed
    assert not judged(case).failed, "without the bug it agrees"


def test_a_rank_that_raises_is_a_failure() -> None:
    assert "of 2 raised KeyError" in judged(Case(2, ()), "there is no such bug").failed[0]


def test_a_refused_case_is_not_run() -> None:
    assert judged(Case(3, ("--tensor-model-parallel-size 2",))).refused.startswith(
        "3 processes cannot be divided"
    )


def test_how_close_a_choice_was() -> None:
    with Margins() as margins:
        torch.tensor([[0.5, 0.1, 0.3, 0.0], [0.9, 0.8, 0.1, 0.0]]).topk(2, -1)
        # Not ties: an expert without tokens, and groups that were not chosen.
        torch.tensor([[0.0, 0.0, 0.0], [1.0, -math.inf, -math.inf]]).topk(2, -1)
        torch.ones(2).topk(2)
    assert margins.closest == pytest.approx(0.2)


@pytest.mark.parametrize(("closest", "failed"), [(1e-7, False), (1e-2, True)])
def test_only_a_tie_is_asked_again(closest: float, failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(case: Case, bug: str, timeout: float) -> tuple[tuple[str, ...], float, float]:
        first = case.config().run.seed == 5
        return (("loss",) if first else (), 2.0, closest)

    monkeypatch.setattr(fuzzing, "_compared", compared)
    outcome = judged(Case(1, ("--seed 5",)))
    assert bool(outcome.failed) == failed and outcome.ties == (() if failed else (closest,))


def test_a_failing_case_is_made_smaller() -> None:
    case = read_case(
        4,
        "--num-layers 3 --swiglu --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1",
    )
    small = shrunk(case, lambda c: {"--swiglu", "--tensor-model-parallel-size 2"} <= set(c.traits), 10)
    assert small == Case(1, ("--swiglu", "--tensor-model-parallel-size 2"))
    assert shrunk(case, lambda c: False, 10) == case


# --- counting ---


def test_the_page_says_what_the_ledger_has() -> None:
    entries = fuzz_log.read(ROOT / fuzz_log.PATH)
    page = (ROOT / "docs/parity.md").read_text(encoding="utf-8")
    assert page == fuzz_log.renewed(page, entries), "run make fuzz, or make parity"
    assert f" {sum(e.cases for e in entries)} cases have been run" in page


def test_the_ledger_adds_up(tmp_path: Path) -> None:
    book = tmp_path / "fuzz.csv"
    assert fuzz_log.read(book) == []
    entries = [
        fuzz_log.Entry("2030-01-01", 1, 100, 9, 0, "2.13.0"),
        fuzz_log.Entry("2030-01-02", 2, 50, 4, 3, "2.13.0"),
        fuzz_log.Entry("2030-01-03", 3, 7, 1, 0, "2.13.0"),
    ]
    for entry in entries:
        fuzz_log.append(book, entry)
    assert fuzz_log.read(book) == entries
    told = fuzz_log.section(entries)
    assert "157 cases" in told and "14 more" in told and "3 did not agree" in told
    assert "the 7 cases since" in told
    assert fuzz_log.section(entries[:1]).rstrip().endswith("All of them agree.")
    page = fuzz_log.renewed("# Parity\n\nA table.\n", entries[:1])
    assert page.startswith("# Parity\n\nA table.\n\n## Random cases\n")
    assert fuzz_log.renewed(page, entries) == fuzz_log.renewed("# Parity\n\nA table.\n", entries)
