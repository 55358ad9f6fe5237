"""Text to token ids and back: tokenizer files, raw bytes, plain numbers, and training a small vocabulary."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pentatron.config.errors import UserError

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
# Looked for, in this order, where the folder of a tokenizer does not say which token ends a document.
KNOWN_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot|>")
BYTE_VALUES = 256


class Tokenizer(Protocol):
    """What the rest of the framework needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no begin, end or padding ids are added."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class FileTokenizer:
    """A `tokenizer.json`, or the folder of a model that holds one."""

    def __init__(self, path: Path | str) -> None:
        library = _tokenizers_library()
        self.path = Path(path)
        if self.path.is_dir():
            self.path /= "tokenizer.json"
        if not self.path.is_file():
            raise UserError(
                f"Tokenizer not found: no file {self.path}; check --tokenizer-model, which takes a local "
                "tokenizer.json or a folder that holds one."
            )
        try:
            self._tokenizer = library.Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises bare Exception for any malformed file
            raise UserError(
                f"{self.path} is not a readable tokenizer ({error}); check --tokenizer-model."
            ) from error
        # Files may carry the settings of an inference pipeline, which would cut or fill up documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Ids can have gaps, and an embedding needs a row for the highest one.
        self._vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._eod = self._find_eod()

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eod(self) -> int:
        if self._eod is None:
            raise UserError(
                f"{self.path} names no token that ends a document; put "
                '{"eos_token": "..."} into tokenizer_config.json beside it.'
            )
        return self._eod

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_as_configured(self, text: str) -> list[int]:
        """Ids of the text with whatever the file itself puts around it, such as an id that begins every text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # The fast variant leaves out the character offsets, which nobody reads here.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _find_eod(self) -> int | None:
        for name in (_configured_end_token(self.path.parent), *KNOWN_END_TOKENS):
            token: int | None = self._tokenizer.token_to_id(name) if name else None
            if token is not None:
                return token
        return None


class ByteTokenizer:
    """UTF-8 bytes as ids, and one more id for the end of a document: works on any text without a file."""

    vocab_size = BYTE_VALUES + 1
    eod = BYTE_VALUES

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token != self.eod).decode(errors="replace")


class NullTokenizer:
    """Text that already is ids, as numbers between spaces; the end of a document is one id more than asked for."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def encode(self, text: str) -> list[int]:
        words = text.split()
        wrong = next((word for word in words if not (word.isdecimal() and int(word) < self.vocab_size)), None)
        if wrong is not None:
            raise UserError(
                f"NullTokenizer reads numbers below {self.vocab_size}, found '{wrong[:40]}'; "
                "choose another --tokenizer-type for text."
            )
        return [int(word) for word in words]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids)


def load_tokenizer(kind: str, model: Path | str | None = None, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that `--tokenizer-type`, `--tokenizer-model` and `--vocab-size` describe."""
    if kind in ("HuggingFaceTokenizer", "HFTokenizer"):
        if model is None:
            raise UserError(
                f"Tokenizer not found: no path was given for {kind}; check --tokenizer-model, which takes a local "
                "tokenizer.json or a folder that holds one."
            )
        return FileTokenizer(model)
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        if vocab_size is None:
            raise UserError("NullTokenizer needs to know how many ids there are; give --vocab-size.")
        return NullTokenizer(vocab_size)
    raise UserError(
        f"Unknown tokenizer type '{kind}'; --tokenizer-type is one of HuggingFaceTokenizer, HFTokenizer, "
        "ByteTokenizer, NullTokenizer."
    )


def train_bpe(texts: Iterator[str], vocab_size: int) -> "tokenizers.Tokenizer":
    """A byte-level BPE vocabulary of at most `vocab_size` ids; the same texts give the same file."""
    library = _tokenizers_library()
    least = BYTE_VALUES + 1
    if vocab_size < least:
        raise UserError(f"A byte-level vocabulary needs {least} ids or more, found {vocab_size}.")
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


def _configured_end_token(folder: Path) -> str | None:
    """The `eos_token` of a model folder, which is a text or an object with a `content`."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a JSON object ({error}); check --tokenizer-model.") from error
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _tokenizers_library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("This tokenizer needs the package tokenizers; run: pip install tokenizers") from error
    return tokenizers
