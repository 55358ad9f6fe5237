"""A copy of a state in host memory, from which a checkpoint is written while the state changes."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pentatron.checkpoint.format import own_fragments
from pentatron.checkpoint.store import CheckpointStore, Stages
from pentatron.checkpoint.tensor_file import BLOCK_BYTES
from pentatron.parallel.collectives import Group
from pentatron.parallel.shards import Fragment

# Every copy begins at a multiple of this, which is one of every type's width.
_ALIGNMENT = 64


class HostCopy:
    """One buffer, made once and used for every save: new memory would have to be cleared by the kernel, which takes longer than the copy.

    What changes only in the optimizer's update is copied by whoever writes, while the next step computes; the update waits for it.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, steady: Sequence[Fragment], changing: Sequence[Fragment]) -> Callable[[], list[Fragment]]:
        """Copies now what is `changing`. The rest is copied when the result is called, from any thread."""
        assert self._copied.is_set(), "one copy at a time"
        places = list(self._places([*changing, *steady]))
        copies = [
            Fragment(fragment.tensor, fragment.shape, fragment.start, place)
            for fragment, place in zip([*changing, *steady], places, strict=True)
        ]
        now = len(changing)
        self._copy([(f.values, place) for f, place in zip(changing, places[:now], strict=True)])
        later = [(f.values, place) for f, place in zip(steady, places[now:], strict=True)]
        events = _reached({values.device for values, _ in later})
        self._copied.clear()

        def finish() -> list[Fragment]:
            try:
                self._copy(later, events)
            finally:
                self._copied.set()
            return copies

        return finish

    def wait(self) -> None:
        """Until nothing is read any more of what was to be copied."""
        self._copied.wait()

    def give_up(self) -> None:
        """Nothing will be copied after all."""
        self._copied.set()

    @torch.no_grad()
    def _copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], after: dict[torch.device, Any] | None = None
    ) -> None:
        """On a GPU in a stream of its own, beside what is computed."""
        for device, reached in (after or _reached({values.device for values, _ in pairs})).items():
            # A thread begins with the first GPU, and going back to it would take memory there for every rank of the machine.
            torch.cuda.set_device(device)
            stream = self._streams.get(device) or torch.cuda.Stream(device)
            self._streams[device] = stream
            stream.wait_event(reached)
            with torch.cuda.stream(stream):
                for values, place in pairs:
                    if values.device == device:
                        place.copy_(values, non_blocking=True)
            stream.synchronize()
        for values, place in pairs:
            if values.device.type != "cuda":
                _copy_in_memory(values.detach(), place)

    def _places(self, fragments: Sequence[Fragment]) -> Iterator[Tensor]:
        sizes = [f.values.numel() * f.values.element_size() for f in fragments]
        starts = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
        if self._buffer is None or self._buffer.numel() < starts[-1]:
            on_gpu = any(f.values.device.type == "cuda" for f in fragments)
            self._buffer = None
            self._buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=on_gpu)
        for fragment, start, size in zip(fragments, starts, sizes):
            flat = self._buffer[start : start + size].view(fragment.values.dtype)
            yield flat.view(fragment.values.shape)


def _reached(devices: set[torch.device]) -> dict[torch.device, Any]:
    """For each GPU, the moment up to which its work must be done before its memory is read."""
    return {
        device: torch.cuda.current_stream(device).record_event()
        for device in devices
        if device.type == "cuda"
    }


def _copy_in_memory(values: Tensor, place: Tensor) -> None:
    """By one thread that lets others run; torch would start as many again as compute the next step."""
    if not values.is_contiguous() or values.numel() == 0:
        place.copy_(values)
        return
    source, target = (t.reshape(-1).view(torch.uint8).numpy() for t in (values, place))
    for start in range(0, len(source), BLOCK_BYTES):
        np.copyto(target[start : start + BLOCK_BYTES], source[start : start + BLOCK_BYTES])


# The saves of a run, one after the other, at once or in the background.


@dataclass(frozen=True)
class Saved:
    """A step that is committed. `note`: what else should be told."""

    step: int
    folder: Path
    note: str = ""


class Saver:
    """In the background, files are written by threads while training goes on; all agreement is made by whoever calls here.

    That must be every rank, at the same points: `begin`, and `settle` between steps and at the end.
    """

    def __init__(
        self, store: CheckpointStore, group: Group, background: bool, say: Callable[[str], None]
    ) -> None:
        self.store, self.group, self.background = store, group, background
        self._say = say
        self._copy = HostCopy()
        self._under_way: tuple[int, Stages] | None = None
        self._told = False

    def begin(
        self,
        step: int,
        steady: Iterable[Fragment],
        changing: Iterable[Fragment],
        own: Mapping[str, Tensor],
        run_state: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> None:
        """Saves, or begins to: then `steady` must not change before `wait_until_copied`. An earlier save must be settled."""
        assert self._under_way is None, "one save at a time"
        held, moving = list(steady), [*changing, *own_fragments(own)]
        if self.background:
            parts = self._copy.begin(held, moving)
        else:
            together = [*held, *moving]

            def parts() -> list[Fragment]:
                return together

        try:
            stages = self.store.start(step, parts, run_state, config, self.group, self.background)
        except BaseException:
            # Nobody will copy: an update must not wait for it.
            self._copy.give_up()
            raise
        self._under_way = step, stages

    @property
    def under_way(self) -> int | None:
        """The step that is being saved."""
        return None if self._under_way is None else self._under_way[0]

    def settle(self, wait: bool) -> Saved | None:
        """The step whose save has ended since, if there is one; its failure is raised, on all ranks alike. Every rank must ask."""
        if self._under_way is None:
            return None
        step, stages = self._under_way
        verdicts = stages.advance(wait)
        if verdicts is None:
            return None
        self._under_way = None
        return Saved(step, self.store.outcome(step, verdicts), verdicts[0].note)

    def settle_before_next(self) -> Saved | None:
        """The same before another save, which has to wait: told once, as whoever saves so often should know."""
        if self._under_way is None:
            return None
        step = self._under_way[0]
        saved = self.settle(wait=False)
        if saved is None and not self._told:
            self._told = True
            self._say(
                f"note: the checkpoint of step {step} is still being written: training waits for it before the next one (a longer "
                f"--save-interval, or a faster disk, avoids that)"
            )
        return saved or self.settle(wait=True)

    def wait_until_copied(self) -> None:
        """Before anything is changed that is being saved."""
        self._copy.wait()
