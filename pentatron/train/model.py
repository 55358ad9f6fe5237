"""The model as it is spread over ranks: the stages this rank holds, and how a step runs through them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from pentatron.checkpoint.state import TrainState
from pentatron.data.datasets import OpenedData, open_data
from pentatron.data.loader import Batch
from pentatron.devices import chip_of
from pentatron.errors import AgreedError
from pentatron.layout.stages import StagePart
from pentatron.models.causal_lm import CausalLM, build_stages
from pentatron.models.router_load import RouterLoads
from pentatron.monitor.display import Display
from pentatron.nn.compiled import Compile
from pentatron.nn.dropout import DropoutKeys, dropout_keys
from pentatron.nn.loss import cross_entropy_of
from pentatron.nn.options import Axes, Fp8Options, ModelOptions, axes_of
from pentatron.nn.recompute import recompute_of
from pentatron.ops.fp8_linear import FORMATS, WeightScales
from pentatron.ops.linear import DeferredGradients
from pentatron.parallel.collectives import all_reduce_, gather_objects
from pentatron.parallel.executor import Executor
from pentatron.parallel.messages import open_messages
from pentatron.parallel.shards import held_parameters
from pentatron.parallel.timers import Timers
from pentatron.parallel.world import World
from pentatron.settings.decision_types import Decisions, DeviceFacts, Fp8Decision
from pentatron.settings.decisions import decide
from pentatron.settings.resolve import Resolved
from pentatron.settings.run import RunConfig
from pentatron.train.compilation import Compilation, checked_compilation, compilation_of
from pentatron.train.graphs import Recording, record_steps

# What a run computes and reads: by default the configured model, its loss and the configured data.
#
# Whoever has a model, a forward step or datasets of their own derives from `Program` and hands it to the
# session; the loop, the schedules, the optimizer and the checkpoints are the same for every program.


# The objective of a step: how the losses of its micro-batches become one number, and what is reported beside
# it.
#
# A loss is a sum over tokens, divided by how many count in the whole step, or a mean, averaged over all
# micro-batches and replicas. The number of tokens that a user's loss function counts is known only when its
# last micro-batch has been computed. Until then sums are divided by the valid tokens of the data, and
# `Total.ratio` mends that at the end of the step; it is 1 where the two agree.


# Of a loss function's tally: tokens that it counted, calls that gave sums and means, calls with a name that is not agreed on.
_COUNTS = 4
# Of a value that is reported: numerator and denominator.
_PAIR = 2


@dataclass(frozen=True)
class Total:
    """What the loss functions of all ranks counted in a step. Every gradient and the loss are to be multiplied by `ratio`."""

    ratio: float = 1.0
    reported: Mapping[str, float] = field(default_factory=dict)


class ReportedNames:
    """Names that loss functions report, in an order all ranks agree on: then a step exchanges their values as plain numbers."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        return _COUNTS + _PAIR * len(self.names)

    def learn(self, own: Mapping[str, Tensor], world: World) -> dict[str, tuple[float, float]]:
        """The values of a step that has a new name, and its names for the steps after it. Every rank must call it."""
        said = {name: (float(pair[0]), float(pair[1])) for name, pair in own.items()}
        found: dict[str, tuple[float, float]] = {}
        for values in gather_objects(said, world.everyone):
            for name, (above, below) in values.items():
                so_far = found.get(name, (0.0, 0.0))
                found[name] = (so_far[0] + above, so_far[1] + below)
        self.names = tuple(dict.fromkeys((*self.names, *found)))
        return found


class Objective:
    """Turns the losses of a step's micro-batches into shares of its objective, and keeps what is reported beside them."""

    def __init__(self, tokens: Callable[[], Tensor], calls: int) -> None:
        """`tokens`: valid tokens of the data in the whole step, on all ranks; asked for by the first sum. `calls`: of the loss, in the
        whole step, by all replicas."""
        self.tokens, self.calls = tokens, calls
        self.counted: list[Tensor] = []
        self.means = 0
        self.reported: dict[str, Tensor] = {}

    def share_of_sum(self, total: Tensor, count: Tensor | None = None) -> Tensor:
        """`total` is a sum over `count` tokens; without `count`, over those that are valid in the data."""
        if count is not None:
            self.counted.append(count.detach().double())
        return total / self.tokens()

    def share_of_mean(self, loss: Tensor) -> Tensor:
        self.means += 1
        return loss / self.calls

    def report(self, name: str, above: Tensor, below: Tensor) -> None:
        """The value of `name` is the sum of all `above` over that of all `below`."""
        pair = torch.stack((above.detach().double().sum(), below.detach().double().sum()))
        self.reported[name] = self.reported[name] + pair if name in self.reported else pair

    def numbers(self, names: ReportedNames, world: World) -> Tensor:
        """This rank's tally, to be summed over all ranks. Tensor ranks compute the same loss, and one of them counts."""
        numbers = torch.zeros(names.width, dtype=torch.float64, device=world.device)
        if not world.is_first_of(("tensor",)):
            self.reported = {}
            return numbers
        if self.counted:
            numbers[0] = torch.stack(self.counted).sum()
        unknown = any(name not in names.names for name in self.reported)
        numbers[1:_COUNTS] = torch.tensor([float(len(self.counted)), float(self.means), float(unknown)])
        for i, name in enumerate(names.names):
            if name in self.reported:
                numbers[_COUNTS + _PAIR * i : _COUNTS + _PAIR * (i + 1)] = self.reported[name]
        return numbers

    def total(self, summed: Tensor, tokens: float, names: ReportedNames, world: World) -> Total:
        """`summed`: the numbers of all ranks, on the host. Every rank must call it."""
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
            values = names.learn(self.reported, world)
        else:
            pairs = summed[_COUNTS:].view(-1, _PAIR).tolist()
            values = dict(zip(names.names, map(tuple, pairs), strict=True))
        # A name that no micro-batch of this step reported has no denominator.
        reported = {name: above / below for name, (above, below) in values.items() if below}
        return Total(tokens / (counted or 1.0) if sums else 1.0, reported)


def ratio_on_device(numbers: Tensor, tokens: Tensor) -> Tensor:
    """`Total.ratio`, of summed numbers that are still on the device."""
    counted = torch.where(numbers[0] == 0, 1.0, numbers[0])
    return torch.where(numbers[1] > 0, tokens.double() / counted, 1.0)


@dataclass(frozen=True)
class StageCall:
    """A micro-batch in one stage: the tokens this rank has, what the stage before made of them, and dropout's keys."""

    stage: int
    is_last: bool
    batch: Batch
    received: Tensor | None
    keys: DropoutKeys | None
    objective: Objective


class Program:
    # Whether --data-path and its kin name files that must be there.
    reads_named_data = True
    # Whether loss functions count their own tokens or report values, in `StageCall.objective`; the names of these values.
    reported_names: ReportedNames | None = None

    def running(self, resolved: Resolved, world: World, display: Display) -> AbstractContextManager[None]:
        """Around all of a run on this rank, from before its data is opened."""
        return nullcontext()

    def begins(self, state: TrainState) -> None:
        """The run starts, or goes on, from here; the state is kept up to date."""

    def timed_by(self, timers: Timers) -> None:
        """The timers of the loop, which shows them every --log-interval steps."""

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
        """The stages of a rank in fp32, with their initial weights. They compute as the options say."""
        return build_stages(config.model, config.moe, parts, axes, config.run.seed, device, options)

    def forward(self, module: CausalLM, call: StageCall) -> Tensor:
        """The stream for the next stage; of the last one, the micro-batch's share of the step's objective."""
        batch = call.batch
        made: Tensor = module(
            batch.tokens,
            batch.position_ids,
            batch.labels,
            call.received,
            call.keys,
            documents=batch.documents,
        )
        return call.objective.share_of_sum((made * batch.loss_mask).sum()) if call.is_last else made


CONFIGURED = Program()


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
