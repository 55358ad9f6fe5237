"""Tokenizers: tokenizer.json, GPT-2 and SentencePiece files, bytes, numbers; BPE training."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.data.indexed import TokenizerIdentity
from pentatron.errors import UserError, explained, import_package
from pentatron.text import one_line, parse_json

if TYPE_CHECKING:
    import tokenizers

BYTE_VALUES = 256
# A text whose tokens are part of a fingerprint, which detects different splitting of words, digits and
# spaces.
PROBE = (
    "The quick brown fox doesn't jump; it's 2026-11-15, 1234567890 or 3.14e-5.\n\n\tdef f(x_1, *args):\r\n        return "
    '{"a": [x_1 ** 2, None]}  # CamelCase snake_case ALLCAPS\n  naïve cafe\u0301 ﬁ Ⅷ Straße ÉCOLE 漢字かな交じり文 한국어 العربية '
    "עברית हिन्दी ไทย Ελληνικά кириллица 🙂👩‍👩‍👧 \u200b\u00a0… «»“” €100 x²≤y https://example.org/a?b=c&d=%20 information "
    "transformation internationalization understanding antidisestablishmentarianism"
)


_CHECK_MODEL = "check --tokenizer-model"


class Tokenizer:
    """The interface of all tokenizers, and the defaults of those without a vocabulary list."""

    # One of TOKENIZER_TYPES.
    kind: str
    vocab_size: int
    # The id that ends a document.
    eod: int

    def vocabulary(self) -> dict[str, int]:
        """Returns tokens and their ids, empty if the tokenizer has no list of them."""
        return {}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text without special tokens."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids, and one more id for the end of a document; needs no file."""

    kind = "ByteTokenizer"
    vocab_size = BYTE_VALUES + 1
    eod = BYTE_VALUES

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Returns the ids of each text, and the character offsets of each id."""
        return [
            (self.encode(text), [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()])
            for text in texts
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token != self.eod).decode(errors="replace")


class NullTokenizer(Tokenizer):
    """Parses space-separated ids; the end of a document is one id more than `vocab_size`."""

    kind = "NullTokenizer"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            if not (word.isdecimal() and int(word) < self.vocab_size):
                raise UserError(
                    f"NullTokenizer reads numbers below {self.vocab_size}, found '{word[:40]}'; "
                    "choose another --tokenizer-type for text"
                )
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file; Llama2Tokenizer prepends the begin-of-sequence token to every text."""

    def __init__(self, path: Path | str, kind: str = "SentencePieceTokenizer") -> None:
        library = import_package("sentencepiece", kind)
        self.kind = kind
        self.path = Path(path) / "tokenizer.model" if Path(path).is_dir() else Path(path)
        if not self.path.is_file():
            raise UserError(
                f"Tokenizer not found: no file {self.path}; check --tokenizer-model, which takes a SentencePiece .model file or a "
                "folder that holds tokenizer.model"
            )
        with explained(Exception, f"{self.path} is not a readable SentencePiece model", _CHECK_MODEL):
            self._model: Any = library.SentencePieceProcessor(model_file=str(self.path))
        # -1: the model has no such token, or it is not prepended.
        self._bos: int = self._model.bos_id() if kind == "Llama2Tokenizer" else -1
        self.vocab_size: int = self._model.get_piece_size()

    @property
    def eod(self) -> int:  # type: ignore[override]
        token: int = self._model.eos_id()
        if token < 0:
            raise UserError(f"{self.path} has no end-of-document token; train it with one (--eos_id)")
        return token

    def vocabulary(self) -> dict[str, int]:
        return {self._model.id_to_piece(token): token for token in range(self.vocab_size)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return [self._bos, *ids] if self._bos >= 0 else ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(ids))


END_OF_TEXT = "<|endoftext|>"
# End-of-document tokens tried in this order if tokenizer_config.json does not name one.
KNOWN_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot|>")
TOKENIZER_TYPES = (
    *("HuggingFaceTokenizer", "HFTokenizer", "GPT2BPETokenizer"),
    *("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"),
    *("ByteTokenizer", "NullTokenizer", "SFTTokenizer"),
)
# The exception of a panic in the library's Rust code, and the error of a regular expression that exceeds
# its step limit.
_PANIC, _STEP_LIMIT = "PanicException", "retry-limit-in-match"
# Largest accepted growth of a text by normalisation; Unicode's longest decomposition has 18 characters.
_LARGEST_GROWTH = 1000


class EncodingError(UserError):
    """Raised for a text that the tokenizers library fails on; `reason` is its error."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"a text cannot be encoded by the tokenizer {path} ({reason}); {_CHECK_MODEL}")
        self.reason = reason


class _LibraryTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self.path = path
        self._tokenizer = tokenizer
        # Ids may have gaps, and the embedding needs a row for the highest one.
        self.vocab_size = max(self.vocabulary().values(), default=-1) + 1
        if self.vocab_size == 0:
            raise UserError(f"{path} has no token; check --tokenizer-model")
        for part in (tokenizer.normalizer, tokenizer.decoder):
            # The library aborts the process when memory is exhausted.
            growth = 1.0 if part is None else _growth(parse_json(part.__getstate__()))
            if growth > _LARGEST_GROWTH:
                raise UserError(
                    f"{path} replaces characters so that a text grows {growth:.0f}-fold, which no tokenizer needs; {_CHECK_MODEL}"
                )
        end_tokens = filter(None, (_configured_end_token(path.parent), *KNOWN_END_TOKENS))
        ids = map(tokenizer.token_to_id, end_tokens)
        self._eod: int | None = next((token_id for token_id in ids if token_id is not None), None)

    @property
    def eod(self) -> int:  # type: ignore[override]
        if self._eod is None:
            raise UserError(
                f"{self.path} defines no end-of-document token; put "
                '{"eos_token": "..."} into tokenizer_config.json beside it'
            )
        return self._eod

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self._call("encode", text, add_special_tokens=False).ids

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Returns the ids of each text, and the character offsets of each id."""
        encodings = self._call("encode_batch", list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Returns the ids with the special tokens added by the tokenizer's post-processor, such as BOS."""
        return self._call("encode", text, add_special_tokens=True).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # The fast variant does not compute character offsets.
        encodings = self._call("encode_batch_fast", list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._call("decode", list(ids), skip_special_tokens=False)

    def _call(self, method: str, content: Any, **options: bool) -> Any:
        """Converts the library's bare Exceptions and BaseException panics to EncodingError."""
        try:
            return getattr(self._tokenizer, method)(content, **options)
        except MemoryError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            reason = one_line(" ".join(str(error).split()).rstrip("."))
            if _STEP_LIMIT in reason:
                reason = f"one of its regular expressions takes too many steps on this text: {reason}"
            raise EncodingError(self.path, reason) from None


class FileTokenizer(_LibraryTokenizer):
    """A `tokenizer.json`, or the folder of a model that holds one."""

    kind = "HuggingFaceTokenizer"

    def __init__(self, path: Path | str) -> None:
        library = _tokenizers_library()
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise UserError(
                f"Tokenizer not found: no file {file}; check --tokenizer-model, which takes a local tokenizer.json or a folder "
                f"that holds one{_other_kind(file.parent)}"
            )
        # The library raises bare Exceptions for malformed files.
        with explained(Exception, f"{file} is not a readable tokenizer", _CHECK_MODEL):
            tokenizer = library.Tokenizer.from_file(str(file))
        # Files may contain settings for inference, which would truncate or pad documents.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        super().__init__(file, tokenizer)


class GPT2BPETokenizer(_LibraryTokenizer):
    """GPT-2's vocabulary and merges. `<|endoftext|>` inside a text is encoded as ordinary text."""

    kind = "GPT2BPETokenizer"

    def __init__(self, vocab_file: Path | str, merge_file: Path | str) -> None:
        library = _tokenizers_library()
        for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            if not Path(path).is_file():
                raise UserError(f"Tokenizer not found: no file {path}; check {flag}")
        problem = f"{vocab_file} and {merge_file} are not a readable vocabulary"
        with explained(Exception, problem, "check --vocab-file and --merge-file"):
            tokenizer = _byte_level(library.models.BPE.from_file(str(vocab_file), str(merge_file)))
        super().__init__(Path(vocab_file), tokenizer)


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings `--tokenizer-type`, `--tokenizer-model` and related flags; any process can load them.

    Without a type, `vocab_file` or `merge_file` select GPT-2's tokenizer, anything else a tokenizer.json.
    """

    kind: str | None
    model: Path | str | None = None
    vocab_size: int | None = None
    vocab_file: Path | str | None = None
    merge_file: Path | str | None = None

    def load(self) -> Tokenizer:
        kind, model, vocab_file, merge_file = self.kind, self.model, self.vocab_file, self.merge_file
        if kind is None and (vocab_file or merge_file) and not model:
            kind = "GPT2BPETokenizer"
        # SFTTokenizer is Megatron's name for a tokenizer.json whose chat template is used.
        if kind in (None, "SFTTokenizer"):
            kind = "HuggingFaceTokenizer"
        if kind == "ByteTokenizer":
            return ByteTokenizer()
        if kind == "NullTokenizer":
            if self.vocab_size is None:
                raise UserError("NullTokenizer needs the number of ids; give --vocab-size")
            return NullTokenizer(self.vocab_size)
        if kind not in TOKENIZER_TYPES:
            raise UserError(
                f"unknown tokenizer type '{kind}'; --tokenizer-type is one of {', '.join(TOKENIZER_TYPES)}"
            )
        if kind == "GPT2BPETokenizer":
            if model is not None and Path(model).is_dir():
                vocab_file = vocab_file or Path(model) / "vocab.json"
                merge_file = merge_file or Path(model) / "merges.txt"
            if vocab_file is None or merge_file is None:
                raise UserError(
                    "Tokenizer not found: GPT2BPETokenizer needs two files; give --vocab-file vocab.json and --merge-file merges.txt, "
                    "or check --tokenizer-model, which takes the folder that holds both"
                )
            return GPT2BPETokenizer(vocab_file, merge_file)
        is_library_file = kind.startswith("H")
        if model is None:
            raise UserError(
                f"Tokenizer not found: no path was given for {kind}; check --tokenizer-model, which takes a local "
                f"{'tokenizer.json' if is_library_file else '.model file'} or a folder that holds one"
            )
        return FileTokenizer(model) if is_library_file else SentencePieceTokenizer(model, kind)


def identify_tokenizer(tokenizer: Tokenizer) -> TokenizerIdentity:
    """Returns the identity of a tokenizer, which does not depend on its file format."""
    try:
        eod: int | None = tokenizer.eod
    except UserError:
        eod = None
    kind, size = tokenizer.kind, tokenizer.vocab_size
    vocabulary = sorted(tokenizer.vocabulary().items(), key=lambda entry: (entry[1], entry[0]))
    # The ids of a fixed text identify the tokenizer beyond its vocabulary.
    probe = tokenizer.encode(PROBE) if vocabulary else []
    content = json.dumps([vocabulary or kind, probe, size, eod]).encode()
    return TokenizerIdentity(kind, hashlib.sha256(content).hexdigest(), size, eod)


def train_bpe(texts: Iterator[str], vocab_size: int) -> "tokenizers.Tokenizer":
    """Trains a byte-level BPE tokenizer of at most `vocab_size` ids; deterministic."""
    library = _tokenizers_library()
    if vocab_size <= BYTE_VALUES:
        raise UserError(f"a byte-level vocabulary needs {BYTE_VALUES + 1} ids or more, found {vocab_size}")
    tokenizer = _byte_level(library.models.BPE())
    # Every byte has an id, so that any text can be encoded.
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    options = {"special_tokens": [END_OF_TEXT], "initial_alphabet": alphabet, "show_progress": False}
    trainer = library.trainers.BpeTrainer(vocab_size=vocab_size, **options)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _growth(part: Any) -> float:
    """Returns the largest factor by which a normalizer or decoder can lengthen a text."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") != "Replace":
        return _growth([value for value in part.values() if isinstance(value, list)])
    pattern = part["pattern"]
    # A regular expression may match between any two characters.
    content = len(part["content"])
    return max(1.0, content / max(1, len(pattern["String"])) if "String" in pattern else content + 1.0)


def _configured_end_token(folder: Path) -> str | None:
    """Returns the `eos_token` in tokenizer_config.json, which is a string or an object with a `content`."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    with explained((ValueError, AttributeError), f"{path} is not a JSON object", _CHECK_MODEL):
        token = parse_json(path.read_text(encoding="utf-8")).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _other_kind(folder: Path) -> str:
    """Returns a hint if the folder contains a tokenizer of another type."""
    if (folder / "tokenizer.model").is_file():
        return " (this one holds tokenizer.model: try --tokenizer-type SentencePieceTokenizer)"
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return " (this one holds vocab.json and merges.txt: try --tokenizer-type GPT2BPETokenizer)"
    return ""


def _byte_level(model: Any) -> Any:
    """Returns a byte-level tokenizer with a BPE model."""
    library = _tokenizers_library()
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _tokenizers_library() -> Any:
    return import_package("tokenizers", "this tokenizer")
