"""Python values as bytes and back, for exchanges between ranks. Unlike `pickle`, decoding calls nothing that the sender names.

The bytes are JSON. What JSON has no form for is an object with one key, `~`, and a pair of its kind and its content. A dataclass travels
if it is declared with `sendable`: its name is looked up among the declared ones, and no module is imported.

With the key of a job, a message carries an HMAC of its content and of the rank that sent it.
"""

import base64
import dataclasses
import hmac
import json
import operator
import struct
from collections.abc import Callable, Collection, Iterable
from pathlib import Path, PurePath
from typing import Any, TypeVar

C = TypeVar("C", bound=type)

_TAG = "~"
_PLAIN = frozenset((str, int, float, bool, type(None)))
_TEXT = frozenset((str,))
# By the name that is sent: the class, and the names of its fields.
_DECLARED: dict[str, tuple[type, tuple[str, ...]]] = {}
_NAMES: dict[type, tuple[str, Callable[[Any], Any]]] = {}
_LENGTH = struct.Struct("<Q")
_MAC_BYTES = 32
# What a rank announces is allocated before it arrives. No manifest comes near this.
_LARGEST = 2**32


class ForgedMessage(Exception):
    """A message is not one of this job's, or not one at all."""


def sendable(declared: C) -> C:
    """Lets a dataclass of these values travel between ranks. It is made by its constructor, as anywhere else."""
    fields = dataclasses.fields(declared)
    assert all(field.init for field in fields), "every field must be an argument of the constructor"
    names = tuple(field.name for field in fields)
    name = f"{declared.__module__.removeprefix('pentatron.')}.{declared.__qualname__}"
    _DECLARED[name] = declared, names
    # A second name, so that one field alone gives a tuple too.
    _NAMES[declared] = name, operator.attrgetter(*names, "__class__")
    return declared


def encode(value: Any) -> bytes:
    """Raises TypeError for a value that could not be decoded as what it is."""
    return json.dumps(_encoded(value), separators=(",", ":"), check_circular=False).encode()


def decode(data: bytes | memoryview) -> Any:
    """Raises ForgedMessage for what `encode` does not write."""
    try:
        return json.loads(bytes(data), object_hook=_decoded)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ForgedMessage(f"it cannot be decoded ({type(error).__name__}: {error})") from None


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return _all_encoded(value)
    if kind is tuple:
        return {_TAG: ("tuple", value if _PLAIN.issuperset(map(type, value)) else _all_encoded(value))}
    if kind in _NAMES:
        name, contents = _NAMES[kind]
        return {_TAG: (name, _all_encoded(contents(value)[:-1]))}
    if kind is dict:
        if _TAG not in value and _TEXT.issuperset(map(type, value)):
            return dict(zip(value, _all_encoded(value.values())))
        return {_TAG: ("dict", list(zip(_all_encoded(value), _all_encoded(value.values()))))}
    if kind is set or kind is frozenset:
        return {_TAG: (kind.__name__, _all_encoded(value))}
    if isinstance(value, PurePath):
        return {_TAG: ["path", str(value)]}
    if kind is bytes:
        return {_TAG: ["bytes", base64.b85encode(value).decode()]}
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks; convert it to plain values, or declare its class "
        f"with pentatron.parallel.encoding.sendable"
    )


def _all_encoded(values: Collection[Any]) -> Iterable[Any]:
    """Plain values alone, as of a shape, are taken by JSON's encoder as they are."""
    return [item if type(item) in _PLAIN else _encoded(item) for item in values]


_KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "set": set,
    "frozenset": frozenset,
    "path": Path,
    "bytes": base64.b85decode,
}


def _decoded(found: dict[str, Any]) -> Any:
    if _TAG not in found:
        return found
    if len(found) > 1:
        raise ValueError("a key is reserved")
    kind, content = found[_TAG]
    if kind in _KINDS:
        return _KINDS[kind](content)
    declared, fields = _DECLARED[kind]
    return declared(**dict(zip(fields, content, strict=True)))


def sealed(message: bytes, key: bytes | None, sender: int, room: int) -> tuple[bytes, bytes]:
    """A message as a block of `room` bytes, which says how long it is, and what did not fit into it; each with an HMAC."""
    head, rest = message[: room - _LENGTH.size - _MAC_BYTES], message[room - _LENGTH.size - _MAC_BYTES :]
    said = _LENGTH.pack(len(message)) + head
    first = _mac(key, b"head", sender, said) + said
    return first.ljust(room, b"\0"), _mac(key, b"rest", sender, said, rest) + rest if rest else b""


def length_of_rest(first: memoryview, key: bytes | None, sender: int) -> int:
    """How many bytes follow the block; 0 if it holds the whole message. Raises ForgedMessage if its HMAC is wrong."""
    said = first[_MAC_BYTES:]
    (length,) = _LENGTH.unpack_from(said)
    room = len(said) - _LENGTH.size
    if length < room:
        said = said[: _LENGTH.size + length]
    _require(_mac(key, b"head", sender, said), first[:_MAC_BYTES])
    if length > _LARGEST:
        raise ForgedMessage(f"it announces {length} bytes")
    return length - room + _MAC_BYTES if length > room else 0


def opened(first: memoryview, rest: memoryview, key: bytes | None, sender: int) -> Any:
    """The value of a message whose block has passed `length_of_rest`; `rest` is what followed it."""
    said = first[_MAC_BYTES:]
    (length,) = _LENGTH.unpack_from(said)
    if not rest:
        return decode(said[_LENGTH.size : _LENGTH.size + length])
    _require(_mac(key, b"rest", sender, said, rest[_MAC_BYTES:]), rest[:_MAC_BYTES])
    return decode(b"".join((said[_LENGTH.size :], rest[_MAC_BYTES:])))


def _mac(key: bytes | None, part: bytes, sender: int, *content: bytes | memoryview) -> bytes:
    if key is None:
        return bytes(_MAC_BYTES)
    return hmac.digest(key, b"".join((part, _LENGTH.pack(sender), *content)), "sha256")


def _require(expected: bytes, found: Iterable[int]) -> None:
    if not hmac.compare_digest(expected, bytes(found)):
        raise ForgedMessage("it does not carry the secret of this job")
