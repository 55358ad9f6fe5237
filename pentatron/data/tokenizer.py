"""Text to token ids and back: tokenizer files, raw bytes, plain numbers, and training a small vocabulary."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pentatron.data.indexed import TokenizerIdentity
from pentatron.errors import UserError
from pentatron.text import one_line, parse_json

if TYPE_CHECKING:
    import tokenizers

# Tokenizers without the tokenizers library: bytes as they are, numbers written as text, and SentencePiece
# models.


BYTE_VALUES = 256
# Encoded into a fingerprint, to notice what a vocabulary does not tell: how words, digits, spaces and signs are cut.
PROBE = (
    "The quick brown fox doesn't jump; it's 2026-11-15, 1234567890 or 3.14e-5.\n\n\tdef f(x_1, *args):\r\n        return "
    '{"a": [x_1 ** 2, None]}  # CamelCase snake_case ALLCAPS\n  naïve cafe\u0301 ﬁ Ⅷ Straße ÉCOLE 漢字かな交じり文 한국어 العربية '
    "עברית हिन्दी ไทย Ελληνικά кириллица 🙂👩‍👩‍👧 \u200b\u00a0… «»“” €100 x²≤y https://example.org/a?b=c&d=%20 information "
    "transformation internationalization understanding antidisestablishmentarianism"
)


class ByteTokenizer:
    """UTF-8 bytes as ids, and one more id for the end of a document: works on any text without a file."""

    kind = "ByteTokenizer"
    vocab_size = BYTE_VALUES + 1
    eod = BYTE_VALUES

    def vocabulary(self) -> dict[str, int]:
        return {}

    def probe(self) -> list[int]:
        return []

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of each text, and for each id the character it is a part of."""
        return [
            (self.encode(text), [(at, at + 1) for at, sign in enumerate(text) for _ in sign.encode()])
            for text in texts
        ]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token != self.eod).decode(errors="replace")


class NullTokenizer:
    """Text that already is ids, as numbers between spaces; the end of a document is one id more than asked for."""

    kind = "NullTokenizer"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def vocabulary(self) -> dict[str, int]:
        return {}

    def probe(self) -> list[int]:
        return []

    def encode(self, text: str) -> list[int]:
        words = text.split()
        wrong = next((word for word in words if not (word.isdecimal() and int(word) < self.vocab_size)), None)
        if wrong is not None:
            raise UserError(
                f"NullTokenizer reads numbers below {self.vocab_size}, found '{wrong[:40]}'; "
                "choose another --tokenizer-type for text"
            )
        return [int(word) for word in words]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids)


class SentencePieceTokenizer:
    """A SentencePiece `.model` file; Llama 2 puts its begin token before every text."""

    def __init__(self, path: Path | str, kind: str = "SentencePieceTokenizer") -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise UserError(
                f"{kind} needs the package sentencepiece; run: pip install sentencepiece"
            ) from error
        self.kind = kind
        self.path = Path(path) / "tokenizer.model" if Path(path).is_dir() else Path(path)
        if not self.path.is_file():
            raise UserError(
                f"Tokenizer not found: no file {self.path}; check --tokenizer-model, which takes a SentencePiece .model file or a "
                "folder that holds tokenizer.model"
            )
        try:
            self._model: Any = sentencepiece.SentencePieceProcessor(model_file=str(self.path))
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"{self.path} is not a readable SentencePiece model ({error}); check --tokenizer-model"
            ) from error
        self._begin: int = self._model.bos_id() if kind == "Llama2Tokenizer" else -1
        self.vocab_size: int = self._model.get_piece_size()

    @property
    def eod(self) -> int:
        token: int = self._model.eos_id()
        if token < 0:
            raise UserError(f"{self.path} has no token that ends a document; train it with one (--eos_id)")
        return token

    def vocabulary(self) -> dict[str, int]:
        return {self._model.id_to_piece(token): token for token in range(self.vocab_size)}

    def probe(self) -> list[int]:
        return self.encode(PROBE)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return [self._begin, *ids] if self._begin >= 0 else ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode(list(ids))
        return text


END_OF_TEXT = "<|endoftext|>"
# Looked for, in this order, where the folder of a tokenizer does not say which token ends a document.
KNOWN_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot|>")
TOKENIZER_TYPES = (
    *("HuggingFaceTokenizer", "HFTokenizer", "GPT2BPETokenizer"),
    *("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"),
    *("ByteTokenizer", "NullTokenizer", "SFTTokenizer"),
)
# How the library's Rust code fails, and what it says when a regular expression takes too many steps.
_PANIC, _STEPS = "PanicException", "retry-limit-in-match"
# Unicode's longest decomposition has 18 characters.
_LARGEST_GROWTH = 1000


class NotEncoded(UserError):
    """A text that a tokenizer of the library fails on; `reason` is what the library says."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"a text cannot be encoded by the tokenizer {path} ({reason}); check --tokenizer-model"
        )
        self.reason = reason


class Tokenizer(Protocol):
    """What the rest of the framework needs of a tokenizer."""

    @property
    def kind(self) -> str:
        """One of TOKENIZER_TYPES."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    def vocabulary(self) -> dict[str, int]:
        """Tokens and their ids, where they are listed."""

    def probe(self) -> list[int]:
        """Ids of a fixed text: what a vocabulary alone does not tell."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no begin, end or padding ids are added."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class _LibraryTokenizer:
    """What the tokenizers library holds, whichever files it came from."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self.path = path
        self._tokenizer = tokenizer
        # Ids can have gaps, and an embedding needs a row for the highest one.
        self._vocab_size = max(self.vocabulary().values(), default=-1) + 1
        if self._vocab_size == 0:
            raise UserError(f"{path} has no token; check --tokenizer-model")
        _require_bounded_growth(path, tokenizer)
        self._eod = self._find_eod()

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eod(self) -> int:
        if self._eod is None:
            raise UserError(
                f"{self.path} names no token that ends a document; put "
                '{"eos_token": "..."} into tokenizer_config.json beside it'
            )
        return self._eod

    def vocabulary(self) -> dict[str, int]:
        known: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return known

    def probe(self) -> list[int]:
        return self.encode(PROBE)

    def encode(self, text: str) -> list[int]:
        with self._failures():
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of each text, and for each id the characters it stands for."""
        with self._failures():
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
            return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def encode_as_configured(self, text: str) -> list[int]:
        """Ids of the text with whatever the file itself puts around it, such as an id that begins every text."""
        with self._failures():
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
            return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # The fast variant leaves out the character offsets, which nobody reads here.
        with self._failures():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        with self._failures():
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
            return text

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """The library raises bare Exception, and a panic of its Rust code is not even that."""
        try:
            yield
        except MemoryError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            reason = one_line(" ".join(str(error).split()).rstrip("."))
            if _STEPS in reason:
                reason = f"a regular expression of it takes too many steps on this text: {reason}"
            raise NotEncoded(self.path, reason) from None

    def _find_eod(self) -> int | None:
        for name in (_configured_end_token(self.path.parent), *KNOWN_END_TOKENS):
            token: int | None = self._tokenizer.token_to_id(name) if name else None
            if token is not None:
                return token
        return None


class FileTokenizer(_LibraryTokenizer):
    """A `tokenizer.json`, or the folder of a model that holds one."""

    kind = "HuggingFaceTokenizer"

    def __init__(self, path: Path | str) -> None:
        library = _tokenizers_library()
        file = Path(path)
        if file.is_dir():
            file /= "tokenizer.json"
        if not file.is_file():
            raise UserError(
                f"Tokenizer not found: no file {file}; check --tokenizer-model, which takes a local tokenizer.json or a folder "
                f"that holds one{_other_kind(file.parent)}"
            )
        try:
            tokenizer = library.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for any malformed file
            raise UserError(
                f"{file} is not a readable tokenizer ({error}); check --tokenizer-model"
            ) from error
        # Files may carry the settings of an inference pipeline, which would cut or fill up documents.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        super().__init__(file, tokenizer)


class GPT2BPETokenizer(_LibraryTokenizer):
    """GPT-2's two files. `<|endoftext|>` inside a text is text here, not the end of a document."""

    kind = "GPT2BPETokenizer"

    def __init__(self, vocab_file: Path | str, merge_file: Path | str) -> None:
        library = _tokenizers_library()
        for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            if not Path(path).is_file():
                raise UserError(f"Tokenizer not found: no file {path}; check {flag}")
        from tokenizers import decoders, models, pre_tokenizers

        try:
            tokenizer = library.Tokenizer(models.BPE.from_file(str(vocab_file), str(merge_file)))
        except Exception as error:  # the library raises bare Exception for any malformed file
            raise UserError(
                f"{vocab_file} and {merge_file} are not a readable vocabulary ({error}); check --vocab-file and --merge-file"
            ) from error
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        super().__init__(Path(vocab_file), tokenizer)


@dataclass(frozen=True)
class TokenizerChoice:
    """What the user said about the tokenizer: enough to load the same one in another process."""

    kind: str
    model: str | None = None
    vocab_size: int | None = None
    vocab_file: str | None = None
    merge_file: str | None = None

    def load(self) -> Tokenizer:
        return load_tokenizer(self.kind, self.model, self.vocab_size, self.vocab_file, self.merge_file)


def load_tokenizer(
    kind: str | None,
    model: Path | str | None = None,
    vocab_size: int | None = None,
    vocab_file: Path | str | None = None,
    merge_file: Path | str | None = None,
    fetch: Callable[[str], Path] | None = None,
) -> Tokenizer:
    """The tokenizer that `--tokenizer-type`, `--tokenizer-model` and the flags beside them describe.

    Without a type, GPT-2's files mean GPT-2's tokenizer and anything else a tokenizer.json.
    `fetch` turns a model that is no local path (a name on a hub) into a folder, or raises a UserError.
    """
    if kind is None:
        kind = "GPT2BPETokenizer" if (vocab_file or merge_file) and not model else "HuggingFaceTokenizer"
    if kind == "SFTTokenizer":
        # Megatron's name for a tokenizer.json whose chat template is used.
        kind = "HuggingFaceTokenizer"
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        if vocab_size is None:
            raise UserError("NullTokenizer needs to know how many ids there are; give --vocab-size")
        return NullTokenizer(vocab_size)
    if kind not in TOKENIZER_TYPES:
        raise UserError(
            f"unknown tokenizer type '{kind}'; --tokenizer-type is one of {', '.join(TOKENIZER_TYPES)}"
        )
    if model is not None and fetch is not None and not Path(model).exists():
        model = fetch(str(model))
    if kind == "GPT2BPETokenizer":
        if model is not None and Path(model).is_dir():
            vocab_file, merge_file = (
                vocab_file or Path(model) / "vocab.json",
                merge_file or Path(model) / "merges.txt",
            )
        if vocab_file is None or merge_file is None:
            raise UserError(
                "Tokenizer not found: GPT2BPETokenizer needs two files; give --vocab-file vocab.json and --merge-file merges.txt, "
                "or check --tokenizer-model, which takes the folder that holds both"
            )
        return GPT2BPETokenizer(vocab_file, merge_file)
    if model is None:
        raise UserError(
            f"Tokenizer not found: no path was given for {kind}; check --tokenizer-model, which takes a local "
            f"{'tokenizer.json' if kind.startswith('H') else '.model file'} or a folder that holds one"
        )
    return FileTokenizer(model) if kind.startswith("H") else SentencePieceTokenizer(model, kind)


def identify(tokenizer: Tokenizer) -> TokenizerIdentity:
    """Kind, size and fingerprint; the same vocabulary from another kind of file has the same fingerprint."""
    try:
        eod: int | None = tokenizer.eod
    except UserError:
        eod = None
    known = sorted(tokenizer.vocabulary().items(), key=lambda entry: (entry[1], entry[0]))
    content = json.dumps([known or tokenizer.kind, tokenizer.probe(), tokenizer.vocab_size, eod]).encode()
    return TokenizerIdentity(tokenizer.kind, hashlib.sha256(content).hexdigest(), tokenizer.vocab_size, eod)


def train_bpe(texts: Iterator[str], vocab_size: int) -> "tokenizers.Tokenizer":
    """A byte-level BPE vocabulary of at most `vocab_size` ids; the same texts give the same file."""
    library = _tokenizers_library()
    least = BYTE_VALUES + 1
    if vocab_size < least:
        raise UserError(f"a byte-level vocabulary needs {least} ids or more, found {vocab_size}")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = library.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # Every byte has an id from the start, so that no text is unknown.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _require_bounded_growth(path: Path, tokenizer: Any) -> None:
    """Replacements one after another multiply the length of a text; the library aborts the process when memory ends."""
    for part in (tokenizer.normalizer, tokenizer.decoder):
        growth = 1.0 if part is None else _growth(parse_json(part.__getstate__()))
        if growth > _LARGEST_GROWTH:
            raise UserError(
                f"{path} replaces characters so that a text grows {growth:.0f}-fold, which no tokenizer needs; check --tokenizer-model"
            )


def _growth(part: Any) -> float:
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
    """The `eos_token` of a model folder, which is a text or an object with a `content`."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        token = parse_json(path.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a JSON object ({error}); check --tokenizer-model") from error
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _other_kind(folder: Path) -> str:
    """The way out for a folder that holds a tokenizer of another kind."""
    if (folder / "tokenizer.model").is_file():
        return " (this one holds tokenizer.model: try --tokenizer-type SentencePieceTokenizer)"
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return " (this one holds vocab.json and merges.txt: try --tokenizer-type GPT2BPETokenizer)"
    return ""


def _tokenizers_library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("this tokenizer needs the package tokenizers; run: pip install tokenizers") from error
    return tokenizers
