"""Tests the commit protocol: a step is complete or does not exist."""

import json
import os
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import pentatron.checkpoint.format as parts_module
import pentatron.checkpoint.store as store_module
from pentatron.checkpoint.find import read_step
from pentatron.checkpoint.load import load_fragments
from pentatron.checkpoint.store import TRACKER, CheckpointStore
from pentatron.errors import FolderLost, UserError
from pentatron.files import rename
from pentatron.parallel.collectives import Group
from pentatron.parallel.sharding import Fragment
from tests.checkpoint.steps import ALONE, DATA, load, newest, save, share, tensors, whole
from tests.harness import RanksFailed, distributed, run_distributed


def test_saved_step_is_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "new" / "folder", keep=None)
    save(store, 7, rng=torch.arange(4, dtype=torch.uint8))
    found, complaints = store.newest_valid(verify=True, set_aside=True)
    assert found is not None and not complaints
    assert found.manifest.run_state == {"step": 7} and found.manifest.config == {"model": {"n": 1}}
    expected = {**tensors(7), "rng": torch.arange(4, dtype=torch.uint8)}
    loaded = load(found, *expected)
    assert all(torch.equal(loaded[name], t) and loaded[name].dtype == t.dtype for name, t in expected.items())
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
    loaded = load(found, *tensors(5), *(f"own/{r}" for r in range(3)))
    assert [int(loaded[f"own/{r}"]) for r in range(3)] == [0, 1, 2]
    assert all(torch.equal(loaded[name], t) for name, t in tensors(5).items())
    row = load_file(found.folder / f"rank-0000{rank}.safetensors")[f"weights/a[{rank}:{rank + 1},0:4]"]
    assert torch.equal(row, tensors(5)["weights/a"][rank : rank + 1])


@distributed(world=2)
def test_a_rank_without_fragments_writes_nothing(tmp_path: Path) -> None:
    group = Group(dist.get_rank(), 2, dist.group.WORLD)
    mine = [whole(name, t) for name, t in tensors(1).items()] if group.rank == 1 else []
    CheckpointStore(tmp_path, keep=None).save(1, mine, {}, {}, {}, group)
    found, _ = CheckpointStore(tmp_path, keep=None).newest_valid(verify=True, set_aside=False)
    assert found is not None and list(found.manifest.files) == ["rank-00001.safetensors"]
    assert torch.equal(load(found, "weights/a")["weights/a"], tensors(1)["weights/a"])


def rows(first: int, last: int, of: int = 6, dtype: torch.dtype = torch.float32) -> Fragment:
    return Fragment("weights/w", (of, 2), (first, 0), torch.zeros(last - first, 2, dtype=dtype))


WRONG = {
    "a gap": ([rows(0, 2)], [rows(3, 6)], r"element \[2, 0\] of \[6, 2\] is missing"),
    "a gap at the end": ([rows(0, 2)], [rows(2, 5)], r"element \[5, 0\] of \[6, 2\] is missing"),
    "an overlap": ([rows(0, 4)], [rows(3, 6)], r"element \[3, 0\] of \[6, 2\] is covered 2 times"),
    "the same twice": ([rows(0, 6)], [rows(0, 6)], r"element \[0, 0\] of \[6, 2\] is covered 2 times"),
    "as much as needed, not as it should": ([rows(0, 3)], [rows(1, 4)], r"element \[1, 0\] .* 2 times"),
    "outside": ([rows(0, 3)], [rows(3, 7)], r"lies outside \[6, 2\]"),
    "two types": ([rows(0, 3)], [rows(3, 6, dtype=torch.float64)], "float32 .* and float64"),
    "two shapes": ([rows(0, 3)], [rows(3, 5, of=5)], r"float32 \[6, 2\] in one part and float32 \[5, 2\]"),
    "twice in one rank": ([rows(0, 3)], [rows(3, 6), rows(3, 6)], r"rank 1: .*\[3:6,0:2\] is given twice"),
    "a type unknown to the format": (
        [rows(0, 3, dtype=torch.complex64)],
        [],
        "rank 0: weights/w is complex64, which a checkpoint cannot store",
    ),
    "other dimensions": (
        [Fragment("weights/w", (6, 2), (0,), torch.zeros(6))],
        [],
        r"has a part \[6\] at \[0\]",
    ),
}


@distributed(world=2)
def test_fragments_that_do_not_fit_together_are_not_committed(tmp_path: Path) -> None:
    group = Group(dist.get_rank(), 2, dist.group.WORLD)
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1, group)
    for kind, (first, second, message) in WRONG.items():
        with pytest.raises(ValueError, match=message):
            store.save(2, second if group.rank else first, {}, {}, {}, group)
        dist.barrier()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", TRACKER, "step-00000001"], kind
        dist.barrier()
    store.save(2, [rows(3, 6) if group.rank else rows(0, 3)], {}, {}, {}, group)
    assert newest(store) == (2, []), "control: what fits together is committed"


def test_a_name_may_not_be_used_for_two_things(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    with pytest.raises(ValueError, match="weights/w is given twice"):
        store.save(1, [rows(0, 6)], {"weights/w": torch.zeros(6, 2)}, {}, {}, ALONE)
    with pytest.raises(ValueError, match="not JSON serializable"):
        store.save(1, [rows(0, 6)], {}, {"step": torch.tensor(1)}, {}, ALONE)
    assert store.steps() == [] and list(tmp_path.iterdir()) == []


@distributed(world=2)
def test_a_rank_that_cannot_write_stops_all_and_leaves_the_old_step(tmp_path: Path) -> None:
    rank = dist.get_rank()
    group = Group(rank, 2, dist.group.WORLD)
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1, group)
    dist.barrier()
    if rank == 1:
        import pentatron.checkpoint.format as module

        def full_disk(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        module.write_tensors = full_disk
    with pytest.raises(UserError, match=r"step 2 could not be saved.*rank 1: No space left on device"):
        save(store, 2, group)
    dist.barrier()
    assert newest(store) == (1, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", TRACKER, "step-00000001"]


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
        store.save(4, share(ALONE, value), {}, {"step": 4}, {}, ALONE)
        found, _ = store.newest_valid(verify=True, set_aside=True)
        assert found is not None
        assert load(found, "weights/a")["weights/a"][0, 0] == value
        assert store.steps() == [found.folder], "what it replaces is gone"


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

    def want(name: str, tensor: torch.Tensor) -> None:
        load_fragments(found.folder, found.manifest, [whole(name, tensor)])

    with pytest.raises(UserError, match=r"weights/a as \[3, 4\], this model needs \[4, 4\]"):
        want("weights/a", torch.empty(4, 4))
    with pytest.raises(UserError, match="holds weights/a as float32, this run keeps it as bfloat16"):
        want("weights/a", torch.empty(3, 4, dtype=torch.bfloat16))
    with pytest.raises(UserError, match="lacks 1 tensors of this model, the first being weights/z"):
        want("weights/z", torch.empty(1))
    with pytest.raises(UserError, match="has no rng"):
        load(found, "rng")


def save_and_die(folder: Path, where: str) -> None:
    """Runs on a forked rank, which it patches and kills."""

    def die(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def partly(path: Path, tensors: Any) -> None:
        path.write_bytes(b"half")
        die()

    def before_pointer(path: Path, target: Path) -> None:
        if path.name.startswith(".latest."):
            die()
        rename(path, target)

    match where.removeprefix("again "):
        case "in a shard":
            parts_module.write_tensors = partly  # type: ignore[assignment]
        case "before manifest":
            store_module.write_new_synced = die
        case "before rename":
            Path.rename = die  # type: ignore[method-assign,assignment]
        case "before pointer":
            store_module.rename = before_pointer
    save(CheckpointStore(folder, keep=None), 1 if where.startswith("again") else 2)


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
    with pytest.raises(RanksFailed, match=r"^rank 0 of 1 was killed by SIGKILL"):
        run_distributed(save_and_die, 1, folder=tmp_path, where=where)
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
        "pieces": [
            {
                "file": DATA,
                "key": "weights/a",
                "start": [0, 0],
                "shape": [3, 4],
                "crc32": f"{zlib.crc32(tensors(2)['weights/a'].numpy().tobytes()):08x}",
            }
        ],
    }
    assert manifest["files"][DATA]["bytes"] == (folder / DATA).stat().st_size


def test_a_step_that_is_there_is_not_saved_again_when_its_folder_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)

    def failing(folder: Path) -> None:
        # The temporary folder of the step can be synced, the folder of steps cannot.
        if folder == store.folder:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(store_module, "fsync_folder", failing)
    draft = parts_module.Manifest(2, {}, {}, {"step": 2}, {})
    verdicts = store.start(draft, lambda: share(ALONE, 2.0), ALONE, background=False).advance(wait=True)
    assert store.outcome(2, verdicts).name == "step-00000002" and verdicts is not None
    assert "could not be synced to the disk (Input/output error)" in verdicts[0].note
    assert [step.name for step in store.steps()] == ["step-00000001", "step-00000002"], (
        "the older one may be all that is left"
    )
    monkeypatch.undo()
    save(store, 3)
    assert [step.name for step in store.steps()] == ["step-00000003"]


def test_a_state_of_another_step_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)
    forged = store.save(2, share(ALONE, 2.0), {}, {"step": 7}, {}, ALONE)
    with pytest.raises(UserError, match=r"manifest\.json is of step 2, but its run state is of step 7"):
        read_step(forged, verify=True)
    step, complaints = newest(store)
    assert step == 1 and "its run state is of step 7" in complaints[0]


def test_nothing_is_written_into_a_folder_that_was_lost(tmp_path: Path) -> None:
    """Checks the lock before the temporary folder, before the commit, and before older steps are removed."""
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    for asked, left in ((1, 0), (2, 1), (3, 2)):
        answers = iter([None] * (asked - 1))

        def guard(thorough: bool, answers: Iterator[None] = answers) -> None:
            if next(answers, "lost") == "lost":
                raise FolderLost("taken")

        store.guard = guard
        with pytest.raises(FolderLost, match="taken"):
            save(store, 2)
        assert [step.name for step in store.steps()] == ["step-00000001"]
        assert len(list(tmp_path.glob(".step-*"))) == min(1, left), (
            "what was being written is not deleted either"
        )
        store.guard = lambda thorough: None
    last = iter([None] * 3)
    store.guard = lambda thorough: guard(thorough, last)
    save(store, 2)
    assert [step.name for step in store.steps()] == ["step-00000001", "step-00000002"]
