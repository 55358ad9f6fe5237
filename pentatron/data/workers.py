"""Worker processes that encode chunks; results come back in the order of the chunks."""

import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from pentatron.data.encode import EncodedChunk, Recipe, work
from pentatron.data.inputs import Chunk
from pentatron.errors import UserError

# Chunks read but not yet written, for each worker: a slow chunk must not stop the others, nor fill the memory.
AHEAD = 4


class Workers:
    """A `with` block around worker processes, up to `count`. They also end when this process does, however it ends."""

    def __init__(self, recipe: Recipe, count: int) -> None:
        self._recipe, self._count = recipe, count
        self._processes: dict[Connection, Any] = {}

    def _start(self) -> Connection:
        # Spawned, not forked: a fork copies locks that threads of this process may hold.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, self._recipe), daemon=True)
        # A worker inherits what is blocked here: Ctrl-C would end it before it can say that it leaves that to us. Whoever starts
        # Python's tracker of resources finds signals unblocked, so it is started before.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # A worker sees the end of its pipe only if nobody else holds the other end open.
        theirs.close()
        self._processes[ours] = process
        return ours

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        for connection, process in self._processes.items():
            connection.close()
            # Busy with a chunk whose result nobody wants any more.
            process.terminate()
        for process in self._processes.values():
            process.join()

    def encode(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, EncodedChunk]]:
        source = enumerate(chunks)
        idle, busy = list[Connection](), set[Connection]()
        read: dict[int, Chunk] = {}
        done: dict[int, EncodedChunk] = {}
        following, more = 0, True
        while more or read:
            while more and len(busy) < self._count and len(read) < AHEAD * self._count:
                entry = next(source, None)
                if entry is None:
                    more = False
                    break
                number, chunk = entry
                # Started when there is something to do: few chunks need few processes, whatever --workers says.
                connection = idle.pop() if idle else self._start()
                self._send(connection, (number, chunk))
                busy.add(connection)
                read[number] = chunk
            if busy:
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    number, encoded = self._receive(ready)
                    done[number] = encoded
                    busy.remove(ready)
                    idle.append(ready)
            while following in done:
                yield read.pop(following), done.pop(following)
                following += 1

    def _send(self, connection: Connection, message: tuple[int, Chunk]) -> None:
        try:
            connection.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._death(connection) from error

    def _receive(self, connection: Connection) -> tuple[int, EncodedChunk]:
        try:
            answer: tuple[int, EncodedChunk] = connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._death(connection) from error
        return answer

    def _death(self, connection: Connection) -> UserError:
        process = self._processes[connection]
        process.join()
        code = process.exitcode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return UserError(
            f"a worker process {how} (not enough memory is the usual cause); the same command goes on where this one stopped, "
            "perhaps with fewer --workers"
        )
