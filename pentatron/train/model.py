"""The model as it is spread over ranks: the stages this rank holds, and how a step runs through them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pentatron.data.loader import Batch
from pentatron.devices import chip_of
from pentatron.models.causal_lm import CausalLM
from pentatron.models.router_load import RouterLoads
from pentatron.nn.compiled import Compile
from pentatron.nn.dropout import DropoutKeys, dropout_keys
from pentatron.nn.loss import cross_entropy_of
from pentatron.nn.options import Axes, Fp8Options, ModelOptions, axes_of
from pentatron.nn.recompute import recompute_of
from pentatron.ops.fp8_linear import FORMATS, WeightScales
from pentatron.ops.split_backward import DeferredGradients
from pentatron.parallel.collectives import all_reduce_
from pentatron.parallel.executor import Executor
from pentatron.parallel.messages import open_messages
from pentatron.parallel.shards import held_parameters
from pentatron.parallel.timers import Timers
from pentatron.parallel.world import World
from pentatron.settings.decision_types import Decisions, DeviceFacts, Fp8Decision
from pentatron.settings.decisions import decide
from pentatron.settings.run import RunConfig
from pentatron.train.compilation import Compilation, checked_compilation, compilation_of
from pentatron.train.graphs import Recording, record_steps
from pentatron.train.program import CONFIGURED, Objective, Program, StageCall

# What decisions need to know of the device of a process.


def device_facts(config: RunConfig, device: torch.device) -> DeviceFacts:
    if device.type != "cuda":
        return DeviceFacts(device.type)
    name, is_nvidia = torch.cuda.get_device_name(device), not torch.version.hip
    chip = chip_of(name)
    return DeviceFacts(
        device.type,
        name,
        torch.cuda.get_device_capability(device) if is_nvidia else None,
        None if chip is None else chip.teraflops(config.precision.name != "fp32"),
        is_nvidia,
    )


# The options that a model is built with, from the decisions of its run.


def model_options(
    config: RunConfig,
    decisions: Decisions,
    compile: Compile | None,
    deferred: DeferredGradients,
    scales: WeightScales,
    world: World,
) -> ModelOptions:
    """`deferred` and `scales` are those of the run: the executor and the step use them too."""
    return ModelOptions(
        attention_backend=config.kernels.attention_backend,
        recompute=recompute_of(config.memory),
        cross_entropy=cross_entropy_of(decisions.loss),
        fuses_gates=decisions.gate.on,
        fp8=fp8_of(decisions.fp8, scales if keeps_scales(config, decisions.fp8, world) else None),
        deferred=deferred if config.defers_weight_gradients else None,
        compile=compile,
    )


def fp8_of(decided: Fp8Decision, scales: WeightScales | None) -> Fp8Options | None:
    """The format of fp8 matmuls, and the layers that have them."""
    if decided.format is None:
        return None
    return Fp8Options(
        format=replace(FORMATS[decided.format], by_rows=decided.by_rows),
        layers=decided.layers,
        head=decided.head,
        scales=scales,
    )


def keeps_scales(config: RunConfig, decided: Fp8Decision, world: World) -> bool:
    """Whether the scales of fp8 weights are computed once a step: weights are whole between steps, with one
    scale each."""
    whole = world.replicas.size == 1 or config.parallel.zero_stage == 0
    return whole and not decided.by_rows


@dataclass(frozen=True)
class ParallelModel:
    config: RunConfig
    world: World
    axes: Axes
    stages: Mapping[int, CausalLM]
    executor: Executor
    routers: RouterLoads
    weight_scales: WeightScales
    decisions: Decisions
    program: Program = CONFIGURED
    compilation: Compilation = field(default_factory=Compilation)
    recording: Recording = field(default_factory=Recording)

    @property
    def timers(self) -> Timers:
        return self.executor.timers

    def train(self, mode: bool = True) -> None:
        for stage in self.stages.values():
            stage.train(mode)

    def count_parameters(self) -> int:
        """Elements of the whole model, each counted once. Every rank must ask."""
        own = sum(
            piece.elements
            for held in held_parameters(*self.stages.values())
            for piece in held.declared.pieces
            if self.world.is_first_of({held.declared.copies, *piece.replicated_over})
        )
        return int(all_reduce_(torch.tensor(own, device=self.world.device), self.world.everyone))

    def own_tokens(self, batches: Sequence[Batch]) -> list[Batch]:
        """Of micro-batches of whole sequences, the tokens this rank computes, with their labels and positions."""
        return [batch.map(self.axes.context.own_sequence) for batch in batches]

    def dropout_keys(self, batches: Sequence[Batch], step: int) -> list[DropoutKeys | None]:
        """For every micro-batch what its dropout is drawn from, or None where there is no dropout."""
        if self.config.model.hidden_dropout == 0:
            return [None] * len(batches)
        keys: list[DropoutKeys | None] = []
        for number, batch in enumerate(batches):
            samples, length = batch.tokens.shape
            positions = self.axes.context.positions(length, batch.tokens.device)[None]
            keys.append(
                dropout_keys(
                    self.config.run.seed,
                    step,
                    first_sample=(number * self.world.data.size + self.world.data.rank) * samples,
                    batch=samples,
                    positions=self.axes.tensor.own_sequence(positions)[0],
                    device=batch.tokens.device,
                )
            )
        return keys


def build_parallel_model(config: RunConfig, world: World, program: Program = CONFIGURED) -> ParallelModel:
    decisions = decide(config, device_facts(config, world.device), own_program=type(program) is not Program)
    axes = axes_of(world, config.parallel)
    own = config.placement.stages_of(world.at.pipeline)
    parts = {number: config.stages[number] for number in own}
    # What is to be cut into shards may be too large for a device: it goes there unit by unit.
    device = torch.device("cpu") if config.parallel.zero_stage == 3 else world.device
    checked = checked_compilation(decisions.compilation, world.device)
    deferred, scales = DeferredGradients(), WeightScales(world.device)
    options = model_options(config, decisions, checked.compile, deferred, scales, world)
    stages = program.build_stages(config, parts, axes, device, options)
    compilation = compilation_of(checked, stages.values(), world.whereabouts)
    timers = Timers(config.loop.timing_log_level, config.loop.timing_log_option, world.device)
    executor = Executor(
        open_messages(world, config.placement),
        world.at.pipeline,
        model_dtype(config),
        world.device,
        deferred,
        timers,
    )
    routers = RouterLoads(config, world, stages)
    recording = record_steps(config, decisions.graphs, world.device)
    return ParallelModel(
        config, world, axes, stages, executor, routers, scales, decisions, program, compilation, recording
    )


def model_dtype(config: RunConfig) -> torch.dtype:
    if config.precision.fp16:
        return torch.float16
    return torch.bfloat16 if config.precision.bf16 else torch.float32


@dataclass(frozen=True)
class MicroBatches:
    """What the executor runs: this rank's stages over the micro-batches of one step.

    The last stage gives each micro-batch's share of the objective.
    """

    model: ParallelModel
    batches: Sequence[Batch]
    keys: Sequence[DropoutKeys | None]
    objective: Objective

    @property
    def divisor(self) -> Callable[[], Tensor]:
        return self.objective.tokens

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        is_last = stage == self.model.config.placement.stages - 1
        call = StageCall(
            stage, is_last, self.batches[micro_batch], received, self.keys[micro_batch], self.objective
        )
        return self.model.program.forward(self.model.stages[stage], call)

    def for_one(
        self, batch: Batch, keys: DropoutKeys | None, divisor: Callable[[], Tensor]
    ) -> "MicroBatches":
        """The same of one micro-batch, with other inputs."""
        return replace(self, batches=[batch], keys=[keys], objective=Objective(divisor, self.objective.calls))

    def message_shape(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        samples, length = self.batches[micro_batch].tokens.shape
        return samples, self.model.axes.tensor.sequence_in_stream(length), self.model.config.model.hidden_size
