"""Tests fp8 in whole runs: coverage, refusals, learning as in bf16, and agreement of layouts.

On a CPU, fp8 products multiply rounded values in fp32.
"""

import json
from pathlib import Path

import pytest

import pentatron.train.preflight as fitting
from pentatron.errors import AgreedError
from pentatron.nn.linear import WeightedModule
from pentatron.ops.fp8 import E4M3, quantize
from pentatron.ops.fp8_linear import UNKNOWN, WeightScales
from pentatron.parallel.world import single_process
from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.train import model as model_module
from pentatron.train.model import ParallelModel, build_parallel_model
from pentatron.train.preflight import check_fp8_support, fp8_notices
from pentatron.train.session import run_training
from tests.harness import run_distributed
from tests.parity.bf16 import KINDS, distance, on_one_process
from tests.parity.cases import LAYOUTS
from tests.parity.trajectory import on_a_rank
from tests.support import LLAMA, resolved

FP8 = "--bf16 --fp8 hybrid"


def built(words: str) -> ParallelModel:
    return build_parallel_model(resolved(f"{LLAMA} {words}").config, single_process())


def weighted(model: ParallelModel) -> list[WeightedModule]:
    return [m for stage in model.stages.values() for m in stage.modules() if isinstance(m, WeightedModule)]


def in_fp8(model: ParallelModel) -> set[str]:
    return {
        name
        for stage in model.stages.values()
        for name, module in stage.named_modules()
        if isinstance(module, WeightedModule) and module.fp8 is not None
    }


def test_the_linear_layers_of_the_layers_are_in_fp8() -> None:
    names = ("attention.linear_qkv", "attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    assert in_fp8(built("--bf16")) == set()
    assert in_fp8(built(FP8)) == {f"layers.{i}.{name}" for i in range(2) for name in names}
    some = built(f"{FP8} --num-layers 6 --first-last-layers-bf16 --num-layers-at-end-in-bf16 2")
    assert {name.split(".")[1] for name in in_fp8(some)} == {"1", "2", "3"}
    untied = "--untie-embeddings-and-output-weights"
    assert in_fp8(built(f"{FP8} --fp8-output-layer {untied}")) - in_fp8(built(f"{FP8} {untied}")) == {"head"}
    assert in_fp8(built(f"{FP8} --fp8-output-layer")) - in_fp8(built(FP8)) == {"embedding.word"}


def test_matrices_left_in_bf16_are_reported() -> None:
    def said(words: str) -> list[str]:
        model = built(words)
        return fp8_notices(model.decisions.fp8, model.stages.values())

    assert said(FP8) == said("--bf16") == []
    assert said(f"{FP8} --ffn-hidden-size 40") == [
        "--fp8: matrices stay in bf16 where a side is not a multiple of 16: mlp.linear_fc2"
    ]
    assert said(f"{FP8} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32") == [
        "--fp8: the matmuls of experts stay in bf16"
    ]


def test_devices_without_fp8_are_refused(tmp_path: Path) -> None:
    asked = resolved(f"{LLAMA} {FP8} --run-dir {tmp_path}")
    with pytest.raises(
        AgreedError, match=r"--fp8 hybrid needs a GPU .* and this run is on a CPU; leave it out"
    ):
        run_training(asked, single_process(), resumes=True)
    a100 = DeviceFacts("cuda", "NVIDIA A100", (8, 0))
    with pytest.raises(AgreedError, match=r"this one \(NVIDIA A100\) has 8\.0; leave it out"):
        check_fp8_support(decide(asked.config, a100).fp8)
    check_fp8_support(decide(resolved("--bf16").config, a100).fp8)
    check_fp8_support(decide(asked.config, DeviceFacts("cuda", "NVIDIA H100", (9, 0))).fp8)
    with pytest.raises(AgreedError, match="not an NVIDIA GPU"):
        check_fp8_support(decide(asked.config, DeviceFacts("cuda", is_nvidia=False)).fp8)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_as_in_bf16_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "check_fp8_support", lambda decided: None)

    def run(name: str, words: str) -> list[float]:
        steps = "--train-iters 40 --lr 3e-3 --init-method-std 0.02 --dataset-size 16 --save-interval 20"
        given = f"{LLAMA} {steps} --run-dir {tmp_path / name} {words}"
        run_training(resolved(given), single_process(), resumes=True)
        return losses(tmp_path / name)

    plain, hybrid = run("bf16", "--bf16"), run("hybrid", f"{FP8} --fp8-output-layer")
    assert plain[0] - plain[-1] > 1.0, "there is something to learn"
    assert hybrid != plain
    assert all(abs(a - b) < 0.05 * a for a, b in zip(plain, hybrid, strict=True)), list(zip(plain, hybrid))
    run("bf16", f"{FP8} --train-iters 41")
    told = (tmp_path / "bf16" / "train.log").read_text()
    assert "settings differ from the checkpoint's: " in told and "--fp8-format hybrid (was unset)" in told
    assert "bf16 with fp8 matmuls (hybrid)" in told


def test_scales_that_are_kept_are_those_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales found for all weights at once and by each layer give the same bits, validations included."""
    monkeypatch.setattr(fitting, "check_fp8_support", lambda decided: None)

    def run(name: str) -> list[float]:
        steps = "--train-iters 6 --lr 3e-2 --dataset-size 16 --eval-interval 3 --eval-iters 1 --no-save-checkpoints"
        asked = resolved(f"{LLAMA} {FP8} {steps} --run-dir {tmp_path / name}")
        run_training(asked, single_process(), resumes=False)
        told = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [row[key] for row in told for key in ("loss", "validation_loss") if key in row]

    kept = run("kept")
    assert len(kept) == 8
    with monkeypatch.context() as patch:
        first_only = iter([WeightScales.refresh])
        patch.setattr(WeightScales, "refresh", lambda self: next(first_only, lambda scales: None)(self))
        patch.setattr(WeightScales, "forget", lambda self: None)
        assert run("once") != kept
    monkeypatch.setattr(model_module, "keeps_scales", lambda config, decided, world: False)
    assert run("each") == kept


def test_weight_scales_are_cached_between_refreshes() -> None:
    model = built(FP8)
    matrices = [m for m in weighted(model) if m.fp8 is not None]
    assert all(m.scale.known == UNKNOWN for m in matrices), "no scale was computed yet"
    model.weight_scales.refresh()
    assert all(m.scale.known[0] == quantize(m.weight, E4M3).scale for m in matrices)
    model.weight_scales.forget()
    assert all(m.scale.known == UNKNOWN for m in matrices)
    by_rows = built(f"{FP8} --fp8-recipe rowwise")
    by_rows.weight_scales.refresh()
    assert all(m.scale.known == UNKNOWN for m in weighted(by_rows)) and in_fp8(by_rows)
    assert all(m.fp8.by_rows for m in weighted(by_rows) if m.fp8 is not None)


@pytest.mark.parametrize(
    ("layout", "family", "nearer"),
    [
        # Every rank has whole sequences and only the micro-batches differ, so every number is rounded alike.
        ("pp2 zbv dp2 zero1", "llama", 0.05),
        ("pp2 dp2 zero3", "qwen2.5", 0.05),
        ("pp2 dp2 zero3", "qwen2.5 rowwise", 0.05),
        # Another order of summation changes the last bit of bf16, which may round to another fp8 number.
        ("tp2 sp pp2 virtual2", "qwen2.5", 0.95),
    ],
)
def test_layouts_compute_what_one_process_does(layout: str, family: str, nearer: float) -> None:
    """Compares layouts with one process, measured by the error of fp8 against fp32.

    Gradients must be nearer to those of one process in fp8 than these are to fp32, and no further from fp32.
    """
    case = next(x for x in LAYOUTS if x.name == layout)
    wide = "--ffn-hidden-size 64"
    family, _, recipe = family.partition(" ")
    in_fp8 = f"{FP8} --fp8-recipe {recipe or 'tensorwise'}"
    words = f"{case.command(family)} {in_fp8} {wide}"
    found = run_distributed(on_a_rank, case.ranks, timeout=180.0, words=words, bug="")
    exact = on_one_process(f"{case.alone(family)} {wide}")
    alone = on_one_process(f"{case.alone(family)} {in_fp8} {wide}")
    lost = {kind: distance([alone], exact, kind) for kind in KINDS}
    assert distance(found, alone, "gradients 1") < nearer * lost["gradients 1"]
    assert all(distance(found, exact, kind) < 1.3 * lost[kind] for kind in KINDS)
