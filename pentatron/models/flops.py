"""Floating-point operations of a training step: matmuls forward and backward, attention counted causally."""

from pentatron.config.model import TransformerConfig

_MULTIPLY_ADD_FORWARD_BACKWARD = 6  # 2 per multiply-add, once forward and twice backward


def step_flops(config: TransformerConfig, batch: int, sequence: int) -> float:
    """FLOPs of one step over `batch` sequences; no recompute, embedding, softmax or norm is counted."""
    assert config.num_attention_heads and config.num_query_groups and config.kv_channels
    assert config.ffn_hidden_size and config.padded_vocab_size
    hidden, attended = config.hidden_size, config.num_attention_heads * config.kv_channels
    keys_and_values = 2 * config.num_query_groups * config.kv_channels
    mlp = hidden * config.ffn_hidden_size * (3 if config.gated_linear_unit else 2)
    projections = hidden * (attended + keys_and_values) + attended * hidden
    per_token = config.num_layers * (mlp + projections) + hidden * config.padded_vocab_size
    per_token_pair = config.num_layers * attended
    return _MULTIPLY_ADD_FORWARD_BACKWARD * batch * sequence * (per_token + sequence * per_token_pair)
