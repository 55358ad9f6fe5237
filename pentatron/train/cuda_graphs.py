"""CUDA graph capture and replay of forward and backward of a micro-batch.

A graph launches the same kernels on the same addresses. Inputs that change are copied to static buffers
before a replay: tokens, dropout keys, the divisor of the loss and the loss scale. Scales of fp8 weights have
a fixed address. Gradients keep their addresses from capture: after a replay the `GradientStorage`s of the
parameters are set to these tensors. The first micro-batch of a step (no gradients), the second (gradients in
the dtype of backward) and later ones (fp32 sums) launch different kernels, so each has its own graph.

Each variant runs once eagerly before capture, which compiles kernels and initializes libraries.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pentatron.data.loader import TENSORS, Batch
from pentatron.errors import UserError
from pentatron.nn.dropout import DropoutKeys
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.executor import StageProgram
from pentatron.parallel.gradients import GradientStorage
from pentatron.parallel.sharding import Shape
from pentatron.plan.memory import bytes_outside_graphs
from pentatron.settings.decision_types import GraphsDecision
from pentatron.settings.run_config import RunConfig
from pentatron.text import binary_size

if TYPE_CHECKING:
    from pentatron.train.model import MicroBatches

# Share of the free memory that a capture may need.
_ROOM = 0.8


class CudaGraphs:
    """Captures CUDA graphs in one memory pool. `pool_bytes`: bytes that are reserved for them.

    A graph reuses memory that earlier graphs have freed: they must be replayed in the order of their capture.
    """

    def __init__(self, device: torch.device, bytes_outside_pool: int = 0) -> None:
        """`bytes_outside_pool`: bytes that the run needs outside the pool, and may not have allocated yet."""
        self.device, self.bytes_outside_pool, self.pool_bytes = device, bytes_outside_pool, 0
        self._pool: Any = None

    def memory_problem(self) -> str:
        """Returns why the memory does not suffice for a capture, or an empty string."""
        needed = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0]
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if self._pool is not None or needed + self.bytes_outside_pool <= _ROOM * free:
            return ""
        return (
            f"the graphs need {binary_size(needed)}, the rest of the run {binary_size(self.bytes_outside_pool)}, and {binary_size(free)} "
            f"are free"
        )

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Runs nothing; returns a function that replays the graph, and its output tensor."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        try:
            # Other threads copy batches and save checkpoints on other streams during the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = work()
        except Exception:
            # A failed capture leaves its stream current and the allocator in its pool.
            torch.cuda.set_stream(stream)
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(stream.device_index, self._pool)
            raise
        self.pool_bytes += max(0, torch.cuda.memory_reserved(self.device) - before)
        return graph.replay, output


@dataclass(frozen=True)
class _Inputs:
    """Static input buffers of the graphs."""

    batch: Batch
    keys: DropoutKeys | None
    divisor: Tensor
    seed: Tensor

    @classmethod
    def like(cls, batch: Batch, keys: DropoutKeys | None, divisor: Tensor) -> "_Inputs":
        static_keys = None if keys is None else DropoutKeys(keys.rows.clone())
        return cls(batch.map(torch.clone), static_keys, divisor.clone(), torch.ones_like(divisor))

    def fit(self, batch: Batch, keys: DropoutKeys | None) -> bool:
        if batch.documents is not None or (keys is None) is not (self.keys is None):
            return False
        return all(a.shape == b.shape and a.dtype == b.dtype for a, b in self._pairs(batch, keys))

    def take(self, batch: Batch, keys: DropoutKeys | None, divisor: Tensor, scale: float) -> None:
        for static, new in self._pairs(batch, keys):
            static.copy_(new)
        self.divisor.copy_(divisor)
        self.seed.fill_(scale)

    def _pairs(self, batch: Batch, keys: DropoutKeys | None) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ((getattr(self.batch, name), getattr(batch, name)) for name in TENSORS)
        if keys is not None and self.keys is not None:
            yield self.keys.rows, keys.rows


Values = list[Tensor | None]


@dataclass(frozen=True)
class _Graph:
    """One graph: its output, and the gradient tensors before and after it."""

    replay: Callable[[], None]
    loss: Tensor
    before: Values
    after: Values


@dataclass(eq=False)
class GraphReplay:
    """The graphs of a run, if any. `notes` are logged at its start.

    `required`: a failed capture ends the run. `draws`: the model uses torch's generator, which a failed
    capture leaves unusable.
    """

    recorder: CudaGraphs | None = None
    required: bool = False
    notes: tuple[str, ...] = ()
    draws: bool = False

    def __post_init__(self) -> None:
        self._inputs: _Inputs | None = None
        # Variants that have run eagerly once.
        self._warm: set[int] = set()
        self._graphs: dict[int, _Graph] = {}
        self._seconds = 0.0
        self._log_lines: list[str] = []

    def wrap(self, program: "MicroBatches", optimizer: object, scale: float) -> StageProgram:
        """Wraps a program so that captured micro-batches are replayed."""
        if self.recorder is None or not isinstance(optimizer, Optimizer):
            return program
        return _Replayed(self, program, optimizer, scale)

    def pop_lines(self) -> Iterator[str]:
        """Yields unreported log lines. Called after a step."""
        while self._log_lines:
            yield self._log_lines.pop(0)

    def forward(
        self, program: "MicroBatches", optimizer: Optimizer, micro_batch: int, scale: float
    ) -> Tensor | None:
        """Runs forward and backward of a micro-batch; returns its loss, or None if it is to run eagerly."""
        batch, keys = program.batches[micro_batch], program.keys[micro_batch]
        storages = optimizer.gradient_storages
        values = [storage.values for storage in storages]
        # The first micro-batch without packed documents determines the static shapes.
        if self._inputs is None and batch.documents is None:
            self._inputs = _Inputs.like(batch, keys, program.objective.tokens())
        if self.recorder is None or self._inputs is None or not self._inputs.fit(batch, keys):
            return None
        state = _gradient_state(values)
        graph = self._graphs.get(state)
        if graph is None:
            if state not in self._warm:
                self._warm.add(state)
                return None
            graph = self._record(program, optimizer, values)
            if graph is None:
                return None
            self._graphs[state] = graph
        elif not all(now is then for now, then in zip(values, graph.before, strict=True)):
            # The graph would add to gradients at other addresses.
            return None
        self._inputs.take(batch, keys, program.objective.tokens(), scale)
        graph.replay()
        _set_gradients(storages, graph.after)
        return graph.loss

    def _record(self, program: "MicroBatches", optimizer: Optimizer, before: Values) -> _Graph | None:
        inputs, recorder, storages = self._inputs, self.recorder, optimizer.gradient_storages
        assert inputs is not None and recorder is not None
        static = {id(t) for graph in self._graphs.values() for t in graph.after}
        if not all(t is None or id(t) in static for t in before):
            # These gradients have this address in this step only.
            return None
        one = program.for_one(inputs.batch, inputs.keys, lambda: inputs.divisor)

        def work() -> Tensor:
            loss = one.forward(0, 0, None)
            optimizer.begin_backward(0, False)
            torch.autograd.backward(loss, inputs.seed)
            optimizer.end_backward(0, False)
            return loss.detach()

        began = time.perf_counter()
        if not self.required and (problem := recorder.memory_problem()):
            self._give_up(problem)
            return None
        try:
            graph = _Graph(*recorder.record(work), before, [storage.values for storage in storages])
        except Exception as error:  # capture fails with many types
            words = str(error).strip().splitlines() or [""]
            self._give_up(f"{type(error).__name__}: {words[0][:200]}", ends=self.required or self.draws)
            return None
        finally:
            _set_gradients(storages, before)
        self._seconds += time.perf_counter() - began
        count = len(self._graphs) + 1
        graphs = "a CUDA graph" if count == 1 else f"{count} CUDA graphs"
        self._log_lines = [
            f"forward and backward of a micro-batch are replayed from now on, recorded as {graphs} in {self._seconds:.1f} s "
            f"with {binary_size(recorder.pool_bytes)} reserved for graphs"
        ]
        return graph

    def _give_up(self, problem: str, ends: bool = False) -> None:
        if ends:
            how = "on" if self.required else "auto"
            raise UserError(
                f"--cuda-graphs {how}: a micro-batch cannot be captured ({problem}); use --cuda-graphs off"
            )
        self.recorder = None
        self._graphs.clear()
        self._log_lines = [
            f"note: CUDA graphs are not used: a micro-batch cannot be captured ({problem}); --cuda-graphs "
            f"off hides this note"
        ]


def _gradient_state(values: Values) -> int:
    """Returns 0 without gradients, 1 with gradients of one micro-batch, 2 with fp32 sums."""
    gradients = [t for t in values if t is not None]
    if not gradients:
        return 0
    return 2 if all(t.dtype == torch.float32 for t in gradients) else 1


def _set_gradients(storages: Sequence[GradientStorage], values: Values) -> None:
    for storage, value in zip(storages, values, strict=True):
        storage.values = value


@dataclass(frozen=True)
class _Replayed:
    """Wraps a program. The loss of a replayed micro-batch has no autograd graph: its backward is done."""

    recording: GraphReplay
    program: "MicroBatches"
    optimizer: Optimizer
    scale: float

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        loss = self.recording.forward(self.program, self.optimizer, micro_batch, self.scale)
        return self.program.forward(stage, micro_batch, received) if loss is None else loss

    def message_shape(self, stage: int, micro_batch: int) -> Shape:
        return self.program.message_shape(stage, micro_batch)


def build_graph_replay(config: RunConfig, decided: GraphsDecision, device: torch.device) -> GraphReplay:
    """Returns the decided recording; its notes say why there is none. Memory is checked at capture."""
    if decided.required and decided.problem:
        raise UserError(
            f"--cuda-graphs on is not possible: {decided.problem}; leave it out, or use --cuda-graphs auto"
        )
    if not (decided.required or decided.if_memory_allows):
        return GraphReplay(notes=(decided.not_captured_reason,) if decided.not_captured_reason else ())
    recorder = CudaGraphs(device, 0 if decided.required else bytes_outside_graphs(config))
    return GraphReplay(recorder, decided.required, draws=config.model.attention_dropout > 0)
