"""The tensors of a model as one process would hold it, without making it."""

import torch

from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.layout.stages import StagePart
from pentatron.models.causal_lm import CausalLM
from pentatron.nn.axes import Axes
from pentatron.parallel.pieces import Shape, held_parameters


def logical_shapes(model: TransformerConfig, moe: MoEConfig) -> dict[str, Shape]:
    """Every tensor of a model of ours, by name."""
    part = StagePart(tuple(range(model.num_layers)), embedding=True, head=True)
    with torch.device("meta"):
        whole = CausalLM(model, moe, part, Axes())
    return {held.tensor: held.declared.shape for held in held_parameters(whole)}
