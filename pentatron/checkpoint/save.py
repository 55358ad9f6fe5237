"""Synchronous and asynchronous checkpoint saves.

The path of a save: train/trainer.py, train/checkpoints.py (when to save), `Saver` (host copy, background
thread), checkpoint/store.py (stages on all ranks, commit), checkpoint/format.py (one rank's file and the
manifest), checkpoint/tensor_file.py (safetensors), files.py (fsync, rename), checksums.py.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pentatron.checkpoint.format import Manifest, rank_local_fragments
from pentatron.checkpoint.store import CheckpointStore, SaveStages
from pentatron.checkpoint.tensor_file import BLOCK_BYTES
from pentatron.parallel.collectives import Group
from pentatron.parallel.sharding import Fragment

# Alignment of each copy in bytes, a multiple of every element size.
_ALIGN_BYTES = 64


class HostCopy:
    """Asynchronous copy of fragments into one host buffer that all saves reuse.

    The buffer is reused because the kernel clears new memory, which takes longer than the copy. Fragments
    that change only in the optimizer update are copied by the writing thread while the next step computes;
    the update waits for it.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, later: Sequence[Fragment], now: Sequence[Fragment]) -> Callable[[], list[Fragment]]:
        """Copies `now` at once.

        The returned function copies `later` and returns all copies; it may be called from any thread.
        """
        assert self._copied.is_set(), "one copy at a time"
        fragments = [*now, *later]
        copies = [replace(fragment, values=view) for fragment, view in self._views(fragments)]
        pairs = [(fragment.values, copy.values) for fragment, copy in zip(fragments, copies, strict=True)]
        self._copy(pairs[: len(now)])
        later_pairs = pairs[len(now) :]
        # Recorded here, on the stream that computed the values: the writing thread has other streams.
        events = _record_events({values.device for values, _ in later_pairs})
        self._copied.clear()

        def finish() -> list[Fragment]:
            try:
                self._copy(later_pairs, events)
            finally:
                self._copied.set()
            return copies

        return finish

    def wait(self) -> None:
        """Blocks until the source tensors are no longer read."""
        self._copied.wait()

    def give_up(self) -> None:
        """Releases `wait` when the copy was not and will not be made."""
        self._copied.set()

    @torch.no_grad()
    def _copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], after: dict[torch.device, Any] | None = None
    ) -> None:
        """Copies each pair (source, target). GPU copies use a side stream, in parallel with computation."""
        for device, event in (after or _record_events({values.device for values, _ in pairs})).items():
            # A new thread's current device is GPU 0; using it would create a CUDA context there for every
            # rank of the node.
            torch.cuda.set_device(device)
            stream = self._streams.get(device) or torch.cuda.Stream(device)
            self._streams[device] = stream
            stream.wait_event(event)
            with torch.cuda.stream(stream):
                for values, target in pairs:
                    if values.device == device:
                        target.copy_(values, non_blocking=True)
            stream.synchronize()
        for values, target in pairs:
            if values.device.type != "cuda":
                _copy_in_memory(values.detach(), target)

    def _views(self, fragments: Sequence[Fragment]) -> Iterator[tuple[Fragment, Tensor]]:
        """Yields each fragment with a view of the buffer, growing the buffer if needed."""
        sizes = [f.values.nbytes for f in fragments]
        starts = np.cumsum([0, *(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes)]).tolist()
        if self._buffer is None or self._buffer.numel() < starts[-1]:
            on_gpu = any(f.values.device.type == "cuda" for f in fragments)
            # Freed first, so that both buffers never exist at the same time.
            self._buffer = None
            self._buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=on_gpu)
        for fragment, start, size in zip(fragments, starts, sizes):
            flat = self._buffer[start : start + size].view(fragment.values.dtype)
            yield fragment, flat.view(fragment.values.shape)


def _record_events(devices: set[torch.device]) -> dict[torch.device, Any]:
    """Records an event on the current stream of each GPU: copies must wait for it."""
    gpus = [device for device in devices if device.type == "cuda"]
    return {gpu: torch.cuda.current_stream(gpu).record_event() for gpu in gpus}


def _copy_in_memory(values: Tensor, copy: Tensor) -> None:
    """Copies with one thread that releases the GIL.

    torch would start as many threads as compute the next step.
    """
    if not values.is_contiguous() or values.numel() == 0:
        copy.copy_(values)
        return
    source, target = (t.reshape(-1).view(torch.uint8).numpy() for t in (values, copy))
    for start in range(0, len(source), BLOCK_BYTES):
        np.copyto(target[start : start + BLOCK_BYTES], source[start : start + BLOCK_BYTES])


# --- saves of a run ---


@dataclass(frozen=True)
class SavedStep:
    """A committed step. `note`: an additional message for the user."""

    step: int
    folder: Path
    note: str = ""


class Saver:
    """Saves steps one after the other, synchronously or in the background.

    In the background a thread writes the files while training continues; only the caller's thread runs
    collectives. All ranks must therefore call `begin`, and `commit_pending` between steps and at the end, at
    the same points.
    """

    def __init__(
        self, store: CheckpointStore, group: Group, background: bool, say: Callable[[str], None]
    ) -> None:
        self.store, self.group, self.background = store, group, background
        self._say = say
        self._copy = HostCopy()
        self._pending: tuple[int, SaveStages] | None = None
        self._warned = False

    def begin(
        self,
        step: int,
        copy_later: Iterable[Fragment],
        copy_now: Iterable[Fragment],
        rank_local: Mapping[str, Tensor],
        run_state: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> None:
        """Saves, or starts to in the background.

        `copy_later` must then not change before `wait_until_copied` returns. An earlier save must be
        committed. `rank_local` are tensors that exist only on this rank.
        """
        assert self._pending is None, "one save at a time"
        later, now = list(copy_later), [*copy_now, *rank_local_fragments(rank_local)]
        copied_fragments = [*later, *now].copy
        if self.background:
            copied_fragments = self._copy.begin(later, now)
        try:
            draft = Manifest(step, {}, {}, dict(run_state), dict(config))
            stages = self.store.start(draft, copied_fragments, self.group, self.background)
        except BaseException:
            # The copy will not run, so the optimizer update must not wait for it.
            self._copy.give_up()
            raise
        self._pending = step, stages

    @property
    def under_way(self) -> int | None:
        """The step that is being saved, or None."""
        return None if self._pending is None else self._pending[0]

    def commit_pending(self, wait: bool) -> SavedStep | None:
        """Finishes a pending save: commits it if all ranks have written. Collective.

        Returns the saved step, or None if there is none or it is still being written (`wait=False`). Raises a
        failure on all ranks alike.
        """
        if self._pending is None:
            return None
        step, stages = self._pending
        if (verdicts := stages.advance(wait)) is None:
            return None
        self._pending = None
        return SavedStep(step, self.store.outcome(step, verdicts), verdicts[0].note)

    def wait_for_previous(self) -> SavedStep | None:
        """Waits for the pending save before the next one starts; warns once that saves are too frequent."""
        if self._pending is None:
            return None
        step = self._pending[0]
        saved = self.commit_pending(wait=False)
        if saved is None and not self._warned:
            self._warned = True
            self._say(
                f"note: the checkpoint of step {step} is still being written: training waits for it before the next one (a longer "
                f"--save-interval, or a faster disk, avoids that)"
            )
        return saved or self.commit_pending(wait=True)

    def wait_until_copied(self) -> None:
        """Blocks until the pending save has copied the tensors; called before they change."""
        self._copy.wait()
