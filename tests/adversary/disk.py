"""Computes from the journal of a run what a power cut leaves on the disk.

A call changes the page cache first. What is on the disk at the cut depends on fsync, and beyond that on the
file system: four models span the behaviour of real ones.
"""

import enum
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.adversary.shim import Op, Record


class Model(enum.Enum):
    """How much of the unsynced changes survives a power cut."""

    STRICT = "only what was synced"
    ENTRIES = "every name, no data"
    HALF = "every name, half of the data"
    ZEROS = "every name and length, zeros for data"


@dataclass
class File:
    """`changes` since the last sync: (offset, data) of a write, (length, None) of a truncation."""

    synced: bytes = b""
    changes: list[tuple[int, bytes | None]] = field(default_factory=list)
    syncs: int = 0

    def sync(self) -> None:
        self.synced = self.content()
        self.changes.clear()
        self.syncs += 1

    def mark(self, model: Model) -> tuple[int, ...]:
        """Returns a key that is equal for two moments with equal contents after a cut."""
        if model is Model.STRICT:
            return id(self), self.syncs
        kept = sum(data is None for _, data in self.changes) if model is Model.ENTRIES else len(self.changes)
        return id(self), self.syncs, kept

    def content(self) -> bytes:
        return self._after(self.changes)

    def _after(self, changes: Sequence[tuple[int, bytes | None]]) -> bytes:
        found = bytearray(self.synced)
        for at, data in changes:
            if data is None:
                found = found[:at] + bytes(max(0, at - len(found)))
            else:
                found += bytes(max(0, at - len(found)))
                found[at : at + len(data)] = data
        return bytes(found)

    def survives(self, model: Model) -> bytes:
        if model is Model.STRICT:
            return self.synced
        if model is Model.ZEROS:
            return self._after(
                [(at, data if data is None else bytes(len(data))) for at, data in self.changes]
            )
        room = 0
        if model is Model.HALF:
            room = sum(len(data) for _, data in self.changes if data is not None) // 2
        kept: list[tuple[int, bytes | None]] = []
        for at, data in self.changes:
            if data is None:
                kept.append((at, None))
            elif room > 0:
                kept.append((at, data[:room]))
                room -= len(data)
        return self._after(kept)


@dataclass
class Folder:
    entries: "dict[str, File | Folder | str]" = field(default_factory=dict)
    synced: "dict[str, File | Folder | str]" = field(default_factory=dict)

    def survives(self, model: Model) -> "dict[str, File | Folder | str]":
        return self.synced if model is Model.STRICT else self.entries


class Disk:
    """The folder `root` while a journal is replayed; its earlier contents count as synced."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, Folder()
        self._inodes: dict[int, File] = {}
        self._played = 0

    def play(self, records: Sequence[Record], until: int) -> None:
        """Replays the calls up to number `until` that were not replayed before."""
        while self._played < len(records) and records[self._played].number <= until:
            self._do(records[self._played])
            self._played += 1

    def _do(self, record: Record) -> None:
        if record.op is Op.OUTPUT:
            return
        if record.op is Op.UNKNOWN:
            raise ValueError(f"no model of a call on {record.path}")
        if record.op is Op.OPEN:
            if record.created:
                self._inodes[record.inode] = File()
                self._put(record.path, self._inodes[record.inode])
            elif record.emptied:
                self._inodes[record.inode].changes.append((0, None))
        elif record.op is Op.WRITE:
            self._inodes[record.inode].changes.append((record.offset, record.data))
        elif record.op is Op.TRUNCATE:
            self._inodes[record.inode].changes.append((record.offset, None))
        elif record.op is Op.FSYNC:
            if record.inode in self._inodes and not self._is_folder(record.path):
                self._inodes[record.inode].sync()
            else:
                folder = self._folder(record.path)
                folder.synced = dict(folder.entries)
        elif record.op is Op.RENAME:
            self._put(record.other, self._take(record.path))
        elif record.op in (Op.UNLINK, Op.RMDIR):
            self._take(record.path)
        elif record.op is Op.MKDIR:
            self._put(record.path, Folder())
        elif record.op is Op.LINK:
            parent, name = os.path.split(record.path)
            self._put(record.other, self._folder(parent).entries[name])
        elif record.op is Op.SYMLINK:
            self._put(record.other, record.path)

    def _folder(self, path: str) -> Folder:
        found: File | Folder | str = self.top
        for part in Path(path).relative_to(self.root).parts:
            assert isinstance(found, Folder)
            found = found.entries[part]
        assert isinstance(found, Folder), path
        return found

    def _is_folder(self, path: str) -> bool:
        try:
            return self._folder(path) is not None
        except (AssertionError, KeyError):
            return False

    def _put(self, path: str, what: "File | Folder | str") -> None:
        parent, name = os.path.split(path)
        self._folder(parent).entries[name] = what

    def _take(self, path: str) -> "File | Folder | str":
        parent, name = os.path.split(path)
        return self._folder(parent).entries.pop(name)

    def _survivors(self, model: Model | None) -> "Iterator[tuple[str, File | Folder]]":
        """Yields every file and folder that a cut now would leave; without a model, what programs saw.

        Symlinks are left out.
        """

        def walk(folder: Folder, prefix: str) -> "Iterator[tuple[str, File | Folder]]":
            entries = folder.entries if model is None else folder.survives(model)
            for name, what in sorted(entries.items()):
                if not isinstance(what, str):
                    yield f"{prefix}{name}", what
                if isinstance(what, Folder):
                    yield from walk(what, f"{prefix}{name}/")

        return walk(self.top, "")

    def files(self, model: Model | None) -> dict[str, bytes | None]:
        """Returns contents by path, None for a folder."""

        def content(what: File | Folder) -> bytes | None:
            if isinstance(what, Folder):
                return None
            return what.content() if model is None else what.survives(model)

        return {path: content(what) for path, what in self._survivors(model)}

    def mark(self, model: Model) -> tuple[object, ...]:
        """Returns a key that is equal for two moments with equal disks after a cut; reads no contents."""
        return tuple(
            (path, None if isinstance(what, Folder) else what.mark(model))
            for path, what in self._survivors(model)
        )


def write_disk(files: dict[str, bytes | None], target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = target / name
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
