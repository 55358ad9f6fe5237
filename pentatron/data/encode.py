"""Chunks of text to token ids, in worker processes that are told one chunk at a time."""

import json
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from pentatron.data.indexed import token_dtype
from pentatron.data.text_files import JSON_LINES, Chunk
from pentatron.data.tokenizer import NotEncoded, Tokenizer, TokenizerChoice
from pentatron.errors import UserError

# Of the bad lines of one chunk, these many are described; all are counted.
MOST_DESCRIBED = 5


@dataclass(frozen=True)
class Recipe:
    """How a document becomes tokens."""

    tokenizer: TokenizerChoice
    keys: tuple[str, ...]
    append_eod: bool
    # Whether every text must be a list of sentences.
    sentences: bool


@dataclass(frozen=True)
class EncodedDocuments:
    """The documents of a chunk under one key, as a pair stores them."""

    tokens: bytes
    lengths: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    largest: int


@dataclass
class EncodedChunk:
    keys: list[EncodedDocuments]
    blank_lines: int = 0
    bad_lines: int = 0
    # Number of the line and what is wrong with it, for the first few.
    bad: list[tuple[int, str]] = field(default_factory=list)


class Encoder:
    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.end = [tokenizer.eod] if recipe.append_eod else []

    def encode(self, chunk: Chunk) -> EncodedChunk:
        result = EncodedChunk([])
        lines: list[int] = []
        # For each document, for each key: its sentences.
        documents: list[list[list[str]]] = []
        texts = self._documents(chunk, result) if chunk.cut == JSON_LINES else self._plain(chunk, result)
        for line, document in texts:
            lines.append(line)
            documents.append(document)
        try:
            encoded = [self._encode([document[k] for document in documents]) for k in range(self._width)]
        except Exception:
            # One text among them cannot be encoded; one by one, to find it.
            good = []
            for line, document in zip(lines, documents):
                reason = self._refusal(document)
                if reason is None:
                    good.append(document)
                else:
                    _note(result, line, reason)
            result.bad.sort()
            encoded = [self._encode([document[k] for document in good]) for k in range(self._width)]
        result.keys = encoded
        return result

    @property
    def _width(self) -> int:
        return len(self.recipe.keys)

    def _encode(self, documents: Sequence[Sequence[str]]) -> EncodedDocuments:
        """Empty sentences are left out; the end comes after the last sentence of a document that has any token."""
        batch = self.tokenizer.encode_batch([text for sentences in documents for text in sentences])
        lengths, counts, at = [], [], 0
        parts: list[list[int]] = []
        for sentences in documents:
            ids = [part for part in batch[at : at + len(sentences)] if part]
            at += len(sentences)
            counts.append(len(ids))
            if ids:
                lengths += [len(part) for part in ids]
                lengths[-1] += len(self.end)
                parts += ids
                parts.append(self.end)
        total = sum(lengths)
        tokens = np.fromiter(chain.from_iterable(parts), dtype=self.dtype, count=total)
        return EncodedDocuments(
            tokens.tobytes(),
            np.array(lengths, np.int32),
            np.array(counts, np.int32),
            int(tokens.max()) if total else -1,
        )

    def _refusal(self, document: Sequence[Sequence[str]]) -> str | None:
        for text in chain.from_iterable(document):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                return f"holds half a surrogate pair, which is no character ({error.reason})"
            try:
                self.tokenizer.encode(text)
            except NotEncoded as error:
                return f"cannot be encoded by the tokenizer ({error.reason})"
            except UserError as error:
                return str(error).rstrip(".")
            except MemoryError:
                raise
            except Exception as error:
                return f"cannot be encoded by the tokenizer ({' '.join(str(error).split()).rstrip('.')})"
        return None

    def _documents(self, chunk: Chunk, result: EncodedChunk) -> Iterator[tuple[int, list[list[str]]]]:
        lines = chunk.data.split(b"\n")
        # What follows the last line break is no line.
        if not lines[-1]:
            lines.pop()
        for number, line in enumerate(lines, chunk.first_line):
            if not line.strip():
                result.blank_lines += 1
                continue
            try:
                yield number, self._texts(json.loads(str(line, "utf-8-sig")))
            except UserError as error:
                _note(result, number, str(error))
            except RecursionError:
                _note(result, number, "is nested too deeply")
            except ValueError as error:
                _note(result, number, f"is no JSON object ({error})")

    def _texts(self, found: Any) -> list[list[str]]:
        """The sentences under each key; a text that is not cut up is one sentence."""
        if not isinstance(found, dict):
            raise UserError(f"is no JSON object but {_kind(found)}")
        texts: list[list[str]] = []
        for key in self.recipe.keys:
            if key not in found:
                has = ", ".join(f"'{name}'" for name in list(found)[:8]) or "nothing"
                raise UserError(f"has no key '{key}' (it has {has})")
            value = found[key]
            if isinstance(value, str) and not self.recipe.sentences:
                texts.append([value])
            elif isinstance(value, list) and all(isinstance(part, str) for part in value):
                texts.append(value)
            elif isinstance(value, str):
                raise UserError(
                    f"has one text under '{key}' where --split-sentences needs a list of sentences: there is no sentence splitter here"
                )
            else:
                raise UserError(f"has {_kind(value)} under '{key}' instead of a text or a list of texts")
        return texts

    def _plain(self, chunk: Chunk, result: EncodedChunk) -> Iterator[tuple[int, list[list[str]]]]:
        for number, raw in plain_documents(chunk):
            if not raw.strip():
                result.blank_lines += 1
                continue
            try:
                # Some editors begin a file with a byte order mark, which is no text.
                yield number, [[raw.decode("utf-8-sig" if number == 1 else "utf-8")]]
            except UnicodeDecodeError as error:
                _note(result, number, f"is not UTF-8 text ({error})")


def plain_documents(chunk: Chunk) -> Iterable[tuple[int, bytes]]:
    """The documents of plain text with the line each begins at."""
    if chunk.cut == "file":
        return [(chunk.first_line, chunk.data)]
    lines = chunk.data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    numbered = enumerate((line.removesuffix(b"\r") for line in lines), chunk.first_line)
    return numbered if chunk.cut == "line" else _paragraphs(numbered)


def _paragraphs(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    first, held = 0, list[bytes]()
    for number, line in lines:
        if line.strip():
            first = first if held else number
            held.append(line)
        elif held:
            yield first, b"\n".join(held)
            held = []
    if held:
        yield first, b"\n".join(held)


def _note(result: EncodedChunk, line: int, reason: str) -> None:
    result.bad_lines += 1
    if len(result.bad) < MOST_DESCRIBED:
        result.bad.append((line, reason))


def _kind(value: Any) -> str:
    names = {str: "a text", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def work(connection: Connection, recipe: Recipe) -> None:
    """The loop of a worker; it ends when the other end of the connection is closed, or its process gone."""
    # Ctrl-C reaches every process of a terminal; the one that reads and writes decides what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        encoder = Encoder(recipe, recipe.tokenizer.load())
        while True:
            number, chunk = connection.recv()
            connection.send((number, encoder.encode(chunk)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


# Worker processes that encode chunks; results come back in the order of the chunks.


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
