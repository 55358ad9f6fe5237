"""Causal self-attention with grouped queries; its heads are split across the tensor axis."""

from torch import Tensor, nn

from pentatron.errors import UserError
from pentatron.layout.documents import DocumentStarts
from pentatron.layout.ranks import Axis
from pentatron.nn.compiled import CompileOptions, Forward
from pentatron.nn.context_attention import attend
from pentatron.nn.init import residual_scale
from pentatron.nn.kv_cache import attend_to_cache
from pentatron.nn.linear import ColumnParallelLinear, RowParallelLinear, Rows
from pentatron.nn.norm import norm_in
from pentatron.nn.options import ONE_PROCESS, Axes
from pentatron.nn.rope import RotaryEmbedding
from pentatron.nn.spec import AttnMaskType, IdentityOp, SelfAttentionSubmodules, build_module, document_kwargs
from pentatron.parallel.axes import TensorAxis
from pentatron.settings.core_config import CoreTransformerConfig
from pentatron.settings.layer_patterns import window_of_layer
from pentatron.settings.model import TransformerConfig
from pentatron.settings.model_sizes import AttentionSizes, attention_sizes


class DotProductAttention(nn.Module):
    """Attention over the queries, keys and values of this rank's heads and tokens."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        axes: Axes = ONE_PROCESS,
    ) -> None:
        super().__init__()
        if attn_mask_type is not AttnMaskType.causal:
            raise UserError(f"attention is causal; AttnMaskType.{attn_mask_type.name} is not available")
        self.context = axes.context
        self.dropout = config.attention_dropout
        # Number of previous tokens a token attends to; None for all.
        self.window = window_of_layer(
            config.window_size, config.window_attn_skip_freq, config.num_layers, layer_number
        )
        # The model enters these around all layers. Needed here too for compiled layers, because the
        # compiler's cache ignores the choice, and for recompute outside of a compiled layer, which runs
        # outside of the model's forward.
        self.kernels = axes.options.kernels
        self.cache_in_use = axes.options.cache

    def forward(
        self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, documents: DocumentStarts | None = None
    ) -> Tensor:
        cache = self.cache_in_use.cache
        if cache is not None:
            keys, values = cache.keep(self, k_BKSH, v_BKSH)
            if not cache.now.is_first:
                return attend_to_cache(q_BNSH, keys, values, cache, self.window)
        dropout = self.dropout if self.training else 0.0
        with self.kernels.context():
            return attend(q_BNSH, k_BKSH, v_BKSH, self.context, dropout, self.window, documents)


PLAIN_ATTENTION = SelfAttentionSubmodules(ColumnParallelLinear, DotProductAttention, RowParallelLinear)


class SelfAttention(nn.Module):
    """Self-attention with a fused QKV projection, whose rows are grouped by key/value head: its queries, its
    key, its value.

    A rank has whole groups. With more ranks than groups, a rank has some queries of a group, and its key and
    value are replicated.
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
        whole, shard = attention_sizes(config), attention_sizes(config, axis.size)
        self.head_width = shard.head
        self.groups = shard.groups
        self.queries_per_group = shard.queries_per_group
        self.recompute = axes.options.recompute
        qkv, rows = whole.linear_qkv, _qkv_rows(whole, shard, axis)
        self.linear_qkv = build_module(
            submodules.linear_qkv, qkv.inputs, qkv.outputs, rows, qkv.has_bias, axis
        )
        # Each rank normalizes its own heads with the same weights, with and without sequence parallelism.
        split = frozenset[Axis]({"tensor"})
        self.q_norm = norm_in(submodules.q_layernorm, config, shard.head, split)
        self.k_norm = norm_in(submodules.k_layernorm, config, shard.head, split)
        core = submodules.core_attention
        self.core_attention = build_module(
            core, config=config, layer_number=layer_number, attn_mask_type=attn_mask_type, axes=axes
        )
        self.graph_breaks: dict[str, str] = {}
        self._eager_core: Forward | None = None
        compile = axes.options.compile
        if compile is not None and (reason := self._core_break_reason(compile)):
            self.graph_breaks["core_attention"] = reason
            self._eager_core = compile.run_eagerly(self, "core_attention")
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
        # Recompute starts here: the projection's output is saved anyway, because the values are a view of it,
        # and the rotated queries and keys need not be.
        attended = self.recompute("core_attn", self._attend, self.linear_qkv(x_BSD), rope, angles, documents)
        return self.linear_proj(attended)

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
        attend = self._eager_core or self.core_attention
        out_BNSH: Tensor = attend(q_BNSH, k_BKSH, v_BKSH, **document_kwargs(self.core_attention, documents))
        return out_BNSH.transpose(1, 2).flatten(2)

    def _core_break_reason(self, compile: CompileOptions) -> str:
        """Returns why the core attention breaks the graph of a compiled layer, or an empty string."""
        # A user's attention class reads documents, so it runs eagerly as a whole.
        documents = compile.documents and type(self) is SelfAttention
        if documents:
            document_kwargs(self.core_attention, ())
        context = getattr(self.core_attention, "context", None)
        if getattr(context, "size", 1) > 1:
            return "attention that communicates with other context ranks"
        return "attention within documents, whose starts differ in every batch" if documents else ""


def supports_kv_cache(layer: nn.Module) -> bool:
    """Whether the layer supports a KV cache: it has plain `SelfAttention`, or no attention."""
    attention = getattr(layer, "attention", None)
    if isinstance(attention, SelfAttention):
        return type(attention.core_attention) is DotProductAttention
    return isinstance(attention, IdentityOp)


def _rotated(x_BNSH: Tensor, rope: RotaryEmbedding, cos: Tensor, sin: Tensor) -> Tensor:
    if not x_BNSH.is_cuda:
        return rope.rotate(x_BNSH, cos, sin)
    # Rotates in the memory layout of the projection. Attention kernels on GPUs write their output in the
    # layout of the queries, which is then that of the hidden states, so no copy is needed.
    return rope.rotate(x_BNSH.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2)).transpose(1, 2)


def _qkv_rows(whole: AttentionSizes, shard: AttentionSizes, axis: TensorAxis) -> tuple[Rows, ...]:
    """The rows of the fused projection that this rank holds."""
    queries, head = whole.queries_per_group * whole.head, whole.head
    rows_of_group = queries + 2 * head
    if axis.kv_copies == 1:
        count = axis.share(whole.groups) * rows_of_group
        return (Rows(axis.rank * count, count),)
    group, part = divmod(axis.rank, axis.kv_copies)
    start, count = group * rows_of_group, shard.queries_per_group * head
    return Rows(start + part * count, count), Rows(start + queries, 2 * head, is_replicated=True)
