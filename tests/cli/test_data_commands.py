"""`pentatron prepare` and `pentatron data`: flags, sentences, summaries and exit codes."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pentatron.cli.main import main
from pentatron.cli.options import flags_of
from pentatron.cli.prepare import IdleOptions, InputOptions, TokenizerOptions, WorkOptions
from pentatron.data.indexed import IndexedDataset
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.data.tokenizer import FileTokenizer, train_bpe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "my_data.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(40)) + "\n")
    return path


def test_the_guides_script_makes_exactly_these_files(text: Path, tmp_path: Path) -> None:
    """Runs the guide's command with a local folder in place of a Hub model name."""
    (tmp_path / "model").mkdir()
    train_bpe(iter([text.read_text()]), 270).save(str(tmp_path / "model" / "tokenizer.json"))
    words = f"--input {text} --output-prefix {tmp_path}/my_dataset --tokenizer-type HFTokenizer --tokenizer-model {tmp_path}/model"
    command = [
        sys.executable,
        str(ROOT / "tools/preprocess_data.py"),
        *words.split(),
        *"--workers 2 --append-eod".split(),
    ]
    done = subprocess.run([*command, "--partitions", "2"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = {path.name for path in tmp_path.iterdir()} - {text.name, "model"}
    assert made == {f"my_dataset_text_document.{ending}" for ending in ("bin", "idx", "meta")}
    dataset, tokenizer = (
        IndexedDataset(tmp_path / "my_dataset_text_document"),
        FileTokenizer(tmp_path / "model"),
    )
    assert len(dataset) == 39, "an empty text is a document without a sequence"
    assert len(dataset.document_indices) == 41
    assert dataset.get(1).tolist() == [*tokenizer.encode("word word "), tokenizer.eod]
    tokens = len(dataset.tokens)
    lines = done.stdout.splitlines()
    assert lines[0] == "note: --partitions has no effect: the input is split into chunks while it is read"
    assert lines[1].startswith(f"40 documents, {tokens:,} tokens in ") and "tokens/s, 2 workers)" in lines[1]
    assert lines[2] == "1 blank line skipped"
    longest = max(dataset.sequence_lengths)
    assert lines[4].endswith(f"document: 40 documents of 0 to {longest} tokens, {tokens / 40:.1f} on average")
    assert lines[5].split()[:3] == ["0", "tokens", "1"]


def prepare(text: Path, tmp_path: Path, *more: str) -> int:
    words = [
        "--input",
        str(text),
        "--output-prefix",
        str(tmp_path / "out"),
        "--tokenizer-type",
        "ByteTokenizer",
    ]
    return main(["prepare", *words, "--workers", "1", *more])


def test_again_and_with_bad_lines(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(text, tmp_path, "--log-interval", "10") == 0
    assert "100 %  40 documents, 3,900 tokens\n" in capsys.readouterr().out
    assert prepare(text, tmp_path) == 0
    assert "already prepared from the same inputs" in capsys.readouterr().out
    assert prepare(text, tmp_path, "--append-eod") == 2
    assert "add --overwrite to replace it" in capsys.readouterr().err
    with text.open("a") as file:
        file.write("{oops\n")
    assert prepare(text, tmp_path, "--overwrite") == 2
    assert "my_data.jsonl line 42 is not a JSON object" in capsys.readouterr().err
    assert prepare(text, tmp_path, "--overwrite", "--skip-bad-lines") == 0
    said = capsys.readouterr().out
    assert "1 bad line skipped, the first:\n" in said and "line 42 is not a JSON object" in said


def test_a_model_of_the_hub_gives_its_tokenizer(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def download(name: str, **how: object) -> str:
        asked.extend((name, how["allow_patterns"]))
        raise OSError("no route to host")

    library = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(library, "snapshot_download", download)
    words = ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", "Qwen/Qwen2.5-7B"]
    assert main(["prepare", "--input", str(text), "--output-prefix", str(tmp_path / "o"), *words]) == 2
    said = capsys.readouterr().err
    assert "Tokenizer not found: Qwen/Qwen2.5-7B is not a folder and could not be downloaded" in said
    assert asked[0] == "Qwen/Qwen2.5-7B" and "*.safetensors" not in asked[1]  # type: ignore[operator]
    (tmp_path / "model").mkdir()
    train_bpe(iter(["a b"]), 260).save(str(tmp_path / "model" / "tokenizer.json"))
    monkeypatch.setattr(library, "snapshot_download", lambda name, **how: str(tmp_path / "model"))
    assert (
        main(
            [
                "prepare",
                "--input",
                str(text),
                "--output-prefix",
                str(tmp_path / "o"),
                "--workers",
                "1",
                *words,
            ]
        )
        == 0
    )
    assert f"note: Qwen/Qwen2.5-7B is in {tmp_path / 'model'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--input is missing; name the text files"),
        ("--input x.jsonl", "--output-prefix is missing"),
        ("--input x.jsonl --output-prefix o", "--tokenizer-type is missing; give one of HuggingFaceTokenizer"),
        ("--input x.jsonl --output-prefix o --tokenizer-type No", "no input file x.jsonl"),
        ("--input text.md --output-prefix o --tokenizer-type No", "unknown tokenizer type 'No'"),
        ("--input text.md --output-prefix o --tokenizer-type HFTokenizer --tokenizer-model /no",
         "Tokenizer not found: no file /no; check --tokenizer-model"),
        ("--input x.jsonl --output-prefix o --tokenizer-type No --workers 0", "--workers 0 must be 1 or more"),
        ("--input x.jsonl --output-prefix o --tokenizer-type No --workers two", "--workers must be a whole number"),
        ("--input x.jsonl --output-prefix o --tokenizer-type No --text-documents word", "one of file, line, blank-line"),
        ("--input x.jsonl --output-prefx o", "unknown flag --output-prefx (did you mean --output-prefix?)"),
        ("--input --output-prefix o", "--input needs a value"),
        ("--append-eod=maybe", "--append-eod must be true or false, not 'maybe'"),
        ("--find-optimal-num-workers", "--find-optimal-num-workers is not available; use --workers N"),
        ("data.jsonl", "'data.jsonl' is not a flag; write --input data.jsonl"),
        ("--input text.md --output-prefix text.md/o --tokenizer-type ByteTokenizer",
         "text.md cannot be read or written (File exists)"),
    ],
)  # fmt: skip
def test_mistakes_are_sentences(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.md").write_text("a text\n")
    assert main(["prepare", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_help_names_every_flag_that_acts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--help"]) == 0
    said = capsys.readouterr().out
    assert "GPT2BPETokenizer" in said
    acts = {*flags_of(InputOptions), *flags_of(TokenizerOptions), *flags_of(WorkOptions)}
    assert all(f"--{flag}" in said for flag in acts if not flag.startswith("no-"))
    assert not acts & set(flags_of(IdleOptions))


@pytest.fixture
def pairs(tmp_path: Path) -> list[Path]:
    for name in ("a", "b"):
        with IndexedDatasetWriter(tmp_path / name, "uint16") as writer:
            writer.add_document([1, 2, 3])
            writer.add_document([4] * 10)
    return [tmp_path / "a", tmp_path / "b"]


def test_describe_verify_merge_seal(pairs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = map(str, pairs)
    merged = f"{first}b"
    assert main(["data", "merge", merged, f"{first}.bin", f"{second}.idx"]) == 0
    assert "ab: 4 documents, 4 sequences, 26 tokens from 2 pairs" in capsys.readouterr().out
    capsys.readouterr()
    assert main(["data", "merge", f"{first}c", first, first, second]) == 0
    assert (
        f"{first} is given 2 times, so {first}c has each of its documents 2 times" in capsys.readouterr().out
    )
    assert main(["data", "merge", merged, first]) == 2
    assert main(["data", "merge", first, first]) == 2
    assert "is both input and output" in capsys.readouterr().err
    assert main(["data", "describe", merged]) == 0
    said = capsys.readouterr().out
    assert "tokens     26 as uint16, 52 bytes" in said and "8 to 15 tokens             2" in said
    assert main(["data", "describe", first, second, "--json"]) == 0
    assert [entry["tokens"] for entry in json.loads(capsys.readouterr().out)] == [13, 13]
    assert main(["data", "verify", first, second, merged]) == 0
    assert capsys.readouterr().out.count("checksums good") == 3
    binary = Path(f"{first}.bin")
    binary.write_bytes(binary.read_bytes()[:-2] + b"\0\0")
    assert main(["data", "verify", first, second]) == 1
    said = capsys.readouterr().out
    assert "a: WRONG: " in said and "between bytes 0 and 26" in said and said.count("checksums good") == 1
    assert main(["data", "seal", first]) == 0
    assert main(["data", "verify", first, "--vocab-size", "5"]) == 0
    assert "13 tokens below 5" in capsys.readouterr().out
    assert main(["data", "verify", first, "--vocab-size", "4"]) == 1


def test_unusable_path_is_one_error_line(pairs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    inside = f"{pairs[0]}.bin/out"
    for words in (["merge", inside, str(pairs[0])], ["describe", "x" * 300]):
        assert main(["data", *words]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and words[1].removesuffix("/out") in err


def test_a_full_disk_is_a_sentence_with_the_way_out(
    pairs: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        # An OSError of a failed write has no file name.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pentatron.data.indexed_writer.merge", full)
    assert main(["data", "merge", f"{pairs[0]}c", str(pairs[0]), str(pairs[1])]) == 2
    assert "cannot be written (No space left on device); make room" in capsys.readouterr().err


def test_input_without_text_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("empty", ""), ("blank", '{"text": ""}\n')):
        (tmp_path / f"{name}.jsonl").write_text(content)
        words = f"--input {tmp_path / name}.jsonl --output-prefix {tmp_path / name} --tokenizer-type ByteTokenizer"
        assert main(["prepare", *words.split()]) == 0
        assert f"{name}_text_document: no tokens, because the input has no text" in capsys.readouterr().out


def test_unknown_data_command_or_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 0
    for words, message in (
        ("shw x", "unknown command 'data shw' (did you mean show?)"),
        ("descibe x", "unknown command 'data descibe' (did you mean describe?)"),
        ("verify", "expected a prefix of data: pentatron data verify PREFIX"),
        ("describe /nowhere", "no data file /nowhere.idx"),
    ):
        assert main(["data", *words.split()]) == 2
        assert message in capsys.readouterr().err
