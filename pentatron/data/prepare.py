"""Tokenizes text files into `.bin/.idx` pairs, atomically and resumable.

Until all inputs are tokenized, one incomplete pair per JSON key is kept in a hidden folder beside the
output, with `progress.json`, which records how far they are valid. The pairs are then renamed to their
final names.
"""

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pentatron.data.encode import EncodedChunk, EncodingSettings, Workers
from pentatron.data.indexed import TokenizerIdentity, pair_paths, read_sidecar, token_dtype
from pentatron.data.indexed_writer import PairInProgress, publish
from pentatron.data.text_files import Chunk, Position, is_json_lines, read_chunks
from pentatron.data.tokenizer import identify_tokenizer
from pentatron.errors import UserError
from pentatron.files import write_file
from pentatron.text import parse_json

# Increment when the same text and settings give other tokens than before.
VERSION = 2
SECONDS_BETWEEN_NOTES = 5.0
MOST_BAD_SHOWN = 10
_LOCK = ".lock"
_PROGRESS = "progress.json"


@dataclass(frozen=True)
class PrepareJob:
    """The inputs, output prefix and settings of a preparation."""

    inputs: tuple[Path, ...]
    prefix: Path
    encoding: EncodingSettings
    workers: int
    text_documents: str = "file"
    skip_bad_lines: bool = False
    overwrite: bool = False
    chunk_bytes: int = 1 << 19

    def output(self, key: str) -> Path:
        unit = "sentence" if self.encoding.sentences else "document"
        return self.prefix.with_name(f"{self.prefix.name}_{key}_{unit}")

    @property
    def outputs(self) -> list[Path]:
        return [self.output(key) for key in self.encoding.keys]

    @property
    def folder(self) -> Path:
        """The working folder, on the file system of the output, so that files can be renamed."""
        return self.prefix.with_name(f".{self.prefix.name}.preparing")


@dataclass
class Counts:
    """What was read and encoded, over all attempts of a job."""

    documents: int = 0
    tokens: int = 0
    blank_lines: int = 0
    bad_lines: int = 0
    # Bytes of the inputs on disk.
    read: int = 0


@dataclass
class PrepareOutcome:
    """The result of a preparation."""

    counts: Counts
    seconds: float
    # Tokens encoded by this run, for its speed.
    tokens_now: int
    bad: list[str] = field(default_factory=list)
    resumed: bool = False
    already_there: bool = False


Report = Callable[[Counts, int], None]
"""Called with the counts so far and the size of all inputs."""
Say = Callable[[str], None]


def prepare(
    job: PrepareJob, report: Report = lambda *counts: None, say: Say = lambda text: None
) -> PrepareOutcome:
    """Tokenizes the inputs of a job; the output depends only on their text, the tokenizer and settings."""
    _check_inputs(job)
    tokenizer = job.encoding.tokenizer.load()
    identity = identify_tokenizer(tokenizer)
    if job.encoding.append_eod:
        # Raises UserError before any work if the tokenizer has no end-of-document token.
        _ = tokenizer.eod
    try:
        fingerprint = _fingerprint(job, identity)
        job.prefix.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(job.folder):
            if _is_done(job, fingerprint):
                return PrepareOutcome(Counts(), 0.0, 0, already_there=True)
            return _Preparation(job, identity, fingerprint, say).run(report)
    except OSError as error:
        raise UserError(
            f"{error.filename or job.prefix.parent} cannot be read or written ({error.strerror}); fix that and run the same command "
            "again to resume"
        ) from error


class _Preparation:
    """One attempt of a job, which resumes from the recorded progress."""

    def __init__(self, job: PrepareJob, identity: TokenizerIdentity, fingerprint: str, say: Say) -> None:
        self.job, self.identity, self.fingerprint = job, identity, fingerprint
        self._progress_file = job.folder / _PROGRESS
        # Whether the files, the position and the counts describe the same chunks.
        self.is_consistent = True
        recorded = self._read_progress(say)
        self.resumed = recorded is not None
        if recorded is None:
            self._progress_file.unlink(missing_ok=True)
            for path in job.folder.iterdir():
                if path.name != _LOCK:
                    path.unlink()
        progress = recorded or {"counts": {}, "place": {}, "bad": [], "pairs": {}, "encoded": False}
        self.counts, self.place = Counts(**progress["counts"]), Position(**progress["place"])
        self.bad, self.encoded = list(progress["bad"]), bool(progress["encoded"])
        states = [] if self.encoded else [progress["pairs"].get(key) for key in job.encoding.keys]
        dtype = token_dtype(identity.vocab_size)
        self.pairs = [PairInProgress(self._stem(n), dtype, state=state) for n, state in enumerate(states)]

    def run(self, report: Report) -> PrepareOutcome:
        job, started, before = self.job, time.perf_counter(), self.counts.tokens
        if not self.encoded:
            try:
                self._encode_all(report)
                for pair in self.pairs:
                    pair.complete(self.identity, self.fingerprint)
            finally:
                for pair in self.pairs:
                    pair.close()
            # From here on files are only renamed; `publish` can be repeated after a crash.
            self._write_progress(encoded=True)
        for number, key in enumerate(job.encoding.keys):
            publish(self._stem(number), "", job.output(key))
        shutil.rmtree(job.folder)
        seconds = time.perf_counter() - started
        return PrepareOutcome(self.counts, seconds, self.counts.tokens - before, self.bad, self.resumed)

    def _encode_all(self, report: Report) -> None:
        job = self.job
        sizes = _stats(job)
        total = sum(size for size, _ in sizes)
        if self.resumed:
            report(self.counts, total)
        chunks = read_chunks(job.inputs, job.text_documents, job.chunk_bytes, self.place)
        written_at = time.monotonic()
        with Workers(job.encoding, job.workers) as workers:
            try:
                for chunk, encoded in workers.encode(chunks):
                    if encoded.bad and not job.skip_bad_lines:
                        raise UserError(
                            f"{self._bad_line(chunk, *encoded.bad[0])}; fix it, or skip such lines with --skip-bad-lines"
                        )
                    self._append(chunk, encoded)
                    report(self.counts, total)
                    if time.monotonic() - written_at >= SECONDS_BETWEEN_NOTES:
                        self._write_progress()
                        written_at = time.monotonic()
            except (UserError, KeyboardInterrupt):
                # The chunks appended so far are valid. After Ctrl-C inside `_append`, the last recorded
                # progress counts.
                if self.place != Position() and self.is_consistent:
                    self._write_progress()
                raise
        if _stats(job) != sizes:
            self._progress_file.unlink(missing_ok=True)
            raise UserError("an input file changed while it was read; repeat the command when it is complete")

    def _append(self, chunk: Chunk, encoded: EncodedChunk) -> None:
        self.is_consistent = False
        for pair, documents in zip(self.pairs, encoded.keys, strict=True):
            pair.append(documents)
        self.place = chunk.after
        self.counts.documents = self.pairs[0].state.documents
        self.counts.tokens = sum(pair.tokens for pair in self.pairs)
        self.counts.blank_lines += encoded.blank_lines
        self.counts.bad_lines += encoded.bad_lines
        self.counts.read = chunk.read
        room = MOST_BAD_SHOWN - len(self.bad)
        self.bad += [self._bad_line(chunk, *entry) for entry in encoded.bad[:room]]
        self.is_consistent = True

    def _bad_line(self, chunk: Chunk, line: int, reason: str) -> str:
        return f"{self.job.inputs[chunk.file]} line {line} {reason}"

    def _write_progress(self, encoded: bool = False) -> None:
        """Records how far the files are valid; a killed run resumes from here."""
        pairs = {} if encoded else {key: pair.sync() for key, pair in zip(self.job.encoding.keys, self.pairs)}
        progress = {"fingerprint": self.fingerprint, "encoded": encoded, "counts": asdict(self.counts)}
        progress |= {"place": asdict(self.place), "pairs": pairs, "bad": self.bad}
        text = json.dumps(progress, indent=1)
        digest = hashlib.sha256(text.encode()).hexdigest()
        write_file(self._progress_file, f"{digest}\n{text}\n".encode())

    def _read_progress(self, say: Say) -> dict[str, Any] | None:
        """Returns the progress recorded by an interrupted run of the same job, or None."""
        try:
            digest, _, text = self._progress_file.read_text(encoding="utf-8").partition("\n")
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        text = text.removesuffix("\n")
        if digest != hashlib.sha256(text.encode()).hexdigest():
            say(f"{self._progress_file} is damaged; starting over")
            return None
        progress: dict[str, Any] = parse_json(text)
        if progress["fingerprint"] != self.fingerprint:
            say(f"{self.job.folder} is of other inputs or settings; starting over")
            return None
        if progress["counts"]["bad_lines"] and not self.job.skip_bad_lines:
            say(f"{self.job.folder} was started with --skip-bad-lines; starting over")
            return None
        return progress

    def _stem(self, number: int) -> Path:
        # Keys may contain any character, so files are named by their index.
        return self.job.folder / f"key{number}"


def _check_inputs(job: PrepareJob) -> None:
    keys = job.encoding.keys
    for key in keys:
        if "/" in key or "\0" in key or not key:
            raise UserError(f"the key '{key}' cannot be part of a file's name; rename it in the input")
    if len(set(keys)) != len(keys):
        raise UserError(f"--json-keys {' '.join(keys)} has a key twice; give every key once")
    plain = next((path for path in job.inputs if not is_json_lines(path)), None)
    if plain is not None and len(keys) > 1:
        raise UserError(f"{plain} is plain text, which has no keys; give one of --json-keys {' '.join(keys)}")
    if plain is not None and job.encoding.sentences:
        raise UserError(
            f"--split-sentences needs lists of sentences in JSON lines, and {plain} is plain text, which this command does not split"
        )


def _fingerprint(job: PrepareJob, identity: TokenizerIdentity) -> str:
    """Hashes everything that the output depends on, with sizes and modification times of the inputs."""
    inputs = [[str(path.resolve()), *stat] for path, stat in zip(job.inputs, _stats(job))]
    settings = {"version": VERSION, "inputs": inputs, "keys": job.encoding.keys}
    settings |= {"append_eod": job.encoding.append_eod, "sentences": job.encoding.sentences}
    tokenizer = [identity.fingerprint, identity.vocab_size]
    settings |= {"text_documents": job.text_documents, "tokenizer": tokenizer}
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _stats(job: PrepareJob) -> list[tuple[int, int]]:
    """Returns size and modification time of each input."""
    return [(stat.st_size, stat.st_mtime_ns) for stat in map(Path.stat, job.inputs)]


def _is_done(job: PrepareJob, fingerprint: str) -> bool:
    """Whether the output exists; raises UserError if other files would be overwritten."""
    existing = [prefix for prefix in job.outputs if pair_paths(prefix)[1].exists()]
    # An interrupted run of the same job was allowed to replace the output, and may have started to.
    if job.overwrite or not existing or _interrupted_job(job) == fingerprint:
        return False
    for prefix in existing:
        sidecar = read_sidecar(prefix)
        if sidecar is None or sidecar.metadata.job != fingerprint:
            raise UserError(
                f"{pair_paths(prefix)[1]} exists already, from other inputs or settings; add --overwrite to replace it, or choose "
                "another --output-prefix"
            )
    return len(existing) == len(job.outputs)


def _interrupted_job(job: PrepareJob) -> str | None:
    """Returns the fingerprint of the job that an interrupted run recorded."""
    try:
        _, _, text = (job.folder / _PROGRESS).read_text(encoding="utf-8").partition("\n")
        return parse_json(text)["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Locks the working folder; raises UserError if another run holds it."""
    folder.mkdir(exist_ok=True)
    with (folder / _LOCK).open("w") as file:
        try:
            # The kernel releases the lock when the file is closed, also if the process is killed.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run is preparing {folder} right now; wait for it, or choose another --output-prefix"
            ) from None
        try:
            yield
        finally:
            # Keep the folder only if there is progress to resume from.
            if folder.exists() and not (folder / _PROGRESS).exists():
                shutil.rmtree(folder, ignore_errors=True)
