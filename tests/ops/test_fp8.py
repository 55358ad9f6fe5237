import importlib.util
import os
from typing import Any

import pytest
import torch

from pentatron.ops.fp8 import (
    E4M3,
    E5M2,
    _largest_of_tiles,
    quantize,
    rounded,
    scale_for,
    scale_of,
    scales_of,
)


def interprets() -> bool:
    return importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


# On a GPU also a shape with enough tiles for all of its multiprocessors.
SHAPES = [(300, 80), (16, 130), (256, 256), *([(8192, 4480)] if torch.cuda.is_available() else [])]
needs_a_kernel = pytest.mark.skipif(
    not torch.cuda.is_available() and not interprets(), reason="needs a GPU, or TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("largest", [1e-30, 0.7, 1.0, 1.75, 447.9, 448.0, 449.0, 3e38])
def test_the_scale_is_the_largest_power_of_two_that_fits(largest: float, dtype: torch.dtype) -> None:
    found = torch.tensor(largest)
    scale = float(scale_for(found, dtype))
    assert torch.frexp(torch.tensor(scale)).mantissa == 0.5
    limit = torch.finfo(dtype).max
    assert float(found) * scale <= limit < 2 * float(found) * scale


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_parts_round_as_the_whole_does(dtype: torch.dtype) -> None:
    """Shards with scales of their own round as the whole tensor, so that layouts equal one process."""
    torch.manual_seed(1)
    # No value is so small that it would be subnormal and have fewer digits.
    whole = (torch.rand(64, 48) + 0.05) * torch.randn(64, 48).sign()
    whole[7, 7] = 30.0
    parts = [quantize(part, dtype) for part in whole.split(16)]
    factors = {float(p.unscale) for p in parts}
    together = quantize(whole, dtype)
    assert len(factors) > 1, "they were scaled differently"
    apart = torch.cat([p.rows.float() * p.unscale for p in parts if p.rows is not None])
    assert together.rows is not None and torch.equal(apart, together.rows.float() * together.unscale)
    # A scale that fills the range exactly, instead of a power of two, would round every part differently.
    full = [torch.finfo(dtype).max / part.abs().max() for part in (*whole.split(16), whole)]
    filled = torch.cat([rounded(p, s, dtype).float() / s for p, s in zip(whole.split(16), full)])
    other = rounded(whole, full[-1], dtype).float() / full[-1]
    assert float((filled - other).norm() / whole.norm()) > 0.02


def test_both_ways_of_writing_hold_the_same() -> None:
    torch.manual_seed(2)
    matrix = torch.randn(32, 48).t()
    both, rows, columns = (
        quantize(matrix, E4M3),
        quantize(matrix, E4M3, columns=False),
        quantize(matrix, E4M3, rows=False),
    )
    assert both.rows is not None and both.columns is not None
    assert both.rows.is_contiguous() and both.columns.is_contiguous() and both.columns.shape == (32, 48)
    assert torch.equal(both.columns.float(), both.rows.float().t())
    assert (
        rows.rows is not None and torch.equal(rows.rows.float(), both.rows.float()) and rows.columns is None
    )
    assert columns.columns is not None and torch.equal(columns.columns.float(), both.columns.float())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_zeros_stay_zeros_and_nan_and_inf_propagate(dtype: torch.dtype) -> None:
    for value in (0.0, 1e-42):
        small = quantize(torch.tensor([[0.0, value]]), dtype)
        assert small.rows is not None
        values = small.rows.float() * small.unscale
        assert torch.isfinite(values).all() and float(values[0, 0]) == 0.0
    for value in (float("nan"), float("inf"), -float("inf")):
        broken = quantize(torch.tensor([[1.0, 2.0], [value, 3.0]]), dtype)
        assert broken.rows is not None
        assert not torch.isfinite((broken.rows.float() * broken.unscale)[1, 0])
    beyond = rounded(torch.tensor([1e30, -1e30]), torch.tensor(1.0), dtype)
    assert beyond.tolist() == [torch.finfo(dtype).max, -torch.finfo(dtype).max], (
        "it stays at the end of the range"
    )


@needs_a_kernel
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_does_what_torch_does(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    from pentatron.ops.triton_fp8 import write_rounded

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(3)
    # The interpreter does not round up correctly, so that there all values are numbers of the format.
    draw = torch.randn(shape) * 3 if device == "cuda" else torch.randint(-7, 8, shape).float()
    matrix = draw.bfloat16().to(device)
    matrix[3, 3] = 1e30
    for given in (matrix, matrix.t()):
        scale = torch.tensor(32.0, device=device)
        rows = torch.empty(given.shape, dtype=dtype, device=device)
        columns = torch.empty(given.t().shape, dtype=dtype, device=device)
        write_rounded(given, rows, columns, scale, scale)
        expected = rounded(given, scale, dtype).float()
        assert torch.equal(columns.float().t(), rows.float())
        assert torch.equal(rows.float(), expected)
        only = torch.empty_like(columns)
        write_rounded(given, None, only, scale, scale)
        assert torch.equal(only.float(), columns.float())


@needs_a_kernel
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_kernel_finds_the_same_scale(dtype: torch.dtype) -> None:
    from pentatron.ops.triton_fp8 import scale_of as by_triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ends = [0.0, 1e-42, 1.0, 1.75, 447.0, 448.0, 448.00003, 57344.0, 3e38, float("inf"), float("nan")]
    for largest in ends:
        for kind in (torch.float32, torch.bfloat16):
            # More elements than one round of the kernel takes, with the largest in the last round.
            found = torch.full((8300,), 1e-43).to(kind)
            found[8299] = largest
            for one, other in zip(by_triton(found.to(device), dtype), scale_of(found, dtype), strict=True):
                assert one.shape == other.shape == () and torch.equal(one.cpu(), other), (largest, one, other)


@needs_a_kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_by_rows_do_what_torch_does(shape: tuple[int, int]) -> None:
    from pentatron.ops.triton_fp8 import largest_of_tiles, write_rounded

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(4)
    matrix = torch.randint(-7, 8, shape).bfloat16()
    matrix[-1, -1], matrix[0, 0] = -64.0, float("nan")
    for given in (matrix, matrix.t()):
        found, expected = largest_of_tiles(given.to(device)), _largest_of_tiles(given)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu().nan_to_num(-1.0), other.nan_to_num(-1.0))
        assert [int(f.isnan().sum()) for f in found] == [1, 1], "what is no number is seen"
        clean = given.nan_to_num(3.0).to(device)
        # Powers of two that differ between neighbours.
        of_rows = (2.0 ** (torch.arange(clean.shape[0]) % 5))[:, None].to(device)
        of_columns = (2.0 ** -(torch.arange(clean.shape[1]) % 3))[:, None].to(device)
        rows = torch.empty(clean.shape, dtype=E5M2, device=device)
        columns = torch.empty(clean.t().shape, dtype=E5M2, device=device)
        write_rounded(clean, rows, columns, of_rows, of_columns)
        if device == "cuda":
            assert torch.equal(rows.float(), rounded(clean, of_rows, E5M2).float())
            assert torch.equal(columns.float(), rounded(clean.t(), of_columns, E5M2).float())
        else:
            # The interpreter does not round up: its result may be a neighbour of the right number.
            torch.testing.assert_close(rows.float(), clean.float() * of_rows, rtol=0.25, atol=0)
            torch.testing.assert_close(columns.float(), clean.float().t() * of_columns, rtol=0.25, atol=0)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, but no GPU")
@pytest.mark.skipif(interprets(), reason="kernels are interpreted")
def test_the_kernels_compile_for_hopper() -> None:
    """Compiles the kernels, because the interpreter accepts more than the compiler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pentatron.ops import triton_fp8
    from pentatron.ops.triton_activation import _gate_backward

    def ptx(kernel: Any, given: str, constants: dict[str, Any]) -> str:
        signature = dict(word.split(":") for word in given.split()) | dict.fromkeys(constants, "constexpr")
        source = ASTSource(kernel, signature, constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
        return str(made.asm["ptx"])

    sizes = "height:i32 width:i32 row_stride:i32"
    scales = "matrix:*bf16 of_rows:*fp32 of_columns:*fp32"
    for by_rows in (False, True):
        wanted = {"ROWS": True, "COLUMNS": True, "BY_ROWS": by_rows, "HIGH": 128, "WIDE": 128}
        constants = {"column_stride": 1, "LIMIT": 57344.0, **wanted}
        made = ptx(triton_fp8._write_rounded, f"{scales} rows:*fp8e5 columns:*fp8e5 {sizes}", constants)
        assert "cvt.rn.satfinite.e5m2x2" in made
    ptx(triton_fp8._largest_of_tiles, f"{scales} {sizes}", {"column_stride": 1, "TILE": 128})
    constants = {"COUNT": 16384, "LIMIT": 448.0, "MOST": 2.0**120, "BLOCK": 8192}
    made = ptx(triton_fp8._scale_of, "largest:*bf16 scale:*fp32 unscale:*fp32", constants)
    assert "div.rn.f32" in made, "not the near one"
    given = "gradient:*bf16 inner:*bf16 grad_inner:*bf16 largest:*fp32"
    ptx(_gate_backward, given, {"WIDTH": 8960, "BLOCK": 1024})


def test_by_rows_each_row_fills_the_range() -> None:
    torch.manual_seed(5)
    matrix = (
        torch.randn(150, 140) * 10.0 ** torch.randint(-6, 6, (150, 1)) * 10.0 ** torch.randint(-6, 6, (140,))
    )
    matrix[7] = 0.0
    made = quantize(matrix, E4M3, by_rows=True)
    for values, unscale, true in (
        (made.rows, made.unscale, matrix),
        (made.columns, made.columns_unscale, matrix.t()),
    ):
        assert values is not None and values.is_contiguous() and values.shape == true.shape
        assert unscale.shape == (len(true), 1)
        largest = values.float().abs().amax(1)
        zero = true.abs().amax(1) == 0
        assert (largest[~zero] > 448 / 2.2).all() and not largest[zero].any()
        # e4m3 has three mantissa bits: the error is at most 1/16 of the row's largest element.
        error = (
            (values.float() * unscale - true).abs() / true.abs().amax(1, keepdim=True).clamp(min=1e-30)
        ).max()
        assert float(error) <= 1 / 16
    only = (
        quantize(matrix, E4M3, columns=False, by_rows=True),
        quantize(matrix, E4M3, rows=False, by_rows=True),
    )
    assert (
        only[0].rows is not None
        and only[1].columns is not None
        and made.rows is not None
        and made.columns is not None
    )
    assert torch.equal(only[0].rows.float(), made.rows.float()) and torch.equal(only[0].unscale, made.unscale)
    assert torch.equal(only[1].columns.float(), made.columns.float())
    assert torch.equal(only[1].columns_unscale, made.columns_unscale)


def test_scales_of_many_are_those_of_each() -> None:
    torch.manual_seed(6)
    many = [(torch.randn(8, 5) * 10.0**n).bfloat16() for n in range(-3, 4)]
    found = scales_of(many, E4M3)
    assert (
        found.tolist() == [float(quantize(one, E4M3).scale) for one in many] and len(set(found.tolist())) > 5
    )
