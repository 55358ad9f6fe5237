"""Runs each check of `make cuda`; without a GPU, tests only that the catalogue is complete."""

import re

import pytest
import torch

from pentatron.compare.trial import Trajectory
from tests.checkpoint.digest import StateDigest
from tests.cuda import trials
from tests.cuda.catalogue import NOT_RUN, TABLES, TINY, Check, checks, measured, nothing_called
from tests.cuda.trials import LOSS_MASK, ONE_WEIGHT, ROPE_BASE, Found
from tests.cuda.whole_runs import told_by_pytest, verdict
from tests.parity.cases import FAMILIES, MIXTURES


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("check", checks(), ids=lambda check: f"{check.table}: {check.name}")
def test_on_the_gpu(check: Check) -> None:
    rows = measured(check, "cuda")
    assert [f"{name}: {row.complaint} {row.note}" for name, row in rows.items() if not row.passes] == []


def test_the_catalogue_is_whole() -> None:
    found = checks()
    assert {check.table for check in found} == {*TABLES} and NOT_RUN
    names = [f"{check.table} {check.name}" for check in found]
    assert len(names) == len({*names})
    assert TINY.keys() == FAMILIES.keys() | MIXTURES.keys()
    text = " ".join(names)
    for word in (
        "ZeRO 3",
        "2 processes",
        "4 processes",
        "fp16",
        "bf16",
        "wide",
        "resumed",
        "launched",
        "qwen3",
    ):
        assert word in text, word


def test_planted_mistakes_are_far_beyond_what_is_allowed() -> None:
    """Applies the comparison for a GPU to the CPU: planted mistakes exceed the tolerance tenfold."""
    (row,) = trials.exactly("qwen3", TINY["qwen3"], "", "cpu", "cpu", "").values()
    assert row.share == 0 and {*row.controls} == {ONE_WEIGHT, ROPE_BASE, LOSS_MASK}
    assert all(share > 10 for share in row.controls.values()), row.controls
    assert row.passes and not Found(0.5, {"unseen": 0.9}).passes and not Found(float("nan")).passes


def test_half_precision_is_held_against_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = trials.roughly("llama", TINY["llama"], "--bf16", "", "cpu", "cpu", "").values()
    assert row.passes and 0.6 < row.share < 0.65, row
    nothing_rounded = trials.trial

    def in_fp32(words: str, device: str, mistake: str = "") -> Trajectory:
        return nothing_rounded(words.replace("--bf16", ""), device, mistake)

    monkeypatch.setattr(trials, "trial", in_fp32)
    (exact,) = trials.roughly("llama", TINY["llama"], "--bf16", "", "cpu", "cpu", "").values()
    assert exact.share == 0


def test_a_case_is_asked_again_only_if_tokens_went_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([3.0, 2.0, 0.5])
    monkeypatch.setattr(trials, "_exactly", lambda *_: Found(next(shares), note="gradient norm"))
    words = TINY["sigmoid"].replace("--num-layers 2", "--num-layers 1")
    one, other = (words, "cpu"), (f"{words} --rotary-base 100", "cpu")
    assert trials.sent_elsewhere(one, one) == 0 < trials.sent_elsewhere(one, other)
    monkeypatch.setattr(trials, "sent_elsewhere", lambda *_: 0)
    (row,) = trials.exactly("sigmoid", words, "", "cpu", "cpu", "").values()
    assert not row.passes and row.note == "every token went to the same experts; gradient norm"
    monkeypatch.setattr(trials, "sent_elsewhere", lambda *_: 7)
    (row,) = trials.exactly("sigmoid", words, "", "cpu", "cpu", "").values()
    assert row.passes and row.note.startswith(
        "200%, with 7 tokens sent elsewhere: asked again with --seed 77"
    )


def test_pytest_output_is_summarised_in_a_line() -> None:
    printed = """
E       AssertionError: 3 is no 4
=== short test summary info ===
FAILED tests/a.py::test_b[1] - AssertionError: 3 is no 4
========= 1 failed, 348 passed, 15 warnings in 106.27s (0:01:46) =========
"""
    found = told_by_pytest(printed)
    assert (
        found.startswith("1 failed, 348 passed") and "tests/a.py::test_b[1]" in found and "3 is no 4" in found
    )


def test_resuming_is_blamed_only_if_the_run_can_be_repeated() -> None:
    one, other, third = (StateDigest("w", moments, "r", "c") for moments in ("1", "2", "3"))
    assert verdict(one, one, one, True) == (0.0, "")
    for repeatable in (True, False):
        gap, why = verdict(other, one, one, repeatable)
        assert gap == float("inf") and why.startswith("optimizer") and "resuming is to blame" in why
    gap, why = verdict(other, one, other, True)
    assert gap == float("inf") and "not repeatable" in why
    assert (
        verdict(other, one, other, False)[0] == 0 and "second of them" in verdict(other, one, other, False)[1]
    )
    assert "neither of them" in verdict(third, one, other, False)[1]


@pytest.mark.parametrize(
    ("only", "table", "listed", "said"),
    [
        ("qwn3", "", "qwen3, tiny", r"--only 'qwn3': no check is called so \(did you mean 'qwen3'[^?]*\?\)"),
        ("zero 4", "", "stale ZeRO shard", r".* \(did you mean 'ZeRO 3'.*\?\)"),
        ("ring", "wole", "Whole runs", r"--table 'wole': no table is called so \(did you mean 'Whole'.*\?\)"),
        (
            "ringg",
            "whole",
            "launched: 2 context, ring",
            r"--only 'ringg': no check of --table 'whole' is called so \(did you mean 'ring'\?\)",
        ),
        ("xyz", "", "yi", "--only 'xyz': no check is called so"),
    ],
)
def test_unknown_check_name_lists_all_and_suggests_the_nearest(
    only: str, table: str, listed: str, said: str
) -> None:
    *names, last = nothing_called(only, table).splitlines()
    assert f"  {listed}" in names and re.fullmatch(f"{said}; all are above", last), last
