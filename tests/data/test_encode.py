"""Tests encoding of lines into documents: document boundaries, invalid lines, chunk independence."""

import gzip
import importlib.util
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from pentatron.data.encode import EncodedChunk, Encoder, EncodingSettings, raw_documents
from pentatron.data.text_files import Chunk, Position, expand_inputs, is_json_lines, read_chunks
from pentatron.data.tokenizer import ByteTokenizer, NullTokenizer, TokenizerSettings

END = 256
UNICODE = "naïve 漢字 🙂\u2028\x85 \x00 end"


def encoder(*keys: str, eod: bool = True, sentences: bool = False) -> Encoder:
    settings = EncodingSettings(TokenizerSettings("ByteTokenizer"), keys or ("text",), eod, sentences)
    return Encoder(settings, ByteTokenizer())


def encoded(lines: list[object], made: Encoder | None = None) -> EncodedChunk:
    data = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines).encode(
        "utf-8", "surrogatepass"
    )
    return (made or encoder()).encode(Chunk(data, 0, 1, "json", Position(1), 0))


def documents(chunk: EncodedChunk, key: int = 0) -> list[list[list[int]]]:
    found = chunk.keys[key]
    tokens, at, sequence = np.frombuffer(found.tokens, np.uint16).tolist(), 0, 0
    listed: list[list[list[int]]] = []
    for count in found.counts.tolist():
        listed.append([])
        for length in found.lengths[sequence : sequence + count].tolist():
            listed[-1].append(tokens[at : at + length])
            at += length
        sequence += count
    assert at == len(tokens)
    return listed


def ids(text: str, *more: int) -> list[int]:
    return [*text.encode(), *more]


def test_documents_sentences_and_ends() -> None:
    chunk = encoded(
        [{"text": "ab"}, {"text": ""}, {"text": ["c", "", "de"]}, {"text": []}, {"text": UNICODE}]
    )
    assert documents(chunk) == [[ids("ab", END)], [], [ids("c"), ids("de", END)], [], [ids(UNICODE, END)]]
    assert chunk.keys[0].largest == END
    assert (chunk.blank_lines, chunk.bad_lines) == (0, 0)
    without = encoded([{"text": "ab"}, {"text": ["c", "d"]}], encoder(eod=False))
    assert documents(without) == [[ids("ab")], [ids("c"), ids("d")]]
    assert without.keys[0].largest == ord("d")


def test_blank_lines_are_counted_and_line_ends_do_not_matter() -> None:
    chunk = encoded(['{"text": "a"}\r\n', "\n", "  \r\n", '{"text": "b"}'])
    assert documents(chunk) == [[ids("a", END)], [ids("b", END)]]
    assert chunk.blank_lines == 2
    assert documents(encoded(["\n"])) == []


def test_every_key_has_its_documents() -> None:
    chunk = encoded([{"a": "x", "b": "yz"}, {"a": "", "b": ["1", "2"]}], encoder("b", "a"))
    assert documents(chunk, 0) == [[ids("yz", END)], [ids("1"), ids("2", END)]]
    assert documents(chunk, 1) == [[ids("x", END)], []]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken\n", "is not a JSON object (Expecting property name"),
        ("[1]\n", "is not a JSON object but a list"),
        ("3\n", "is not a JSON object but a number"),
        ('{"title": "x"}\n', "has no key 'text' (it has 'title')"),
        ("{}\n", "has no key 'text' (it has nothing)"),
        ('{"text": null}\n', "has null under 'text' instead of a text"),
        ('{"text": {"a": 1}}\n', "has an object under 'text'"),
        ('{"text": ["a", 1]}\n', "has a list under 'text'"),
        ('{"text": "\\ud800"}\n', "contains half a surrogate pair"),
        ('{"text": "\ud800"}\n', "is not a JSON object ('utf-8' codec"),
        ("[" * 200_000 + "\n", "is nested too deeply"),
    ],
)
def test_bad_lines_are_left_out_and_described(line: str, reason: str) -> None:
    chunk = encoded([{"text": "a"}, "\n", line, {"text": "b"}])
    assert chunk.bad_lines == 1
    assert chunk.bad[0][0] == 3 and chunk.bad[0][1].startswith(reason)
    assert documents(chunk) == [[ids("a", END)], [ids("b", END)]]


def test_all_bad_lines_are_counted_and_the_first_described() -> None:
    chunk = encoded(["x\n", {"text": "\ud800"}, {"text": "good"}] * 10)
    assert chunk.bad_lines == 20
    assert [line for line, _ in chunk.bad[:3]] == [1, 4, 7]
    assert len(documents(chunk)) == 10


def test_text_refused_by_the_tokenizer_is_a_bad_line() -> None:
    settings = EncodingSettings(TokenizerSettings("NullTokenizer", vocab_size=10), ("text",), True, False)
    chunk = encoded([{"text": "1 2"}, {"text": "3 x"}], Encoder(settings, NullTokenizer(10)))
    assert documents(chunk) == [[[1, 2, 10]]]
    assert chunk.bad[0][0] == 2 and "NullTokenizer reads numbers below 11, found 'x'" in chunk.bad[0][1]


def test_unexpected_tokenizer_error_is_a_bad_line() -> None:
    """Libraries raise errors of any type; the line must be reported instead of killing the worker."""

    class Choking(NullTokenizer):
        def encode(self, text: str) -> list[int]:
            if text == "7":
                raise Exception("no merge for\nthis")
            return super().encode(text)

    settings = EncodingSettings(TokenizerSettings("NullTokenizer", vocab_size=10), ("text",), False, False)
    chunk = encoded([{"text": "1 2"}, {"text": "7"}], Encoder(settings, Choking(10)))
    assert documents(chunk) == [[[1, 2]]]
    assert chunk.bad == [(2, "cannot be encoded by the tokenizer (no merge for this)")]


@pytest.mark.parametrize("cut", ["file", "line", "blank-line"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes("\ufeffone".encode())
    (chunk,) = read_chunks([path], cut, 100)
    assert documents(encoder().encode(chunk)) == [[ids("one", END)]]


def test_split_sentences_takes_lists_only() -> None:
    chunk = encoded([{"text": ["a", "b"]}, {"text": "a. b."}], encoder(sentences=True))
    assert documents(chunk) == [[ids("a"), ids("b", END)]]
    assert "--split-sentences needs a list of sentences" in chunk.bad[0][1]


TEXT = b"one\n\ntwo\nthree\n\n \n\nfour\r\n\r\nfive"
PLAIN = {
    "file": [(1, TEXT)],
    "line": [(1, b"one"), (3, b"two"), (4, b"three"), (8, b"four"), (10, b"five")],
    "blank-line": [(1, b"one"), (3, b"two\nthree"), (8, b"four"), (10, b"five")],
}


@pytest.mark.parametrize("cut", PLAIN)
@pytest.mark.parametrize("chunk_bytes", [1, 5, 9, 1000])
def test_plain_text(tmp_path: Path, cut: str, chunk_bytes: int) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(TEXT)
    found = [entry for chunk in read_chunks([path], cut, chunk_bytes) for entry in raw_documents(chunk)]
    assert [(line, text) for line, text in found if text.strip()] == PLAIN[cut]


def zstandard_frames(data: bytes) -> bytes:
    import zstandard

    half = len(data) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))


PACKED = {"": bytes, ".gz": lambda data: gzip.compress(data[:99]) + gzip.compress(data[99:])}
if importlib.util.find_spec("zstandard") is not None:
    PACKED[".zst"] = zstandard_frames


@pytest.mark.parametrize("packed", PACKED)
def test_neither_packing_nor_cuts_nor_resuming_change_the_lines(tmp_path: Path, packed: str) -> None:
    draw = random.Random(3)
    lines = [
        json.dumps({"text": "é" * draw.choice((0, 3, 50, 900)), "n": n}).encode()
        + draw.choice((b"\n", b"\n\n"))
        for n in range(60)
    ]
    paths = [tmp_path / f"a.jsonl{packed}", tmp_path / f"empty.jsonl{packed}", tmp_path / f"b.jsonl{packed}"]
    for path, content in zip(paths, (b"".join(lines[:40]), b"", b"".join(lines[40:]).rstrip())):
        path.write_bytes(PACKED[packed](content))
    total = sum(path.stat().st_size for path in paths)
    for chunk_bytes in (1, 700, 10**6):
        chunks = list(read_chunks(paths, "file", chunk_bytes))
        joined = b"".join(chunk.data for chunk in chunks)
        assert joined == b"".join(lines).rstrip()
        assert all(chunk.data.endswith(b"\n") for chunk in chunks[:-1])
        assert chunks[-1].read == total
        for number in range(0, len(chunks), 7):
            after = list(read_chunks(paths, "file", chunk_bytes, chunks[number].after))
            assert [(c.data, c.file, c.first_line) for c in after] == [
                (c.data, c.file, c.first_line) for c in chunks[number + 1 :]
            ]


@pytest.mark.parametrize("packed", [name for name in PACKED if name])
def test_a_packed_file_that_is_cut_short_is_named(tmp_path: Path, packed: str) -> None:
    path = tmp_path / f"x.jsonl{packed}"
    path.write_bytes(PACKED[packed](random.Random(1).randbytes(5000))[:-5])
    with pytest.raises(
        ValueError, match=r"x\.jsonl\S* cannot be unpacked beyond its byte \d+ .* copy it again"
    ):
        list(read_chunks([path], "file", 1000))


def test_zstandard_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "x.txt.zst").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"x\.txt\.zst needs the package zstandard; run: pip install zstandard"
    ):
        list(read_chunks([tmp_path / "x.txt.zst"], "file", 10))


def test_inputs_are_found_once_and_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("")
    found = expand_inputs([str(tmp_path / "c.txt"), str(tmp_path / "*.jsonl")])
    assert [path.name for path in found] == ["c.txt", "a.jsonl", "b.jsonl"]
    assert [is_json_lines(path) for path in found] == [False, True, True]
    for patterns, message in (
        (["none-*.jsonl"], "no input file none-"),
        ([tmp_path], "is a folder; name its files"),
        ([tmp_path / "a.jsonl", tmp_path / "*.jsonl"], r"names .*a\.jsonl twice"),
    ):
        with pytest.raises(ValueError, match=message):
            expand_inputs([str(pattern) for pattern in patterns])
    with pytest.raises(ValueError, match=r"the format of x\.parquet is not clear"):
        is_json_lines(Path("x.parquet"))
