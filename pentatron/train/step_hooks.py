"""Hooks around training steps: profiler, memory snapshots, garbage collection, comparison of replicas."""

import errno
import gc
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentatron.errors import AgreedError
from pentatron.optim.build import AnyOptimizer
from pentatron.parallel.collectives import gather_objects
from pentatron.parallel.sharding import Shape
from pentatron.parallel.world import World
from pentatron.settings.decision_types import Decisions
from pentatron.settings.run_config import RunConfig
from pentatron.train.output import Output

_MEMORY_EVENTS = 100_000
# Name, start and shape of a rank's part of a logical tensor.
_Part = tuple[str, Shape, Shape]


@dataclass(eq=False)
class StepHooks:
    """Called before and after each step, around evaluations, and at the end of the loop."""

    config: RunConfig
    decisions: Decisions
    world: World
    optimizer: AnyOptimizer
    folder: Path
    output: Output

    def __post_init__(self) -> None:
        self._trace: Any = None
        self._in_cuda_range = False
        if self.config.loop.manual_gc:
            gc.disable()
            gc.collect()
        if self.decisions.allocations_recorded:
            record = torch.cuda.memory._record_memory_history
            record(enabled="all", context="all", stacks="all", max_entries=_MEMORY_EVENTS)

    def before(self, step: int) -> None:
        """Starts the profile. `step` counts from 1."""
        log = self.config.log
        is_due = log.profile and step == log.profile_step_start + 1
        if not is_due or self.world.all_ranks.rank not in log.profile_ranks:
            return
        if not self.decisions.torch_profiler:
            # Starts `nsys profile --capture-range=cudaProfilerApi`.
            torch.cuda.cudart().cudaProfilerStart()
            self._in_cuda_range = True
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.world.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._trace = torch.profiler.profile(activities=kinds, record_shapes=True)
        self._trace.start()

    def after(self, step: int) -> None:
        """Collective: every rank calls it for the same step."""
        loop = self.config.loop
        if self.config.log.profile and step == self.config.log.profile_step_end:
            self._end_profile()
        interval = loop.check_weight_hash_across_dp_replicas_interval
        if interval and step % interval == 0:
            count = require_equal_weights(self.optimizer, self.world, step)
            self.output.note(f"weights of replicas are the same after iteration {step} ({count} comparisons)")
        if loop.manual_gc and loop.manual_gc_interval and step % loop.manual_gc_interval == 0:
            gc.collect()

    @contextmanager
    def around_evaluation(self) -> Iterator[None]:
        """Collects garbage before and after an evaluation, so that the objects it creates delay no step."""
        collects = self.config.loop.manual_gc and self.config.loop.manual_gc_eval
        if collects:
            gc.collect()
        yield
        if collects:
            gc.collect(0)

    def _end_profile(self) -> None:
        if self._in_cuda_range:
            torch.cuda.cudart().cudaProfilerStop()
            self._in_cuda_range = False
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        trace.stop()
        path = self.folder / "profile" / f"rank-{self.world.all_ranks.rank:05d}.json"
        hint = "open it at ui.perfetto.dev or chrome://tracing"
        self._write("profile", path, partial(_export, trace), hint)

    def _write(self, what: str, path: Path, write: Callable[[str], object], hint: str) -> None:
        """Warns instead of failing if the file cannot be written: a full disk must not end the training."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(path))
        except (OSError, RuntimeError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            reason = getattr(error, "strerror", None) or lines[0]
            self.output.say(
                f"warning: the {what} {path} cannot be written ({reason}); the run continues without it"
            )
        else:
            self.output.say(f"{what}: {path} ({hint})")

    def close(self) -> None:
        """Writes the profile and the memory history, also after an error such as OOM."""
        self._end_profile()
        if self.config.loop.manual_gc:
            gc.enable()
        if self.decisions.allocations_recorded:
            # Joining with an absolute path yields that path.
            path = self.folder / self.config.memory.memory_snapshot_path
            path = path.with_name(f"{path.stem}-rank-{self.world.all_ranks.rank:05d}{path.suffix}")
            dump = torch.cuda.memory._dump_snapshot
            self._write("memory history", path, dump, "open it at pytorch.org/memory_viz")
            torch.cuda.memory._record_memory_history(enabled=None)


def require_equal_weights(optimizer: AnyOptimizer, world: World, step: int) -> int:
    """Compares the weights of ranks that hold the same part of a tensor. Collective.

    These are data-parallel replicas, and tensor-parallel ranks for norms. Returns the number of comparisons.
    """
    weights = optimizer.model_weights()
    local = {(f.tensor, tuple(f.start), tuple(f.values.shape)): digest(f.values) for f in weights}
    first: dict[_Part, tuple[int, str]] = {}
    compared, different = 0, []
    for rank, digests in enumerate(gather_objects(local, world.all_ranks)):
        for part, value in digests.items():
            holder, expected = first.setdefault(part, (rank, value))
            compared += holder != rank
            if value != expected:
                different.append((part[0], holder, rank))
    if different:
        name, holder, rank = different[0]
        more = f" (and {len(different) - 1} more differ)" if len(different) > 1 else ""
        raise AgreedError(
            f"after step {step} the weights of ranks {holder} and {rank} are not the same: {name} differs{more}; one of them computes or "
            f"communicates wrongly. Check the machine of rank {rank}, and resume from a checkpoint before the last step at which this was checked"
        )
    return compared


def digest(values: Tensor) -> str:
    flat = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest()


def _export(trace: Any, path: str) -> None:
    """Exports a trace and checks that it is complete: the profiler reports no failed or partial write."""
    trace.export_chrome_trace(path)
    with Path(path).open("rb") as written:
        size = written.seek(0, os.SEEK_END)
        written.seek(max(0, size - 16))
        if not size or not written.read().rstrip().endswith(b"}"):
            raise OSError(errno.EIO, "it is not whole: is the disk full?", path)
