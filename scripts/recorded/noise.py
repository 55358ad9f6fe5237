"""Removes what differs between recordings of the same code: paths, times, rates, memory in use."""

import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STAMP = re.compile(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?")
_NUMBER = r" *[\d,.]+(?:e[-+]?\d+)?"
_TIMED = [
    (re.compile(rf"{_NUMBER} (tokens|samples|texts|documents|MB|GB)/s"), r" N \1/s"),
    (re.compile(rf"{_NUMBER} (T|G)FLOP(/s)?"), r" N \1FLOP\2"),
    (re.compile(rf"{_NUMBER} (GiB|MiB|KiB) (of [\d.,]+ GiB )?free"), " N free"),
    (re.compile(rf"(tokens/s|memory) {_NUMBER} (GiB|MiB|KiB)\b"), r"\1 N bytes"),
    (re.compile(r"(tokens/s|memory \(MiB\)|resident|iteration \(ms\)|\(seconds\)): +[\d.]+"), r"\1: N"),
    # Timers of the log: the times of the fastest and of the slowest rank.
    (re.compile(r": \([\d.]+, [\d.]+\)$", re.MULTILINE), ": (N, N)"),
    (re.compile(r"\b(left|saved|in|after|took) +\d+:\d\d(:\d\d)?"), r"\1 T"),
    (re.compile(rf"{_NUMBER} (ms|s|seconds|minutes)\b"), " N s"),
    # The ranks of `pentatron monitor`.
    (re.compile(r"communication \d+% of a step.*"), "communication N"),
    (re.compile(r"^( +\d+ +)█.*$", re.MULTILINE), r"\1busy"),
    (re.compile(r"\bpid \d+"), "pid N"),
]
_MASKED = re.compile(
    r"(^|_)(seconds|second|time|since|pid|host|memory_bytes)$|per_second|^token$|^teraflops_|^memory_|^(busy|waiting)"
)


class Noise:
    """Removes noise from text.

    `places` maps a placeholder to the folder that it replaces.
    """

    def __init__(self, places: Mapping[str, Path | str]) -> None:
        found = {str(path): word for word, path in places.items()}
        found |= {str(Path(path).resolve()): word for word, path in places.items()}
        # The longest path first: one may lie inside another.
        self._places = sorted(found.items(), key=lambda pair: -len(pair[0]))
        self._host = socket.gethostname()

    def remove(self, text: str, kind: str) -> str:
        """Returns the text without paths, host name and dates, and what else `kind` demands.

        `kind`: "exact" for outputs without times, "times", or "numbers" for outputs in which all numbers
        vary.
        """
        for path, word in self._places:
            text = text.replace(path, word)
        text = re.sub(rf"\b{re.escape(self._host)}\b", "HOST", text) if len(self._host) > 3 else text
        text = _STAMP.sub("DATE", text)
        if kind == "exact":
            return text
        if (data := _as_json(text)) is not None:
            text = json.dumps(without_times(data), indent=1, ensure_ascii=False)
        for pattern, instead in _TIMED:
            text = pattern.sub(instead, text)
        return re.sub(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?", "N", text) if kind == "numbers" else text


def without_times(data: Any, is_masked: bool = False) -> Any:
    """Replaces values by "..." if their key names a time, a rate or memory in use."""
    if isinstance(data, dict):
        return {
            key: without_times(value, is_masked or bool(_MASKED.search(key))) for key, value in data.items()
        }
    if isinstance(data, list):
        return [without_times(item, is_masked) for item in data]
    return "..." if is_masked and data is not None else data


def _as_json(text: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None
