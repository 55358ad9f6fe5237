"""Chunks of text to token ids, in worker processes that are told one chunk at a time."""

import json
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from pentatron.data.indexed import token_dtype
from pentatron.data.inputs import JSON_LINES, Chunk
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
