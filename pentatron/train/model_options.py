"""The options that a model is built with, from the decisions of its run."""

from dataclasses import replace

from pentatron.config.decided import Decisions, Fp8Decision
from pentatron.config.run import RunConfig
from pentatron.nn.compiled import Compile
from pentatron.nn.loss import cross_entropy_of
from pentatron.nn.options import Fp8Options, ModelOptions
from pentatron.nn.recompute import recompute_of
from pentatron.parallel.deferral import DeferredGradients
from pentatron.parallel.linear_options import WeightScales
from pentatron.parallel.scaled_linear import FORMATS
from pentatron.parallel.world import World


def model_options(
    config: RunConfig,
    decisions: Decisions,
    compile: Compile | None,
    deferred: DeferredGradients,
    scales: WeightScales,
    world: World,
) -> ModelOptions:
    """`deferred` and `scales` are those of the run: the executor and the step use them too."""
    return ModelOptions(
        attention_backend=config.kernels.attention_backend,
        recompute=recompute_of(config.memory),
        cross_entropy=cross_entropy_of(decisions.loss),
        fuses_gates=decisions.gate.on,
        fp8=fp8_of(decisions.fp8, scales if keeps_scales(config, decisions.fp8, world) else None),
        deferred=deferred if config.defers_weight_gradients else None,
        compile=compile,
    )


def fp8_of(decided: Fp8Decision, scales: WeightScales | None) -> Fp8Options | None:
    """The format of fp8 matmuls, and the layers that have them."""
    if decided.format is None:
        return None
    return Fp8Options(
        format=replace(FORMATS[decided.format], by_rows=decided.by_rows),
        layers=decided.layers,
        head=decided.head,
        scales=scales,
    )


def keeps_scales(config: RunConfig, decided: Fp8Decision, world: World) -> bool:
    """Whether the scales of fp8 weights are computed once a step: weights are whole between steps, with one
    scale each."""
    whole = world.replicas.size == 1 or config.parallel.zero_stage == 0
    return whole and not decided.by_rows
