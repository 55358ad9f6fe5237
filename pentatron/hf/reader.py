"""A config.json with account kept of which keys were understood."""

import sys
from collections.abc import Mapping
from typing import Any

_WORDS = {
    int: "a whole number above 0 and below 2^63",
    float: "a number, 0 or more",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class Problem(ValueError):
    """One thing wrong with a config.json, as a sentence."""


class ConfigReader:
    """Reads keys one by one; what is still unread at the end was not understood."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self.config, self.where = config, where
        self.read: set[str] = set()

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key; the default, if it is absent or null."""
        self.read.add(key)
        value = self.config.get(key)
        if value is None:
            return default
        if not _is(value, kind):
            raise Problem(f"{self.where} has {key} {value!r:.200}, but it must be {_WORDS[kind]}")
        return float(value) if kind is float else value

    def one_of(self, keys: tuple[str, ...], kind: type, default: Any = None) -> Any:
        """Of several names of one thing."""
        found = {key: value for key in keys if (value := self.get(key, kind)) is not None}
        if len(set(map(str, found.values()))) > 1:
            both = ", ".join(f"{key} {value!r:.200}" for key, value in found.items())
            raise Problem(f"{self.where} has {both}, which must be equal; remove the wrong one")
        return next(iter(found.values()), default)

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuses any other value; null and absence are always right."""
        self.read.add(key)
        value = self.config.get(key)
        if value is not None and not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed
        ):
            only = f"only {', '.join(repr(one) for one in allowed)} is" if allowed else "no value of it is"
            raise Problem(f"{self.where} has {key} {value!r:.200}, but {only} supported")

    def unread(self) -> dict[str, Any]:
        return {key: value for key, value in self.config.items() if key not in self.read}


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and 0 <= value <= sys.float_info.max
    if kind is int:
        # Beyond that no library counts.
        return isinstance(value, int) and 0 < value < 2**63
    return isinstance(value, kind)
