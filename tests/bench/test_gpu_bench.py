"""Tests bench/gpu.py without a GPU: FLOP counts, groups of kernels, turns and tables."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.kernel_groups import OPTIMIZER, group_of, grouped
from bench.ours import words_of
from bench.performance_page import with_tables
from bench.steps import GIB, SHAPES, Case, milliseconds, milliseconds_in_a_row, record
from bench.turns import CaseProcess, Turns
from pentatron.cli.configure import prepare
from pentatron.settings.entry_points import TRAIN
from pentatron.settings.model_sizes import step_flops

PAGE = Path(__file__).parents[2] / "docs/performance.md"


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_those_of_our_presets(shape: str, tmp_path: Path) -> None:
    """The FLOPs of a shape equal those of the model that its settings describe."""
    case = Case("ours:selective", shape, 2, 512, "cpu")
    words = [*words_of(case, "--seed 7", tmp_path, 10), "--dataset-size", "10"]
    config = prepare(words, dataclasses.replace(TRAIN, default_preset=None)).resolved.config
    own = step_flops(config.model, 2, 512, config.moe)
    assert own == pytest.approx(SHAPES[shape].flops_per_token(512) * case.tokens)
    assert config.memory.recompute_granularity == "selective" and config.run.seed == 7
    assert SHAPES[shape].tied is not config.model.untie_embeddings_and_output_weights


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>", "attention"),
        ("triton_red_fused__fused_rms_norm__to_copy_add_0", "norms and elementwise"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_mm_t_3", "norms and elementwise"),
        (
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>",
            "norms and elementwise",
        ),
        ("_write_rounded", "fp8 rounding"),
        ("_largest_of_tiles", "fp8 rounding"),
        ("_cross_entropy_gradient", "loss"),
        ("_update", "optimizer"),
        ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_1", "loss"),
        ("void at::native::multi_tensor_apply_kernel<..., at::native::FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<..., LpNormFunctor<float>>", "gradient norm and clip"),
        ("Memcpy DtoD (Device -> Device)", "copies and memsets"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("void at::native::vectorized_elementwise_kernel<4, silu>", "norms and elementwise"),
    ],
)
def test_kernels_have_their_group_by_name(name: str, group: str) -> None:
    assert group_of(name) == group


def test_groups_of_a_trace_add_up() -> None:
    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": ts, "dur": dur}

    found = grouped(
        [
            event("kernel", "nvjet_a", 0, 4000),
            # On another stream at the same time as a kernel: the gaps count this busy time once.
            event("gpu_memcpy", "Memcpy HtoD", 3000, 1000),
            event("kernel", "vectorized_elementwise", 6000, 1000),
            event("gpu_user_annotation", OPTIMIZER, 8000, 2000),
            event("kernel", "vectorized_elementwise", 8000, 2000),
            event("cpu_op", "aten::mm", 0, 99999),
        ],
        steps=2,
    )
    assert found["step_ms"] == 5.0 and found["launches"] == 2
    assert found["groups"] == {
        "matmul": 2.0,
        "norms and elementwise": 0.5,
        "optimizer": 1.0,
        "copies and memsets": 0.5,
        "gaps": 1.5,
    }


CASE = Case("ours", "qwen3-8b-8l", 4, 4096)
LAST = {"peak": 60 * GIB, "held": 40 * GIB, "total": 139 * GIB, "loss": 11.5, "first_seconds": 30.0}


def test_a_record_is_of_the_median_step_and_the_spread_of_blocks() -> None:
    found = record(CASE, [[0.40, 0.41, 0.40], [0.42, 0.42, 9.0], [0.40, 0.40, 0.40]], LAST)
    assert found["tok_s"] == round(16384 / 0.40) and found["spread"] == 0.05
    # Printed elsewhere for this shape: 536 TFLOP/s at 38,810 tokens/s.
    assert pytest.approx(found["tflops"] / found["tok_s"], rel=2e-3) == 536 / 38810


class Clock:
    """Fakes torch.cuda.Event: the time is `done`, which the tested work increases."""

    done = 0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = Clock.done

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: "Clock") -> float:
        return float(other.at - self.at)


def test_warm_up_and_preparation_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Clock)

    def work() -> None:
        Clock.done += 1

    def much() -> None:
        Clock.done += 100

    assert milliseconds(work, 2, before=much) == milliseconds_in_a_row(work, 5) == 1.0
    # All benchmarks measure time in one file.
    own = [
        path.name for path in (PAGE.parents[1] / "bench").glob("*.py") if "elapsed_time" in path.read_text()
    ]
    assert own == ["steps.py"]


class Fake(CaseProcess):
    """A case without a process, which runs out of memory beyond `room` bytes in all."""

    def __init__(self, case: Case, held: dict[str, float], log: list[str], room: float) -> None:
        self.case, self.blocks, self.extras, self.failure = case, [], {}, None
        self.held, self.log_of_all, self.room = held, log, room

    def ask(self, timeout: float, **command: Any) -> dict[str, Any]:
        if command["do"] != "block":
            return {"syncs": []}
        self.log_of_all.append(self.case.name)
        self.held[self.case.name] = 60 * GIB
        if sum(self.held.values()) > self.room:
            del self.held[self.case.name]
            self.failure = {"oom": True}
            return self.failure
        self.held[self.case.name] = 40 * GIB
        return LAST | {"seconds": [0.4] * command["steps"], "total": self.room}

    def end(self) -> None:
        self.held.pop(self.case.name, None)


@pytest.mark.parametrize(
    ("at_once", "room", "order", "together"),
    [
        (3, 200, "a b c a b c a b c", "abc"),
        (2, 200, "a b a b a b c c c", "ab"),
        # Two fit at once; the third is not tried before they are done.
        (3, 139, "a b a b a b c c c", "ab"),
        (3, 70, "a a a b b b c c c", ""),
    ],
)
def test_cases_take_turns_as_far_as_there_is_room(at_once: int, room: int, order: str, together: str) -> None:
    held: dict[str, float] = {}
    log: list[str] = []
    found: list[dict[str, Any]] = []
    turns = Turns(
        lambda case: Fake(case, held, log, room * GIB), blocks=3, steps=2, timeout=1.0, at_once=at_once
    )
    turns.run([dataclasses.replace(CASE, name=name) for name in "abc"], found.append)
    assert " ".join(log) == order
    assert all(len(r["blocks"]) == 3 for r in found)
    assert "".join(r["case"] for r in found if r["in_turns"]) == together


def test_tables_are_made_of_results() -> None:
    said = {
        "versions": {"torch": "2.11"},
        "command": "python bench/gpu.py --json /some/where --timeout 9",
    }
    ours = record(CASE, [[0.40] * 3], LAST) | said
    titan = record(dataclasses.replace(CASE, name="titan:compile"), [[0.44] * 3], LAST) | said
    missing = {"case": "hf:liger", "shape": CASE.shape, "mbs": 4, "seq": 4096, "oom": True}
    page = with_tables(PAGE.read_text(encoding="utf-8"), [ours, titan, missing])
    assert "| Pentatron, bf16 | 40,960 |" in page and "| 1.10 |" in page and "out of memory" in page
    assert "python bench/gpu.py --json bench/results\n" in page and "/some/where" not in page
    assert with_tables(page, [ours, titan, missing]) == page
    # Results of different commands are not compared.
    apart = with_tables(page, [ours | {"command": "python bench/gpu.py"}, titan])
    assert "| 40,960 |" in apart and "| 1.10 |" not in apart
