"""The transformer layer: attention and an MLP, each with a norm before it and a residual connection."""

from functools import partial

import torch
from torch import Tensor, nn

from pentatron.layout.documents import DocumentStarts
from pentatron.nn.attention import SelfAttention
from pentatron.nn.compiled import Forward
from pentatron.nn.dropout import DropoutKeys, hidden_dropout
from pentatron.nn.moe import MoE
from pentatron.nn.norm import norm_in
from pentatron.nn.options import ONE_PROCESS, Axes
from pentatron.nn.rope import RotaryEmbedding
from pentatron.nn.spec import TransformerLayerSubmodules, build_module, document_kwargs
from pentatron.settings.model import TransformerConfig


def dropout_add(
    output_BSD: Tensor, residual_BSD: Tensor, keys: DropoutKeys | None, site: int | Tensor, probability: float
) -> Tensor:
    """Adds a block's output to the residual after dropout; without keys dropout is off.

    Biases were added before.
    """
    if keys is None:
        return residual_BSD + output_BSD
    return hidden_dropout(output_BSD, keys, site, probability, residual_BSD)


class TransformerLayer(nn.Module):
    """`layer_number` counts from 1, as in Megatron.

    `runs_whole`: the layer is compiled, so hooks of its submodules do not run.
    """

    sites: Tensor
    runs_whole = False

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        axes: Axes = ONE_PROCESS,
    ) -> None:
        super().__init__()
        partial_over = axes.tensor.partial_axes
        self.dropout = config.hidden_dropout
        self.first_site = 2 * layer_number - 1
        self.register_buffer("sites", torch.tensor((self.first_site, self.first_site + 1)), persistent=False)
        self.input_norm = norm_in(submodules.input_layernorm, config, config.hidden_size, partial_over)
        build = partial(build_module, config=config, layer_number=layer_number, axes=axes)
        self.attention = build(submodules.self_attention)
        self.mlp_norm = norm_in(submodules.pre_mlp_layernorm, config, config.hidden_size, partial_over)
        self.mlp = build(submodules.mlp)
        self.add_attention = build(submodules.self_attn_bda or dropout_add)
        self.add_mlp = build(submodules.mlp_bda or dropout_add)
        self.recompute = axes.options.recompute
        self.graph_breaks: dict[str, str] = {}
        self._eager_attention: Forward | None = None
        compile = axes.options.compile
        # A user's layer class may read documents, which are opaque inside a graph.
        if compile is not None and (not compile.documents or type(self) is TransformerLayer):
            if compile.documents and type(self.attention) is not SelfAttention:
                document_kwargs(self.attention, ())
                self.graph_breaks["attention"] = f"{type(self.attention).__name__}, which reads documents"
                self._eager_attention = compile.run_eagerly(self, "attention")
            self.runs_whole = True
            # The forward, not the call, so that hooks such as FSDP's stay outside the graph.
            self.forward = compile.layer(self.forward)  # type: ignore[method-assign]

    def forward(
        self,
        x_BSD: Tensor,
        rope: RotaryEmbedding | None,
        angles: tuple[Tensor, Tensor] | None,
        keys: DropoutKeys | None,
        documents: DocumentStarts | None = None,
    ) -> Tensor:
        normed = self.recompute("layernorm", self.input_norm, x_BSD)
        attend = self._eager_attention or self.attention
        attended = attend(normed, rope, angles, **document_kwargs(self.attention, documents))
        x_BSD = self.add_attention(attended, x_BSD, keys, self._site(0), self.dropout)
        part = "" if isinstance(self.mlp, MoE) else "mlp"
        output = self.recompute(part, self.mlp, self.recompute("layernorm", self.mlp_norm, x_BSD))
        return self.add_mlp(output, x_BSD, keys, self._site(1), self.dropout)

    def _site(self, which: int) -> int | Tensor:
        """Number of a dropout site.

        As a tensor in compiled graphs, where an int would be a constant and need one graph per layer.
        """
        return self.sites[which] if torch.compiler.is_compiling() else self.first_site + which
