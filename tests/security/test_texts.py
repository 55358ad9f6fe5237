"""Tests untrusted texts and tokenizers: endless lines, bombs, empty vocabularies, slow regexes."""

import gzip
import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pentatron.data import text_files
from pentatron.data.conversations import read_conversations
from pentatron.data.encode import Encoder, EncodingSettings
from pentatron.data.text_files import JSON_LINES, Chunk, Position, read_chunks
from pentatron.data.tokenizer import FileTokenizer, TokenizerSettings, identify_tokenizer
from pentatron.errors import UserError

MOST = 1 << 20
CHUNK = 1 << 14


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LONGEST_DOCUMENT", MOST)
    monkeypatch.setattr(text_files, "LONGEST_FILE", 2 * MOST)


def gzipped(path: Path, unfolded: int) -> Path:
    with gzip.open(path, "wb") as file:
        for _ in range(unfolded >> 20):
            file.write(b" " * MOST)
    return path


def zipped(path: Path, unfolded: int) -> Path:
    library = pytest.importorskip("zstandard")
    path.write_bytes(library.ZstdCompressor().compress(b" " * unfolded))
    return path


def plain(path: Path, unfolded: int) -> Path:
    path.write_bytes(b'{"text": "' + b"x" * unfolded)
    return path


@pytest.fixture
def peak() -> Iterator[Callable[[], int]]:
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "make"), [("a.jsonl", plain), ("a.jsonl.gz", gzipped), ("a.jsonl.zst", zipped)]
)
def test_a_line_without_end_is_a_sentence(
    tmp_path: Path, name: str, make: Callable[[Path, int], Path], peak: Callable[[], int]
) -> None:
    """Reads a line of 32 times the limit; memory stays a small multiple of the limit."""
    path = make(tmp_path / name, 32 * MOST)
    before = peak()
    with pytest.raises(
        UserError, match=rf"the line that begins at line 1 of .*{name} is longer than 1 MiB; cut"
    ):
        list(read_chunks([path], JSON_LINES, CHUNK))
    # A Zstandard block is decompressed as a whole: 4 bytes can expand to 128 KiB.
    assert peak() - before < (40 if name.endswith("zst") else 5) * MOST
    with pytest.raises(UserError, match="is longer than 1 MiB"):
        list(read_conversations(path))


def test_where_the_limits_are(tmp_path: Path) -> None:
    """A line of the maximum length is read, with or without a line break; one byte more is refused."""
    path = tmp_path / "a.txt"
    for cut, most in (("line", MOST), ("blank-line", MOST), ("file", 2 * MOST)):
        path.write_bytes(b"first\n\n" + b"x" * (most - 7 if cut == "file" else most))
        assert sum(len(chunk.data) for chunk in read_chunks([path], cut, CHUNK)) == path.stat().st_size
        path.write_bytes(b"first\n\n" + b"x" * (most + 1))
        with pytest.raises(UserError, match=r"longer than [12] MiB") as refusal:
            list(read_chunks([path], cut, CHUNK))
        told = {"line": "the line that begins at line 3", "blank-line": "the paragraph that begins at line 3"}
        assert told.get(cut, "cut it into several with --text-documents line") in str(refusal.value)


def test_a_place_after_a_zstandard_frame_is_found_again(tmp_path: Path) -> None:
    library = pytest.importorskip("zstandard")
    lines = [json.dumps({"text": f"{i} " * (i % 900)}) for i in range(500)]
    path = tmp_path / "a.jsonl.zst"
    halves = ("\n".join(lines[:250]) + "\n", "\n".join(lines[250:]))
    path.write_bytes(b"".join(library.ZstdCompressor().compress(half.encode()) for half in halves))
    chunks = list(read_chunks([path], JSON_LINES, CHUNK))
    assert b"".join(chunk.data for chunk in chunks).decode() == "\n".join(lines)
    rest = list(read_chunks([path], JSON_LINES, CHUNK, chunks[3].after))
    assert b"".join(chunk.data for chunk in rest) == b"".join(chunk.data for chunk in chunks[4:])


def saved(folder: Path, model: str, **parts: Any) -> Path:
    """Saves a tokenizer.json with a model of one type, and other parts as given."""
    library = pytest.importorskip("tokenizers")
    kinds = {
        "empty BPE": lambda: library.models.BPE(),
        "empty WordLevel": lambda: library.models.WordLevel({}, "[UNK]"),
        "WordLevel": lambda: library.models.WordLevel({"a": 0}, "[UNK]"),
        "WordPiece": lambda: library.models.WordPiece({"a": 0}, unk_token="[UNK]"),
        "BPE": lambda: library.models.BPE({"a": 0, "</s>": 1}, []),
    }
    made = library.Tokenizer(kinds[model]())
    for name, part in parts.items():
        setattr(made, name, part)
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("model", ["empty BPE", "empty WordLevel"])
def test_a_vocabulary_without_a_token_is_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(UserError, match=r"tokenizer.json has no token; check --tokenizer-model"):
        FileTokenizer(saved(tmp_path, model))


@pytest.mark.parametrize("model", ["WordLevel", "WordPiece"])
def test_a_text_that_a_vocabulary_cannot_say_is_a_sentence(tmp_path: Path, model: str) -> None:
    tokenizer = FileTokenizer(saved(tmp_path, model))
    calls: list[Callable[[], object]] = [
        lambda: identify_tokenizer(tokenizer),
        lambda: tokenizer.encode("b"),
        lambda: tokenizer.encode_batch(["b"]),
        lambda: tokenizer.encode_with_offsets(["b"]),
        lambda: tokenizer.encode_with_special_tokens("b"),
    ]
    for call in calls:
        with pytest.raises(UserError, match=r"cannot be encoded by the tokenizer .*Missing \[UNK\]") as told:
            call()
        assert "\n" not in str(told.value)


def test_runaway_regular_expression_is_reported(tmp_path: Path) -> None:
    """The library panics, which raises an exception that derives from BaseException."""
    library = pytest.importorskip("tokenizers")
    split = library.pre_tokenizers.Split(library.Regex("(a|a)*b|(a|a|a|a|a)*$"), "isolated")
    folder = saved(tmp_path, "BPE", pre_tokenizer=split)
    tokenizer, text = FileTokenizer(folder), "a" * 60 + "!"
    with pytest.raises(
        UserError, match=r"one of its regular expressions takes too many steps on this text: .*retry-limit"
    ):
        tokenizer.encode(text)
    choice = TokenizerSettings("HuggingFaceTokenizer", str(folder))
    lines = "\n".join(json.dumps({"text": words}) for words in ("a", text, "aa"))
    found = Encoder(EncodingSettings(choice, ("text",), append_eod=False, sentences=False), tokenizer).encode(
        Chunk(lines.encode(), 0, 1, JSON_LINES, Position(), 0)
    )
    ((line, reason),) = found.bad
    assert line == 2 and "cannot be encoded by the tokenizer (one of its regular expressions" in reason
    assert found.keys[0].counts.tolist() == [1, 1], "the other lines are encoded"


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_replacements_that_multiply_a_text_are_refused(tmp_path: Path, part: str) -> None:
    """Twelve tenfold replacements: the library would abort the process on OOM."""
    library = pytest.importorskip("tokenizers")
    of = getattr(library, f"{part}s")

    def replacing(pattern: Any, content: str, times: int) -> Any:
        return of.Sequence([of.Replace(pattern, content) for _ in range(times)])

    for pattern in ("a", library.Regex("a")):
        with pytest.raises(UserError, match=r"a text grows \d+-fold, which no tokenizer needs"):
            FileTokenizer(saved(tmp_path, "BPE", **{part: replacing(pattern, "a" * 10, 12)}))
    FileTokenizer(saved(tmp_path, "BPE", **{part: replacing(" ", "\u2581", 12)}))
