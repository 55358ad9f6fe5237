"""Temporary and free file names, and atomic folders.

Single files are tested in tests/data/test_leftovers.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pentatron.files import (
    atomic_folder,
    free_name,
    hidden_name,
    hidden_names,
    next_numbered_name,
    remove_leftover_folders,
    rename,
    shared_suffix,
    temporary_suffix,
    write_new_synced,
)


def test_free_names_pass_over_broken_links(tmp_path: Path) -> None:
    assert free_name(tmp_path / "a") == tmp_path / "a"
    (tmp_path / "a").touch()
    (tmp_path / "a-2").symlink_to("nowhere")
    assert free_name(tmp_path / "a") == tmp_path / "a-3"
    assert next_numbered_name(tmp_path / "a", ".") == tmp_path / "a.1"
    (tmp_path / "a.1").mkdir()
    (tmp_path / "a.2").symlink_to("nowhere")
    assert next_numbered_name(tmp_path / "a", ".") == tmp_path / "a.3"
    assert next_numbered_name(tmp_path / "a", ".", ".jsonl") == tmp_path / "a.1.jsonl"


def test_temporary_names_are_recognised(tmp_path: Path) -> None:
    assert temporary_suffix() == f".{os.getpid()}.tmp"
    assert re.fullmatch(r"\.[0-9a-f]{16}\.tmp", shared_suffix()) and shared_suffix() != shared_suffix()
    names = [hidden_name(tmp_path / "a"), hidden_name(tmp_path / "a")]
    for path in (*names, tmp_path / ".a.1234567", tmp_path / ".ab.12345678", tmp_path / "a.12345678"):
        path.touch()
    assert sorted(hidden_names(tmp_path / "a")) == sorted(names)


def test_a_new_file_replaces_nothing(tmp_path: Path) -> None:
    write_new_synced(tmp_path / "a", "é\n")
    assert (tmp_path / "a").read_bytes() == "é\n".encode()
    with pytest.raises(FileExistsError):
        write_new_synced(tmp_path / "a", "other")
    write_new_synced(tmp_path / "b", "other")
    rename(tmp_path / "b", tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "other"


def test_a_folder_is_complete_or_not_there(tmp_path: Path) -> None:
    wanted = tmp_path / "out"
    with atomic_folder(wanted) as folder:
        assert hidden_names(wanted) == [folder] and not wanted.exists()
        (folder / "file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "other") as folder:
        (folder / "file").touch()
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(OSError, match="not empty"), atomic_folder(wanted):
        pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "out"]


def test_folders_of_killed_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    wanted = tmp_path / "out"
    left = hidden_name(wanted)
    (left / "inner").mkdir(parents=True)
    beside = hidden_name(tmp_path / "other")
    beside.mkdir()
    program = (
        "import sys; from pathlib import Path; from pentatron.files import remove_leftover_folders; "
        "remove_leftover_folders(Path(sys.argv[1]))"
    )
    with atomic_folder(wanted) as folder:
        subprocess.run([sys.executable, "-c", program, wanted], check=True)
        assert folder.is_dir() and not left.exists() and beside.is_dir()
    remove_leftover_folders(wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([beside.name, "out"])
