"""Tests the notice that a setting for GPUs has no effect on a CPU.

It is printed once, whether the CPU was requested or is the only device.
"""

import pytest

from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.resolve import Resolved, notices_of_device
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import ProcessFacts
from tests.settings.builders import LEAST, about, resolved

ONE, TWO = ProcessFacts(1), ProcessFacts(2, 2)
EXPERTS = "--swiglu --num-experts 4 --moe-ffn-hidden-size 32 --no-bias-swiglu-fusion"
SHARED = "--moe-shared-expert-intermediate-size 32"
FP8 = "--swiglu --bf16 --fp8 e4m3 --num-layers 4 --no-bias-swiglu-fusion"
DEFERS = "--pp_size 2 --pipeline-schedule zero-bubble --num-microbatches 4"

# Settings that have an effect on a GPU only.
ON_A_GPU = {
    "bias_swiglu_fusion": "--swiglu --no-bias-swiglu-fusion",
    "cross_entropy_fusion_impl": "--cross-entropy-fusion-impl native",
    "cross_entropy_chunk": "--cross-entropy-chunk 64",
    "fused_update": "--no-fused-update",
    "record_memory_history": "--record-memory-history",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "use_pytorch_profiler": "--profile --profile-step-start 1 --profile-step-end 2 --use-pytorch-profiler",
    "moe_grouped_gemm": "--bf16 --num-experts 4 --disable-bias-linear --moe-grouped-gemm",
    "compile_layers_together": "--compile-layers-together 2",
    "fp16": "--fp16",
}


@pytest.mark.parametrize(("name", "words"), ON_A_GPU.items(), ids=list(ON_A_GPU))
def test_gpu_settings_are_reported_on_a_cpu(name: str, words: str) -> None:
    asked, auto, on_gpu = (resolved(f"{words} --device {kind}") for kind in ("cpu", "auto", "cuda"))
    (told,) = asked.notices
    assert told.split()[0].rstrip(":") in words.split() and all_settings()[name].flag[2:] in told
    assert later(asked, "cpu") == []
    assert list(auto.notices) == [] and later(auto, "cpu") == [told]
    assert list(on_gpu.notices) == [] and later(on_gpu, "cuda") == []
    assert later(auto, "cuda") == []


def later(found: Resolved, kind: str) -> list[str]:
    """Returns the notices that a run prints once its device is known."""
    return notices_of_device(found, decide(found.config, DeviceFacts(kind)))


@pytest.mark.parametrize(
    ("name", "words", "told", "facts"),
    [
        ("bias_swiglu_fusion", "--no-bias-swiglu-fusion", "are not gated (--swiglu)", ONE),
        ("bias_swiglu_fusion", EXPERTS, "every layer has experts", ONE),
        ("bias_swiglu_fusion", f"{EXPERTS} {SHARED}", "", ONE),
        ("bias_swiglu_fusion", f"{EXPERTS} --moe-layer-freq 2", "", ONE),
        (
            "bias_swiglu_fusion",
            f"--swiglu --no-bias-swiglu-fusion {DEFERS}",
            "zero-bubble defers weight gradients",
            TWO,
        ),
        (
            "bias_swiglu_fusion",
            f"--swiglu --no-bias-swiglu-fusion {DEFERS} --pipeline-schedule 1f1b",
            "",
            TWO,
        ),
        ("bias_swiglu_fusion", f"{FP8} {DEFERS}", "", TWO),
        ("bias_swiglu_fusion", f"{FP8} --first-last-layers-bf16", "", ONE),
        ("bias_swiglu_fusion", f"{FP8} --ffn-hidden-size 40", "", ONE),
        ("cross_entropy_chunk", "--cross-entropy-chunk 64 --no-cross-entropy-loss-fusion", "not fused", ONE),
        ("cross_entropy_chunk", "--cross-entropy-chunk 64 --cross-entropy-loss-fusion", "", ONE),
        ("fused_update", "--no-fused-update --optimizer sgd", "--optimizer sgd always uses torch's", ONE),
        ("fused_update", "--no-fused-update --optimizer-cpu-offload", "updated by torch", ONE),
        ("use_pytorch_profiler", "--use-pytorch-profiler", "nothing is profiled", ONE),
        ("compile_layers_together", "--compile-layers-together 4 --compile off", "no layer is compiled", ONE),
        (
            "compile_layers_together",
            "--compile-layers-together 4 --tp_size 2",
            "tensor ranks communicate",
            TWO,
        ),
        ("compile_layers_together", "--compile-layers-together 2 --compile on", "", ONE),
        (
            "compile_layers_together",
            "--compile-layers-together 64 --compile on",
            "layers on 1 pipeline rank",
            ONE,
        ),
        (
            "compile_layers_together",
            "--compile-layers-together 2 --compile on --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "fewer layers are recomputed",
            ONE,
        ),
        (
            "compile_layers_together",
            "--compile-layers-together 2 --compile on --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            "(--overlap-param-gather)",
            TWO,
        ),
    ],
)
def test_settings_without_effect_on_a_gpu_are_reported_once(
    name: str, words: str, told: str, facts: ProcessFacts
) -> None:
    """A setting without effect on a GPU gives the same single notice on a CPU."""
    found = about(name, f"{LEAST} {words} --device cuda", facts)
    assert len(found) == bool(told) and all(told in line for line in found)
    if told:
        assert (
            about(name, f"{LEAST} {words}", facts)
            == about(name, f"{LEAST} {words} --device cpu", facts)
            == found
        )


def test_a_loss_that_is_fused_on_a_cpu_acts_there() -> None:
    words = f"{LEAST} --device cpu --cross-entropy-chunk 64"
    assert about("cross_entropy_chunk", f"{words} --cross-entropy-loss-fusion", ONE) == []
    assert len(about("cross_entropy_chunk", words, ONE)) == 1
