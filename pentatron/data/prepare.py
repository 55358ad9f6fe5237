"""Text files to `.bin/.idx` pairs: in order, whole or not at all, going on after an interruption.

Until everything is encoded, all is kept in a hidden folder beside the output: one growing pair per key, and `progress.json`, which says how
far they are good. The pairs then move to their names.
"""

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pentatron.data.encode import EncodedChunk, Recipe, Workers
from pentatron.data.indexed import TokenizerIdentity, pair_paths, read_sidecar, token_dtype
from pentatron.data.pair_writer import PairInProgress, publish
from pentatron.data.text_files import Chunk, Place, is_json, read_chunks
from pentatron.data.tokenizer import identify
from pentatron.errors import UserError
from pentatron.files import write_file
from pentatron.text import parse_json

# Raise this when the same text and settings give other tokens than before.
VERSION = 2
SECONDS_BETWEEN_NOTES = 5.0


@dataclass(frozen=True)
class Job:
    inputs: tuple[Path, ...]
    prefix: Path
    recipe: Recipe
    workers: int
    text_documents: str = "file"
    skip_bad_lines: bool = False
    overwrite: bool = False
    chunk_bytes: int = 1 << 19

    def output(self, key: str) -> Path:
        return self.prefix.with_name(
            f"{self.prefix.name}_{key}_{'sentence' if self.recipe.sentences else 'document'}"
        )

    @property
    def outputs(self) -> list[Path]:
        return [self.output(key) for key in self.recipe.keys]

    @property
    def folder(self) -> Path:
        """Where the work is kept until it is done; on the same file system, so that it can be renamed."""
        return self.prefix.with_name(f".{self.prefix.name}.preparing")


@dataclass
class Counts:
    """What was read and encoded, over all runs of a job."""

    documents: int = 0
    tokens: int = 0
    blank_lines: int = 0
    bad_lines: int = 0
    # Bytes of the inputs as they lie on the disk.
    read: int = 0


@dataclass
class Outcome:
    counts: Counts
    seconds: float
    # Tokens of this run alone, for its speed.
    tokens_now: int
    bad: list[str] = field(default_factory=list)
    resumed: bool = False
    already_there: bool = False


Report = Callable[[Counts, int], None]
"""Called with the counts so far and the size of all inputs."""
Say = Callable[[str], None]

MOST_BAD_SHOWN = 10


def prepare(job: Job, report: Report = lambda counts, total: None, say: Say = lambda text: None) -> Outcome:
    """Encodes the inputs of a job; the output depends on nothing but their text, the tokenizer and the recipe."""
    _check_inputs(job)
    tokenizer = job.recipe.tokenizer.load()
    identity = identify(tokenizer)
    if job.recipe.append_eod:
        # Named by the tokenizer, or this is the sentence that says how.
        _ = tokenizer.eod
    try:
        fingerprint = _fingerprint(job, identity)
        job.prefix.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(job.folder):
            if _is_done(job, fingerprint):
                return Outcome(Counts(), 0.0, 0, already_there=True)
            return _Preparation(job, identity, fingerprint, say).run(report)
    except OSError as error:
        raise UserError(
            f"{error.filename or job.prefix.parent} cannot be read or written ({error.strerror}); when that is mended, the same command "
            "goes on where this one stopped"
        ) from error


class _Preparation:
    def __init__(self, job: Job, identity: TokenizerIdentity, fingerprint: str, say: Say) -> None:
        self.job, self.identity, self.fingerprint = job, identity, fingerprint
        self.counts, self.place = Counts(), Place()
        self.bad: list[str] = []
        # Whether the growing files, the place and the counts are of the same chunks.
        self.is_whole = True
        noted = self._noted(say)
        self.resumed = noted is not None
        states: Mapping[str, Any] = {}
        if noted is not None:
            self.counts, self.place = Counts(**noted["counts"]), Place(**noted["place"])
            self.bad, states = list(noted["bad"]), noted["pairs"]
        self.encoded = noted is not None and bool(noted["encoded"])
        self.pairs: list[PairInProgress] = []
        if not self.encoded:
            if noted is None:
                self._empty_folder()
            dtype = token_dtype(identity.vocab_size)
            for number, key in enumerate(job.recipe.keys):
                self.pairs.append(PairInProgress(self._stem(number), dtype, state=states.get(key)))

    def run(self, report: Report) -> Outcome:
        job, started, before = self.job, time.perf_counter(), self.counts.tokens
        if not self.encoded:
            try:
                self._encode_all(report)
                for pair in self.pairs:
                    pair.complete(self.identity, self.fingerprint)
            finally:
                for pair in self.pairs:
                    pair.close()
            # From here on only names change; `publish` can be called again after a crash.
            self._note(encoded=True, states={})
        for number, key in enumerate(job.recipe.keys):
            publish(self._stem(number), "", job.output(key))
        shutil.rmtree(job.folder)
        seconds = time.perf_counter() - started
        return Outcome(self.counts, seconds, self.counts.tokens - before, self.bad, self.resumed)

    def _encode_all(self, report: Report) -> None:
        job = self.job
        sizes = _stats(job)
        total = sum(size for size, _ in sizes)
        if self.resumed:
            report(self.counts, total)
        chunks = read_chunks(job.inputs, job.text_documents, job.chunk_bytes, self.place)
        noted_at = time.monotonic()
        with Workers(job.recipe, job.workers) as workers:
            try:
                for chunk, encoded in workers.encode(chunks):
                    self._refuse_bad_lines(chunk, encoded)
                    self._append(chunk, encoded)
                    report(self.counts, total)
                    if time.monotonic() - noted_at >= SECONDS_BETWEEN_NOTES:
                        self._note()
                        noted_at = time.monotonic()
            except (UserError, KeyboardInterrupt):
                # What is encoded is good, whatever stopped us; Ctrl-C in the midst of a chunk goes back to the last note.
                if self.place != Place() and self.is_whole:
                    self._note()
                raise
        if _stats(job) != sizes:
            self._forget()
            raise UserError(
                "an input file changed while it was read; run the same command again when it is complete"
            )

    def _append(self, chunk: Chunk, encoded: EncodedChunk) -> None:
        self.is_whole = False
        for pair, documents in zip(self.pairs, encoded.keys, strict=True):
            pair.append(documents.tokens, documents.lengths, documents.counts, documents.largest)
        self.place = chunk.after
        self.counts.documents = self.pairs[0].documents
        self.counts.tokens = sum(pair.tokens for pair in self.pairs)
        self.counts.blank_lines += encoded.blank_lines
        self.counts.bad_lines += encoded.bad_lines
        self.counts.read = chunk.read
        room = MOST_BAD_SHOWN - len(self.bad)
        self.bad += [self._bad_line(chunk, *entry) for entry in encoded.bad[:room]]
        self.is_whole = True

    def _refuse_bad_lines(self, chunk: Chunk, encoded: EncodedChunk) -> None:
        if encoded.bad and not self.job.skip_bad_lines:
            raise UserError(
                f"{self._bad_line(chunk, *encoded.bad[0])}; mend it, or leave such lines out with --skip-bad-lines"
            )

    def _bad_line(self, chunk: Chunk, line: int, reason: str) -> str:
        return f"{self.job.inputs[chunk.file]} line {line} {reason}"

    def _note(self, encoded: bool = False, states: dict[str, Any] | None = None) -> None:
        """Writes down how far the growing files are good; after this, a killed run goes on from here."""
        if states is None:
            states = {key: pair.sync() for key, pair in zip(self.job.recipe.keys, self.pairs)}
        noted = {
            "fingerprint": self.fingerprint,
            "encoded": encoded,
            "counts": asdict(self.counts),
            "place": asdict(self.place),
            "pairs": states,
            "bad": self.bad,
        }
        text = json.dumps(noted, indent=1)
        digest = hashlib.sha256(text.encode()).hexdigest()
        write_file(self._notes, f"{digest}\n{text}\n".encode())

    def _noted(self, say: Say) -> dict[str, Any] | None:
        """What an interrupted run of the same job wrote down, if it can be used."""
        try:
            digest, _, text = self._notes.read_text(encoding="utf-8").partition("\n")
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        text = text.removesuffix("\n")
        if digest != hashlib.sha256(text.encode()).hexdigest():
            say(f"{self._notes} is damaged; starting over")
            return None
        noted: dict[str, Any] = parse_json(text)
        if noted["fingerprint"] != self.fingerprint:
            say(f"{self.job.folder} is of other inputs or settings; starting over")
            return None
        if noted["counts"]["bad_lines"] and not self.job.skip_bad_lines:
            say(f"{self.job.folder} was begun with --skip-bad-lines; starting over")
            return None
        return noted

    def _forget(self) -> None:
        self._notes.unlink(missing_ok=True)

    def _empty_folder(self) -> None:
        self._forget()
        for path in self.job.folder.iterdir():
            if path.name != _LOCK:
                path.unlink()

    @property
    def _notes(self) -> Path:
        return self.job.folder / "progress.json"

    def _stem(self, number: int) -> Path:
        # Keys may hold any character; their numbers make safe names.
        return self.job.folder / f"key{number}"


def _check_inputs(job: Job) -> None:
    keys = job.recipe.keys
    for key in keys:
        if "/" in key or "\0" in key or not key:
            raise UserError(f"the key '{key}' cannot be part of a file's name; rename it in the input")
    if len(set(keys)) != len(keys):
        raise UserError(f"--json-keys {' '.join(keys)} names a key twice; name every key once")
    plain = next((path for path in job.inputs if not is_json(path)), None)
    if plain is not None and len(keys) > 1:
        raise UserError(f"{plain} is plain text, which has no keys; give one of --json-keys {' '.join(keys)}")
    if plain is not None and job.recipe.sentences:
        raise UserError(
            f"--split-sentences needs lists of sentences in JSON lines, and {plain} is plain text: there is no sentence splitter here"
        )


def _fingerprint(job: Job, identity: TokenizerIdentity) -> str:
    """Of everything the output depends on, with sizes and times for the content of the inputs."""
    said = {
        "version": VERSION,
        "inputs": [[str(path.resolve()), *stat] for path, stat in zip(job.inputs, _stats(job))],
        "keys": job.recipe.keys,
        "append_eod": job.recipe.append_eod,
        "sentences": job.recipe.sentences,
        "text_documents": job.text_documents,
        "tokenizer": [identity.fingerprint, identity.vocab_size],
    }
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _stats(job: Job) -> list[tuple[int, int]]:
    stats = [path.stat() for path in job.inputs]
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats]


def _is_done(job: Job, fingerprint: str) -> bool:
    """Whether the output is of this very job; other files under its names are replaced only when told to."""
    there = [prefix for prefix in job.outputs if pair_paths(prefix)[1].exists()]
    if job.overwrite or not there or _begun(job) == fingerprint:
        return False
    for prefix in there:
        sidecar = read_sidecar(prefix)
        if sidecar is None or sidecar.facts.job != fingerprint:
            raise UserError(
                f"{pair_paths(prefix)[1]} exists already, from other inputs or settings; add --overwrite to replace it, or choose "
                "another --output-prefix"
            )
    return len(there) == len(job.outputs)


def _begun(job: Job) -> str | None:
    """The job that an interrupted run was doing; it had leave to replace what is there, and may have begun to."""
    try:
        _, _, text = (job.folder / "progress.json").read_text(encoding="utf-8").partition("\n")
        found: str = parse_json(text)["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


_LOCK = ".lock"


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Two runs of one job would write into the same files; the second is told so."""
    folder.mkdir(exist_ok=True)
    with (folder / _LOCK).open("w") as file:
        try:
            # Closing the file gives the lock back, also when the process is killed.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run is preparing {folder} right now; wait for it, or choose another --output-prefix"
            ) from None
        try:
            yield
        finally:
            # Kept for the next run only where there is something to go on with.
            if folder.exists() and not (folder / "progress.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
