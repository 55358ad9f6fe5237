"""Damage is found and named, and the step before is used; what an older version wrote is no damage."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pentatron.checkpoint.store import CheckpointStore
from pentatron.checkpoint.sums import SHA256, SUM_BLOCK_BYTES, sum_of_file
from pentatron.errors import UserError
from tests.checkpoint.steps import DATA, load, newest, save, tensors


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Alters a manifest as someone who knows how to sign it."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["sha256"]
    change(content)
    signed = {**content, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(signed))


def in_rows(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Stores weights/b in five pieces, one element each, and then alters what the manifest says of them."""
    path = folder / DATA
    stored = load_file(path)
    values = stored.pop("weights/b")
    pieces = [{"file": DATA, "key": f"weights/b[{i}:{i + 1}]", "start": [i], "shape": [1]} for i in range(5)]
    save_file({**stored, **{p["key"]: values[i : i + 1].clone() for i, p in enumerate(pieces)}}, path)
    change(pieces)
    record = {"name": DATA, "bytes": path.stat().st_size, "sha256": sum_of_file(path, 0, SHA256)}

    def alter(manifest: dict[str, Any]) -> None:
        manifest["files"][DATA] = record
        manifest["tensors"]["weights/b"]["pieces"] = pieces

    rewrite(folder, alter)


def swap(pieces: list[dict[str, Any]], field: str) -> None:
    pieces[1][field], pieces[3][field] = pieces[3][field], pieces[1][field]


DAMAGE = {
    "payload bit": lambda d: flip_bit(d / DATA, -3),
    "header bit": lambda d: flip_bit(d / DATA, 20),
    "truncated by one": lambda d: os.truncate(d / DATA, (d / DATA).stat().st_size - 1),
    "truncated to half": lambda d: os.truncate(d / DATA, (d / DATA).stat().st_size // 2),
    "emptied": lambda d: os.truncate(d / DATA, 0),
    "a file too many": lambda d: (d / "rank-00001.safetensors").write_bytes((d / DATA).read_bytes()),
    "missing file": lambda d: (d / DATA).unlink(),
    "missing manifest": lambda d: (d / "manifest.json").unlink(),
    "manifest cut": lambda d: os.truncate(d / "manifest.json", 100),
    "manifest of another program": lambda d: (d / "manifest.json").write_text(
        '{"format": "x", "version": 1}'
    ),
    "manifest without files": lambda d: (d / "manifest.json").write_text(
        '{"format": "pentatron-checkpoint", "version": 1}'
    ),
    "another step in the run state": lambda d: (d / "manifest.json").write_text(
        (d / "manifest.json").read_text().replace('"step": 2', '"step": 3')
    ),
    "no files listed": lambda d: rewrite(d, lambda m: m.update(files={})),
    "another step, well signed": lambda d: rewrite(d, lambda m: m.update(step=3)),
    "piece outside, well signed": lambda d: rewrite(
        d, lambda m: m["tensors"]["weights/a"]["pieces"][0].update(file=f"../step-00000001/{DATA}")
    ),
    "file outside, well signed": lambda d: rewrite(
        d, lambda m: m["files"][DATA].update(name=f"../step-00000001/{DATA}")
    ),
    "a gap, well signed": lambda d: in_rows(d, lambda pieces: pieces.pop(2)),
    "an overlap, well signed": lambda d: in_rows(d, lambda pieces: pieces.append(pieces[2])),
    "two starts swapped, well signed": lambda d: in_rows(d, lambda pieces: swap(pieces, "start")),
    "two keys swapped, well signed": lambda d: in_rows(d, lambda pieces: swap(pieces, "key")),
    "a start moved, well signed": lambda d: in_rows(d, lambda pieces: pieces[1].update(start=[2])),
    "a start outside, well signed": lambda d: in_rows(d, lambda pieces: pieces[4].update(start=[5])),
    "a start before, well signed": lambda d: in_rows(d, lambda pieces: pieces[0].update(start=[-1])),
    "no number, well signed": lambda d: in_rows(d, lambda pieces: pieces[0].update(start=["0"])),
    "two dimensions, well signed": lambda d: in_rows(d, lambda pieces: pieces[0].update(start=[0, 0])),
    "unknown type, well signed": lambda d: rewrite(
        d, lambda m: m["tensors"]["weights/a"].update(dtype="float31")
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_step_before_is_used(tmp_path: Path, kind: str) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)
    DAMAGE[kind](save(store, 2))
    step, complaints = newest(store)
    assert step == 1
    assert len(complaints) == 1 and "step-00000002" in complaints[0] and "set aside" in complaints[0]
    assert (tmp_path / "step-00000002.damaged").is_dir()
    assert newest(store) == (1, []), "a step set aside is not met again"


def test_a_tensor_in_pieces_is_no_damage(tmp_path: Path) -> None:
    """Control of the kinds of damage above: unaltered, such a step is loaded."""
    store = CheckpointStore(tmp_path, keep=None)
    in_rows(save(store, 2), lambda pieces: None)
    found, complaints = store.newest_valid(verify=True, set_aside=True)
    assert found is not None and not complaints
    assert torch.equal(load(found, "weights/b")["weights/b"], tensors(2)["weights/b"])


def test_a_swapped_file_of_another_step_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    first, second = save(store, 1), save(store, 2)
    (second / DATA).write_bytes((first / DATA).read_bytes())
    assert newest(store)[0] == 1


def test_without_verification_only_structure_is_checked(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    DAMAGE["payload bit"](save(store, 2))
    assert newest(store, verify=False) == (2, [])


def test_a_newer_format_is_refused_but_not_set_aside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    rewrite(save(store, 1), lambda m: m.update(version=5))
    with pytest.raises(UserError, match=r"format version 5, this program knows 4"):
        newest(store)
    assert [p.name for p in store.steps()] == ["step-00000001"]


def test_a_mere_reader_renames_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)
    DAMAGE["payload bit"](save(store, 2))
    found, complaints = store.newest_valid(verify=True, set_aside=False)
    assert found is not None and found.manifest.step == 1 and len(complaints) == 1
    assert len(store.steps()) == 2 and store.damaged() == []


def as_version_3(folder: Path) -> None:
    """The manifest as the third version wrote it: the sum of a file is that of SHA-256 of its blocks."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["version"] = 3
        for name, record in manifest["files"].items():
            del record["block_sums"]
            record["sha256"] = sum_of_file(folder / name, SUM_BLOCK_BYTES, SHA256)

    rewrite(folder, change)


def as_version_2(folder: Path) -> None:
    """The manifest as the second version wrote it: the sum of a file is that of all its bytes."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["version"] = 2
        for name, record in manifest["files"].items():
            del record["block_bytes"], record["block_sums"]
            record["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()

    rewrite(folder, change)


def as_version_1(folder: Path) -> None:
    """The manifest as the first version wrote it: every tensor in one piece, without a key."""
    as_version_2(folder)

    def change(manifest: dict[str, Any]) -> None:
        manifest["version"] = 1
        for record in manifest["tensors"].values():
            (piece,) = record["pieces"]
            del piece["key"]

    rewrite(folder, change)


@pytest.mark.parametrize("as_version", [as_version_1, as_version_2, as_version_3])
def test_earlier_versions_are_still_read(tmp_path: Path, as_version: Callable[[Path], None]) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    as_version(save(store, 2))
    found, complaints = store.newest_valid(verify=True, set_aside=True)
    assert found is not None and not complaints
    assert all(torch.equal(t, load(found, name)[name]) for name, t in tensors(2).items())


def test_the_first_version_knew_no_parts(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    folder = save(store, 2)
    as_version_1(folder)
    rewrite(folder, lambda m: m["tensors"]["weights/a"]["pieces"][0].update(shape=[2, 4]))
    assert newest(store)[0] is None
