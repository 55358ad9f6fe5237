"""The pipeline stages of this rank, the program that runs micro-batches through them, and the loss."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from pentatron.checkpoint.state import TrainState
from pentatron.data.loader import Batch
from pentatron.data.open_data import OpenedData, open_data
from pentatron.devices import find_chip
from pentatron.errors import AgreedError
from pentatron.layout.stages import StagePart
from pentatron.models.causal_lm import CausalLM, build_stages
from pentatron.models.router_load import RouterLoads
from pentatron.monitor.display import Display
from pentatron.nn.compiled import CompileOptions
from pentatron.nn.dropout import DropoutKeys, dropout_keys
from pentatron.nn.loss import cross_entropy_of
from pentatron.nn.options import Axes, Fp8Options, ModelOptions, axes_of
from pentatron.nn.recompute import recompute_of
from pentatron.ops.fp8_linear import FORMATS, WeightScales
from pentatron.ops.linear import DeferredGradients
from pentatron.parallel.collectives import all_reduce_, gather_objects
from pentatron.parallel.executor import Executor
from pentatron.parallel.messages import open_messages
from pentatron.parallel.sharding import sharded_parameters
from pentatron.parallel.timers import Timers
from pentatron.parallel.world import World
from pentatron.settings.decision_types import Decisions, DeviceFacts, Fp8Decision
from pentatron.settings.decisions import decide
from pentatron.settings.resolve import Resolved
from pentatron.settings.run_config import RunConfig
from pentatron.train.compilation import Compilation, check_compilation, track_compilation
from pentatron.train.cuda_graphs import GraphReplay, build_graph_replay

# --- the objective: normalization of the loss over the micro-batches and ranks of a step ---

# Entries of a tally: tokens counted by the loss function, calls that returned sums, calls that returned
# means, and whether a name is unknown.
_COUNTS = 4
# Entries of a reported value: numerator and denominator.
_PAIR = 2


@dataclass
class ReportedNames:
    """Names of the values that loss functions report.

    All ranks have them in the same order, so that one all-reduce of a tensor exchanges the values of a step.
    """

    names: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        return _COUNTS + _PAIR * len(self.names)

    def add_new_names(self, own: Mapping[str, Tensor], world: World) -> dict[str, tuple[float, float]]:
        """Exchanges the values of a step that has a new name, and adds its names. Collective."""
        local = {name: tuple(pair.tolist()) for name, pair in own.items()}
        sums: dict[str, tuple[float, float]] = {}
        for values in gather_objects(local, world.all_ranks):
            for name, (numerator, denominator) in values.items():
                upper, lower = sums.get(name, (0.0, 0.0))
                sums[name] = (upper + numerator, lower + denominator)
        self.names = tuple(dict.fromkeys((*self.names, *sums)))
        return sums


class Objective:
    """Scales losses of micro-batches to shares of the objective of the step; collects reported values.

    A loss is either a sum over tokens, divided by the tokens that count in the whole step, or a mean,
    averaged over all micro-batches and replicas. The number of tokens that a user's loss function counts is
    known only after the last micro-batch. Until then sums are divided by the valid tokens of the data, and
    the ratio of `total` corrects the result at the end of the step; it is 1 if both numbers are equal.
    """

    def __init__(self, tokens: Callable[[], Tensor], calls: int) -> None:
        """`tokens` returns the valid tokens of the data in the whole step, on all ranks; the first sum calls
        it.

        `calls`: number of calls of the loss function in the whole step, by all replicas.
        """
        self.tokens, self.calls = tokens, calls
        self.counted: list[Tensor] = []
        self.means = 0
        self.reported: dict[str, Tensor] = {}

    def share_of_sum(self, total: Tensor, count: Tensor | None = None) -> Tensor:
        """`total` is a sum over `count` tokens, by default over the valid tokens of the data."""
        if count is not None:
            self.counted.append(count.detach().double())
        return total / self.tokens()

    def share_of_mean(self, loss: Tensor) -> Tensor:
        self.means += 1
        return loss / self.calls

    def report(self, name: str, numerator: Tensor, denominator: Tensor) -> None:
        """The value of `name` is the sum of all `numerator` divided by the sum of all `denominator`."""
        pair = torch.stack((numerator.detach().double().sum(), denominator.detach().double().sum()))
        self.reported[name] = self.reported[name] + pair if name in self.reported else pair

    def tally(self, names: ReportedNames, world: World) -> Tensor:
        """Returns the tally of this rank, to be summed over all ranks.

        Tensor-parallel ranks compute the same loss: all but the first contribute zeros.
        """
        tally = torch.zeros(names.width, dtype=torch.float64, device=world.device)
        if not world.is_first_of(("tensor",)):
            self.reported = {}
            return tally
        if self.counted:
            tally[0] = torch.stack(self.counted).sum()
        unknown = not self.reported.keys() <= set(names.names)
        tally[1:_COUNTS] = torch.tensor([float(len(self.counted)), float(self.means), float(unknown)])
        for pair, name in zip(tally[_COUNTS:].view(-1, _PAIR), names.names):
            if name in self.reported:
                pair.copy_(self.reported[name])
        return tally

    def total(
        self, summed: Tensor, tokens: float, names: ReportedNames, world: World
    ) -> tuple[float, dict[str, float]]:
        """Returns the factor that the loss and every gradient lack, and the reported values. Collective.

        `summed`: the tallies of all ranks, on the host.
        """
        counted, sums, means, unknown = summed[:_COUNTS].tolist()
        if sums and means:
            raise AgreedError(
                "the loss function returned a sum with a number of tokens for some micro-batches and a mean for others; return the "
                "same form for all"
            )
        if counted < 0:
            raise AgreedError(
                f"the loss function counted {counted:g} tokens in a step; return how many tokens its sum is over, 0 or more"
            )
        if unknown:
            values = names.add_new_names(self.reported, world)
        else:
            pairs = summed[_COUNTS:].view(-1, _PAIR).tolist()
            values = dict(zip(names.names, map(tuple, pairs), strict=True))
        # A name that no micro-batch of this step reported has the denominator 0.
        reported = {name: total / denominator for name, (total, denominator) in values.items() if denominator}
        return tokens / (counted or 1.0) if sums else 1.0, reported


def ratio_on_device(totals: Tensor, tokens: Tensor) -> Tensor:
    """Computes the ratio of `Objective.total` from summed tallies on the device, without a host
    synchronization."""
    counted = torch.where(totals[0] == 0, 1.0, totals[0])
    return torch.where(totals[1] > 0, tokens.double() / counted, 1.0)


# --- the program: model, data and forward step ---


@dataclass(frozen=True)
class StageInputs:
    """Inputs of one stage for one micro-batch. `received`: hidden states from the previous stage."""

    stage: int
    is_last: bool
    batch: Batch
    received: Tensor | None
    keys: DropoutKeys | None
    objective: Objective


class Program:
    """The configured model, its loss and the configured data.

    A subclass replaces the model, the forward step or the datasets; loop, schedules, optimizer and
    checkpoints stay the same.
    """

    # Whether the files that --data-path and the like name must exist.
    reads_named_data = True
    # Set if loss functions count their own tokens or report values in `StageInputs.objective`.
    reported_names: ReportedNames | None = None

    def running(self, resolved: Resolved, world: World, display: Display) -> AbstractContextManager[None]:
        """Context manager around the whole run on this rank, entered before its data is opened."""
        return nullcontext()

    def begins(self, state: TrainState) -> None:
        """Called when the run starts or resumes; `state` is updated by every step."""

    def set_timers(self, timers: Timers) -> None:
        """Called with the timers of the loop, which are logged every --log-interval steps."""

    def open_data(self, config: RunConfig, world: World, folder: Path, display: Display) -> OpenedData:
        return open_data(config, world, folder, display)

    def build_stages(
        self,
        config: RunConfig,
        parts: Mapping[int, StagePart],
        axes: Axes,
        device: torch.device,
        options: ModelOptions,
    ) -> dict[int, CausalLM]:
        """Builds the stages of this rank in fp32 with their initial weights."""
        return build_stages(config.model, config.moe, parts, axes, config.run.seed, device, options)

    def forward(self, module: CausalLM, call: StageInputs) -> Tensor:
        """Returns the hidden states for the next stage; in the last stage, the share of the objective."""
        batch = call.batch
        inputs = (batch.tokens, batch.position_ids, batch.labels, call.received, call.keys)
        output: Tensor = module(*inputs, documents=batch.documents)
        return call.objective.share_of_sum((output * batch.loss_mask).sum()) if call.is_last else output


CONFIGURED = Program()


# --- the stages of this rank ---


@dataclass(frozen=True)
class ParallelModel:
    """The stages of this rank with the executor, compilation and CUDA graphs that run them."""

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
    recording: GraphReplay = field(default_factory=GraphReplay)

    @property
    def timers(self) -> Timers:
        return self.executor.timers

    def train(self, mode: bool = True) -> None:
        for stage in self.stages.values():
            stage.train(mode)

    def count_parameters(self) -> int:
        """Returns the number of parameters of the whole model, without replicas. Collective."""
        elements = sum(
            shard.elements
            for param in sharded_parameters(*self.stages.values())
            for shard in param.declared.shards
            if self.world.is_first_of({param.declared.replica_axis, *shard.replicated_over})
        )
        return int(all_reduce_(torch.tensor(elements, device=self.world.device), self.world.all_ranks))

    def local_tokens(self, batches: Sequence[Batch]) -> list[Batch]:
        """Returns the part of each micro-batch's sequences that this context-parallel rank computes."""
        return [batch.map(self.axes.context.own_sequence) for batch in batches]

    def dropout_keys(self, batches: Sequence[Batch], step: int) -> list[DropoutKeys | None]:
        """Returns the dropout keys of every micro-batch, or None without dropout."""
        if self.config.model.hidden_dropout == 0:
            return [None] * len(batches)
        keys: list[DropoutKeys | None] = []
        for number, batch in enumerate(batches):
            (samples, length), device = batch.tokens.shape, batch.tokens.device
            # Keys depend on the sample within the step, not on the rank that computes it.
            first = (number * self.world.data.size + self.world.data.rank) * samples
            positions = self.axes.tensor.own_sequence(self.axes.context.positions(length, device)[None])[0]
            keys.append(dropout_keys(self.config.run.seed, step, first, samples, positions, device))
        return keys


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one step as the executor runs them through this rank's stages."""

    model: ParallelModel
    batches: Sequence[Batch]
    keys: Sequence[DropoutKeys | None]
    objective: Objective

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        is_last, batch = stage == self.model.config.placement.stages - 1, self.batches[micro_batch]
        call = StageInputs(stage, is_last, batch, received, self.keys[micro_batch], self.objective)
        return self.model.program.forward(self.model.stages[stage], call)

    def for_one(
        self, batch: Batch, keys: DropoutKeys | None, divisor: Callable[[], Tensor]
    ) -> "MicroBatches":
        """Returns a copy with this one micro-batch and divisor."""
        return replace(self, batches=[batch], keys=[keys], objective=Objective(divisor, self.objective.calls))

    def message_shape(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        samples, length = self.batches[micro_batch].tokens.shape
        local_length = self.model.axes.tensor.local_sequence_length(length)
        return samples, local_length, self.model.config.model.hidden_size


# --- building ---


def device_facts(config: RunConfig, device: torch.device) -> DeviceFacts:
    """Returns the properties of the device that `decide` needs."""
    if device.type != "cuda":
        return DeviceFacts(device.type)
    name, is_nvidia = torch.cuda.get_device_name(device), not torch.version.hip
    capability = torch.cuda.get_device_capability(device) if is_nvidia else None
    return DeviceFacts(device.type, name, capability, peak_teraflops(config, device), is_nvidia)


def peak_teraflops(config: RunConfig, device: torch.device) -> float | None:
    """Returns the peak rate of a known GPU in the precision of the run."""
    chip = find_chip(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if chip is None else chip.teraflops(config.precision.name != "fp32")


def model_dtype(config: RunConfig) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[config.precision.name]


def model_options(
    config: RunConfig,
    decisions: Decisions,
    compile: CompileOptions | None,
    deferred: DeferredGradients,
    scales: WeightScales,
    world: World,
) -> ModelOptions:
    """Returns the options of the model's layers. The executor and the step share `deferred` and `scales`."""
    fp8, options = decisions.fp8, None
    if fp8.format is not None:
        kept = scales if keeps_scales(config, fp8, world) else None
        form = replace(FORMATS[fp8.format], by_rows=fp8.by_rows)
        options = Fp8Options(format=form, layers=fp8.layers, head=fp8.head, scales=kept)
    return ModelOptions(
        attention_backend=config.kernels.attention_backend,
        recompute=recompute_of(config.memory),
        cross_entropy=cross_entropy_of(decisions.loss),
        fuses_gates=decisions.gate.on,
        fp8=options,
        deferred=deferred if config.defers_weight_gradients else None,
        compile=compile,
    )


def keeps_scales(config: RunConfig, decided: Fp8Decision, world: World) -> bool:
    """Whether fp8 scales are computed once per step: weights are unsharded, with one scale each."""
    unsharded = world.replicas.size == 1 or config.parallel.zero_stage == 0
    return unsharded and not decided.by_rows


def build_parallel_model(config: RunConfig, world: World, program: Program = CONFIGURED) -> ParallelModel:
    is_custom = type(program) is not Program
    decisions = decide(config, device_facts(config, world.device), has_custom_program=is_custom)
    axes = axes_of(world, config.parallel)
    parts = {number: config.stages[number] for number in config.placement.stages_of(world.at.pipeline)}
    # An unsharded ZeRO-3 model may exceed the device's memory: `fully_shard` moves it there unit by unit.
    device = torch.device("cpu") if config.parallel.zero_stage == 3 else world.device
    compile, notes = check_compilation(decisions.compilation, world.device)
    deferred, scales = DeferredGradients(), WeightScales(world.device)
    options = model_options(config, decisions, compile, deferred, scales, world)
    stages = program.build_stages(config, parts, axes, device, options)
    compilation = track_compilation(compile, notes, stages.values(), world.status)
    timers = Timers(config.loop.timing_log_level, config.loop.timing_log_option, world.device)
    messages = open_messages(world, config.placement)
    executor = Executor(messages, world.at.pipeline, model_dtype(config), world.device, deferred, timers)
    routers = RouterLoads(config, world, stages)
    recording = build_graph_replay(config, decisions.graphs, world.device)
    return ParallelModel(
        config, world, axes, stages, executor, routers, scales, decisions, program, compilation, recording
    )
