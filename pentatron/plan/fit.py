"""Checks before a run whether it fits the memory of a process, and suggests remedies if memory runs out."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pentatron.plan.memory import RankMemory, memory_of
from pentatron.plan.sizes import with_values
from pentatron.plan.static_memory import StaticMemory
from pentatron.settings.run_config import RunConfig
from pentatron.text import binary_size, in_mib

# Above this share of free memory a run may go out of memory: fragmentation and the libraries need the rest.
_TIGHT = 0.95
# Megatron-LM's bytes per parameter: undivided; with the distributed optimizer, replicated and divided.
_BYTES, _REPLICATED_BYTES, _OPTIMIZER_BYTES = 18, 6, 12
# Megatron-LM's allowance without sequence parallelism.
_ALLOWANCE = 1.05


@dataclass(frozen=True)
class AvailableMemory:
    """Memory available to one process in bytes. `kind` is GPU or host."""

    kind: str
    total: float
    free: float


@dataclass(frozen=True)
class FitVerdict:
    """Result of a memory check: a message for the user. `impossible`: not even the static memory fits."""

    sentence: str
    impossible: bool


def check_device_memory(config: RunConfig, pipeline_rank: int, room: AvailableMemory) -> FitVerdict | None:
    """Checks the memory of a pipeline rank; returns None if it fits.

    The run is impossible if the static memory of any rank exceeds the total memory.
    """
    ranks = memory_of(config, room.kind == "GPU").ranks
    planned = max(ranks, key=lambda rank: _static_memory(rank, room))
    impossible = _static_memory(planned, room) > room.total
    planned = planned if impossible else ranks[pipeline_rank]
    static = _static_memory(planned, room)
    needed = planned.total - planned.static.on_device + static
    if needed <= _TIGHT * room.free:
        return None
    # Custom layers of the user (--spec) may need less memory than the configured ones.
    impossible = impossible and not config.model.spec
    alone = f"weights, gradients and optimizer alone take {binary_size(static)}"
    why = f"it needs about {binary_size(needed)} for each process"
    has = f"{binary_size(room.total)} of {room.kind} memory, {binary_size(room.free)} of it free"
    parts = alone if impossible else format_parts(planned)
    return _verdict(impossible, f"{why}, and a process has {has} ({parts}); {remedies(config, planned)}")


def _verdict(impossible: bool, why: str) -> FitVerdict:
    fits = "cannot" if impossible else "may not"
    return FitVerdict(f"this run {fits} fit: {why}; `pentatron plan` lists layouts that fit", impossible)


def check_host_memory(config: RunConfig, room: AvailableMemory) -> FitVerdict | None:
    """Checks the host memory of processes that compute on GPUs; returns None if it fits."""
    static = max((rank.static for rank in memory_of(config, on_gpu=True).ranks), key=lambda s: s.in_host)
    needed = static.in_host
    if needed <= _TIGHT * room.free:
        return None
    impossible = needed > room.total and not config.model.spec
    ways = [way for way in _static_remedies(config) if "zero-stage" in way or "distributed" in way]
    ways += ["saving without --async-save"] if static.async_save_copy else []
    ways += ["fewer processes on a machine", "a smaller model"]
    why = f"{' and '.join(_in_host(static))} in host memory for each process"
    has = f"{binary_size(room.total)} of it, {binary_size(room.free)} free"
    return _verdict(impossible, f"{why}, and a process has {has}; try {', '.join(ways)}")


def _in_host(static: StaticMemory) -> Iterator[str]:
    if static.host:
        yield f"--optimizer-cpu-offload keeps {binary_size(static.host)} of master weights and moments"
    if static.async_save_copy:
        yield f"--async-save {'' if static.host else 'keeps '}a copy of {binary_size(static.async_save_copy)} to write from"


def _static_memory(planned: RankMemory, room: AvailableMemory) -> int:
    """Returns the static memory in this kind of memory."""
    return planned.static.on_device + (planned.static.in_host if room.kind == "host" else 0)


def format_parts(planned: RankMemory) -> str:
    """Formats the parts of a rank's memory that are not zero."""
    parts = {
        "weights": planned.static.weights,
        "gradients": planned.static.gradients,
        "optimizer": planned.static.optimizer,
        "activations": planned.activations + planned.logits,
        "buffers and working space": planned.buffers + planned.working,
        "beside CUDA graphs": planned.graphs,
    }
    return ", ".join(f"{name} {binary_size(count)}" for name, count in parts.items() if count)


def planned_memory_line(config: RunConfig, on_gpu: bool) -> str:
    """Formats the planned memory of every pipeline rank, for the log beside the measured memory."""
    memory = memory_of(config, on_gpu)
    totals = ", ".join(in_mib(rank.total, ".1f") for rank in memory.ranks)
    return f"planned memory by pipeline rank (MB): {totals} ({format_parts(memory.largest)} at most)"


def out_of_memory(config: RunConfig, rank: int, reason: str, kind: str, has_graphs: bool = False) -> str:
    """Formats the error of a rank that went out of memory: the planned memory and the remedies.

    `has_graphs`: micro-batches are captured as CUDA graphs, also if `--cuda-graphs auto` decided that.
    """
    config = with_values(config, cuda_graphs="on") if has_graphs else config
    planned = memory_of(config, kind == "GPU").ranks[config.grid.coordinates(rank).pipeline]
    plan = f"the plan for this rank was about {binary_size(planned.total)}: {format_parts(planned)}"
    ways = f"{remedies(config, planned, has_graphs).capitalize()}; `pentatron plan` shows what fits"
    return f"out of {kind} memory ({reason}); {plan}. {ways}"


def remedies(config: RunConfig, planned: RankMemory, has_graphs: bool = False) -> str:
    """Lists the flags that would lower the memory of a rank and are not set yet, the most effective first."""
    ways = [_activation_remedies(config), _static_remedies(config)]
    if planned.static.on_device > planned.activations + planned.logits + planned.working:
        ways.reverse()
    first = ["--cuda-graphs off"] if planned.graphs or has_graphs else []
    model = config.model
    smaller = f"a smaller model (--num-layers {model.num_layers}, --hidden-size {model.hidden_size} now)"
    return "try " + ", ".join([*first, *ways[0], *ways[1], smaller])


def _activation_remedies(config: RunConfig) -> list[str]:
    micro, sequence = config.train.micro_batch_size or 1, config.model.seq_length
    smaller = f"a smaller --micro-batch-size ({micro} now; --batch-size in scripts that have it)"
    ways = [smaller] if micro > 1 else []
    stronger = {None: "selective or full", "selective": "full"}
    if config.memory.recompute_granularity in stronger:
        ways.append(f"--recompute-granularity {stronger[config.memory.recompute_granularity]}")
    if config.grid.tensor > 1 and not config.parallel.sequence_parallel:
        ways.append("--sequence-parallel")
    shorter = 2048 if sequence > 2048 else max(1, sequence // 2)
    return [*ways, f"a shorter --seq-length (such as {shorter}, {sequence} now)"]


def _static_remedies(config: RunConfig) -> list[str]:
    grid, parallel, precision = config.grid, config.parallel, config.precision
    ways = [] if precision.bf16 or precision.fp16 else ["--bf16 or --fp16"]
    replicas = grid.data * grid.context
    if replicas > 1 and parallel.zero_stage == 0:
        ways.append("--use-distributed-optimizer")
    elif replicas > 1 and parallel.zero_stage < 3:
        ways.append(f"--zero-stage {parallel.zero_stage + 1}")
    sizes = f"{grid.tensor} and {grid.pipeline} now"
    ways.append(f"a larger --tensor-model-parallel-size or --pipeline-model-parallel-size ({sizes})")
    if config.moe.num_experts and grid.expert < config.moe.num_experts:
        ways.append(f"a larger --expert-model-parallel-size ({grid.expert} now)")
    return ways


class MegatronEstimate(NamedTuple):
    """Megatron-LM's estimate of the bytes on the most loaded rank."""

    weight_and_optimizer: float
    activation: float


def megatron_estimate(config: RunConfig, micro_batches: int | None = None) -> MegatronEstimate:
    """Returns Megatron-LM's estimate by its published formulas, for comparable logs; coarser than
    `pentatron.plan.memory`.

    It counts 18 bytes per parameter, or 6 + 12 / data-parallel size with the distributed optimizer, and
    activations by table 2 of arXiv 2205.05198. Parameters are counted without biases and routers.
    `micro_batches` of a step default to those of the first.
    """
    model, parallel = config.model, config.parallel
    steps = config.accumulation if micro_batches is None else micro_batches
    tensor, ranks, virtual = parallel.tensor_model_parallel_size, config.grid.pipeline, config.virtual_stages
    hidden_states = model.seq_length * config.train.micro_batch_size * model.hidden_size
    vocab_ratio = model.padded_vocab_size / model.hidden_size
    with_sequence = parallel.sequence_parallel and config.memory.recompute_granularity == "selective"
    layer = 18 + 4 * model.ffn_hidden_size / model.hidden_size if with_sequence else 10 + 24 / tensor
    # Of all micro-batches in the pipeline, with the embedding's input and dropout.
    activation = hidden_states * layer * model.num_layers
    activation += (8 * hidden_states / model.hidden_size + hidden_states) * ranks
    activation *= 1 + (ranks - 1) / (ranks * virtual) if virtual > 1 else min(1, steps / ranks)
    if ranks == 1:
        output = 4 * (1 + vocab_ratio) if with_sequence else 2 * (vocab_ratio / tensor + 1)
        activation += hidden_states * output
    activation = activation / tensor if with_sequence else _ALLOWANCE * activation
    return MegatronEstimate(_weight_and_optimizer(config), activation)


def megatron_estimate_line(config: RunConfig, micro_batches: int | None = None) -> str:
    """Formats the line that Megatron-LM prints after its first iterations."""
    static, activation = megatron_estimate(config, micro_batches)
    parts = {"weight and optimizer": static, "activation": activation, "total": static + activation}
    shown = ", ".join(f"{name}={in_mib(count, '.2f')} MB" for name, count in parts.items())
    return f"Theoretical memory footprints: {shown}"


def _weight_and_optimizer(config: RunConfig) -> float:
    model, moe, parallel = config.model, config.moe, config.parallel
    hidden = model.hidden_size
    gate = 3 / 2 if model.gated_linear_unit else 1
    norm = 1 if model.normalization == "RMSNorm" else 2
    share = model.kv_channels * model.num_attention_heads / hidden
    attention = 2 * hidden * hidden * (1 + model.num_query_groups / model.num_attention_heads) * share
    sparse = len(config.layers_with_experts)
    ffn = (moe.moe_ffn_hidden_size or 0) * (moe.num_experts or 0)
    ffn += moe.moe_shared_expert_intermediate_size or 0
    dense_layer = 2 * hidden * (model.ffn_hidden_size * gate + norm) + attention
    sparse_layer = 2 * hidden * (ffn * gate + norm) + attention
    block = dense_layer * (model.num_layers - sparse) + sparse_layer * sparse + norm * hidden
    table = hidden * model.padded_vocab_size
    pipeline = parallel.pipeline_model_parallel_size
    ends = 2 if model.untie_embeddings_and_output_weights and pipeline == 1 else 1
    parameters = block / pipeline + ends * table
    divided = parallel.zero_stage > 0
    bytes_each = _REPLICATED_BYTES + _OPTIMIZER_BYTES / config.grid.data if divided else _BYTES
    return parameters / parallel.tensor_model_parallel_size * bytes_each
