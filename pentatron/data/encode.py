"""Tokenizes chunks of text in worker processes."""

import json
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, groupby
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from pentatron.data.indexed import token_dtype
from pentatron.data.indexed_writer import EncodedDocuments
from pentatron.data.text_files import JSON_LINES, Chunk
from pentatron.data.tokenizer import EncodingError, Tokenizer, TokenizerSettings
from pentatron.errors import UserError

# Invalid lines described per chunk; all are counted.
MOST_DESCRIBED = 5
# Chunks read but not yet written, per worker: a slow chunk must neither block the others nor exhaust memory.
MAX_PENDING_CHUNKS = 4


@dataclass(frozen=True)
class EncodingSettings:
    """Settings that determine the tokens of a document."""

    tokenizer: TokenizerSettings
    keys: tuple[str, ...]
    append_eod: bool
    # Whether each text is a list of sentences, stored as one sequence each.
    sentences: bool


@dataclass
class EncodedChunk:
    """The tokens of a chunk, for each JSON key, and its skipped lines."""

    keys: list[EncodedDocuments]
    blank_lines: int = 0
    bad_lines: int = 0
    # Line number and reason of the first few invalid lines.
    bad: list[tuple[int, str]] = field(default_factory=list)


class Encoder:
    """Tokenizes chunks with one tokenizer."""

    def __init__(self, settings: EncodingSettings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.end = [tokenizer.eod] if settings.append_eod else []

    def encode(self, chunk: Chunk) -> EncodedChunk:
        result = EncodedChunk([])
        documents = list(self._documents(chunk, result))
        try:
            result.keys = self._encode_keys([document for _, document in documents])
        except Exception:
            # Some text of the batch cannot be encoded: try the documents one by one to find it.
            encodable = []
            for line, document in documents:
                if (reason := self._encoding_problem(document)) is None:
                    encodable.append(document)
                else:
                    _add_bad_line(result, line, reason)
            result.bad.sort()
            result.keys = self._encode_keys(encodable)
        return result

    def _encode_keys(self, documents: Sequence[Sequence[Sequence[str]]]) -> list[EncodedDocuments]:
        return [self._encode([document[k] for document in documents]) for k in range(len(self.settings.keys))]

    def _encode(self, documents: Sequence[Sequence[str]]) -> EncodedDocuments:
        """Encodes sentences without empty ones; appends the end token to non-empty documents."""
        batch = self.tokenizer.encode_batch([text for sentences in documents for text in sentences])
        lengths: list[int] = []
        counts, start = [], 0
        sequences: list[list[int]] = []
        for sentences in documents:
            ids = [sentence for sentence in batch[start : start + len(sentences)] if sentence]
            start += len(sentences)
            counts.append(len(ids))
            if ids:
                lengths += map(len, ids)
                lengths[-1] += len(self.end)
                sequences += [*ids, self.end]
        tokens = np.fromiter(chain.from_iterable(sequences), dtype=self.dtype, count=sum(lengths))
        largest = int(tokens.max()) if len(tokens) else -1
        sizes, numbers = np.array(lengths, np.int32), np.array(counts, np.int32)
        return EncodedDocuments(tokens.tobytes(), sizes, numbers, largest)

    def _encoding_problem(self, document: Sequence[Sequence[str]]) -> str | None:
        """Returns why a document cannot be encoded, or None."""
        for text in chain.from_iterable(document):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                return f"contains half a surrogate pair, which is not a character ({error.reason})"
            try:
                self.tokenizer.encode(text)
            except EncodingError as error:
                return f"cannot be encoded by the tokenizer ({error.reason})"
            except UserError as error:
                return str(error).rstrip(".")
            except MemoryError:
                raise
            except Exception as error:
                return f"cannot be encoded by the tokenizer ({' '.join(str(error).split()).rstrip('.')})"
        return None

    def _documents(self, chunk: Chunk, result: EncodedChunk) -> Iterator[tuple[int, list[list[str]]]]:
        """Yields the first line of each document, and its sentences for each key."""
        is_json = chunk.cut == JSON_LINES
        for number, raw in raw_documents(chunk):
            if not raw.strip():
                result.blank_lines += 1
                continue
            try:
                if is_json:
                    yield number, self._texts(json.loads(str(raw, "utf-8-sig")))
                else:
                    # Some editors write a byte order mark at the start of a file.
                    yield number, [[raw.decode("utf-8-sig" if number == 1 else "utf-8")]]
            except UserError as error:
                _add_bad_line(result, number, str(error))
            except RecursionError:
                _add_bad_line(result, number, "is nested too deeply")
            except ValueError as error:
                what = "is not a JSON object" if is_json else "is not UTF-8 text"
                _add_bad_line(result, number, f"{what} ({error})")

    def _texts(self, row: Any) -> list[list[str]]:
        """Returns the sentences of each key; a string is one sentence."""
        if not isinstance(row, dict):
            raise UserError(f"is not a JSON object but {_kind(row)}")
        texts: list[list[str]] = []
        for key in self.settings.keys:
            if key not in row:
                has = ", ".join(f"'{name}'" for name in list(row)[:8]) or "nothing"
                raise UserError(f"has no key '{key}' (it has {has})")
            value = row[key]
            if isinstance(value, str) and not self.settings.sentences:
                texts.append([value])
            elif isinstance(value, list) and all(isinstance(part, str) for part in value):
                texts.append(value)
            elif isinstance(value, str):
                raise UserError(
                    f"has one text under '{key}' where --split-sentences needs a list of sentences, because this command does not split text"
                )
            else:
                raise UserError(f"has {_kind(value)} under '{key}' instead of a text or a list of texts")
        return texts


def raw_documents(chunk: Chunk) -> Iterable[tuple[int, bytes]]:
    """Returns the documents of a chunk with their first line numbers."""
    if chunk.cut == "file":
        return [(chunk.first_line, chunk.data)]
    lines = chunk.data.split(b"\n")
    # The text after the last line break is not a line.
    if not lines[-1]:
        lines.pop()
    if chunk.cut == JSON_LINES:
        return enumerate(lines, chunk.first_line)
    numbered = enumerate((line.removesuffix(b"\r") for line in lines), chunk.first_line)
    return numbered if chunk.cut == "line" else _paragraphs(numbered)


def _paragraphs(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    for has_text, group in groupby(lines, lambda entry: bool(entry[1].strip())):
        if has_text:
            numbers, paragraph = zip(*group)
            yield numbers[0], b"\n".join(paragraph)


def _add_bad_line(result: EncodedChunk, line: int, reason: str) -> None:
    result.bad_lines += 1
    if len(result.bad) < MOST_DESCRIBED:
        result.bad.append((line, reason))


def _kind(value: Any) -> str:
    names = {str: "a text", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def run_worker(connection: Connection, settings: EncodingSettings) -> None:
    """Runs the loop of a worker until the other end of the connection is closed."""
    # Ctrl-C is sent to all processes of the terminal; the parent decides and stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        encoder = Encoder(settings, settings.tokenizer.load())
        while True:
            number, chunk = connection.recv()
            connection.send((number, encoder.encode(chunk)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


class Workers(AbstractContextManager["Workers"]):
    """Up to `count` worker processes in a context manager; they exit with this process."""

    def __init__(self, settings: EncodingSettings, count: int) -> None:
        self._settings, self._count = settings, count
        self._processes: dict[Connection, Any] = {}

    def _start(self) -> Connection:
        # Spawned, not forked: a fork copies locks that threads of this process may hold.
        context = multiprocessing.get_context("spawn")
        connection, worker_end = context.Pipe()
        process = context.Process(target=run_worker, args=(worker_end, self._settings), daemon=True)
        # A worker inherits the signal mask: SIGINT stays blocked until the worker ignores it. Starting the
        # resource tracker unblocks signals, so it is started first.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # This process must not keep the worker's end open, or it would not see EOF when the worker dies.
        worker_end.close()
        self._processes[connection] = process
        return connection

    def __exit__(self, *error: object) -> None:
        for connection, process in self._processes.items():
            connection.close()
            # It may be busy with a chunk whose result is no longer needed.
            process.terminate()
        for process in self._processes.values():
            process.join()

    def encode(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """Yields the chunks and their tokens in order."""
        source = enumerate(chunks)
        idle, busy = list[Connection](), set[Connection]()
        pending: dict[int, Chunk] = {}
        done: dict[int, EncodedChunk] = {}
        following, more = 0, True
        while more or pending:
            while more and len(busy) < self._count and len(pending) < MAX_PENDING_CHUNKS * self._count:
                number, chunk = next(source, (-1, None))
                if chunk is None:
                    more = False
                    break
                # Workers are started on demand: a few chunks need only a few processes.
                connection = idle.pop() if idle else self._start()
                try:
                    connection.send((number, chunk))
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise self._death(connection) from error
                busy.add(connection)
                pending[number] = chunk
            if busy:
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    try:
                        number, done_chunk = ready.recv()
                    except (EOFError, ConnectionResetError) as error:
                        raise self._death(ready) from error
                    done[number] = done_chunk
                    busy.remove(ready)
                    idle.append(ready)
            while following in done:
                yield pending.pop(following), done.pop(following)
                following += 1

    def _death(self, connection: Connection) -> UserError:
        """Returns the error for a worker whose connection has closed."""
        process = self._processes[connection]
        process.join()
        code = process.exitcode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return UserError(
            f"a worker process {how} (not enough memory is the usual cause); run the same command again to resume, "
            "perhaps with fewer --workers"
        )
