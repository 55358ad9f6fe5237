"""The decoder-only language model: embedding, a loop over layers, a norm and a head."""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentatron.config.model import TransformerConfig
from pentatron.nn.attention import SelfAttention, attention_kernels
from pentatron.nn.linear import Table
from pentatron.nn.loss import token_losses
from pentatron.nn.mlp import MLP
from pentatron.nn.norm import build_norm
from pentatron.nn.rope import RotaryEmbedding


@runtime_checkable
class DrawsWeights(Protocol):
    """A layer that fills its own parameters, given the name it has in the model."""

    def init_weights(self, seed: int, name: str, std: float) -> None: ...


class TransformerLayer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        norm = (config.normalization, config.hidden_size, config.layernorm_epsilon)
        self.input_norm = build_norm(*norm)
        self.attention = SelfAttention(config)
        self.mlp_norm = build_norm(*norm)
        self.mlp = MLP(config)

    def forward(
        self, x_BSD: Tensor, rope: RotaryEmbedding | None, angles: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        x_BSD = x_BSD + self.attention(self.input_norm(x_BSD), rope, angles)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class Embedding(nn.Module):
    """Word vectors, plus learned positions where the family has them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.padded_vocab_size and config.max_position_embeddings
        self.word = Table(config.padded_vocab_size, config.hidden_size, config.vocab_size)
        learned = config.position_embedding_type == "learned_absolute"
        self.position = Table(config.max_position_embeddings, config.hidden_size) if learned else None

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        x_BSD = self.word(tokens_BS)
        return x_BSD if self.position is None else x_BSD + self.position(positions_BS)


class CausalLM(nn.Module):
    """Returns logits, or the loss of every token when labels are given."""

    def __init__(self, config: TransformerConfig, attention_backend: str = "auto") -> None:
        super().__init__()
        assert config.padded_vocab_size and config.vocab_size and config.kv_channels
        self.vocab_size = config.vocab_size
        self.attention_backend = attention_backend
        self.embedding = Embedding(config)
        self.rope = (
            RotaryEmbedding(
                config.kv_channels, config.rotary_base, config.rotary_percent, config.rotary_interleaved
            )
            if config.position_embedding_type == "rope"
            else None
        )
        # A ModuleDict keeps a layer's number in its name when a stage holds only some of the layers.
        self.layers = nn.ModuleDict({str(i): TransformerLayer(config) for i in range(config.num_layers)})
        self.final_norm = build_norm(config.normalization, config.hidden_size, config.layernorm_epsilon)
        untied = config.untie_embeddings_and_output_weights
        self.head = Table(config.padded_vocab_size, config.hidden_size, config.vocab_size) if untied else None

    def draw_weights(self, seed: int, std: float) -> None:
        """Fills every parameter from its own name, in whatever order and on whatever ranks the parts are built."""
        for name, module in self.named_modules():
            if isinstance(module, DrawsWeights):
                module.init_weights(seed, name, std)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        x_BSD = self.embedding(tokens_BS, positions_BS)
        angles = self.rope(positions_BS) if self.rope is not None else None
        with attention_kernels(self.attention_backend):
            for layer in self.layers.values():
                x_BSD = layer(x_BSD, self.rope, angles)
        logits_BSV = F.linear(self.final_norm(x_BSD), self.output_weight)
        return logits_BSV if labels_BS is None else token_losses(logits_BSV, labels_BS, self.vocab_size)

    @property
    def output_weight(self) -> Tensor:
        return self.embedding.word.weight if self.head is None else self.head.weight


def build_model(
    config: TransformerConfig, seed: int, device: torch.device, attention_backend: str = "auto"
) -> CausalLM:
    """An fp32 model with its initial weights, which depend on the seed and on nothing else."""
    with device:
        model = CausalLM(config, attention_backend)
    model.draw_weights(seed, config.init_method_std)
    return model
