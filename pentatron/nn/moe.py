"""A mixture of experts in place of the feed-forward part of a layer."""

import dataclasses

import torch
from torch import Tensor, nn

from pentatron.config.core import CoreTransformerConfig
from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.config.moe_layers import moe_layers
from pentatron.config.parameters import has_shared_expert, has_shared_gate, shared_gate_shape
from pentatron.errors import UserError
from pentatron.nn.axes import ONE_PROCESS, Axes
from pentatron.nn.dispatch import DISPATCHERS
from pentatron.nn.experts import Experts
from pentatron.nn.mlp import MLP, PLAIN_MLP
from pentatron.nn.router import Router
from pentatron.nn.spec import MLPSubmodules
from pentatron.parallel.pieces import DeclaringModule, Initial, whole
from pentatron.parallel.tensor_axis import TensorAxis


class SharedExpert(nn.Module):
    """Every token goes through it; with a gate, it has a say in how much of that it takes."""

    def __init__(
        self,
        config: TransformerConfig,
        moe: MoEConfig,
        axes: Axes,
        submodules: MLPSubmodules = PLAIN_MLP,
    ) -> None:
        super().__init__()
        self.mlp = MLP(config, axes=axes, submodules=submodules, inner=moe.shared_width)
        self.gate = SharedGate(config.hidden_size, axes.tensor) if has_shared_gate(moe) else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        made: Tensor = self.mlp(x_BSD)
        return made if self.gate is None else made * self.gate(x_BSD)


class SharedGate(DeclaringModule):
    """One number for each token of the stream."""

    def __init__(self, hidden: int, axis: TensorAxis) -> None:
        super().__init__()
        shape = shared_gate_shape(hidden)
        self.weight = self.declare("weight", shape, whole(shape, Initial(), axis.partial_in_stream))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return torch.sigmoid(nn.functional.linear(x_BSD, self.weight))


class MoE(nn.Module):
    """`submodules` are those of the shared expert. `num_experts`, if given, must be what the configuration says;
    `grouped` asks for one grouped matmul even where that does not want it."""

    left_out = ""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        axes: Axes = ONE_PROCESS,
        submodules: MLPSubmodules = PLAIN_MLP,
        num_experts: int | None = None,
        grouped: bool = False,
    ) -> None:
        super().__init__()
        moe = config.moe if isinstance(config, CoreTransformerConfig) else MoEConfig()
        if moe.num_experts is None or (num_experts or moe.num_experts) != moe.num_experts:
            raise UserError(
                f"a spec asks for {num_experts or 'some'} experts in layer {layer_number}, the configuration has "
                f"{moe.num_experts or 'none'}; write the same number in both (--num-experts)"
            )
        if not moe_layers(moe.moe_layer_freq, config.num_layers)[layer_number - 1]:
            raise UserError(
                f"a spec puts experts into layer {layer_number}, which has none by --moe-layer-freq {moe.moe_layer_freq}; "
                "use get_gpt_decoder_block_spec, which has a spec for each layer"
            )
        self.count = moe.num_experts
        if grouped:
            moe = dataclasses.replace(moe, moe_grouped_gemm=True)
        if axes.options.compile is not None:
            self.left_out = "experts, whose sizes follow from their tokens"
            self.forward = axes.options.compile.apart(self.forward)  # type: ignore[method-assign]
            axes = axes.out_of_graphs()
        self.axis = axes.expert
        self.dispatch = DISPATCHERS[moe.moe_token_dispatcher_type]
        self.recompute = axes.options.recompute
        self.router = Router(config.hidden_size, moe, axes)
        self.experts = Experts(config, moe, axes)
        self.shared = SharedExpert(config, moe, axes, submodules) if has_shared_expert(moe) else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.recompute("moe", self._mixed, x_BSD)

    def _mixed(self, x_BSD: Tensor) -> Tensor:
        routing = self.router(x_BSD)
        x_TD = x_BSD.flatten(0, 1)
        if self.axis.group.size == 1 and self.experts.all_on(x_TD):
            made_TD = self.experts(x_TD, routing=routing)
        else:
            made_TD = self.dispatch(x_TD, routing, self.count, self.axis, self.experts)
        made_BSD = made_TD.view_as(x_BSD)
        return (
            made_BSD
            if self.shared is None
            else made_BSD + self.recompute("shared_experts", self.shared, x_BSD)
        )
