"""Compares Triton's counter-based dropout with plain torch, bit for bit."""

import os

import pytest
import torch

from pentatron.nn import dropout as module
from pentatron.nn.dropout import dropout_keys, hidden_dropout
from pentatron.ops.dispatch import has_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    not has_triton() or (DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs Triton and a GPU, or its interpreter",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "site", "probability"), [(8, 0, 0.5), (33, 1, 0.1), (4100, 30, 0.25)])
def test_every_bit_is_that_of_plain_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, site: int, probability: float
) -> None:
    draw = torch.Generator().manual_seed(3)
    drawn = [torch.randn(2, 3, width, generator=draw).to(DEVICE, dtype) for _ in range(3)]
    keys = dropout_keys(1234, 7, 0, 2, torch.arange(3, device=DEVICE), DEVICE)
    found = []
    for chosen in (False, True):
        monkeypatch.setattr(module, "uses_triton", lambda tensor, chosen=chosen: chosen)
        x, stream = (t.clone().requires_grad_() for t in drawn[:2])
        alone = hidden_dropout(x, keys, site, probability)
        added = hidden_dropout(x, keys, site, probability, stream)
        (alone + added).backward(drawn[2])
        assert x.grad is not None and stream.grad is not None
        found.append((alone, added, x.grad, stream.grad))
    for plain, by_kernel in zip(*found, strict=True):
        # The interpreter truncates where a GPU rounds to bf16.
        exact = DEVICE.type == "cuda" or dtype == torch.float32
        assert (
            torch.equal(plain, by_kernel) if exact else torch.allclose(plain, by_kernel, rtol=0.02, atol=0.02)
        )
    assert torch.equal(found[0][0].eq(0), found[1][0].eq(0))
    assert 0 < found[0][0].eq(0).float().mean() < 1


def test_the_site_may_lie_in_memory() -> None:
    """The site may be a tensor, as in a graph that all layers share."""
    from pentatron.ops import triton_dropout

    x = torch.ones(2, 3, 64, device=DEVICE)
    rows = dropout_keys(1234, 7, 0, 2, torch.arange(3, device=DEVICE), DEVICE).rows
    made = [
        triton_dropout.dropout(x, None, rows, site, 0, 2.0) for site in (5, torch.tensor(5, device=DEVICE), 6)
    ]
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
