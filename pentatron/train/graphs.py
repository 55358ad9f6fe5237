"""Forward and backward of a micro-batch as CUDA graphs: what the host launches one by one in a step is recorded once, and replayed.

A graph is the same kernels on the same addresses. What changes from step to step is copied to where it reads: tokens, keys of
dropout, the number a loss is divided by, the loss scale; the scales of weights in fp8 lie in one place all the time. Gradients come to lie where they lay when it was recorded: `Holder`s are
told so after each replay. A micro-batch that finds no gradients, one that finds the first of a step, and one that finds sums of several
launch different kernels, so each is a graph of its own; one belongs to the gradients it was recorded with.

Everything runs as it is written once before it is recorded: compilers, kernels and libraries set themselves up then.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pentatron.data.loader import TENSORS, Batch
from pentatron.errors import UserError
from pentatron.nn.dropout import DropoutKeys
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.executor import StageProgram
from pentatron.parallel.gradients import Holder
from pentatron.parallel.shards import Shape
from pentatron.plan.memory import beside_graphs
from pentatron.settings.decision_types import GraphsDecision
from pentatron.settings.run import RunConfig
from pentatron.text import binary_size

# Of the memory that is free, what a recording may take.
_ROOM = 0.8


class Computation(StageProgram, Protocol):
    """The micro-batches of a step, of one stage that is the whole model; `for_one` is the same with other inputs."""

    @property
    def batches(self) -> Sequence[Batch]: ...
    @property
    def keys(self) -> Sequence[DropoutKeys | None]: ...
    @property
    def divisor(self) -> Callable[[], Tensor]: ...
    def for_one(
        self, batch: Batch, keys: DropoutKeys | None, divisor: Callable[[], Tensor]
    ) -> "Computation": ...


class Recorder(Protocol):
    """Who records: `record` computes nothing, it gives what computes, and where its result will lie."""

    def lacks(self) -> str:
        """Why there is no room for a recording; nothing if there is."""
        ...

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]: ...

    @property
    def held(self) -> int:
        """Bytes of memory that nothing but the recordings can use."""
        ...


class CudaGraphs:
    """Graphs in one memory of their own: what one has let go is used by those after it, so they are replayed in the order in which they
    were recorded."""

    def __init__(self, device: torch.device, beside: int = 0) -> None:
        """`beside`: bytes that the run needs outside of its recordings, and may not have needed yet."""
        self.device, self.beside = device, beside
        self.held = 0
        self._pool: Any = None

    def lacks(self) -> str:
        needed = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0]
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if self._pool is not None or needed + self.beside <= _ROOM * free:
            return ""
        return (
            f"it would hold {binary_size(needed)}, the run needs {binary_size(self.beside)} beside it, and {binary_size(free)} "
            f"are free"
        )

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        try:
            # Other threads may go on: they copy batches and save checkpoints on streams of their own.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                made = work()
        except Exception:
            # A recording that broke is left half open: its stream is still the current one, and memory still comes from its pool.
            torch.cuda.set_stream(stream)
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(stream.device_index, self._pool)
            raise
        self.held += max(0, torch.cuda.memory_reserved(self.device) - before)
        return graph.replay, made


@dataclass(frozen=True)
class _Inputs:
    """Where graphs read what changes."""

    batch: Batch
    keys: DropoutKeys | None
    divisor: Tensor
    seed: Tensor

    @classmethod
    def like(cls, batch: Batch, keys: DropoutKeys | None, divisor: Tensor) -> "_Inputs":
        own = None if keys is None else DropoutKeys(keys.rows.clone())
        return cls(batch.map(torch.clone), own, divisor.clone(), torch.ones_like(divisor))

    def fit(self, batch: Batch, keys: DropoutKeys | None) -> bool:
        return (
            batch.documents is None
            and (keys is None) is (self.keys is None)
            and all(_alike(own, new) for own, new in self._pairs(batch, keys))
        )

    def take(self, batch: Batch, keys: DropoutKeys | None, divisor: Tensor, scale: float) -> None:
        for own, new in self._pairs(batch, keys):
            own.copy_(new)
        self.divisor.copy_(divisor)
        self.seed.fill_(scale)

    def _pairs(self, batch: Batch, keys: DropoutKeys | None) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ((getattr(self.batch, name), getattr(batch, name)) for name in TENSORS)
        if keys is not None and self.keys is not None:
            yield self.keys.rows, keys.rows


def _alike(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype


Values = list[Tensor | None]


@dataclass(frozen=True)
class _Recorded:
    """One graph: the gradients it finds, those it leaves, and where the loss lies."""

    replay: Callable[[], None]
    loss: Tensor
    before: Values
    after: Values


class Recording:
    """What is recorded of a run, if anything. `notes` are for the beginning of a run."""

    def __init__(
        self,
        recorder: Recorder | None = None,
        required: bool = False,
        notes: tuple[str, ...] = (),
        draws: bool = False,
    ) -> None:
        """`required`: a run that cannot be recorded ends. `draws`: from torch's generator, which a recording that breaks leaves unusable."""
        self.notes = notes
        self._recorder, self._required, self._draws = recorder, required, draws
        self._inputs: _Inputs | None = None
        self._warm: set[int] = set()
        self._graphs: dict[int, _Recorded] = {}
        self._seconds = 0.0
        self._news: list[str] = []

    def around(self, program: Computation, optimizer: object, scale: float) -> StageProgram:
        """The same micro-batches, replayed where they are recorded."""
        if self._recorder is None or not isinstance(optimizer, Optimizer):
            return program
        return _Replayed(self, program, optimizer, scale)

    def news(self) -> Iterator[str]:
        """What the user does not know yet, after a step."""
        while self._news:
            yield self._news.pop(0)

    def forward(
        self, program: Computation, optimizer: Optimizer, micro_batch: int, scale: float
    ) -> Tensor | None:
        """Forward and backward of a micro-batch; its loss, or None where it is to be computed as it is written."""
        batch, keys = program.batches[micro_batch], program.keys[micro_batch]
        holders = optimizer.holders
        values = [holder.values for holder in holders]
        if self._recorder is None or not self._fits(program, batch, keys):
            return None
        assert self._inputs is not None
        state = _state(values)
        found = self._graphs.get(state)
        if found is None:
            if state not in self._warm:
                self._warm.add(state)
                return None
            found = self._record(program, optimizer, holders, values)
            if found is None:
                return None
            self._graphs[state] = found
        elif not _are(values, found.before):
            return None
        self._inputs.take(batch, keys, program.divisor(), scale)
        found.replay()
        _put(holders, found.after)
        return found.loss

    def _fits(self, program: Computation, batch: Batch, keys: DropoutKeys | None) -> bool:
        """The first micro-batch that could be recorded says how large one is."""
        if self._inputs is None and batch.documents is None:
            self._inputs = _Inputs.like(batch, keys, program.divisor())
        return self._inputs is not None and self._inputs.fit(batch, keys)

    def _record(
        self, program: Computation, optimizer: Optimizer, holders: Sequence[Holder], before: Values
    ) -> _Recorded | None:
        inputs, recorder = self._inputs, self._recorder
        assert inputs is not None and recorder is not None
        lasting = {id(t) for graph in self._graphs.values() for t in graph.after}
        if not all(t is None or id(t) in lasting for t in before):
            # Gradients that lie there in this step alone.
            return None
        one = program.for_one(inputs.batch, inputs.keys, lambda: inputs.divisor)

        def work() -> Tensor:
            loss = one.forward(0, 0, None)
            optimizer.begin_backward(0, False)
            torch.autograd.backward(loss, inputs.seed)
            optimizer.end_backward(0, False)
            return loss.detach()

        began = time.perf_counter()
        problem, ends = "" if self._required else recorder.lacks(), self._required
        if not problem:
            try:
                replay, loss = recorder.record(work)
            except Exception as error:  # a graph that cannot be made is told of in many ways
                words = str(error).strip().splitlines() or [""]
                problem, ends = f"{type(error).__name__}: {words[0][:200]}", ends or self._draws
        if problem:
            _put(holders, before)
            self._give_up(problem, ends)
            return None
        found = _Recorded(replay, loss, before, [holder.values for holder in holders])
        _put(holders, before)
        self._seconds += time.perf_counter() - began
        self._tell(len(self._graphs) + 1, recorder.held)
        return found

    def _tell(self, graphs: int, held: int) -> None:
        many = "a CUDA graph" if graphs == 1 else f"{graphs} CUDA graphs"
        self._news = [
            f"forward and backward of a micro-batch are replayed from now on, recorded as {many} in {self._seconds:.1f} s "
            f"with {binary_size(held)} of their own"
        ]

    def _give_up(self, problem: str, ends: bool) -> None:
        if ends:
            how = "on" if self._required else "auto"
            raise UserError(
                f"--cuda-graphs {how}: a micro-batch cannot be recorded ({problem}); use --cuda-graphs off"
            )
        self._recorder = None
        self._graphs.clear()
        self._news = [
            f"note: CUDA graphs are left out, each kernel is launched by itself: a micro-batch cannot be recorded ({problem}); --cuda-graphs "
            f"off runs without this line"
        ]


def _state(values: Values) -> int:
    """Which kernels take the next gradients: 0 if there are none to add to, 1 if there are some as they came, 2 if there are sums."""
    found = [t for t in values if t is not None]
    if not found:
        return 0
    return 2 if all(t.dtype == torch.float32 for t in found) else 1


def _are(values: Values, others: Values) -> bool:
    return all(one is other for one, other in zip(values, others, strict=True))


def _put(holders: Sequence[Holder], values: Values) -> None:
    for holder, value in zip(holders, values, strict=True):
        holder.values = value


@dataclass(frozen=True)
class _Replayed:
    """A loss that has no graph of autograd any more: whoever asks for its backward finds it done."""

    recording: Recording
    program: Computation
    optimizer: Optimizer
    scale: float

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        made = self.recording.forward(self.program, self.optimizer, micro_batch, self.scale)
        return self.program.forward(stage, micro_batch, received) if made is None else made

    def message_shape(self, stage: int, micro_batch: int) -> Shape:
        return self.program.message_shape(stage, micro_batch)


def record_steps(config: RunConfig, decided: GraphsDecision, device: torch.device) -> Recording:
    """Records what was decided, or says why not. Whether there is room is seen when something is to be recorded."""
    draws = config.model.attention_dropout > 0
    if decided.required:
        if decided.problem:
            raise UserError(
                f"--cuda-graphs on is not possible: {decided.problem}; leave it out, or use --cuda-graphs auto"
            )
        return Recording(CudaGraphs(device), required=True, draws=draws)
    if decided.if_room:
        return Recording(CudaGraphs(device, beside_graphs(config)), draws=draws)
    return Recording(notes=(decided.left_out,) if decided.left_out else ())
