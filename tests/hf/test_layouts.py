"""Tests that an export does not depend on the layout that saved the checkpoint."""

from pathlib import Path

import pytest

from tests.harness import run_distributed
from tests.hf.saving import save_on_a_rank
from tests.hf.support import save, theirs
from tests.hf.test_round_trip import convert, export, same, tensors


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_every_layout_exports_the_same(precision: str, tmp_path: Path) -> None:
    source = save(theirs("qwen2"), tmp_path / "theirs")
    convert(source, tmp_path / "start")
    trained = ("--tp_size 2 --pp_size 2", tmp_path / "start", tmp_path / "tp2 pp2", 1)
    again = [
        ("--tp_size 4 --sequence-parallel", tmp_path / "tp2 pp2", tmp_path / "tp4", 0),
        ("--dp_size 2 --zero-stage 3", tmp_path / "tp2 pp2", tmp_path / "zero3", 0),
    ]
    for layout, begin, out, steps in (trained, *again):
        ranks = 2 if "dp" in layout else 4
        words = f"{layout} {precision}"
        run_distributed(save_on_a_rank, ranks, layout=words, source=begin, out=out, steps=steps)
    save_on_a_rank(precision, tmp_path / "tp2 pp2", tmp_path / "one", 0)
    expected = tensors(export(tmp_path / "one", tmp_path / "one exported"))
    assert {str(t.dtype) for t in expected.values()} == {"torch.bfloat16" if precision else "torch.float32"}
    assert not same(expected, tensors(source)), "the step changed nothing"
    for name in ("tp2 pp2", "tp4", "zero3"):
        exported = export(tmp_path / name, tmp_path / f"{name} exported", file_bytes=20_000)
        assert same(tensors(exported), expected), name
