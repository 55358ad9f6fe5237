"""Causal self-attention with grouped queries, its heads spread over the tensor axis."""

from torch import Tensor, nn

from pentatron.errors import UserError
from pentatron.layout.documents import DocumentStarts
from pentatron.layout.ranks import Axis
from pentatron.nn.compiled import Compile, Forward
from pentatron.nn.context_attention import attend
from pentatron.nn.init import residual_scale
from pentatron.nn.kv_cache import attend_to_kept
from pentatron.nn.linear import ColumnParallelLinear, RowParallelLinear, Rows
from pentatron.nn.norm import norm_in
from pentatron.nn.options import ONE_PROCESS, Axes
from pentatron.nn.rope import RotaryEmbedding
from pentatron.nn.spec import AttnMaskType, IdentityOp, SelfAttentionSubmodules, build_module, documents_for
from pentatron.parallel.axes import TensorAxis
from pentatron.settings.core import CoreTransformerConfig
from pentatron.settings.layers import window_of
from pentatron.settings.model import TransformerConfig
from pentatron.settings.parameters import AttentionSizes, attention_sizes


class DotProductAttention(nn.Module):
    """Queries, keys and values of this rank's heads and tokens go in; what each token found comes out."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        axes: Axes = ONE_PROCESS,
    ) -> None:
        super().__init__()
        if attn_mask_type is not AttnMaskType.causal:
            raise UserError(f"attention here is causal; AttnMaskType.{attn_mask_type.name} is not available")
        self.context = axes.context
        self.dropout = config.attention_dropout
        # How many tokens before its own a token sees, if not all.
        self.window = window_of(
            config.window_size, config.window_attn_skip_freq, config.num_layers, layer_number
        )
        # The model's own, said around all of its layers; here it is said again, for what is compiled (a cache of compiled layers would
        # not tell two choices apart) and for what is recomputed out of a compiled layer, where the model says nothing.
        self.kernels = axes.options.kernels
        self.cache_in_use = axes.options.cache

    def forward(
        self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, documents: DocumentStarts | None = None
    ) -> Tensor:
        cache = self.cache_in_use.cache
        if cache is not None:
            keys, values = cache.of(self).keep(k_BKSH, v_BKSH)
            if not cache.now.is_first:
                return attend_to_kept(q_BNSH, keys, values, cache, self.window)
        dropout = self.dropout if self.training else 0.0
        with self.kernels.around():
            return attend(q_BNSH, k_BKSH, v_BKSH, self.context, dropout, self.window, documents)


PLAIN_ATTENTION = SelfAttentionSubmodules(
    linear_qkv=ColumnParallelLinear,
    core_attention=DotProductAttention,
    linear_proj=RowParallelLinear,
    q_layernorm=IdentityOp,
    k_layernorm=IdentityOp,
)


class SelfAttention(nn.Module):
    """One fused QKV projection; its rows are grouped by key/value head: the queries of a group, its key, its value.

    A rank has whole groups; where there are more ranks than groups, it has a part of a group's queries, and its key
    and value like its neighbours.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        axes: Axes = ONE_PROCESS,
        submodules: SelfAttentionSubmodules = PLAIN_ATTENTION,
    ) -> None:
        super().__init__()
        config, axis = CoreTransformerConfig.of(config), axes.tensor
        whole, own = attention_sizes(config), attention_sizes(config, axis.size)
        self.head_width = own.head
        self.groups = own.groups
        self.queries_per_group = own.queries_per_group
        self.recompute = axes.options.recompute
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            whole.linear_qkv.inputs,
            whole.linear_qkv.outputs,
            _qkv_rows(whole, own, axis),
            whole.linear_qkv.has_bias,
            axis,
        )
        # Every rank norms its own heads with the same weights, sequence parallelism or not.
        own_heads = frozenset[Axis]({"tensor"})
        self.q_norm = norm_in(submodules.q_layernorm, config, own.head, own_heads)
        self.k_norm = norm_in(submodules.k_layernorm, config, own.head, own_heads)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            axes=axes,
        )
        self.called_apart: dict[str, str] = {}
        self._core_apart: Forward | None = None
        compile = axes.options.compile
        if compile is not None and (reason := self._why_core_is_apart(compile)):
            self.called_apart["core_attention"] = reason
            self._core_apart = compile.called_apart(self, "core_attention")
        proj, scale = whole.linear_proj, residual_scale(config.num_layers)
        self.linear_proj = build_module(
            submodules.linear_proj, proj.inputs, proj.outputs, proj.has_bias, axis, scale
        )

    def forward(
        self,
        x_BSD: Tensor,
        rope: RotaryEmbedding | None,
        angles: tuple[Tensor, Tensor] | None,
        documents: DocumentStarts | None = None,
    ) -> Tensor:
        # The values are a view of the projection's output, so keeping that keeps no more, and rotated copies need not be.
        attended = self.recompute("core_attn", self._attend, self.linear_qkv(x_BSD), rope, angles, documents)
        made: Tensor = self.linear_proj(attended)
        return made

    def _attend(
        self,
        qkv: Tensor,
        rope: RotaryEmbedding | None,
        angles: tuple[Tensor, Tensor] | None,
        documents: DocumentStarts | None,
    ) -> Tensor:
        batch, length, _ = qkv.shape
        per_group = qkv.view(batch, length, self.groups, self.queries_per_group + 2, self.head_width)
        q, k, v = per_group.split((self.queries_per_group, 1, 1), dim=3)
        q_BNSH, k_BKSH, v_BKSH = (t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))
        q_BNSH, k_BKSH = self.q_norm(q_BNSH), self.k_norm(k_BKSH)
        if rope is not None and angles is not None:
            q_BNSH, k_BKSH = (_rotated(t, rope, *angles) for t in (q_BNSH, k_BKSH))
        attend = self._core_apart or self.core_attention
        out_BNSH: Tensor = attend(q_BNSH, k_BKSH, v_BKSH, **documents_for(self.core_attention, documents))
        return out_BNSH.transpose(1, 2).flatten(2)

    def _why_core_is_apart(self, compile: Compile) -> str:
        """Why the attention proper interrupts the graph of a compiled layer, if it does."""
        # A class of a user's own, which is told of documents, is apart as a whole.
        documents = compile.documents and type(self) is SelfAttention
        if documents:
            documents_for(self.core_attention, ())
        context = getattr(self.core_attention, "context", None)
        if getattr(context, "size", 1) > 1:
            return "attention that talks to other context ranks"
        return "attention within documents, which begin elsewhere in every batch" if documents else ""


def can_keep(layer: nn.Module) -> bool:
    """Whether a KV cache can serve a layer: it attends with the attention above, or not at all."""
    attention = getattr(layer, "attention", None)
    if isinstance(attention, SelfAttention):
        return type(attention.core_attention) is DotProductAttention
    return isinstance(attention, IdentityOp)


def _rotated(x_BNSH: Tensor, rope: RotaryEmbedding, cos: Tensor, sin: Tensor) -> Tensor:
    if not x_BNSH.is_cuda:
        return rope.rotate(x_BNSH, cos, sin)
    # Written token by token, as the projection wrote them: a GPU's kernels give their output the order of the queries, which then
    # is that of the stream, and no copy is needed after them.
    return rope.rotate(x_BNSH.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2)).transpose(1, 2)


def _qkv_rows(whole: AttentionSizes, own: AttentionSizes, axis: TensorAxis) -> tuple[Rows, ...]:
    """The rows of the fused projection that this rank holds."""
    queries, head = whole.queries_per_group * whole.head, whole.head
    rows_of_group = queries + 2 * head
    if axis.kv_copies == 1:
        count = axis.share(whole.groups) * rows_of_group
        return (Rows(axis.rank * count, count),)
    group, part = divmod(axis.rank, axis.kv_copies)
    start, count = group * rows_of_group, own.queries_per_group * head
    return Rows(start + part * count, count), Rows(start + queries, 2 * head, copies=True)
