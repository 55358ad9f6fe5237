"""Causal self-attention with grouped queries, its heads spread over the tensor axis."""

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pentatron.config.core import CoreTransformerConfig
from pentatron.config.model import TransformerConfig
from pentatron.config.windows import window_of
from pentatron.errors import UserError
from pentatron.layout.documents import DocumentStarts
from pentatron.layout.ranks import Axis
from pentatron.nn.context_attention import attend
from pentatron.nn.init import residual_scale
from pentatron.nn.linear import ColumnParallelLinear, RowParallelLinear, Rows
from pentatron.nn.norm import norm_in
from pentatron.nn.recompute import NOTHING, Recompute
from pentatron.nn.rope import RotaryEmbedding
from pentatron.nn.spec import AttnMaskType, IdentityOp, SelfAttentionSubmodules, build_module, documents_for
from pentatron.parallel.axes import ONE_PROCESS, Axes
from pentatron.parallel.tensor_axis import TensorAxis

# Megatron's names for kernels, beside torch's own. Of several, the first that takes what it is given runs.
_BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "fused": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
    "unfused": [SDPBackend.MATH],
    "local": [SDPBackend.MATH],
}


# On GPUs from this generation on (Hopper), cuDNN's kernel is the fastest of those that take the same.
_CUDNN_FIRST = 9
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def chosen_kernels(backend: str, device: torch.device, dropout: float = 0.0) -> list[SDPBackend] | None:
    """Which kernels may run, those to prefer first; None leaves the choice to torch, as `auto` does on most devices."""
    if backend != "auto":
        return _BACKENDS[backend]
    # A GPU is asked only by who computes on it: asking opens it.
    newest = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _CUDNN_FIRST
    # With dropout cuDNN's results and gradients are right (against fp64, with the mask it used); whole runs that resume with it are yet to be compared.
    return (_FASTEST_FIRST[1:] if dropout else _FASTEST_FIRST) if newest else None


class AttentionKernels:
    """Around attention that is restricted to some kernels, in their order; nothing is, where none are chosen.

    To say so takes torch longer than a launch, so what is said around a whole model is not said again in each of its layers.
    """

    def __init__(self, chosen: list[SDPBackend] | None = None) -> None:
        self.chosen = chosen
        self._device: torch.device | None = None
        self._said: AbstractContextManager[None] | None = None
        self._inside = 0

    def choose(self, backend: str, device: torch.device, dropout: float) -> None:
        """For where a model runs now; it may have been made elsewhere."""
        if device != self._device:
            self._device, self.chosen = device, chosen_kernels(backend, device, dropout)

    def __enter__(self) -> None:
        if self.chosen is not None and not self._inside:
            self._said = sdpa_kernel(self.chosen, set_priority=True)
            self._said.__enter__()
        self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside -= 1
        if self._said is not None and not self._inside:
            said, self._said = self._said, None
            said.__exit__(kind, error, trace)

    def around(self) -> AbstractContextManager[None]:
        """Itself; a compiler, which cannot look into how it counts, is told each time, and compiles it in."""
        if not torch.compiler.is_compiling():
            return self
        return nullcontext() if self.chosen is None else sdpa_kernel(self.chosen, set_priority=True)


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
        self.kernels = AttentionKernels()

    def forward(
        self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, documents: DocumentStarts | None = None
    ) -> Tensor:
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
        assert config.num_attention_heads and config.num_query_groups and config.kv_channels
        groups, width = config.num_query_groups, config.kv_channels
        queries = config.num_attention_heads // groups
        self.head_width = width
        self.groups = max(1, groups // axis.size)
        self.queries_per_group = queries // axis.kv_copies
        self.recompute: Recompute = NOTHING
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            groups * (queries + 2) * width,
            _qkv_rows(groups, queries, width, axis),
            qkv_bias,
            axis,
        )
        # Every rank norms its own heads with the same weights, sequence parallelism or not.
        own_heads = frozenset[Axis]({"tensor"})
        self.q_norm = norm_in(submodules.q_layernorm, config, width, own_heads)
        self.k_norm = norm_in(submodules.k_layernorm, config, width, own_heads)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            axes=axes,
        )
        attended = config.num_attention_heads * width
        proj_bias = config.add_bias_linear or config.add_proj_bias
        scale = residual_scale(config.num_layers)
        self.linear_proj = build_module(
            submodules.linear_proj, attended, config.hidden_size, proj_bias, axis, scale
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
        out_BNSH: Tensor = self.core_attention(
            q_BNSH, k_BKSH, v_BKSH, **documents_for(self.core_attention, documents)
        )
        return out_BNSH.transpose(1, 2).flatten(2)


def _rotated(x_BNSH: Tensor, rope: RotaryEmbedding, cos: Tensor, sin: Tensor) -> Tensor:
    if not x_BNSH.is_cuda:
        return rope.rotate(x_BNSH, cos, sin)
    # Written token by token, as the projection wrote them: a GPU's kernels give their output the order of the queries, which then
    # is that of the stream, and no copy is needed after them.
    return rope.rotate(x_BNSH.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2)).transpose(1, 2)


def _qkv_rows(groups: int, queries: int, width: int, axis: TensorAxis) -> tuple[Rows, ...]:
    """The rows of the fused projection that this rank holds."""
    rows_of_group = (queries + 2) * width
    if axis.kv_copies == 1:
        own = axis.share(groups)
        return (Rows(axis.rank * own * rows_of_group, own * rows_of_group),)
    group, part = divmod(axis.rank, axis.kv_copies)
    own = queries // axis.kv_copies * width
    start = group * rows_of_group
    return Rows(start + part * own, own), Rows(start + queries * width, 2 * width, copies=True)
