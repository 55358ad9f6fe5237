"""What of the settings a model is built with. Each decision is a function of its own."""

from dataclasses import replace

from pentatron.config.fp8 import fp8_layers
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
    compile: Compile | None,
    deferred: DeferredGradients,
    scales: WeightScales,
    world: World,
) -> ModelOptions:
    """`deferred` and `scales` are those of the run: the executor and the step use them too."""
    return ModelOptions(
        attention_backend=config.kernels.attention_backend,
        recompute=recompute_of(config.memory),
        cross_entropy=cross_entropy_of(config.kernels),
        fuses_gates=config.kernels.bias_swiglu_fusion,
        fp8=fp8_of(config, scales if keeps_scales(config, world) else None),
        deferred=deferred if config.defers_weight_gradients else None,
        compile=compile,
    )


def fp8_of(config: RunConfig, scales: WeightScales | None) -> Fp8Options | None:
    """Which matrices are multiplied in fp8, and in which format."""
    precision = config.precision
    if precision.fp8_format is None:
        return None
    by_rows = precision.fp8_recipe == "rowwise"
    return Fp8Options(
        format=replace(FORMATS[precision.fp8_format], by_rows=by_rows),
        layers=fp8_layers(precision, config.model.num_layers),
        head=precision.fp8_output_layer,
        scales=scales,
    )


def keeps_scales(config: RunConfig, world: World) -> bool:
    """Whether the scales of fp8 weights are computed once a step: weights are whole between steps, with one scale each."""
    whole = world.replicas.size == 1 or config.parallel.zero_stage == 0
    return whole and config.precision.fp8_recipe == "tensorwise"
