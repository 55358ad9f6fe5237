"""The commit protocol: a step is complete or not there, and damage is found and named."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pentatron.checkpoint.load import load_into
from pentatron.checkpoint.store import CheckpointStore
from pentatron.config.errors import UserError
from pentatron.parallel.collectives import Group
from tests.harness import distributed

ALONE = Group(0, 1)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "weights/a": torch.full((3, 4), value),
        "weights/b": torch.full((5,), value, dtype=torch.bfloat16),
        "exp_avg/a": torch.full((3, 4), -value),
        "scalar": torch.tensor(value, dtype=torch.float64),
        "empty": torch.zeros(0, 7),
    }


def save(store: CheckpointStore, step: int, group: Group = ALONE, **own: torch.Tensor) -> Path:
    return store.save(step, tensors(float(step)), own, {"step": step}, {"model": {"n": 1}}, group)


def newest(store: CheckpointStore, verify: bool = True) -> tuple[int | None, list[str]]:
    found, complaints = store.newest_valid(verify, set_aside=True)
    return (found.manifest.step if found else None), complaints


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "new" / "folder", keep=None)
    save(store, 7, rng=torch.arange(4, dtype=torch.uint8))
    found, complaints = store.newest_valid(verify=True, set_aside=True)
    assert found is not None and not complaints
    assert found.manifest.run_state == {"step": 7} and found.manifest.config == {"model": {"n": 1}}
    targets = {name: torch.empty_like(t) for name, t in tensors(0.0).items()}
    load_into(found.folder, found.manifest, targets)
    assert all(torch.equal(targets[name], t) for name, t in tensors(7).items())
    assert (store.folder / "latest").read_text() == "step-00000007\n"


def test_the_files_are_plain_safetensors(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path, keep=None), 3)
    loaded = load_file(folder / "rank-00000.safetensors")
    assert set(loaded) == set(tensors(3))
    assert all(torch.equal(loaded[name], t) for name, t in tensors(3).items())


@distributed(world=3)
def test_every_rank_writes_its_share(tmp_path: Path) -> None:
    rank = dist.get_rank()
    group = Group(rank, 3, dist.group.WORLD)
    save(CheckpointStore(tmp_path, keep=None), 5, group, **{f"own/{rank}": torch.tensor([rank])})
    dist.barrier()
    found, _ = CheckpointStore(tmp_path, keep=None).newest_valid(verify=True, set_aside=True)
    assert found is not None and set(found.manifest.files) == {f"rank-0000{r}.safetensors" for r in range(3)}
    targets = {name: torch.empty_like(t) for name, t in tensors(0.0).items()}
    targets |= {f"own/{r}": torch.zeros(1, dtype=torch.int64) for r in range(3)}
    load_into(found.folder, found.manifest, targets)
    assert [int(targets[f"own/{r}"]) for r in range(3)] == [0, 1, 2]
    assert torch.equal(targets["weights/a"], tensors(5)["weights/a"])


@distributed(world=2)
def test_a_rank_that_cannot_write_stops_all_and_leaves_the_old_step(tmp_path: Path) -> None:
    rank = dist.get_rank()
    group = Group(rank, 2, dist.group.WORLD)
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1, group)
    dist.barrier()
    if rank == 1:
        import pentatron.checkpoint.store as module

        def full_disk(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        module.write_tensors = full_disk
    with pytest.raises(UserError, match=r"step 2 could not be saved.*rank 1: No space left on device"):
        save(store, 2, group)
    dist.barrier()
    assert newest(store) == (1, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_an_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="could not be saved"):
        save(CheckpointStore(tmp_path / "file", keep=None), 1)


def test_old_steps_go_and_the_newest_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10, 9):
        save(store, step)
    assert [p.name for p in store.steps()] == ["step-00000009", "step-00000010"]
    keep_all = CheckpointStore(tmp_path / "all", keep=None)
    for step in range(4):
        save(keep_all, step)
    assert len(keep_all.steps()) == 4


def test_the_same_step_can_be_saved_again_and_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 4)
    for value in (44.0, 45.0, 46.0):
        store.save(4, tensors(value), {}, {"step": 4}, {}, ALONE)
        found, _ = store.newest_valid(verify=True, set_aside=True)
        assert found is not None
        target = torch.empty(3, 4)
        load_into(found.folder, found.manifest, {"weights/a": target})
        assert target[0, 0] == value
        assert store.steps() == [found.folder], "what it replaces is gone"


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DATA = "rank-00000.safetensors"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Alters a manifest as someone who knows how to sign it."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["sha256"]
    change(content)
    signed = {**content, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(signed))


DAMAGE = {
    "payload bit": lambda d: flip_bit(d / DATA, -3),
    "header bit": lambda d: flip_bit(d / DATA, 20),
    "truncated by one": lambda d: os.truncate(d / DATA, (d / DATA).stat().st_size - 1),
    "truncated to half": lambda d: os.truncate(d / DATA, (d / DATA).stat().st_size // 2),
    "emptied": lambda d: os.truncate(d / DATA, 0),
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
    rewrite(save(store, 1), lambda m: m.update(version=2))
    with pytest.raises(UserError, match=r"format version 2, this program knows 1"):
        newest(store)
    assert [p.name for p in store.steps()] == ["step-00000001"]


def test_a_mere_reader_renames_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)
    DAMAGE["payload bit"](save(store, 2))
    found, complaints = store.newest_valid(verify=True, set_aside=False)
    assert found is not None and found.manifest.step == 1 and len(complaints) == 1
    assert len(store.steps()) == 2 and store.damaged() == []


def test_the_step_just_saved_is_never_removed(tmp_path: Path) -> None:
    for step in (6, 8, 10):
        save(CheckpointStore(tmp_path, keep=None), step)
    save(CheckpointStore(tmp_path, keep=2), 4)
    assert {p.name for p in tmp_path.glob("step-*")} == {"step-00000004", "step-00000008", "step-00000010"}


def test_nothing_there_is_no_error(tmp_path: Path) -> None:
    assert newest(CheckpointStore(tmp_path / "none", keep=None)) == (None, [])


def test_wrong_shape_and_missing_tensor_are_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)
    found, _ = store.newest_valid(verify=True, set_aside=True)
    assert found is not None
    with pytest.raises(UserError, match=r"weights/a as \[3, 4\], this model wants \[4, 4\]"):
        load_into(found.folder, found.manifest, {"weights/a": torch.empty(4, 4)})
    with pytest.raises(UserError, match="holds weights/a as float32, this run keeps it as bfloat16"):
        load_into(found.folder, found.manifest, {"weights/a": torch.empty(3, 4, dtype=torch.bfloat16)})
    with pytest.raises(UserError, match="lacks 1 tensors of this model, the first being weights/z"):
        load_into(found.folder, found.manifest, {"weights/z": torch.empty(1)})


KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    import tests.checkpoint.test_store as t
    import pentatron.checkpoint.store as module

    folder, where = Path(sys.argv[1]), sys.argv[2]
    store = t.CheckpointStore(folder, keep=None)
    step = 1 if where.startswith("again") else 2
    where = where.removeprefix("again ")
    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "in a shard":
        write = module.write_tensors
        def partly(path, tensors):
            path.write_bytes(b"half")
            die()
        module.write_tensors = partly
    elif where == "before manifest":
        module._write_text = die
    elif where == "before rename":
        Path.rename = die
    elif where == "before pointer":
        Path.replace = die
    t.save(store, step)
    """
)


@pytest.mark.parametrize(
    ("where", "survives"),
    [
        ("in a shard", 1),
        ("before manifest", 1),
        ("before rename", 1),
        ("before pointer", 2),
        ("again before rename", 1),
        ("again before pointer", 1),
    ],
)
def test_a_kill_in_the_middle_of_a_save_leaves_a_whole_step(
    tmp_path: Path, where: str, survives: int
) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), where], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert newest(store) == (survives, [])
    save(store, 3)
    assert newest(store) == (3, [])
    assert not list(tmp_path.glob(".step-*")), "what the killed save left behind is cleared away"


def test_the_manifest_is_json_without_surprises(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path, keep=None), 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["tensors"]["weights/a"] == {
        "dtype": "float32",
        "shape": [3, 4],
        "pieces": [{"file": DATA, "start": [0, 0], "shape": [3, 4]}],
    }
    assert manifest["files"][DATA]["bytes"] == (folder / DATA).stat().st_size
