import pytest

from tests.parity.bf16 import ALLOWED, BF16_CASES, FP16, FP16_CASES, excess


@pytest.mark.parametrize(("layout", "family"), BF16_CASES)
def test_a_layout_is_as_near_to_fp32_as_one_process(layout: str, family: str) -> None:
    found = excess(layout, family)
    assert max(found.values()) < ALLOWED, found


def test_a_bug_would_be_seen_through_the_rounding() -> None:
    found = excess("tp2 sp pp2 virtual2", "qwen2.5", "tied weights not summed")
    assert found["gradients 1"] > 2 * ALLOWED, found


@pytest.mark.parametrize(("layout", "family"), FP16_CASES)
def test_a_layout_in_fp16_is_as_near_to_fp32_as_one_process(layout: str, family: str) -> None:
    found = excess(layout, family, half=FP16)
    assert max(found.values()) < ALLOWED, found


def test_a_scale_that_is_forgotten_would_be_seen_in_fp16() -> None:
    found = excess("ep2", "mixtral", "router losses not scaled", half=FP16)
    assert found["gradients 1"] > 2 * ALLOWED, found
