"""Tests removal of temporary files of killed processes; those of running processes stay."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pentatron.data.indexed_writer import (
    ALL_PARTS,
    EncodedDocuments,
    IndexedDatasetWriter,
    PairInProgress,
    merge,
)
from pentatron.data.inspect import seal
from pentatron.files import atomic_write, remove_leftovers, write_file


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    with IndexedDatasetWriter(tmp_path / "source" / "pair", "uint16") as writer:
        writer.add_document(np.arange(10))
    return tmp_path / "source" / "pair"


def leave(folder: Path, *targets: str) -> None:
    """Creates a leftover as a killed process does."""
    folder.mkdir(exist_ok=True)
    for target in targets:
        (folder / f"{target}.4194304.tmp").write_bytes(b"half")


def temporary_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_next_start_removes_leftovers(pair: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    leave(folder, *(f"pair.{part}" for part in ALL_PARTS))
    (folder / "other.bin.4194304.tmp").touch()
    merge([pair], folder / "pair")
    assert temporary_files(folder) == ["other.bin.4194304.tmp"]
    # Leftovers are removed even if the result exists already and nothing is written.
    leave(folder, "pair.ends")
    with pytest.raises(Exception, match="exists already"):
        merge([pair], folder / "pair")
    assert temporary_files(folder) == ["other.bin.4194304.tmp"]
    leave(pair.parent, "pair.meta", "pair.bin")
    seal(pair)
    assert temporary_files(pair.parent) == ["pair.bin.4194304.tmp"], "the seal's own"


def test_files_that_another_process_is_writing_stay(pair: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    begun = PairInProgress(folder / "pair", "uint16", ".4194304.tmp")
    begun.append(EncodedDocuments(bytes(8), np.array([4], np.int32), np.array([1]), 0))
    begun.complete()
    before = sorted(temporary_files(folder))
    assert len(before) == len(ALL_PARTS)
    merge([pair], folder / "pair")
    assert sorted(temporary_files(folder)) == before
    begun.discard()
    assert temporary_files(folder) == []
    # A clean-up by another process also keeps a single file that this process is writing.
    program = f"from pathlib import Path; from pentatron.files import remove_leftovers; remove_leftovers(Path({str(folder / 'x')!r}))"
    with atomic_write(folder / "x") as file:
        file.write(b"whole")
        subprocess.run([sys.executable, "-c", program], check=True)
    assert (folder / "x").read_bytes() == b"whole" and temporary_files(folder) == []


def test_odd_entries_with_such_names_block_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.1.tmp")
    (tmp_path / "x.2.tmp").mkdir()
    (tmp_path / "x.3.tmp").symlink_to("kept")
    (tmp_path / "kept").touch()
    write_file(tmp_path / "x", b"content")
    remove_leftovers(tmp_path / "missing" / "x")
    assert (tmp_path / "x").read_bytes() == b"content" and (tmp_path / "kept").exists()


@pytest.mark.parametrize("fails_at", ["truncate", "close"])
def test_a_full_disk_leaves_nothing_behind(
    fails_at: str, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The constructor may fail half-way, and closing a file flushes its buffer."""
    opened = Path.open

    def open_full(path: Path, mode: str = "r", **given: object) -> object:
        file = opened(path, mode, **given)  # type: ignore[call-overload]
        return Full(file) if ".sums." in path.name and "w" in mode else file

    class Full:
        def __init__(self, file: object) -> None:
            self.file = file

        def __getattr__(self, name: str) -> object:
            if name == fails_at:
                if name == "close":
                    self.file.close()  # type: ignore[attr-defined]
                raise OSError(errno.ENOSPC, "full")
            return getattr(self.file, name)

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(OSError, match="full"):
        merge([pair], tmp_path / "out" / "pair")
    assert list((tmp_path / "out").iterdir()) == []
