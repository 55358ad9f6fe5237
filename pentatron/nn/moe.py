"""A mixture of experts in place of the feed-forward part of a layer."""

import torch
from torch import Tensor, nn

from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.nn.dispatch import DISPATCHERS
from pentatron.nn.experts import Experts
from pentatron.nn.mlp import MLP
from pentatron.nn.recompute import NOTHING, Recompute
from pentatron.nn.router import Router
from pentatron.parallel.axes import Axes
from pentatron.parallel.pieces import DeclaringModule, Initial, whole
from pentatron.parallel.tensor_axis import TensorAxis


class SharedExpert(nn.Module):
    """Every token goes through it; with a gate, it has a say in how much of that it takes."""

    def __init__(self, config: TransformerConfig, moe: MoEConfig, axis: TensorAxis) -> None:
        super().__init__()
        assert moe.moe_shared_expert_intermediate_size is not None
        self.mlp = MLP(config, axis, moe.moe_shared_expert_intermediate_size)
        self.gate = SharedGate(config.hidden_size, axis) if moe.moe_shared_expert_gate else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        made: Tensor = self.mlp(x_BSD)
        return made if self.gate is None else made * self.gate(x_BSD)


class SharedGate(DeclaringModule):
    """One number for each token of the stream."""

    def __init__(self, hidden: int, axis: TensorAxis) -> None:
        super().__init__()
        self.weight = self.declare(
            "weight", (1, hidden), whole((1, hidden), Initial(), axis.partial_in_stream)
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        return torch.sigmoid(nn.functional.linear(x_BSD, self.weight))


class MoE(nn.Module):
    def __init__(self, config: TransformerConfig, moe: MoEConfig, axes: Axes) -> None:
        super().__init__()
        assert moe.num_experts is not None
        self.count = moe.num_experts
        self.axis = axes.expert
        self.dispatch = DISPATCHERS[moe.moe_token_dispatcher_type]
        self.recompute: Recompute = NOTHING
        self.router = Router(config.hidden_size, moe, axes)
        self.experts = Experts(config, moe, axes.expert)
        shared = moe.moe_shared_expert_intermediate_size is not None
        self.shared = SharedExpert(config, moe, axes.tensor) if shared else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.recompute("moe", self._mixed, x_BSD)

    def _mixed(self, x_BSD: Tensor) -> Tensor:
        routing = self.router(x_BSD)
        made_TD = self.dispatch(x_BSD.flatten(0, 1), routing, self.count, self.axis, self.experts)
        made_BSD = made_TD.view_as(x_BSD)
        return (
            made_BSD
            if self.shared is None
            else made_BSD + self.recompute("shared_experts", self.shared, x_BSD)
        )
