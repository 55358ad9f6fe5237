"""Hostile mutations of JSON documents, one leaf or container at a time, in an order given by a seed.

`mutations` yields a label and a mutated copy for each change. The caller writes it, signs it if the format
has a checksum, and reads it as a command would.
"""

import copy
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# A key of an object, or an index of a list.
Key = str | int
Place = tuple[Key, ...]

# Values that no honest writer puts in place of a leaf: other types, numbers beyond every machine, texts that
# steer a terminal or escape a folder.
HOSTILE_VALUES: Mapping[str, Any] = {
    "null": None,
    "true": True,
    "minus one": -1,
    "zero": 0,
    "one": 1,
    "a half": 0.5,
    "1e9": 10**9,
    "4e9": 4 * 10**9,
    "1e15": 10**15,
    "1e30": 10**30,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "empty text": "",
    "digits": "7",
    "a path": "../../../../etc/passwd",
    "an escape sequence": "\x1b[2J\x00\n",
    "half a surrogate pair": "\ud800",
    "a long text": "x" * 10_000,
    "empty list": [],
    "nested list": [[[]]],
    "empty object": {},
    "an object": {"__class__": "os.system", "a": [None]},
}


def leaves(document: Any, prefix: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yields every scalar and every empty container of a document with its path."""
    for path, value in nodes(document, prefix):
        if not (isinstance(value, dict | list) and value):
            yield path, value


def nodes(document: Any, prefix: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yields every value of a document with its path, a container before its contents; not the root."""
    if isinstance(document, dict):
        entries: Any = document.items()
    elif isinstance(document, list):
        entries = enumerate(document)
    else:
        return
    for key, value in entries:
        path = (*prefix, key)
        yield path, value
        yield from nodes(value, path)


def mutations(
    document: Any,
    rng: random.Random,
    *,
    values: Mapping[str, Any] = HOSTILE_VALUES,
    under: Sequence[Place] = ((),),
    containers: bool = True,
    removals: bool = True,
    limit: int | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yields (label, mutated copy) for every path and hostile value, shuffled; at most `limit` of them.

    `under` restricts the paths to those below the given keys. `containers`: whole objects and lists are
    replaced too. `removals`: each path is also removed once, and each entry of a list repeated once.
    """
    chosen = [
        (path, value)
        for path, value in nodes(document)
        if any(path[: len(start)] == tuple(start) and len(path) > len(start) for start in under)
        and (containers or not (isinstance(value, dict | list) and value))
    ]
    plans: list[tuple[str, Place, Callable[[Any, Key], None]]] = []
    for path, found in chosen:
        for name, hostile in values.items():
            if type(hostile) is type(found) and hostile == found:
                continue
            plans.append((f"{written(path)} = {name}", path, _replacing(hostile)))
        if removals:
            plans.append((f"{written(path)} left out", path, _remove))
            if isinstance(path[-1], int):
                plans.append((f"{written(path)} repeated", path, _repeat))
    rng.shuffle(plans)
    for label, path, change in itertools.islice(plans, limit):
        yield label, _changed(document, path, change)


def several(
    document: Any, rng: random.Random, changes: int, count: int, **options: Any
) -> Iterator[tuple[str, Any]]:
    """Yields `count` documents with `changes` mutations each, every one drawn after the one before."""
    for _ in range(count):
        mutated, labels = document, []
        for _ in range(changes):
            change = next(mutations(mutated, rng, **{**options, "limit": 1}), None)
            if change is not None:
                labels.append(change[0])
                mutated = change[1]
        yield " and ".join(labels), mutated


def written(path: Place) -> str:
    """Formats `("model", "sizes", 0)` as `model.sizes[0]`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")


def sign_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint manifest with the checksum of its content, as a forger would sign it."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return {**content, "sha256": digest}


def write_manifest(step: Path, manifest: Mapping[str, Any]) -> None:
    """Writes a signed manifest into the folder of a step."""
    (step / "manifest.json").write_text(json.dumps(sign_manifest(manifest)), encoding="utf-8")


def _changed(document: Any, path: Place, change: Callable[[Any, Key], None]) -> Any:
    changed = copy.deepcopy(document)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return changed


def _replacing(value: Any) -> Callable[[Any, Key], None]:
    def replace(holder: Any, key: Key) -> None:
        holder[key] = copy.deepcopy(value)

    return replace


def _remove(holder: Any, key: Key) -> None:
    del holder[key]


def _repeat(holder: Any, key: Key) -> None:
    holder.insert(key, copy.deepcopy(holder[key]))
