"""Formatting for messages, removal of control characters and secrets, parsing of untrusted JSON.

Level 0: imports no other module of the package.
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
    """Returns the plural of a noun unless `number` is 1: `rank` or `ranks`, `process` or `processes`."""
    suffix = "es" if noun.endswith(("s", "x", "tch", "sh")) else "s"
    return noun if number == 1 else f"{noun}{suffix}"


def format_count(number: int, noun: str) -> str:
    """Formats a count with its noun: `1 file`, `2 files`, `1,024 files`."""
    return f"{number:,} {plural(number, noun)}"


def format_significant(number: float, digits: int = 3) -> str:
    """Formats a number in significant digits, large numbers without an exponent: `1.23`, `999`, `1000`."""
    text = f"{number:.{digits}g}"
    return f"{number:.0f}" if "e+" in text else text


def binary_size(count: float) -> str:
    """Formats bytes of memory or disk in three digits and binary units: `71.3 GiB`."""
    return _scaled(count, _BINARY, 3) or f"{count:.0f} B"


def decimal_size(count: float) -> str:
    """Formats bytes in decimal units, as disks and networks are measured: `1.25 GB`, `31.2 MB`, `4.1 kB`."""
    if count >= 1e9:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def decimal_rate(count: float, seconds: float) -> str:
    """Formats bytes per second: `1,234 MB/s`."""
    return f"{count / max(seconds, 1e-9) / 1e6:,.0f} MB/s"


def in_mib(count: float, spec: str = ",.0f") -> str:
    """Formats bytes as a number of MiB, for a column with a fixed unit. `spec` is a format specification."""
    return f"{count / 2**20:{spec}}"


def in_gib(count: float, spec: str) -> str:
    """Formats bytes as a number of GiB. `spec` is a format specification."""
    return f"{count / 2**30:{spec}}"


def format_abbreviated(number: float) -> str:
    """Formats a count in three digits: `1.5 M`, `82 k`, `999`."""
    return _scaled(number, _THOUSANDS, 3) or f"{number:.0f}"


def parameter_count(number: float) -> str:
    """Formats a number of parameters in four digits, in the units of model names: `8.03 B`, `494 M`."""
    return _scaled(number, _PARAMETERS, 4) or f"{number:.0f}"


def _scaled(number: float, units: Sequence[tuple[str, float]], digits: int) -> str:
    """Formats a number in its largest fitting unit; returns an empty string if it is below all units."""
    fits = (f"{format_significant(number / size, digits)} {unit}" for unit, size in units if number >= size)
    return next(fits, "")


def seconds_text(seconds: float) -> str:
    """Formats a short duration in three digits: `12.3 ms`, `4.56 s`."""
    if not seconds:
        return "0 s"
    return f"{format_significant(seconds * 1000)} ms" if seconds < 1 else f"{format_significant(seconds)} s"


def duration(seconds: float) -> str:
    """Formats a long duration as a clock: `2:05`, `1:02:05`."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes}:{remainder:02d}"


# --- control characters ---

# All control characters except line feed and tab, and the bidirectional control characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Escapes control characters (`\\x1b`), so that the text cannot control a terminal."""
    return _CONTROL.sub(lambda c: f"\\x{ord(c[0]):02x}" if c[0] < "\u0100" else f"\\u{ord(c[0]):04x}", text)


def one_line(text: str) -> str:
    """Escapes control characters, line feeds and tabs."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def printable_without_secrets(text: str) -> str:
    """Removes control characters and secrets from text for a terminal or log."""
    return redact(printable(text))


# --- secrets ---

REDACTED = "***"
_SECRET_NAMES = r"API_?KEY|ACCESS_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH_?TOKEN|ACCESS_?TOKEN"
_SECRETS = (
    # user:password@ or token@ in a URL.
    (re.compile(r"(?<=://)[^/\s@'\"]+(?=@)"), REDACTED),
    # WANDB_API_KEY=..., ?access_token=...; HF_TOKEN=... in capitals only: eos_token is not a secret.
    (re.compile(rf"(?i)\b([A-Z0-9_]*(?:{_SECRET_NAMES})[A-Z0-9_]*\s*[=:]\s*)(?!\*\*\*)[^\s'\"&,;]+"), rf"\1{REDACTED}"),
    (re.compile(r"\b([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*_TOKEN\s*=\s*)(?!\*\*\*)[^\s'\"&,;]+"), rf"\1{REDACTED}"),
    (re.compile(r"(?i)([?&](?:token|key|sig|signature)=)[^\s'\"&]+"), rf"\1{REDACTED}"),
    (re.compile(r"(?i)\b(Bearer\s+)[A-Za-z0-9._~+/-]{16,}"), rf"\1{REDACTED}"),
    # Keys with a known format.
    (re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16})\b"), REDACTED),
)  # fmt: skip


def redact(text: str) -> str:
    """Replaces everything that looks like a key or password by `***`."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def redact_value(value: Any) -> Any:
    """Applies `redact` to the value of a setting."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, tuple | list):
        return type(value)(redact_value(item) for item in value)
    return value


# --- JSON from untrusted files ---


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Every failure is a ValueError, including too deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# The escape of a surrogate, which is valid only as half of a pair.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_printable_json(text: str) -> Any:
    """Parses JSON whose strings are printed or written again.

    Also rejects unpaired surrogates, which UTF-8 cannot encode.
    """
    value = parse_json(text)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a string in it has half a surrogate pair, which is not a character") from None
    return value


# --- rendezvous ---


def parse_rendezvous_url(url: str) -> tuple[str, int] | None:
    """Parses a rendezvous URL: `tcp://host:1234` returns (host, 1234), anything else None."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    if not url.startswith("tcp://") or not host or not (port.isascii() and port.isdigit()):
        return None
    # The brackets around an IPv6 address belong to the URL, not to the address.
    return (host.strip("[]"), int(port)) if 1 <= int(port) <= 65535 else None


# --- divisibility ---


def divisors(number: int) -> list[int]:
    """Returns all positive divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def join_choices(choices: list[int], limit: int = 12) -> str:
    """Joins choices with `or`: `[1, 2, 3]` gives `1, 2 or 3`. Elides the middle of a long list."""
    *others, last = map(str, choices)
    if len(choices) > limit:
        others[limit - 2 :] = ["..."]
    return f"{', '.join(others)} or {last}" if others else last
