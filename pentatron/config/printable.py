"""Text of strangers on a terminal or in a log: names in files may hold what would steer either."""

import re

from pentatron.config.redaction import redacted

# All control characters but the end of a line and the tabulator, and those that turn the direction of writing round.
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The same text with its control characters written out, as in `\\x1b`."""
    return _STEERS.sub(_written_out, text)


def spoken(text: str) -> str:
    """What a terminal or a log gets: nothing that steers it, and no secrets."""
    return redacted(printable(text))


def one_line(text: str) -> str:
    """The same with ends of lines and tabulators written out as well."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
