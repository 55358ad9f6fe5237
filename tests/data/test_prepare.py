"""Tests preparation with real workers: equal bytes for any number, atomicity, resume after a kill."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pentatron.data import prepare as prepare_module
from pentatron.data.encode import EncodingSettings
from pentatron.data.indexed import IndexedDataset
from pentatron.data.indexed_writer import PairInProgress
from pentatron.data.inspect import verify
from pentatron.data.prepare import Counts, PrepareJob, PrepareOutcome, prepare
from pentatron.data.tokenizer import TokenizerSettings, train_bpe

CHUNK = 4000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a tokenizer and two files of documents of very different lengths."""
    folder = tmp_path_factory.mktemp("source")
    draw = random.Random(7)
    words = ["naïve", "return", "漢字", "x", "transformer", "🙂", "\n", "  "]
    texts = [" ".join(draw.choices(words, k=draw.choice((0, 1, 20, 300)))) for _ in range(250)]
    train_bpe(iter(texts), 300).save(str(folder / "tokenizer.json"))
    for name, part in (("a", texts[:200]), ("b", texts[200:])):
        lines = [json.dumps({"text": text, "title": [text[:5], "", text[5:9]]}) for text in part]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n\n")
    return folder


def job(
    source: Path, out: Path, workers: int = 1, keys: tuple[str, ...] = ("text",), **more: object
) -> PrepareJob:
    choice = TokenizerSettings("HFTokenizer", str(source))
    inputs = (source / "a.jsonl", source / "b.jsonl")
    settings = EncodingSettings(choice, keys, append_eod=True, sentences=False)
    return PrepareJob(inputs, out / "out", settings, workers, chunk_bytes=CHUNK, **more)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def clean(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], PrepareOutcome]:
    """Returns the output of one worker without interruption."""
    folder = tmp_path_factory.mktemp("clean")
    outcome = prepare(job(source, folder, 1, ("text", "title")))
    return contents(folder), outcome


def test_the_result_is_the_text(
    source: Path, tmp_path: Path, clean: tuple[dict[str, bytes], PrepareOutcome]
) -> None:
    files, outcome = clean
    names = [f"out_{key}_document.{ending}" for key in ("text", "title") for ending in ("bin", "idx", "meta")]
    assert sorted(files) == names
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    text, title = (IndexedDataset(tmp_path / f"out_{key}_document") for key in ("text", "title"))
    tokenizer = TokenizerSettings("HFTokenizer", str(source)).load()
    lines = [
        json.loads(line)
        for name in "ab"
        for line in (source / f"{name}.jsonl").read_text().split("\n")
        if line
    ]
    assert len(text.document_indices) - 1 == len(lines) == outcome.counts.documents
    sequence = 0
    for number, line in enumerate(lines):
        first, last = text.document_indices[number : number + 2].tolist()
        assert last - first == bool(line["text"])
        if line["text"]:
            expected = [*tokenizer.encode(line["text"]), tokenizer.eod]
            assert text.get(sequence).tolist() == expected
            sequence += 1
    assert len(title) > len(text), "lists are documents of several sequences"
    assert outcome.counts.blank_lines == 2
    assert outcome.counts.tokens == len(text.tokens) + len(title.tokens)
    for dataset in (text, title):
        verify(dataset.prefix)
        assert dataset.metadata is not None and dataset.metadata.tokenizer is not None
        assert dataset.metadata.tokenizer.vocab_size == 300


@pytest.mark.parametrize("workers", [2, 3])
def test_the_same_bytes_for_any_number_of_workers(
    source: Path, tmp_path: Path, clean: tuple[dict[str, bytes], PrepareOutcome], workers: int
) -> None:
    seen: list[int] = []
    prepare(job(source, tmp_path, workers, ("text", "title")), lambda counts, total: seen.append(counts.read))
    assert contents(tmp_path) == clean[0]
    assert len(seen) > 10 and seen == sorted(seen)


KILLED = """
import os, signal, sys
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from pentatron.data import prepare as prepare_module
from tests.data.test_prepare import job

def report(counts, total):
    if counts.documents > 150:
        print(*(child.pid for child in active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

real = prepare_module.publish
def publish(stem, suffix, prefix):
    real(stem, suffix, prefix)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    source, out, when = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    prepare_module.SECONDS_BETWEEN_NOTES = 0.0
    if when == "renaming":
        prepare_module.publish = publish
    prepare_module.prepare(job(source, out, 2, ("text", "title")), report if when == "encoding" else lambda *x: None)
"""


@pytest.mark.parametrize("when", ["encoding", "renaming"])
def test_killed_and_resumed(
    source: Path, tmp_path: Path, clean: tuple[dict[str, bytes], PrepareOutcome], when: str
) -> None:
    script, out = tmp_path / "killed.py", tmp_path / "out"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(
        [sys.executable, str(script), str(source), str(out), when],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = {path.name for path in out.iterdir()}
    if when == "encoding":
        assert left == {".out.preparing"}, "nothing under a final name"
        wait_until_gone([int(pid) for pid in killed.stdout.split()])
        # Data after the last recorded progress must be ignored.
        with (out / ".out.preparing" / "key0.bin").open("ab") as file:
            file.write(b"garbage")
    else:
        assert left == {".out.preparing", *(f"out_text_document.{end}" for end in ("bin", "idx", "meta"))}
    outcome = prepare(job(source, out, 3, ("text", "title")))
    assert outcome.resumed
    assert outcome.tokens_now < clean[1].counts.tokens * 0.6
    assert outcome.counts == clean[1].counts
    assert contents(out) == clean[0]


@pytest.mark.parametrize("before", [True, False])
def test_ctrl_c_in_the_midst_of_a_chunk(
    source: Path,
    tmp_path: Path,
    clean: tuple[dict[str, bytes], PrepareOutcome],
    monkeypatch: pytest.MonkeyPatch,
    before: bool,
) -> None:
    """Interrupted between two keys, or before progress is recorded: no document is lost or duplicated."""
    monkeypatch.setattr(prepare_module, "SECONDS_BETWEEN_NOTES", 0.0)
    append, calls = PairInProgress.append, 0

    def interrupted(self: PairInProgress, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 8 and before:
            raise KeyboardInterrupt
        append(self, *arguments)
        if calls == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(PairInProgress, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(job(source, tmp_path, 1, ("text", "title")))
    monkeypatch.setattr(PairInProgress, "append", append)
    outcome = prepare(job(source, tmp_path, 1, ("text", "title")))
    assert outcome.resumed and outcome.counts == clean[1].counts
    assert contents(tmp_path) == clean[0]


def wait_until_gone(pids: list[int]) -> None:
    assert pids
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "workers outlive the command"
        time.sleep(0.05)


def test_a_bad_line_stops_or_is_left_out(tmp_path: Path) -> None:
    lines = ['{"text": "good"}'] * 800 + ['{"text": 3}'] + ['{"text": "good"}'] * 9 + ["{"]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    (tmp_path / "out").mkdir()
    settings = EncodingSettings(TokenizerSettings("ByteTokenizer"), ("text",), True, False)

    def run(skip: bool) -> PrepareOutcome:
        given = ((tmp_path / "x.jsonl",), tmp_path / "out" / "o", settings, 1)
        return prepare(PrepareJob(*given, skip_bad_lines=skip, chunk_bytes=CHUNK))

    with pytest.raises(ValueError, match=r"x\.jsonl line 801 has a number under 'text' .*--skip-bad-lines"):
        run(skip=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".o.preparing"]
    outcome = run(skip=True)
    assert outcome.resumed, "what was good is not read again"
    assert outcome.counts == Counts(809, 809 * 5, 0, 2, (tmp_path / "x.jsonl").stat().st_size)
    assert [line.split(" ")[2] for line in outcome.bad] == ["801", "811"]
    assert run(skip=True).already_there
    (tmp_path / "x.jsonl").write_text('{"text": "other"}')
    refused = r"o_text_document\.idx exists already, from other inputs .*--overwrite"
    with pytest.raises(ValueError, match=refused):
        run(skip=True)
    # Recorded progress of an unfinished job with --overwrite does not change that.
    (tmp_path / "out" / ".o.preparing").mkdir()
    (tmp_path / "out" / ".o.preparing" / "progress.json").write_text('x\n{"fingerprint": "another"}')
    with pytest.raises(ValueError, match=refused):
        run(skip=True)


def test_no_more_workers_than_there_is_work(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n' * 9)
    settings = EncodingSettings(TokenizerSettings("ByteTokenizer"), ("text",), True, False)
    started: list[int] = []

    def report(counts: Counts, total: int) -> None:
        started.append(len(multiprocessing.active_children()))

    prepare(PrepareJob((path,), tmp_path / "out", settings, workers=32), report)
    assert max(started) == 1


def test_a_dead_worker_is_reported(tmp_path: Path, source: Path) -> None:
    def report(counts: Counts, total: int) -> None:
        from multiprocessing import active_children

        for child in active_children():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(ValueError, match=r"a worker process was killed by signal 9 .*fewer --workers"):
        prepare(job(source, tmp_path), report)
    assert [path.name for path in tmp_path.iterdir()] == [".out.preparing"]


def test_an_input_that_changes_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n' * 900)

    def report(counts: Counts, total: int) -> None:
        with path.open("a") as file:
            file.write("\n")

    settings = EncodingSettings(TokenizerSettings("ByteTokenizer"), ("text",), True, False)
    with pytest.raises(ValueError, match="changed while it was read"):
        prepare(PrepareJob((path,), tmp_path / "o", settings, 1, chunk_bytes=CHUNK), report)
    assert [found.name for found in tmp_path.iterdir()] == ["x.jsonl"]


def test_notes_of_another_job_or_damaged_ones_are_not_used(tmp_path: Path) -> None:
    path, settings = (
        tmp_path / "x.jsonl",
        EncodingSettings(TokenizerSettings("ByteTokenizer"), ("text",), True, False),
    )
    path.write_text('{"text": "a"}\n' * 900 + "{")
    given = PrepareJob((path,), tmp_path / "o", settings, 1, chunk_bytes=CHUNK)
    notes, said = tmp_path / ".o.preparing" / "progress.json", list[str]()
    with pytest.raises(ValueError, match="line 901"):
        prepare(given)
    notes.write_text(notes.read_text().replace('"documents": ', '"documents": 1'))
    with pytest.raises(ValueError, match="line 901"):
        prepare(given, say=said.append)
    path.write_text('{"text": "b"}\n' * 300)
    assert not prepare(given, say=said.append).resumed
    assert said[0].endswith("progress.json is damaged; starting over")
    assert said[1].endswith("is of other inputs or settings; starting over")
    assert IndexedDataset(tmp_path / "o_text_document").get(299).tolist() == [98, 256]


def test_contradictory_settings_are_refused(tmp_path: Path, source: Path) -> None:
    text = tmp_path / "x.txt"
    text.write_text("hello")
    choice = TokenizerSettings("ByteTokenizer")
    for keys, sentences, message in (
        (("a", "b"), False, "plain text, which has no keys"),
        (("a", "a"), False, "has a key twice"),
        (("a/b",), False, "cannot be part of a file's name"),
        (("a",), True, "--split-sentences needs lists of sentences"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(PrepareJob((text,), tmp_path / "o", EncodingSettings(choice, keys, True, sentences), 1))
    given = PrepareJob((text,), tmp_path / "o", EncodingSettings(choice, ("text",), True, False), 1)
    with (
        prepare_module._only_one(given.folder),
        pytest.raises(ValueError, match="another run is preparing"),
    ):
        prepare(given)
