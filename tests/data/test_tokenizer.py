"""Tests tokenizers: round trips, lookup of files and end tokens, deterministic training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pentatron.data.tokenizer import (
    END_OF_TEXT,
    PROBE,
    ByteTokenizer,
    FileTokenizer,
    GPT2BPETokenizer,
    NullTokenizer,
    Tokenizer,
    TokenizerSettings,
    identify_tokenizer,
    train_bpe,
)

TEXTS = ["def f(x):\n    return x + 1\n", "class A:\n    pass\n", "naïve 漢字 🙂 \x00\ttab"] * 20
VOCAB = 290
UNSEEN = "import os\r\n\n\n   λ 🚀 ﷽ end"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    train_bpe(iter(TEXTS), VOCAB).save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("text", [TEXTS[0], TEXTS[2], UNSEEN, ""])
def test_there_and_back(folder: Path, text: str) -> None:
    tokenizers: list[Tokenizer] = [FileTokenizer(folder), ByteTokenizer()]
    for tokenizer in tokenizers:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= token < tokenizer.vocab_size and token != tokenizer.eod for token in ids)
        assert tokenizer.encode_batch([text, "x", text]) == [ids, tokenizer.encode("x"), ids]


def test_trained_vocabulary(folder: Path) -> None:
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    assert tokenizer.vocab_size == VOCAB
    assert tokenizer.decode([tokenizer.eod]) == END_OF_TEXT
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2, "nothing was learnt"
    with pytest.raises(ValueError, match="257 ids or more, found 256"):
        train_bpe(iter(TEXTS), 256)


def test_training_is_the_same_in_every_process(folder: Path) -> None:
    """Hash seeds and thread counts differ between processes, but the file does not."""
    body = (
        "import sys; from tests.data.test_tokenizer import TEXTS, VOCAB; from pentatron.data.tokenizer import train_bpe;"
        "sys.stdout.buffer.write(train_bpe(iter(TEXTS), VOCAB).to_str(pretty=True).encode())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAYON_NUM_THREADS": "3"}
    result = subprocess.run([sys.executable, "-c", body], env=environment, capture_output=True, check=True)
    assert result.stdout.strip() == (folder / "tokenizer.json").read_bytes().strip()


def variant(folder: Path, target: Path, **changes: object) -> Path:
    """Returns the trained tokenizer with some top-level fields replaced."""
    content = json.loads((folder / "tokenizer.json").read_text())
    (target / "tokenizer.json").write_text(json.dumps({**content, **changes}))
    return target


def test_saved_truncation_and_padding_are_ignored(folder: Path, tmp_path: Path) -> None:
    padding: dict[str, object] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": END_OF_TEXT}
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    changed = FileTokenizer(variant(folder, tmp_path, padding=padding, truncation=truncation))
    plain = FileTokenizer(folder)
    assert changed.encode(TEXTS[0]) == plain.encode(TEXTS[0])
    assert changed.encode_batch(TEXTS[:3]) == plain.encode_batch(TEXTS[:3])


def test_no_special_ids_are_added(folder: Path, tmp_path: Path) -> None:
    """Tokenizers that prepend BOS to prompts must not prepend it to documents."""
    processor = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}},
    }
    changed = FileTokenizer(variant(folder, tmp_path, post_processor=processor))
    assert changed.encode("x") == FileTokenizer(folder).encode("x")
    assert changed.encode_batch(["x"]) == [FileTokenizer(folder).encode("x")]


@pytest.mark.parametrize("eos", ["</end>", {"content": "</end>", "lstrip": False}])
def test_end_of_document_token_comes_from_the_folder(folder: Path, tmp_path: Path, eos: object) -> None:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    added.append({**added[0], "id": VOCAB, "content": "</end>"})
    variant(folder, tmp_path, added_tokens=added)
    assert FileTokenizer(tmp_path).eod == FileTokenizer(folder).eod == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert FileTokenizer(tmp_path).eod == VOCAB
    assert FileTokenizer(tmp_path).vocab_size == VOCAB + 1


def test_without_an_end_token(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "model": {"type": "BPE", "vocab": {"a": 0, "b": 7}, "merges": []},
            }
        )
    )
    tokenizer = FileTokenizer(tmp_path)
    assert tokenizer.encode("ab") == [0, 7]
    assert tokenizer.vocab_size == 8, "ids with a gap need rows up to the highest"
    with pytest.raises(ValueError, match=r"defines no end-of-document token.*eos_token"):
        _ = tokenizer.eod


def test_null_tokenizer() -> None:
    tokenizer = NullTokenizer(100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode(" 5 17\n99 ") == [5, 17, 99]
    assert tokenizer.decode([5, 17]) == "5 17"
    for wrong in ("101", "-1", "word", "1.5"):
        with pytest.raises(ValueError, match=f"numbers below 101, found '{wrong}'"):
            tokenizer.encode(f"3 {wrong}")


def test_byte_tokenizer_never_fails_to_decode() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.decode([104, 105, 256, 255]) == "hi\ufffd"


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "HFTokenizer"])
def test_load_by_type(folder: Path, kind: str) -> None:
    assert TokenizerSettings(kind, folder).load().vocab_size == VOCAB
    assert TokenizerSettings("ByteTokenizer").load().vocab_size == 257
    assert TokenizerSettings("NullTokenizer", vocab_size=5).load().eod == 5


@pytest.mark.parametrize(
    ("kind", "model", "message"),
    [
        ("HuggingFaceTokenizer", None, "^Tokenizer not found: no path was given.*check --tokenizer-model"),
        ("HFTokenizer", "absent", r"^Tokenizer not found: no file .*absent; check --tokenizer-model"),
        ("HFTokenizer", "", r"^Tokenizer not found: no file .*tokenizer\.json; check --tokenizer-model"),
        ("NullTokenizer", None, "give --vocab-size"),
        ("Megabyte", None, "unknown tokenizer type 'Megabyte'.*HuggingFaceTokenizer"),
    ],
)
def test_missing_or_unknown_tokenizer(tmp_path: Path, kind: str, model: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenizerSettings(kind, None if model is None else tmp_path / model).load()


def test_broken_files_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
        FileTokenizer(tmp_path)
    variant(folder, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not a JSON object"):
        FileTokenizer(tmp_path)


def test_the_package_works_without_tokenizers_and_torch() -> None:
    """Everything except the loader imports without torch; missing tokenizers raise a UserError."""
    body = """
import sys
sys.modules["tokenizers"] = None
from pentatron.data import python_corpus, gpt_dataset, indexed, sample_index, tokenizer
assert "torch" not in sys.modules
assert tokenizer.TokenizerSettings("ByteTokenizer").load().encode("a") == [97]
for call in (lambda: tokenizer.FileTokenizer("x"), lambda: tokenizer.train_bpe(iter(["a"]), 300)):
    try:
        call()
    except ValueError as error:
        assert "pip install tokenizers" in str(error), error
    else:
        raise AssertionError
"""
    subprocess.run(
        [sys.executable, "-c", body], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=True
    )


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes GPT-2's two files from the trained vocabulary."""
    path = tmp_path_factory.mktemp("gpt2")
    train_bpe(iter(TEXTS), VOCAB).model.save(str(path))
    return path


def test_gpt2_files_give_the_same_ids_as_transformers(gpt2: Path, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = TokenizerSettings(None, None, None, gpt2 / "vocab.json", gpt2 / "merges.txt").load()
    assert isinstance(tokenizer, GPT2BPETokenizer)
    reference = transformers.GPT2Tokenizer.from_pretrained(str(gpt2))
    for text in (*TEXTS[:3], UNSEEN, PROBE):
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert TokenizerSettings("GPT2BPETokenizer", gpt2).load().vocab_size == tokenizer.vocab_size == VOCAB
    # Text equal to the end token is encoded as ordinary text.
    assert tokenizer.eod == 0 and tokenizer.eod not in tokenizer.encode(f"a{END_OF_TEXT}b")
    assert identify_tokenizer(tokenizer).fingerprint == identify_tokenizer(FileTokenizer(folder)).fingerprint


def test_gpt2_files_that_are_not_there(gpt2: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (
            (None, None, None, gpt2 / "vocab.json"),
            "^Tokenizer not found: GPT2BPETokenizer needs two files; give --vocab-file",
        ),
        (("GPT2BPETokenizer", tmp_path), r"^Tokenizer not found: no file .*vocab\.json; check --vocab-file"),
        ((None, None, None, gpt2 / "vocab.json", tmp_path / "m"), r"no file .*m; check --merge-file"),
        ((None, None, None, gpt2 / "merges.txt", gpt2 / "merges.txt"), "are not a readable vocabulary"),
        (
            ("HFTokenizer", gpt2),
            r"no file .*tokenizer\.json; .*holds vocab.json and merges.txt: try --tokenizer-type GPT2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            TokenizerSettings(*arguments).load()  # type: ignore[arg-type]


def test_fingerprints_tell_tokenizers_apart(folder: Path, tmp_path: Path) -> None:
    known = [
        identify_tokenizer(tokenizer)
        for tokenizer in (FileTokenizer(folder), ByteTokenizer(), NullTokenizer(9), NullTokenizer(8))
    ]
    assert len({identity.fingerprint for identity in known}) == 4
    assert known[0].vocab_size == VOCAB and known[0].eod == 0
    # The fingerprint depends on the ids, including how words are split.
    padding = {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    (tmp_path / "same").mkdir()
    (tmp_path / "other").mkdir()
    same = FileTokenizer(variant(folder, tmp_path / "same", padding=padding))
    assert identify_tokenizer(same).fingerprint == known[0].fingerprint
    other = FileTokenizer(variant(folder, tmp_path / "other", normalizer={"type": "Lowercase"}))
    assert identify_tokenizer(other).fingerprint != known[0].fingerprint


def test_sentencepiece(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text(
        "\n".join(f"the quick brown fox {n} jumps over the lazy dog" for n in range(200))
    )
    library.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=60, minloglevel=2
    )
    text = "the lazy fox jumps"
    plain = TokenizerSettings("SentencePieceTokenizer", tmp_path).load()
    llama = TokenizerSettings("Llama2Tokenizer", tmp_path / "tokenizer.model").load()
    reference = library.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert plain.encode(text) == reference.encode(text)
    assert llama.encode_batch([text]) == [[reference.bos_id(), *reference.encode(text)]]
    assert plain.decode(plain.encode(text)) == text
    assert (plain.vocab_size, plain.eod) == (60, reference.eos_id())
    assert identify_tokenizer(plain).fingerprint != identify_tokenizer(llama).fingerprint
    (tmp_path / "broken.model").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"broken\.model is not a readable SentencePiece model"):
        TokenizerSettings("SentencePieceTokenizer", tmp_path / "broken.model").load()
    with pytest.raises(ValueError, match=r"^Tokenizer not found: no file .*absent; check --tokenizer-model"):
        TokenizerSettings("Llama2Tokenizer", tmp_path / "absent").load()
    with pytest.raises(
        ValueError, match=r"holds tokenizer\.model: try --tokenizer-type SentencePieceTokenizer"
    ):
        TokenizerSettings("HFTokenizer", tmp_path).load()


def test_sentencepiece_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ValueError, match="Llama2Tokenizer needs the package sentencepiece; run: pip install"):
        TokenizerSettings("Llama2Tokenizer", "x").load()
