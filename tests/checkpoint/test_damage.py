"""Tests damaged steps: the damage is named, and the step before is used; other format versions."""

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
from pentatron.errors import UserError
from tests.checkpoint.steps import DATA, load, newest, save, tensors


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Alters a manifest and signs it again."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["sha256"]
    change(content)
    signed = {**content, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(signed))


def record_of(path: Path, name: str) -> dict[str, Any]:
    """Returns the record of a file that has one checksum of all its bytes."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    size = path.stat().st_size
    return {"name": name, "bytes": size, "sha256": digest, "block_bytes": 0, "block_sums": "sha256"}


def in_rows(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Stores weights/b in five pieces of one element, and alters their records in the manifest."""
    path = folder / DATA
    stored = load_file(path)
    values = stored.pop("weights/b")
    pieces = [{"file": DATA, "key": f"weights/b[{i}:{i + 1}]", "start": [i], "shape": [1]} for i in range(5)]
    save_file({**stored, **{p["key"]: values[i : i + 1].clone() for i, p in enumerate(pieces)}}, path)
    change(pieces)
    record = record_of(path, DATA)

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
    "no block size, well signed": lambda d: rewrite(d, lambda m: m["files"][DATA].pop("block_bytes")),
    "no kind of sum, well signed": lambda d: rewrite(d, lambda m: m["files"][DATA].pop("block_sums")),
    "another kind of sum, well signed": lambda d: rewrite(
        d, lambda m: m["files"][DATA].update(block_sums="sha256")
    ),
    "a piece without a key, well signed": lambda d: rewrite(
        d, lambda m: m["tensors"]["weights/a"]["pieces"][0].pop("key")
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


@pytest.mark.parametrize(("version", "other"), [(5, "a newer"), (3, "an older"), (1, "an older")])
def test_another_format_version_is_refused_but_not_set_aside(
    tmp_path: Path, version: int, other: str
) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    rewrite(save(store, 1), lambda m: m.update(version=version))
    with pytest.raises(
        UserError, match=rf"format version {version}, but this program supports version 4; use {other} "
    ):
        newest(store)
    assert [p.name for p in store.steps()] == ["step-00000001"]


def test_a_damaged_version_is_damage(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    path = save(store, 1) / "manifest.json"
    path.write_text(path.read_text().replace('"version": 4', '"version": 0'))
    assert newest(store)[0] is None


def test_a_mere_reader_renames_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)
    DAMAGE["payload bit"](save(store, 2))
    found, complaints = store.newest_valid(verify=True, set_aside=False)
    assert found is not None and found.manifest.step == 1 and len(complaints) == 1
    assert len(store.steps()) == 2 and store.damaged() == []
