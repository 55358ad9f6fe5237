"""Causal self-attention with grouped queries."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pentatron.config.model import TransformerConfig
from pentatron.nn.init import residual_scale
from pentatron.nn.linear import Linear
from pentatron.nn.norm import build_norm
from pentatron.nn.rope import RotaryEmbedding

# Megatron's names for kernels, beside torch's own.
_BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "fused": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
    "unfused": [SDPBackend.MATH],
    "local": [SDPBackend.MATH],
}


@contextmanager
def attention_kernels(backend: str) -> Iterator[None]:
    """Restricts attention to the kernels the user named; `auto` leaves the choice to torch."""
    with nullcontext() if backend == "auto" else sdpa_kernel(_BACKENDS[backend]):
        yield


class SelfAttention(nn.Module):
    """One fused QKV projection; its rows are grouped by key/value head: the queries of a group, its key, its value."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.num_attention_heads and config.num_query_groups and config.kv_channels
        self.groups = config.num_query_groups
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        self.head_width = config.kv_channels
        attended = config.num_attention_heads * config.kv_channels
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.linear_qkv = Linear(config.hidden_size, attended + 2 * self.groups * self.head_width, qkv_bias)
        self.linear_proj = Linear(
            attended, config.hidden_size, config.add_bias_linear, residual_scale(config.num_layers)
        )
        self.q_norm, self.k_norm = self._query_key_norms(config)

    def _query_key_norms(self, config: TransformerConfig) -> tuple[nn.Module, nn.Module]:
        if not config.qk_layernorm:
            return nn.Identity(), nn.Identity()
        kind, width, epsilon = config.normalization, self.head_width, config.layernorm_epsilon
        return build_norm(kind, width, epsilon), build_norm(kind, width, epsilon)

    def forward(
        self, x_BSD: Tensor, rope: RotaryEmbedding | None, angles: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        batch, length, _ = x_BSD.shape
        per_group = self.linear_qkv(x_BSD).view(
            batch, length, self.groups, self.queries_per_group + 2, self.head_width
        )
        q, k, v = per_group.split((self.queries_per_group, 1, 1), dim=3)
        q_BNSH, k_BKSH, v_BKSH = (t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))
        q_BNSH, k_BKSH = self.q_norm(q_BNSH), self.k_norm(k_BKSH)
        if rope is not None and angles is not None:
            q_BNSH, k_BKSH = rope.rotate(q_BNSH, *angles), rope.rotate(k_BKSH, *angles)
        out_BNSH = F.scaled_dot_product_attention(
            q_BNSH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=self.queries_per_group > 1
        )
        return self.linear_proj(out_BNSH.transpose(1, 2).flatten(2))
