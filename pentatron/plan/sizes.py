"""Sizes that the planner computes with: of the model, of one rank's shard of it, and of a micro-batch."""

import copy
import dataclasses
from functools import cached_property
from typing import Any

from pentatron.layout.ranks import Axis
from pentatron.layout.stages import StagePart
from pentatron.settings.decision_types import Decisions, DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.model_sizes import ModelParameters, is_tied, matrices_before_activation
from pentatron.settings.run_config import RunConfig, all_settings

# Bytes of a number in fp32.
FP32 = 4


def with_values(config: RunConfig, **values: Any) -> RunConfig:
    """Returns the configuration with other values of some settings. Does not check the rules."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        sections.setdefault(all_settings()[name].section, {})[name] = value
    parts = {name: dataclasses.replace(getattr(config, name), **own) for name, own in sections.items()}
    return dataclasses.replace(config, **parts)


class PlanSizes:
    """A configuration with short names for derived sizes, and what is computed from it only once.

    Widths are those of one rank. `on_gpu` None assumes neither: the device behaves as a CPU, and GPU-only
    features count if they are requested.
    """

    def __init__(self, config: RunConfig, on_gpu: bool | None = None) -> None:
        model, self.on_gpu, self.grid = config.model, on_gpu, config.grid
        self.sparse_layers = frozenset(config.layers_with_experts)
        # Parameters of a rank's shard of each part of the model.
        self.parameters = ModelParameters(model, config.moe, self.sparse_layers, self.grid)
        # Filled by `pentatron.plan.static_memory`, so that each pipeline rank is packed once.
        self.buckets: dict[int, list[tuple[tuple[int, ...], Axis, int]]] = {}
        attention, shared = self.parameters.attention, self.parameters.shared_expert
        # `groups`: key/value heads of a rank; if there are fewer than ranks, they are replicated.
        self.head, self.heads, self.groups = attention.head, attention.heads, attention.groups
        # `queries` is also the width of the attention output.
        self.queries, self.keys = self.heads * self.head, self.groups * self.head
        self.hidden, self.local_vocab_size = model.hidden_size, self.parameters.embedding_shape[0]
        self.inner, self.shared_inner = self.parameters.mlp.inner, shared.inner if shared else 0
        self.expert_inner = self.parameters.experts.inner if self.sparse_layers else 0
        # Matrices before the activation function: 2 in a gated MLP, otherwise 1.
        self.fc1_matrices = matrices_before_activation(model)
        self.tied = is_tied(model)
        self.stages, self.placement = config.stages, config.placement
        self._set_config(config)

    def _set_config(self, config: RunConfig) -> None:
        """Sets what does not depend on the division of the model alone."""
        self.config, precision = config, config.precision
        # Bytes per element of weights and of most activations.
        self.element_bytes = 2 if precision.bf16 or precision.fp16 else FP32
        # Modules of a layer that selective recompute covers.
        selective = config.memory.recompute_granularity == "selective"
        self.recomputed_modules = frozenset(config.memory.recompute_modules if selective else ())
        self.sequence_parallel = config.parallel.sequence_parallel and self.grid.tensor > 1
        # Tokens of a micro-batch that the attention and the MLP of a rank process.
        self.tokens = config.train.micro_batch_size * config.model.seq_length // self.grid.context
        # Tokens of a micro-batch whose hidden states a rank holds between layers, and their bytes.
        self.local_tokens = self.tokens // self.grid.tensor if self.sequence_parallel else self.tokens
        self.hidden_states = self.element_bytes * self.local_tokens * self.hidden
        # Token-expert pairs dispatched to one rank, with balanced experts.
        pairs = self.local_tokens * config.moe.moe_router_topk * self.grid.expert_tensor
        capacity_factor = config.moe.moe_expert_capacity_factor
        self.dispatched_rows = pairs if capacity_factor is None else int(pairs * min(1.0, capacity_factor))

    def with_config(self, config: RunConfig) -> "PlanSizes":
        """Returns the sizes of a configuration with the same division of the model, sharing everything cached
        about it."""
        sizes = copy.copy(self)
        sizes.__dict__.pop("decisions", None)
        sizes._set_config(config)
        return sizes

    @cached_property
    def decisions(self) -> Decisions:
        return decide(self.config, DeviceFacts({True: "cuda", False: "cpu", None: ""}[self.on_gpu]))

    @property
    def accumulation(self) -> int:
        return self.config.accumulation

    def parts(self, pipeline_rank: int) -> dict[int, StagePart]:
        """Returns the stages of a pipeline rank by stage number."""
        return {number: self.stages[number] for number in self.placement.stages_of(pipeline_rank)}

    @cached_property
    def representative_ranks(self) -> tuple[int, ...]:
        """The pipeline ranks among which are those that need most memory and send most: the first, which
        keeps most micro-batches, the second, the first of those with most layers, and the last, which has the
        output layer. All ranks if the pipeline is folded."""
        ranks = self.grid.pipeline
        if self.config.parallel.pipeline_schedule not in ("1f1b", "gpipe", "interleaved"):
            return tuple(range(ranks))
        layers = [sum(len(part.layers) for part in self.parts(rank).values()) for rank in range(ranks)]
        return tuple(sorted({0, min(1, ranks - 1), layers.index(max(layers)), ranks - 1}))

    @property
    def requires_graphs(self) -> bool:
        """Whether CUDA graphs are required. By default they are used only if there is memory for them, so
        that a run never needs more because of them."""
        return bool(self.on_gpu) and self.decisions.graphs.required

    @property
    def fp8_layers(self) -> range:
        """Layers whose linear layers save their inputs in fp8."""
        return self.decisions.fp8.layers if self.on_gpu else range(0)

    def ranks(self, axis: Axis) -> int:
        """Returns the number of replicas of a parameter on this axis."""
        return self.grid.expert_data if axis == "expert_data" else self.grid.data * self.grid.context
