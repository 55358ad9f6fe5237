"""Tokenizers without the tokenizers library: bytes as they are, numbers written as text, and SentencePiece models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pentatron.errors import UserError

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
