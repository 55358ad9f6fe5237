"""Small routers and expert layers for the tests of this folder."""

import torch
from torch import Tensor, nn

from pentatron.nn.init import draw_weights
from pentatron.nn.moe import MoE
from pentatron.nn.options import Axes, LayerOptions
from pentatron.nn.recompute import NO_RECOMPUTE, Recompute, RecomputeSwitch
from pentatron.nn.router import Router
from pentatron.ops.fp8_linear import LinearOptions
from pentatron.ops.linear import DeferredGradients
from pentatron.parallel.axes import NO_CONTEXT_PARALLELISM, NO_EXPERT_PARALLELISM, ContextAxis, ExpertAxis
from pentatron.parallel.sharding import sharded_parameters
from pentatron.settings.core_config import CoreTransformerConfig
from pentatron.settings.run_config import RunConfig
from tests.support import LLAMA, resolved

HIDDEN = 32
GROUPS = "--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2"
SIGMOID = "--moe-router-score-function sigmoid"
BIAS = f"{SIGMOID} --moe-router-enable-expert-bias"


def config_of(words: str) -> RunConfig:
    return resolved(f"{LLAMA} --moe-ffn-hidden-size 24 --num-experts 8 {words}").config


def drawn(module: nn.Module) -> nn.Module:
    draw_weights(sharded_parameters(module), seed=1, std=0.3)
    return module


def router(
    words: str = "", axis: ExpertAxis = NO_EXPERT_PARALLELISM, context: ContextAxis = NO_CONTEXT_PARALLELISM
) -> Router:
    made = drawn(Router(HIDDEN, config_of(words).moe, Axes(context=context, expert=axis)))
    assert isinstance(made, Router)
    return made


def axes_with(
    recompute: Recompute = NO_RECOMPUTE,
    deferred: DeferredGradients | None = None,
    axis: ExpertAxis = NO_EXPERT_PARALLELISM,
) -> Axes:
    """Returns the axes of one process with an expert axis; `deferred` collects weight gradients."""
    options = LayerOptions(RecomputeSwitch(recompute))
    return Axes(expert=axis, options=options).with_linear(LinearOptions(deferred))


def layer(words: str = "", axis: ExpertAxis = NO_EXPERT_PARALLELISM, axes: Axes | None = None) -> MoE:
    config = config_of(words)
    core = CoreTransformerConfig.of(config.model, config.moe)
    made = drawn(MoE(core, axes=axes or Axes(expert=axis)))
    assert isinstance(made, MoE)
    return made


def stream(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
