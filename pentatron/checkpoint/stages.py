"""Work that all ranks do in stages, in the background if wished: what every rank's stage gave is known to all before the next one.

Only the caller's thread ever talks to other ranks. A collective of a second thread would meet those of training in another
order on each rank, and hang or mix them up.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from pentatron.parallel.collectives import Group, gather_objects, largest

# Gets what the stage before gave on every rank, in their order; the first one gets nothing.
Stage = Callable[[Sequence[Any]], Any]


class Stages:
    def __init__(self, stages: Sequence[Stage], group: Group, background: bool) -> None:
        self._left, self._group, self._background = list(stages), group, background
        self._running = self._start(())

    def _start(self, before: Sequence[Any]) -> "Future[Any]":
        stage = self._left.pop(0)
        return run(lambda: stage(before), self._background)

    def advance(self, wait: bool) -> Sequence[Any] | None:
        """Goes on as far as all ranks have come; what the last stage gave on every rank, or None if they are not done.

        Every rank must ask, with the same `wait`. An exception of this rank's stage is raised here.
        """
        while True:
            if not wait and largest(int(not self._running.done()), self._group):
                return None
            everyone = gather_objects(self._running.result(), self._group)
            if not self._left:
                return everyone
            self._running = self._start(everyone)


def run(action: Callable[[], Any], background: bool) -> "Future[Any]":
    """Runs it now, or in a thread of its own."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    if background:
        # A daemon: a process that is told twice to end ends, and what it was writing is no step yet.
        threading.Thread(target=work, name="checkpoint", daemon=True).start()
    else:
        future.set_result(action())
    return future
