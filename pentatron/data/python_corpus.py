"""A small corpus of Python's standard library, with a BPE tokenizer trained on it."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pentatron.data.indexed import pair_paths, sidecar_path, token_dtype
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.data.tokenizer import FileTokenizer, identify_tokenizer, train_bpe
from pentatron.errors import UserError
from pentatron.files import TEMPORARY_SUFFIX, exclusive_folder, write_file
from pentatron.text import parse_json

Progress = Callable[[str, int, int], None]
"""Called with the name of the stage, the bytes done and the total bytes."""

EXCLUDED_FOLDERS = {
    # Repetitive.
    *("test", "tests", "idle_test"),
    # Not source code of the library.
    *("site-packages", "dist-packages", "lib-dynload", "ensurepip", "__pycache__"),
    # An application, grammars of old versions, and generated tables and texts.
    *("idlelib", "lib2to3", "encodings", "pydoc_data"),
}
GENERATED_FILES = frozenset(["stringprep.py", "html/entities.py"])
GENERATED_PREFIXES = ("_sysconfigdata", "config-")

# Increment when the steps below change, so that existing corpora are prepared again.
RECIPE = 1
STAGES = ("read", "train tokenizer", "tokenize")
MANIFEST = "corpus.json"
# Texts tokenized at a time by the tokenizer's threads.
BATCH_TEXTS = 32


@dataclass(frozen=True)
class PreparedCorpus:
    prefix: Path
    tokenizer_path: Path
    documents: int
    tokens: int
    bytes: int
    # Hash of the source texts.
    fingerprint: str


@dataclass(frozen=True)
class _Sources:
    texts: list[str]
    bytes: int
    fingerprint: str


def python_stdlib_files() -> list[Path]:
    """Returns the `.py` files of the standard library to train on, sorted by relative path."""
    root = _stdlib_root()
    kept: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # Modified in place, so that os.walk does not descend into site-packages, which is far larger than
        # the rest.
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        kept += [Path(folder).relative_to(root) / name for name in names if name.endswith(".py")]
    written = [path for path in sorted(kept, key=Path.as_posix) if path.as_posix() not in GENERATED_FILES]
    return [root / path for path in written if not path.parts[0].startswith(GENERATED_PREFIXES)]


def prepare_python_corpus(
    folder: Path | str, vocab_size: int = 2048, max_bytes: int = 8_000_000, progress: Progress | None = None
) -> PreparedCorpus:
    """Trains a tokenizer and tokenizes the standard library, or reuses an earlier result.

    The manifest `corpus.json` is removed first and written last: without it the folder is incomplete.
    """
    folder, report = Path(folder), progress or (lambda stage, done, total: None)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive_folder(folder):
        sources = _read_sources(max_bytes, report)
        recipe = {"recipe": RECIPE, "vocab_size": vocab_size, "max_bytes": max_bytes}
        identity = {**recipe, "sources_sha256": sources.fingerprint}
        if (counts := _finished_counts(folder, identity)) is None:
            (folder / MANIFEST).unlink(missing_ok=True)
            for leftover in folder.glob(f"*{TEMPORARY_SUFFIX}"):
                leftover.unlink()
            tokens = _tokenize(folder, vocab_size, sources, report)
            counts = {"documents": len(sources.texts), "tokens": tokens, "bytes": sources.bytes}
            manifest = {"identity": identity, "counts": counts, "files": _file_hashes(folder)}
            write_file(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    return PreparedCorpus(_prefix(folder), _tokenizer_path(folder), **counts, fingerprint=sources.fingerprint)


def _tokenize(folder: Path, vocab_size: int, sources: _Sources, report: Progress) -> int:
    """Trains the tokenizer, tokenizes the texts with it, and returns the number of tokens."""
    _, training, tokenizing = STAGES
    trained = train_bpe(_reported(sources, training, report), vocab_size)
    write_file(_tokenizer_path(folder), trained.to_str(pretty=True).encode())
    tokenizer = FileTokenizer(_tokenizer_path(folder))
    dtype, identity = token_dtype(tokenizer.vocab_size), identify_tokenizer(tokenizer)
    with IndexedDatasetWriter(_prefix(folder), dtype, identity) as writer:
        texts = _reported(sources, tokenizing, report)
        while batch := list(islice(texts, BATCH_TEXTS)):
            for ids in tokenizer.encode_batch(batch):
                writer.add_document([*ids, tokenizer.eod])
    return writer.metadata.tokens


def _finished_counts(folder: Path, identity: dict[str, object]) -> dict[str, int] | None:
    """Returns the counts of an earlier preparation of the same text and settings, or None."""
    try:
        manifest = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["identity"] != identity or manifest["files"] != _file_hashes(folder):
            return None
        return {name: int(manifest["counts"][name]) for name in ("documents", "tokens", "bytes")}
    except (OSError, ValueError, KeyError, TypeError):
        # Missing or damaged: rebuild.
        return None


def _read_sources(max_bytes: int, report: Progress) -> _Sources:
    root = _stdlib_root()
    names = [path.relative_to(root).as_posix() for path in python_stdlib_files()]
    # Ordered by hash, which spreads related modules, so that the validation split at the end resembles the
    # rest.
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    texts: list[str] = []
    total = 0
    digest = hashlib.sha256()
    for name in names:
        content = (root / name).read_bytes()
        if total + len(content) > max_bytes:
            break
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if not text.strip():
            continue
        # The lengths make the hash of (name, content) pairs unambiguous.
        digest.update(f"{len(name)} {name} {len(content)} ".encode() + content)
        texts.append(text)
        total += len(content)
        report(STAGES[0], total, max_bytes)
    if not texts:
        raise UserError(
            f"no file of the Python standard library in {root} fits into {max_bytes} bytes; allow more, or use a "
            "Python that ships its library as .py files"
        )
    return _Sources(texts, total, digest.hexdigest())


def _reported(sources: _Sources, stage: str, report: Progress) -> Iterator[str]:
    """Yields the texts and reports the progress."""
    done = 0
    for text in sources.texts:
        yield text
        done += len(text.encode())
        report(stage, done, sources.bytes)


def _file_hashes(folder: Path) -> dict[str, str]:
    paths = [_tokenizer_path(folder), *pair_paths(_prefix(folder)), sidecar_path(_prefix(folder))]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _prefix(folder: Path) -> Path:
    return folder / "python_text_document"


def _tokenizer_path(folder: Path) -> Path:
    return folder / "tokenizer.json"
