"""One layer: attention and a feed-forward part, each after a norm and added to the stream."""

from functools import partial

import torch
from torch import Tensor, nn

from pentatron.config.model import TransformerConfig
from pentatron.layout.documents import DocumentStarts
from pentatron.nn.dropout import DropoutKeys, dropout_added
from pentatron.nn.moe import MoE
from pentatron.nn.norm import norm_in
from pentatron.nn.recompute import NOTHING, Recompute
from pentatron.nn.rope import RotaryEmbedding
from pentatron.nn.spec import Slot, TransformerLayerSubmodules, build_module, documents_for
from pentatron.parallel.axes import ONE_PROCESS, Axes


def dropout_add(
    made_BSD: Tensor, stream_BSD: Tensor, keys: DropoutKeys | None, site: int | Tensor, probability: float
) -> Tensor:
    """The stream with what a part made; without keys nothing is dropped. (Biases were added where they arise.)"""
    if keys is None:
        return stream_BSD + made_BSD
    return dropout_added(made_BSD, stream_BSD, keys, site, probability)


class TransformerLayer(nn.Module):
    """`layer_number` counts from 1, as Megatron's does."""

    sites: Tensor

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        axes: Axes = ONE_PROCESS,
    ) -> None:
        super().__init__()
        partial_over = axes.tensor.partial_in_stream
        self.dropout = config.hidden_dropout
        self.first_site = 2 * layer_number - 1
        self.register_buffer("sites", torch.tensor((self.first_site, self.first_site + 1)), persistent=False)
        self.input_norm = norm_in(submodules.input_layernorm, config, config.hidden_size, partial_over)
        build = partial(build_module, config=config, layer_number=layer_number, axes=axes)
        self.attention = build(submodules.self_attention)
        self.mlp_norm = norm_in(submodules.pre_mlp_layernorm, config, config.hidden_size, partial_over)
        self.mlp = build(submodules.mlp)
        self.add_attention = build(submodules.self_attn_bda or _ADD)
        self.add_mlp = build(submodules.mlp_bda or _ADD)
        self.recompute: Recompute = NOTHING

    def forward(
        self,
        x_BSD: Tensor,
        rope: RotaryEmbedding | None,
        angles: tuple[Tensor, Tensor] | None,
        keys: DropoutKeys | None,
        documents: DocumentStarts | None = None,
    ) -> Tensor:
        normed = self.recompute("layernorm", self.input_norm, x_BSD)
        attended = self.attention(normed, rope, angles, **documents_for(self.attention, documents))
        x_BSD = self.add_attention(attended, x_BSD, keys, self._site(0), self.dropout)
        part = "" if isinstance(self.mlp, MoE) else "mlp"
        made = self.recompute(part, self.mlp, self.recompute("layernorm", self.mlp_norm, x_BSD))
        added: Tensor = self.add_mlp(made, x_BSD, keys, self._site(1), self.dropout)
        return added

    def _site(self, which: int) -> int | Tensor:
        """Where this layer drops. A number would be compiled in; with a tensor, all layers share what is compiled for one."""
        return self.sites[which] if torch.compiler.is_compiling() else self.first_site + which


_ADD: Slot = dropout_add
