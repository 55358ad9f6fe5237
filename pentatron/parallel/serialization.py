"""Serialization of Python objects for exchange between ranks, with authentication. Safer than `pickle`.

The format is JSON. A type that JSON lacks becomes an object with the single key `~` and a pair of type name
and content. Dataclasses must be registered with `sendable`: decoding looks their name up among the registered
ones, imports no module and calls no other code. With the key of a job, a message carries an HMAC of its
content and sender.
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
# By the name in the message: the class, and the names of its fields.
_DATACLASSES: dict[str, tuple[type, tuple[str, ...]]] = {}
_NAMES: dict[type, tuple[str, Callable[[Any], Any]]] = {}
_LENGTH = struct.Struct("<Q")
_MAC_BYTES = 32
# The announced length is allocated before the content arrives. No checkpoint manifest comes near this limit.
_MAX_BYTES = 2**32


class ForgedMessage(Exception):
    """Raised for a message that is malformed or does not belong to this job."""


def sendable(declared: C) -> C:
    """Class decorator: registers a dataclass with serializable fields for `encode` and `decode`."""
    fields = dataclasses.fields(declared)
    assert all(field.init for field in fields), "every field must be an argument of the constructor"
    names = tuple(field.name for field in fields)
    name = f"{declared.__module__.removeprefix('pentatron.')}.{declared.__qualname__}"
    _DATACLASSES[name] = declared, names
    # `attrgetter` returns a tuple only for two names or more, so `__class__` is added and dropped again.
    _NAMES[declared] = name, operator.attrgetter(*names, "__class__")
    return declared


def encode(value: Any) -> bytes:
    """Serializes a value. Raises TypeError for types that could not be decoded to an equal value."""
    return json.dumps(_encoded(value), separators=(",", ":"), check_circular=False).encode()


def decode(data: bytes | memoryview) -> Any:
    """Deserializes a value. Raises ForgedMessage for anything that `encode` does not write."""
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
    if kind in (tuple, set, frozenset):
        return {_TAG: (kind.__name__, _all_encoded(value))}
    if kind in _NAMES:
        name, contents = _NAMES[kind]
        return {_TAG: (name, _all_encoded(contents(value)[:-1]))}
    if kind is dict:
        if _TAG not in value and _TEXT.issuperset(map(type, value)):
            return dict(zip(value, _all_encoded(value.values())))
        return {_TAG: ("dict", list(zip(_all_encoded(value), _all_encoded(value.values()))))}
    if isinstance(value, PurePath):
        return {_TAG: ["path", str(value)]}
    if kind is bytes:
        return {_TAG: ["bytes", base64.b85encode(value).decode()]}
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks; convert it to plain values, or declare its class "
        f"with pentatron.parallel.serialization.sendable"
    )


def _all_encoded(values: Collection[Any]) -> Iterable[Any]:
    """Encodes the items.

    Plain ones, such as those of a shape, are left to JSON's encoder, which is faster.
    """
    return [item if type(item) in _PLAIN else _encoded(item) for item in values]


_KINDS: dict[str, Callable[[Any], Any]] = {kind.__name__: kind for kind in (tuple, dict, set, frozenset)}
_KINDS |= {"path": Path, "bytes": base64.b85decode}


def _decoded(value: dict[str, Any]) -> Any:
    if _TAG not in value:
        return value
    if len(value) > 1:
        raise ValueError("a key is reserved")
    kind, content = value[_TAG]
    if kind in _KINDS:
        return _KINDS[kind](content)
    declared, fields = _DATACLASSES[kind]
    return declared(**dict(zip(fields, content, strict=True)))


def sign(message: bytes, key: bytes | None, sender: int, room: int) -> tuple[bytes, bytes]:
    """Splits a message into a block of `room` bytes, with its length, and the rest; each with an HMAC."""
    head, rest = message[: room - _LENGTH.size - _MAC_BYTES], message[room - _LENGTH.size - _MAC_BYTES :]
    content = _LENGTH.pack(len(message)) + head
    first = _mac(key, b"head", sender, content) + content
    return first.ljust(room, b"\0"), _mac(key, b"rest", sender, content, rest) + rest if rest else b""


def length_of_rest(first: memoryview, key: bytes | None, sender: int) -> int:
    """Returns how many bytes follow the block, 0 if it holds the whole message.

    Raises ForgedMessage on a wrong HMAC.
    """
    content = first[_MAC_BYTES:]
    (length,) = _LENGTH.unpack_from(content)
    room = len(content) - _LENGTH.size
    if length < room:
        content = content[: _LENGTH.size + length]
    _require_equal_mac(_mac(key, b"head", sender, content), first[:_MAC_BYTES])
    if length > _MAX_BYTES:
        raise ForgedMessage(f"it announces {length} bytes")
    return length - room + _MAC_BYTES if length > room else 0


def verify_and_decode(first: memoryview, rest: memoryview, key: bytes | None, sender: int) -> Any:
    """Verifies and decodes a message whose block has passed `length_of_rest`; `rest` followed the block."""
    content = first[_MAC_BYTES:]
    (length,) = _LENGTH.unpack_from(content)
    if not rest:
        return decode(content[_LENGTH.size : _LENGTH.size + length])
    _require_equal_mac(_mac(key, b"rest", sender, content, rest[_MAC_BYTES:]), rest[:_MAC_BYTES])
    return decode(b"".join((content[_LENGTH.size :], rest[_MAC_BYTES:])))


def _mac(key: bytes | None, part: bytes, sender: int, *content: bytes | memoryview) -> bytes:
    if key is None:
        return bytes(_MAC_BYTES)
    return hmac.digest(key, b"".join((part, _LENGTH.pack(sender), *content)), "sha256")


def _require_equal_mac(expected: bytes, received: Iterable[int]) -> None:
    if not hmac.compare_digest(expected, bytes(received)):
        raise ForgedMessage("its HMAC does not match the secret of this job")
