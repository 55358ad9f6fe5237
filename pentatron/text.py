"""Text for people: numbers with their units and nouns, and text from files that is safe to print.

Every package may import this module; it imports none of them.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

# --- numbers ---

_BINARY = ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)
_THOUSANDS = ("G", 1e9), ("M", 1e6), ("k", 1e3)
_PARAMETERS = ("T", 1e12), ("B", 1e9), ("M", 1e6)


def plural(number: int, noun: str) -> str:
    """`rank` for 1, else `ranks`; `process`, `processes`."""
    ending = "es" if noun.endswith(("s", "x", "tch", "sh")) else "s"
    return noun if number == 1 else f"{noun}{ending}"


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`, `1,024 files`."""
    return f"{number:,} {plural(number, noun)}"


def in_digits(number: float, digits: int = 3) -> str:
    """`1.23`, `999`, `1000`: significant digits, and never an exponent for a large number."""
    text = f"{number:.{digits}g}"
    return f"{number:.0f}" if "e+" in text else text


def binary_size(count: float) -> str:
    """Bytes of memory or of a disk in three digits: `71.3 GiB`."""
    return _scaled(count, _BINARY, 3) or f"{count:.0f} B"


def decimal_size(count: float) -> str:
    """Bytes of files as disks and networks count them: `1.25 GB`, `31.2 MB`, `4.1 kB`."""
    if count >= 1e9:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def decimal_rate(count: float, seconds: float) -> str:
    """`1,234 MB/s`."""
    return f"{count / max(seconds, 1e-9) / 1e6:,.0f} MB/s"


def in_mib(count: float, spec: str = ",.0f") -> str:
    """Bytes as a number of MiB, for a column or a line whose unit is fixed; `spec` is a format specification."""
    return f"{count / 2**20:{spec}}"


def in_gib(count: float, spec: str) -> str:
    """The same of GiB."""
    return f"{count / 2**30:{spec}}"


def abbreviated(number: float) -> str:
    """A count in three digits: `1.5 M`, `82 k`, `999`."""
    return _scaled(number, _THOUSANDS, 3) or f"{number:.0f}"


def parameter_count(number: float) -> str:
    """Parameters in four digits, in the units of model names: `8.03 B`, `494 M`."""
    return _scaled(number, _PARAMETERS, 4) or f"{number:.0f}"


def _scaled(number: float, units: Sequence[tuple[str, float]], digits: int) -> str:
    """In the largest of the units that the number reaches; empty if it reaches none."""
    return next((f"{in_digits(number / size, digits)} {unit}" for unit, size in units if number >= size), "")


def seconds_text(seconds: float) -> str:
    """A short time in three digits: `12.3 ms`, `4.56 s`."""
    if not seconds:
        return "0 s"
    return f"{in_digits(seconds * 1000)} ms" if seconds < 1 else f"{in_digits(seconds)} s"


def duration(seconds: float) -> str:
    """A long time on a clock: `2:05`, `1:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# --- control characters ---

# All control characters but line feed and tab, and the characters that change the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with its control characters escaped, as in `\\x1b`, so that it cannot steer a terminal."""
    return _CONTROL.sub(_escaped, text)


def one_line(text: str) -> str:
    """The text with control characters, line feeds and tabs escaped."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def spoken(text: str) -> str:
    """Text for a terminal or a log: without control characters and without secrets."""
    return redacted(printable(text))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


# --- secrets ---

HIDDEN = "***"
_NAMED = r"API_?KEY|ACCESS_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH_?TOKEN|ACCESS_?TOKEN"
_SECRETS = (
    # user:password@ or token@ in an address.
    (re.compile(r"(?<=://)[^/\s@'\"]+(?=@)"), HIDDEN),
    # WANDB_API_KEY=..., ?access_token=...; and HF_TOKEN=..., where eos_token is no secret.
    (re.compile(rf"(?i)\b([A-Z0-9_]*(?:{_NAMED})[A-Z0-9_]*\s*[=:]\s*)(?!\*\*\*)[^\s'\"&,;]+"), rf"\1{HIDDEN}"),
    (re.compile(r"\b([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*_TOKEN\s*=\s*)(?!\*\*\*)[^\s'\"&,;]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)([?&](?:token|key|sig|signature)=)[^\s'\"&]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(Bearer\s+)[A-Za-z0-9._~+/-]{16,}"), rf"\1{HIDDEN}"),
    # Keys that are known by their form.
    (re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16})\b"), HIDDEN),
)  # fmt: skip


def redacted(text: str) -> str:
    """The text with everything that looks like a key or a password replaced by `***`."""
    for rule, instead in _SECRETS:
        text = rule.sub(instead, text)
    return text


def redacted_value(value: Any) -> Any:
    """The same for the value of a setting."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, tuple | list):
        return type(value)(redacted_value(item) for item in value)
    return value


# JSON that a stranger may have written.


def parse_json(text: str | bytes) -> Any:
    """What a text holds; whatever is wrong with it is a ValueError, also that it is nested without end."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested without end") from None


# An escape that is half of a pair, unless its other half is beside it.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_document(text: str) -> Any:
    """The same of a document whose texts are printed and written again, so all of them must be characters."""
    found = parse_json(text)
    if _SURROGATE.search(text):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text in it has half a surrogate pair, which is no character") from None
    return found


# The place where processes meet.


def meeting_point(url: str) -> tuple[str, int] | None:
    """`tcp://host:1234` → (host, 1234), or None if it does not look so."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    if not url.startswith("tcp://") or not host or not (port.isascii() and port.isdigit()):
        return None
    # The brackets around an IPv6 address belong to the URL, not to the address.
    return (host.strip("[]"), int(port)) if 1 <= int(port) <= 65535 else None


# Divisibility, put into the words an error message needs.


def divisors(number: int) -> list[int]:
    """All positive divisors, smallest first."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def either(choices: list[int], limit: int = 12) -> str:
    """`[1, 2, 3]` becomes `1, 2 or 3`; a long list keeps its ends."""
    if len(choices) > limit:
        shown = [*map(str, choices[: limit - 2]), "...", str(choices[-1])]
    else:
        shown = [str(c) for c in choices]
    if len(shown) == 1:
        return shown[0]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"
