"""Megatron-LM's own estimate of memory, by its published formulas, for logs that people compare.

It is coarser than `pentatron.plan.memory`, which follows what the layers here keep: Megatron's counts 18 bytes for a parameter, or
6 + 12 / data parallel size with the distributed optimizer, and activations as in table 2 of arXiv 2205.05198.
Parameters are counted as Megatron counts them, without biases and routers. The count of the layers here is
`pentatron.config.parameters`.
"""

from dataclasses import dataclass

from pentatron.config.run import RunConfig
from pentatron.text import in_mib

_WHOLE, _DIVIDED, _OF_OPTIMIZER = 18, 6, 12
# What Megatron adds to its formula without sequence parallelism.
_SPARE = 1.05


@dataclass(frozen=True)
class Footprint:
    """Bytes on the most loaded rank."""

    weight_and_optimizer: float
    activation: float

    @property
    def total(self) -> float:
        return self.weight_and_optimizer + self.activation


def footprint(config: RunConfig, micro_batches: int | None = None) -> Footprint:
    """`micro_batches` of a step; by default those of this run's first."""
    steps = config.accumulation if micro_batches is None else micro_batches
    selective = config.memory.recompute_granularity == "selective"
    with_sequence = config.parallel.sequence_parallel and selective
    activation = _with_sequence(config, steps) if with_sequence else _without_sequence(config, steps)
    return Footprint(_weight_and_optimizer(config), activation)


def footprint_line(config: RunConfig, micro_batches: int | None = None) -> str:
    """The line that Megatron-LM prints after its first iterations."""
    found = footprint(config, micro_batches)
    return (
        f"Theoretical memory footprints: weight and optimizer={in_mib(found.weight_and_optimizer, '.2f')} MB, "
        f"activation={in_mib(found.activation, '.2f')} MB, total={in_mib(found.total, '.2f')} MB"
    )


def _weight_and_optimizer(config: RunConfig) -> float:
    model, moe, parallel = config.model, config.moe, config.parallel
    hidden = model.hidden_size
    gate = 3 / 2 if model.gated_linear_unit else 1
    norm = 1 if model.normalization == "RMSNorm" else 2
    share = model.kv_channels * model.num_attention_heads / hidden
    attention = 2 * hidden * hidden * (1 + model.num_query_groups / model.num_attention_heads) * share
    sparse = len(config.layers_with_experts)
    inner = (moe.moe_ffn_hidden_size or 0) * (moe.num_experts or 0)
    inner += moe.moe_shared_expert_intermediate_size or 0
    dense_layer = 2 * hidden * (model.ffn_hidden_size * gate + norm) + attention
    sparse_layer = 2 * hidden * (inner * gate + norm) + attention
    block = dense_layer * (model.num_layers - sparse) + sparse_layer * sparse + norm * hidden
    table = hidden * model.padded_vocab_size
    ends = (
        2 if model.untie_embeddings_and_output_weights and parallel.pipeline_model_parallel_size == 1 else 1
    )
    held = block / parallel.pipeline_model_parallel_size + ends * table
    divided = parallel.zero_stage > 0
    each = _DIVIDED + _OF_OPTIMIZER / config.grid.data if divided else _WHOLE
    return held / parallel.tensor_model_parallel_size * each


def _with_sequence(config: RunConfig, steps: int) -> float:
    model = config.model
    stream = _stream(config)
    total = stream * (18 + 4 * model.ffn_hidden_size / model.hidden_size) * model.num_layers
    total = _in_flight(config, total, steps)
    if config.parallel.pipeline_model_parallel_size == 1:
        total += stream * 4 * (1 + model.padded_vocab_size / model.hidden_size)
    return total / config.parallel.tensor_model_parallel_size


def _without_sequence(config: RunConfig, steps: int) -> float:
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    stream = _stream(config)
    total = _in_flight(config, stream * (10 + 24 / tensor) * model.num_layers, steps)
    if config.parallel.pipeline_model_parallel_size == 1:
        total += 2 * (stream * model.padded_vocab_size / model.hidden_size / tensor + stream)
    return _SPARE * total


def _stream(config: RunConfig) -> int:
    return config.model.seq_length * config.train.micro_batch_size * config.model.hidden_size


def _in_flight(config: RunConfig, layers: float, steps: int) -> float:
    """With the embedding's input and dropout, for all micro-batches in the pipeline."""
    ranks, virtual = config.parallel.pipeline_model_parallel_size, config.virtual_stages
    stream = _stream(config)
    total = layers + (8 * stream / config.model.hidden_size + stream) * ranks
    if virtual > 1:
        return total * (1 + (ranks - 1) / (ranks * virtual))
    return total * min(1, steps / ranks)
