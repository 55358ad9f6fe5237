"""Models are built as `decide` decides, and a given setting has a notice exactly if it has no effect."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import pentatron.train.compilation as compilation
import pentatron.train.model as parallel_model
from pentatron.errors import ConfigError, UserError
from pentatron.models.causal_lm import CausalLM
from pentatron.nn import compiled
from pentatron.nn.experts import Experts
from pentatron.nn.linear import WeightedModule
from pentatron.nn.mlp import MLP
from pentatron.ops.linear import grouped_mm_supports
from pentatron.optim import update_rules
from pentatron.optim.build import build_optimizer
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.reduction import FullReduction
from pentatron.parallel.world import single_process
from pentatron.plan.sizes import PlanSizes
from pentatron.settings.decision_types import Decisions, DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.resolve import notices_of_decisions
from pentatron.settings.run_config import RunConfig, all_settings
from pentatron.train.cuda_graphs import build_graph_replay
from pentatron.train.model import ParallelModel, build_parallel_model, model_dtype
from tests.harness import run_distributed
from tests.optim.tiny import here
from tests.support import LLAMA, resolved

CPU = DeviceFacts("cpu")
H200 = DeviceFacts("cuda", "NVIDIA H200", (9, 0), 989)
A100 = DeviceFacts("cuda", "NVIDIA A100", (8, 0), 312)
MIXED = "--num-experts 4 --disable-bias-linear --moe-ffn-hidden-size"
TOGETHER = "--compile-layers-together 2"
WIDE = "--num-layers 4 --hidden-size 64 --ffn-hidden-size 64"
MODELS = (
    "",
    "--swiglu",
    f"--swiglu {MIXED} 32",
    f"--swiglu {MIXED} 36 --moe-shared-expert-intermediate-size 24 --moe-layer-freq 2",
)
PRECISIONS = (
    "",
    "--bf16",
    "--bf16 --fp8 hybrid",
    "--bf16 --fp8 e4m3 --fp8-output-layer --first-last-layers-bf16",
    "--fp16",
)
KERNELS = (
    "--cuda-graphs auto",
    "--compile off --no-cross-entropy-loss-fusion",
    "--compile on --cross-entropy-loss-fusion --profile --profile-step-start 1 --profile-step-end 2",
    "--deterministic-mode --recompute-granularity full --recompute-num-layers 1 --optimizer sgd",
    "--reset-attention-mask --optimizer-cpu-offload",
)
LAYOUTS = (
    ("", 1),
    ("--zero-stage 3", 1),
    ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --zero-stage 1", 2),
    ("--context-parallel-size 2", 2),
    ("--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble", 2),
    ("--pipeline-model-parallel-size 2 --zero-stage 1", 4),
    ("--zero-stage 1 --overlap-param-gather", 2),
    ("--zero-stage 2 --overlap-grad-reduce", 2),
    ("--zero-stage 3", 2),
)
# For each setting a value that requests something, and one that does not.
ASKED: dict[str, tuple[Any, Any]] = {
    "bias_swiglu_fusion": (True, False),
    "cross_entropy_fusion_impl": ("native", "auto"),
    "cross_entropy_chunk": (8, 16),
    "fused_update": (True, False),
    "optimizer_cpu_offload": (True, False),
    "overlap_grad_reduce": (True, False),
    "overlap_param_gather": (True, False),
    "moe_grouped_gemm": (True, False),
    "compile_layers_together": (2, 1),
    "fp8_recipe": ("rowwise", "tensorwise"),
    "fp8_output_layer": (True, False),
    "first_last_layers_bf16": (True, False),
    "num_layers_at_start_in_bf16": (2, 1),
    "num_layers_at_end_in_bf16": (2, 1),
    "record_memory_history": (True, False),
    "use_pytorch_profiler": (True, False),
}


def grid() -> list[RunConfig]:
    found = []
    for *words, (layout, world) in itertools.product(MODELS, PRECISIONS, KERNELS, LAYOUTS):
        try:
            found.append(resolved(f"{WIDE} {' '.join(words)} {layout}", world).config)
        except ConfigError:
            continue
    return found


def changed(config: RunConfig, name: str, value: Any) -> RunConfig:
    section = all_settings()[name].section
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}
    )


def done(decisions: Decisions) -> tuple[object, ...]:
    """Returns what is done: without reasons, and without options of features that are off."""
    d = decisions
    return (
        (d.compilation.on, d.compilation.on and d.compilation.layers_per_graph),
        (d.gate.in_second, d.gate.in_fp8),
        (d.loss.on, d.loss.on and (d.loss.implementation, d.loss.chunk)),
        (d.experts.on, d.experts.on_device),
        (d.graphs.required, d.graphs.if_memory_allows),
        (d.fp8.format, d.fp8.format and d.fp8.by_rows, d.fp8.layers, d.fp8.head),
        *(
            d.optimizer.fused,
            d.optimizer.in_host_memory,
            d.optimizer.overlap_reduce,
            d.optimizer.overlap_gather,
        ),
        *(d.allocations_recorded, d.torch_profiler),
    )


@pytest.fixture(scope="module")
def every() -> list[RunConfig]:
    found = grid()
    assert len(found) > 300
    return found


@pytest.mark.parametrize("name", ASKED)
def test_the_line_appears_exactly_when_the_setting_changes_nothing(name: str, every: list[RunConfig]) -> None:
    asked, other = ASKED[name]
    seen = set()
    for config, device in itertools.product(every, (CPU, H200, A100)):
        one, two = (decide(changed(config, name, value), device) for value in (asked, other))
        assert bool(one.no_effect[name]) == (done(one) == done(two)), (one.no_effect[name], config.flat())
        seen.add(bool(one.no_effect[name]))
        expected = f"{all_settings()[name].written(asked)}: {one.no_effect[name]}"
        assert said(changed(config, name, asked), one, name) == ([expected] if one.no_effect[name] else [])
    assert seen == {True, False}, "control: each setting acts somewhere, and is idle somewhere"


def said(config: RunConfig, decisions: Decisions, name: str) -> list[str]:
    """Returns the notices about a setting that is given by a flag.

    Remarks, which are printed without the flag too, are left out.
    """
    settings = config.settings.copy()
    assert notices_of_decisions(settings, decisions) == decisions.remarks
    settings.assign(f"flag {all_settings()[name].flag}", **{name: getattr(settings, name)})
    found = notices_of_decisions(settings, decisions)
    return found[: len(found) - len(decisions.remarks)]


def test_every_setting_that_may_be_idle_is_asked_for() -> None:
    assert set(ASKED) == set(decide(resolved().config, CPU).no_effect)


def test_notices_without_a_known_device_hold_on_every_device(every: list[RunConfig]) -> None:
    """A notice that is printed before the device is known must hold on every device."""
    for config in every:
        unknown = decide(config, DeviceFacts())
        for device in (CPU, H200):
            known = decide(config, device)
            assert all(known.no_effect[name] for name, reason in unknown.no_effect.items() if reason)
    assert decide(resolved("--bf16 --fp8 hybrid").config, DeviceFacts()).fp8.unsupported_reason == ""


def test_plan_follows_the_decisions(every: list[RunConfig]) -> None:
    for config in every[::7]:
        for on_gpu, device in ((True, DeviceFacts("cuda")), (False, CPU)):
            assert done(PlanSizes(config, on_gpu=on_gpu).decisions) == done(decide(config, device))


# --- what is built ---


def built(
    words: str, facts: DeviceFacts | None = None, planted: Callable[[Decisions], Decisions] | None = None
) -> ParallelModel:
    """Builds a model on a CPU.

    `facts`: the device to decide for. `planted`: changes the decisions that the builder gets.
    """
    config = resolved(f"{LLAMA} {WIDE} {words}").config

    def decided(config: RunConfig, device: DeviceFacts, has_custom_program: bool = False) -> Decisions:
        found = decide(config, facts or device, has_custom_program)
        return found if planted is None else planted(found)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compilation, "_trial", lambda device: "")
        patched.setattr(parallel_model, "decide", decided)
        return build_parallel_model(config, single_process())


def modules(model: ParallelModel, kind: type[Any]) -> list[Any]:
    return [m for stage in model.stages.values() for m in stage.modules() if isinstance(m, kind)]


def stage_of(model: ParallelModel) -> CausalLM:
    (stage,) = model.stages.values()
    return stage


def optimizer_of(model: ParallelModel) -> Optimizer:
    config = model.config
    made = build_optimizer(
        model.stages, model.world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    assert isinstance(made, Optimizer)
    return made


def fuses_gates(model: ParallelModel) -> bool:
    return any(mlp.fuses_gate for mlp in modules(model, MLP))


def fuses_loss(model: ParallelModel) -> bool:
    return stage_of(model).cross_entropy.fuses(torch.zeros(1))


def is_compiled(model: ParallelModel) -> bool:
    wrapped = any("forward" in vars(layer) for layer in stage_of(model).layers.values())
    assert wrapped == (model.compilation.compiled.layers > 0)
    return wrapped


def compiled_together(model: ParallelModel) -> int:
    together = stage_of(model).multi_layer_graph
    return 1 if together is None else together.count


def layers_in_fp8(model: ParallelModel) -> set[int]:
    layers = stage_of(model).layers.items()
    return {
        int(number)
        for number, layer in layers
        if any(m.fp8 is not None for m in layer.modules() if isinstance(m, WeightedModule))
    }


def head_in_fp8(model: ParallelModel) -> bool:
    embedding = stage_of(model).embedding
    assert embedding is not None
    return embedding.word.fp8 is not None


class FusedUpdate:
    """Replaces the update kernel, which needs Triton."""

    is_fused = False

    def __init__(self, parts: object, config: object) -> None: ...


def updates_fused(model: ParallelModel) -> bool:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(update_rules, "_can_fuse", lambda parts: True)
        patched.setattr(update_rules, "FusedAdamW", FusedUpdate)
        return isinstance(optimizer_of(model).update, FusedUpdate)


def offloads(model: ParallelModel) -> bool:
    return optimizer_of(model).bytes()["master"] > 0


Observed = Callable[[ParallelModel], object]
# For each feature: how to observe it in a model, its decision, and settings with and without it.
BUILT: dict[str, tuple[Observed, Callable[[Decisions], object], tuple[str, ...]]] = {
    "gate": (
        fuses_gates,
        lambda d: d.gate.on,
        ("", "--no-bias-swiglu-fusion", "--bf16 --fp8 hybrid", "--bf16 --fp8 hybrid --no-bias-swiglu-fusion"),
    ),
    "loss": (
        fuses_loss,
        lambda d: d.loss.on,
        ("", "--cross-entropy-loss-fusion", "--no-cross-entropy-loss-fusion"),
    ),
    "compilation": (
        is_compiled,
        lambda d: d.compilation.on,
        ("", "--compile on", "--compile off", "--deterministic-mode", "--deterministic-mode --compile on"),
    ),
    "layers together": (
        compiled_together,
        lambda d: d.compilation.layers_per_graph if d.compilation.on else 1,
        tuple(f"--compile on {words}" for words in ("", TOGETHER, f"{TOGETHER} --reset-attention-mask")),
    ),
    "graphs": (
        lambda model: model.recording.recorder is not None,
        lambda d: d.graphs.required or d.graphs.if_memory_allows,
        ("--cuda-graphs auto", "--cuda-graphs off", f"--cuda-graphs auto {MIXED} 32"),
    ),
    "layers in fp8": (
        layers_in_fp8,
        lambda d: set(d.fp8.layers),
        ("--bf16", "--bf16 --fp8 hybrid", "--bf16 --fp8 hybrid --first-last-layers-bf16"),
    ),
    "head in fp8": (
        head_in_fp8,
        lambda d: d.fp8.head,
        ("--bf16 --fp8 hybrid", "--bf16 --fp8 hybrid --fp8-output-layer"),
    ),
    "update": (
        updates_fused,
        lambda d: d.optimizer.fused,
        ("", "--no-fused-update", "--optimizer sgd", "--optimizer-cpu-offload"),
    ),
    "offload": (offloads, lambda d: d.optimizer.in_host_memory, ("", "--optimizer-cpu-offload")),
}


@pytest.mark.parametrize("name", BUILT)
def test_built_model_follows_the_decisions(name: str) -> None:
    """Builds on this CPU, with the decisions for the CPU and for a GPU."""
    observed, decided, settings = BUILT[name]
    seen = []
    for words, facts in itertools.product(settings, (CPU, H200)):
        model = built(words, facts)
        seen.append(observed(model))
        assert seen[-1] == decided(model.decisions) == decided(decide(model.config, facts)), (words, facts)
    assert any(one != seen[0] for one in seen), "control: it is done somewhere, and not everywhere"


@pytest.mark.parametrize(
    ("name", "words", "planted"),
    [
        ("gate", "--no-bias-swiglu-fusion", {"gate": {"in_second": True}}),
        ("loss", "--no-cross-entropy-loss-fusion", {"loss": {"on": True}}),
        ("compilation", "--compile off", {"compilation": {"on": True}}),
        ("layers together", "--compile on", {"compilation": {"layers_per_graph": 2}}),
        ("graphs", "--cuda-graphs off", {"graphs": {"if_memory_allows": True}}),
        ("layers in fp8", "--bf16 --fp8 hybrid", {"fp8": {"layers": range(1)}}),
        ("head in fp8", "--bf16 --fp8 hybrid", {"fp8": {"head": True}}),
        ("update", "--no-fused-update", {"optimizer": {"fused": True}}),
        ("offload", "", {"optimizer": {"in_host_memory": True}}),
    ],
)
def test_the_builder_follows_the_decision_not_the_settings(
    name: str, words: str, planted: dict[str, dict[str, Any]]
) -> None:
    def plant(found: Decisions) -> Decisions:
        changes = {n: dataclasses.replace(getattr(found, n), **fields) for n, fields in planted.items()}
        return dataclasses.replace(found, **changes)

    observed = BUILT[name][0]
    assert observed(built(words, CPU, plant)) != observed(built(words, CPU))


class OnGPU:
    is_cuda, dtype = True, torch.bfloat16


def test_experts_are_one_matmul_where_it_was_decided() -> None:
    seen = set()
    for width, words in itertools.product((32, 36), ("", "--moe-grouped-gemm", "--no-moe-grouped-gemm")):
        model = built(f"--bf16 {MIXED} {width} {words}")
        experts = modules(model, Experts)[0]
        rows: Any = OnGPU()
        sizes = (*experts.linear_fc1.weight.shape[1:], *experts.linear_fc2.weight.shape[1:])
        on_gpu = experts.grouped and grouped_mm_supports(rows, *sizes)
        decided = decide(model.config, H200).experts
        assert decided.on == decided.on_device == on_gpu
        assert not decide(model.config, CPU).experts.on and not experts.can_run_on_device(torch.zeros(1, 64))
        seen.add(on_gpu)
    assert seen == {True, False}


def overlaps(words: str) -> tuple[tuple[object, ...], ...]:
    """Returns which collectives overlap on this rank, observed and decided.

    Modules must have forward pre-hooks exactly if gathers overlap.
    """
    world_size = torch.distributed.get_world_size()
    config = resolved(words, world_size).config
    model = build_parallel_model(config, here(config.grid))
    made = optimizer_of(model)
    hooks = any(m._forward_pre_hooks for m in modules(model, nn.Module))
    # With ZeRO 0 and 1 every reduction is a `FullReduction`.
    found = {cast(FullReduction, reduction).overlap for reduction in made._reductions.values()}
    d = model.decisions
    return (tuple(found), made._gathering.overlap, hooks), (
        (d.optimizer.overlap_reduce,),
        d.optimizer.overlap_gather,
        d.optimizer.overlap_gather,
    )


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("flags", ["", "--overlap-grad-reduce --overlap-param-gather"])
@pytest.mark.parametrize("world", [1, 2])
def test_overlapped_communication_follows_the_decisions(stage: int, flags: str, world: int) -> None:
    (found, decided), *_ = run_distributed(overlaps, world, words=f"--zero-stage {stage} {flags}")
    assert found == decided
    assert found == ((bool(flags) and world == 2,), *2 * (bool(flags) and world == 2 and stage == 1,))


def run_together(words: str, count: int) -> int:
    """Returns the most layers that ran as one function, with `layers_per_graph=count`."""

    def planted(decided: Decisions) -> Decisions:
        together = dataclasses.replace(decided.compilation, on=True, layers_per_graph=count)
        return dataclasses.replace(decided, compilation=together)

    model = built(words, planted=planted)
    stage, most = stage_of(model), [1]
    documents = model.decisions.compilation.documents
    if stage.multi_layer_graph is not None:

        def in_turn(layers: Any, x: torch.Tensor, *inputs: Any) -> torch.Tensor:
            most.append(len(layers))
            return compiled._in_turn(layers, x, *inputs)

        stage.multi_layer_graph._compiled = in_turn  # type: ignore[attr-defined]
    tokens = torch.zeros(1, 16, dtype=torch.long)
    starts = ((0, 5),) if documents else None
    with torch.compiler.set_stance("force_eager"):
        made: torch.Tensor = stage(tokens, torch.arange(16)[None], documents=starts)
        made.sum().backward()
    return max(most)


@pytest.mark.parametrize(
    ("words", "together"),
    [
        ("", True),
        ("--num-layers 1", False),
        ("--reset-attention-mask", False),
        (f"{MIXED} 32", False),
        ("--recompute-granularity selective", True),
        ("--recompute-granularity full --recompute-num-layers 1", False),
        ("--recompute-granularity full --recompute-num-layers 2", True),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", True),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", False),
    ],
)
def test_layers_run_together_where_it_was_decided(words: str, together: bool) -> None:
    config = resolved(f"{LLAMA} {WIDE} {words} --compile on {TOGETHER}").config
    assert (decide(config, CPU).compilation.layers_per_graph == 2) == together
    assert (run_together(words, 2) == 2) == together


def test_recordings_that_are_required_end_a_run_that_cannot_have_them() -> None:
    config = resolved("--bf16 --cuda-graphs on").config
    for facts, has_custom_program, problem in (
        (H200, False, ""),
        (H200, True, "a custom model"),
        (dataclasses.replace(H200, is_nvidia=False), False, "no NVIDIA GPU"),
        (CPU, False, "no NVIDIA GPU"),
    ):
        decided = decide(config, facts, has_custom_program).graphs
        assert decided.required and bool(decided.problem) == bool(problem)
        if problem:
            with pytest.raises(UserError, match=problem):
                build_graph_replay(config, decided, torch.device("cpu"))
        else:
            assert build_graph_replay(config, decided, torch.device("cpu")).recorder is not None
