"""Tokenizers that need no file: bytes as they are, and numbers written as text."""

from collections.abc import Sequence

from pentatron.config.errors import UserError

BYTE_VALUES = 256


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
