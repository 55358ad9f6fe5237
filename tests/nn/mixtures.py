"""Small routers and layers of experts for the tests of this folder."""

import torch
from torch import Tensor, nn

from pentatron.config.core import CoreTransformerConfig
from pentatron.config.run import RunConfig
from pentatron.nn.init import draw_weights
from pentatron.nn.moe import MoE
from pentatron.nn.router import Router
from pentatron.parallel.axes import Axes
from pentatron.parallel.context_axis import WHOLE_SEQUENCES, ContextAxis
from pentatron.parallel.expert_axis import NO_EXPERTS_ELSEWHERE, ExpertAxis
from pentatron.parallel.pieces import held_parameters
from tests.support import LLAMA, resolved

HIDDEN = 32
GROUPS = "--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2"
SIGMOID = "--moe-router-score-function sigmoid"
BIAS = f"{SIGMOID} --moe-router-enable-expert-bias"


def config_of(words: str) -> RunConfig:
    return resolved(f"{LLAMA} --moe-ffn-hidden-size 24 --num-experts 8 {words}").config


def drawn(module: nn.Module) -> nn.Module:
    draw_weights(held_parameters(module), seed=1, std=0.3)
    return module


def router(
    words: str = "", axis: ExpertAxis = NO_EXPERTS_ELSEWHERE, context: ContextAxis = WHOLE_SEQUENCES
) -> Router:
    made = drawn(Router(HIDDEN, config_of(words).moe, Axes(context=context, expert=axis)))
    assert isinstance(made, Router)
    return made


def layer(words: str = "", axis: ExpertAxis = NO_EXPERTS_ELSEWHERE) -> MoE:
    config = config_of(words)
    made = drawn(MoE(CoreTransformerConfig.of(config.model, config.moe), axes=Axes(expert=axis)))
    assert isinstance(made, MoE)
    return made


def stream(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
