"""Tests the corpus of Python's standard library: its content, reuse, and recovery after a kill."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pentatron.data import python_corpus
from pentatron.data.indexed import IndexedDataset
from pentatron.data.python_corpus import PreparedCorpus, prepare_python_corpus, python_stdlib_files
from pentatron.data.tokenizer import FileTokenizer
from tests.data.splits import open_splits

VOCAB, BYTES = 400, 300_000


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    return prepare_python_corpus(tmp_path_factory.mktemp("corpus"), VOCAB, BYTES)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_the_files_are_the_library_without_its_tests() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root).as_posix() for path in python_stdlib_files()]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py", "unittest/mock.py"} <= set(names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert folders.isdisjoint(
        {"test", "tests", "site-packages", "encodings", "idlelib", "lib2to3", "__pycache__"}
    )
    assert not any(name.startswith("_sysconfigdata") for name in names), "it holds paths of the machine"


def test_documents_are_the_files_each_with_an_end(prepared: PreparedCorpus) -> None:
    dataset, tokenizer = IndexedDataset(prepared.prefix), FileTokenizer(prepared.tokenizer_path)
    assert prepared.prefix.name == "python_text_document"
    assert len(dataset) == prepared.documents > 2
    assert int(dataset.sequence_lengths.sum()) == prepared.tokens
    assert prepared.bytes <= BYTES
    assert tokenizer.vocab_size == VOCAB
    sources = {path.read_bytes() for path in python_stdlib_files()}
    total = 0
    for document in range(len(dataset)):
        ids = dataset.get(document).tolist()
        assert ids.count(tokenizer.eod) == 1 and ids[-1] == tokenizer.eod
        text = tokenizer.decode(ids[:-1]).encode()
        assert text in sources
        total += len(text)
    assert total == prepared.bytes


def test_the_tail_is_not_the_end_of_the_alphabet() -> None:
    sources = python_corpus._read_sources(2_000_000, lambda stage, done, total: None)
    by_text = {
        path.read_text(encoding="utf-8", errors="replace"): path.name[0] for path in python_stdlib_files()
    }
    tail = {by_text[text] for text in sources.texts[-20:]}
    assert len(tail) > 5


def test_it_feeds_a_dataset(prepared: PreparedCorpus) -> None:
    train, valid, _ = open_splits(prepared.prefix, "90,10,0", (20, 5, 0), 64, seed=1, vocab_size=VOCAB)
    assert train is not None and valid is not None
    assert train[0]["tokens"].max() < VOCAB


def test_a_second_call_reuses_and_says_the_same(prepared: PreparedCorpus) -> None:
    folder = prepared.prefix.parent
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.suffix}
    stages: set[str] = set()
    again = prepare_python_corpus(folder, VOCAB, BYTES, lambda stage, done, total: stages.add(stage))
    assert again == prepared
    assert stages == {"read"}
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.suffix} == times


def test_another_place_gives_the_same_bytes(prepared: PreparedCorpus, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    prepare_python_corpus(tmp_path, VOCAB, BYTES, lambda *call: calls.append(call))
    assert contents(tmp_path) == contents(prepared.prefix.parent)
    assert sorted(contents(tmp_path)) == [
        "corpus.json",
        "python_text_document.bin",
        "python_text_document.idx",
        "python_text_document.meta",
        "tokenizer.json",
    ]
    assert list(dict.fromkeys(stage for stage, _, _ in calls)) == ["read", "train tokenizer", "tokenize"]
    for stage in ("train tokenizer", "tokenize"):
        done = [done for name, done, _ in calls if name == stage]
        assert done == sorted(done) and done[-1] == prepared.bytes
    assert all(0 < done <= total for _, done, total in calls)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    prepare_python_corpus(tmp_path, 300, 100_000)
    return tmp_path


def stages_of(folder: Path, vocab_size: int = 300, max_bytes: int = 100_000) -> set[str]:
    stages: set[str] = set()
    prepare_python_corpus(folder, vocab_size, max_bytes, lambda stage, done, total: stages.add(stage))
    return stages


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates a standard library of two usable files, an empty one and one that is not UTF-8."""
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n")
    (folder / "b.py").write_text("y = 2\n")
    (folder / "empty.py").write_text("\n")
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr(python_corpus, "_stdlib_root", lambda: folder)
    return folder


@pytest.mark.usefixtures("library")
def test_other_settings_or_damage_rebuild(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    assert "tokenize" in stages_of(folder)
    assert stages_of(folder) == {"read"}
    good = contents(folder)
    for name in good:
        path = folder / name
        path.write_bytes(good[name][:-2])
        assert "tokenize" in stages_of(folder), f"{name} cut short was accepted"
        path.unlink()
        assert "tokenize" in stages_of(folder), f"{name} missing was accepted"
        assert contents(folder) == good
    assert "tokenize" in stages_of(folder, vocab_size=301)
    assert "tokenize" in stages_of(folder, vocab_size=301, max_bytes=120_000)
    assert json.loads((folder / "corpus.json").read_text())["identity"]["max_bytes"] == 120_000


def test_changed_sources_rebuild(library: Path, tmp_path: Path) -> None:
    first = prepare_python_corpus(tmp_path / "corpus", 300, 1000)
    assert (first.documents, first.bytes) == (2, 12)
    (library / "b.py").write_text("y = 3\n")
    second = prepare_python_corpus(tmp_path / "corpus", 300, 1000)
    assert first.fingerprint != second.fingerprint
    dataset, tokenizer = IndexedDataset(second.prefix), FileTokenizer(second.tokenizer_path)
    assert {tokenizer.decode(dataset.get(i)[:-1].tolist()) for i in range(2)} == {"x = 1\n", "y = 3\n"}


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fits into 3 bytes; allow more"):
        prepare_python_corpus(tmp_path, 300, 3)
    assert not (tmp_path / "corpus.json").exists()


@pytest.mark.parametrize("stage", ["train tokenizer", "tokenize"])
def test_a_killed_preparation_does_not_look_finished(small: Path, stage: str) -> None:
    """A kill during a rebuild over a finished corpus makes the next call rebuild and clean up."""
    body = f"""
import os, signal
from pentatron.data.python_corpus import prepare_python_corpus
def die(stage, done, total):
    if stage == {stage!r} and done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
prepare_python_corpus({str(small)!r}, 320, 900_000, die)
"""
    result = subprocess.run(
        [sys.executable, "-c", body], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert result.returncode == -signal.SIGKILL
    assert not (small / "corpus.json").exists()
    if stage == "tokenize":
        assert list(small.glob("*.tmp")), "the kill came too early or too late to test the clean-up"
    assert "tokenize" in stages_of(small, 320, 100_000)
    assert not list(small.glob("*.tmp"))
    assert stages_of(small, 320, 100_000) == {"read"}


def test_two_preparations_at_once_share_one_result(tmp_path: Path) -> None:
    body = f"""
from pentatron.data.python_corpus import prepare_python_corpus
stages = set()
prepare_python_corpus({str(tmp_path)!r}, 300, 200_000, lambda stage, done, total: stages.add(stage))
print(len(stages))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    both = [
        subprocess.Popen([sys.executable, "-c", body], env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = sorted(int(process.communicate()[0]) for process in both)
    assert outputs == [1, 3], "one builds, the other reads its result"
