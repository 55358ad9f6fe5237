"""Compares Triton's two passes of the cross entropy with those of plain torch."""

import os

import pytest
import torch

from pentatron.ops import cross_entropy
from pentatron.ops.dispatch import has_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 70
# The first and last words of each case, words of other shards, and -100, which has no loss.
LABELS = torch.tensor([0, 1, 19, 20, 63, 69, 79, 80, -100])


@pytest.mark.skipif(
    not has_triton() or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs Triton and a GPU, or its interpreter",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab, first", [(70, 0), (64, 0), (0, 80), (50, 20), (1, 79)])
def test_the_same_passes(dtype: torch.dtype, vocab: int, first: int) -> None:
    from pentatron.ops import triton_cross_entropy

    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(len(LABELS), WIDTH, generator=generator) * 30).to(DEVICE, dtype)
    weights = torch.randn(len(LABELS), generator=generator).to(DEVICE)
    weights[3] = 0
    labels, small = LABELS.to(DEVICE), {"block": 32, "warps": 1}
    expected = cross_entropy.row_sums(logits, labels, vocab, first)
    found = triton_cross_entropy.row_sums(logits, labels, vocab, first, **small)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    log_sums = expected[0] + expected[1].log() if vocab else torch.ones_like(weights)
    plain = torch.empty_like(logits)
    given = (labels, log_sums, weights, vocab, first)
    cross_entropy.write_gradient(plain, logits, *given)
    apart = torch.empty_like(logits)
    triton_cross_entropy.write_gradient(apart, logits, *given, **small)
    triton_cross_entropy.write_gradient(logits, logits, *given, **small)
    assert torch.equal(logits, apart)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(logits, plain, rtol=near, atol=near)
