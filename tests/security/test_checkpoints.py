"""Tests forged steps: nothing is executed, nothing outside is read, and memory stays bounded."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pentatron.checkpoint.find import find_step
from pentatron.checkpoint.store import CheckpointStore
from pentatron.checkpoint.torch_file import TorchFile, rectangle_key, torch_save_position
from pentatron.errors import UserError
from tests.checkpoint.steps import DATA, load, newest, save
from tests.checkpoint.test_damage import record_of, rewrite
from tests.security.canary import Payload, pickled, refused, run

A = "weights/a"


def listed(manifest: dict[str, Any], file: Path, name: str) -> None:
    """Lists `file` as `name`, with its right size and checksum, as the file of every tensor."""
    manifest["files"] = {name: record_of(file, name)}
    for record in manifest["tensors"].values():
        for piece in record["pieces"]:
            piece["file"] = name


def outside(step: Path, name: str) -> None:
    """Moves the file out of the step and lists it at its new place."""
    moved = (step / DATA).rename(step.parent.parent / "outside.safetensors")
    rewrite(step, lambda m: listed(m, moved, name.format(moved)))


def linked(step: Path) -> None:
    moved = (step / DATA).rename(step.parent.parent / "outside.safetensors")
    (step / DATA).symlink_to(moved)


def huge(step: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["tensors"][A]["shape"] = [10**15]
        manifest["tensors"][A]["pieces"] = [{"file": DATA, "key": A, "start": [0], "shape": [10**15]}]

    rewrite(step, change)


def many_dimensions(step: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        shape = [1] * 40
        manifest["tensors"][A]["shape"] = shape
        manifest["tensors"][A]["pieces"] = [{"file": DATA, "key": A, "start": [0] * 40, "shape": shape}]

    rewrite(step, change)


def a_pipe(step: Path) -> None:
    """Replaces the manifest by a FIFO, which would block a reader forever."""
    (step / "manifest.json").unlink()
    os.mkfifo(step / "manifest.json")


def written(text: str) -> Callable[[Path], object]:
    return lambda step: (step / "manifest.json").write_text(text)


def signed(**changes: Any) -> Callable[[Path], object]:
    return lambda step: rewrite(step, lambda m: m.update(changes))


def of_tensor(**changes: Any) -> Callable[[Path], object]:
    return lambda step: rewrite(step, lambda m: m["tensors"][A].update(changes))


def of_piece(**changes: Any) -> Callable[[Path], object]:
    return lambda step: rewrite(step, lambda m: m["tensors"][A]["pieces"][0].update(changes))


def of_file(**changes: Any) -> Callable[[Path], object]:
    return lambda step: rewrite(step, lambda m: m["files"][DATA].update(changes))


ATTACKS: dict[str, Callable[[Path], object]] = {
    "a file above": lambda step: outside(step, "../../outside.safetensors"),
    "a file by its whole path": lambda step: outside(step, "{}"),
    "a link to a file outside": linked,
    "a tensor larger than its file": huge,
    "a tensor of many dimensions": many_dimensions,
    "a pipe for a manifest": a_pipe,
    "a manifest without end": written("[" * 200_000),
    "a manifest of nested objects": written('{"a":' * 200_000),
    "a number without end": written('{"step": ' + "9" * 10_000 + "}"),
    "no number for a step": signed(step=float("nan")),
    "an infinite step": signed(step=float("inf")),
    "a step before the first": signed(step=-1),
    "a list for the files": signed(files=[1]),
    "a text for the tensors": signed(tensors="x"),
    "a list for the state": signed(run_state=[]),
    "a list for the settings": signed(config=[]),
    "a text for a section": signed(config={"model": "x"}),
    "a list for a type": of_tensor(dtype=["float32"]),
    "no number in a shape": of_tensor(shape=[float("nan"), 4]),
    "a list for a file's name": of_piece(file=[DATA]),
    "a list for a key": of_piece(key=[A]),
    "a number for a sum": of_file(sha256=1),
    "a list for a tensor's sum": of_piece(crc32=[1]),
    "a text for a size": of_file(bytes="many"),
    "more than is known of a file": of_file(also=1),
}  # fmt: skip


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save(CheckpointStore(folder, keep=None), step)
    return folder


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_forged_step_is_damaged_and_the_one_before_is_used(
    steps: Path, attack: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert newest(CheckpointStore(steps, keep=None), verify=True) == (2, []), "control: it was whole"
    ATTACKS[attack](steps / "step-00000002")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, said, _ = run(capsys, "checkpoint", "verify", steps, "--numbers")
    lines = [line for line in said.splitlines() if "step-00000002" in line and "ok (" not in line]
    assert code == 1 and any("DAMAGED" in line for line in lines)
    assert run(capsys, "checkpoint", "inspect", steps)[0] == 0
    step, complaints = newest(CheckpointStore(steps, keep=None))
    assert step == 1 and len(complaints) == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kB"


def test_pickle_under_the_name_of_tensors_is_not_unpickled(
    steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canary, step = tmp_path / "canary", steps / "step-00000002"
    (step / DATA).write_bytes(pickled(canary))
    rewrite(step, lambda m: listed(m, step / DATA, DATA))
    with pytest.raises(UserError, match="is damaged"):
        load(find_step(step)[0], A)
    assert run(capsys, "checkpoint", "verify", step, "--numbers")[0] == 1
    refused(capsys, "checkpoint", "diff", step, steps / "step-00000001")
    assert not canary.exists()


@pytest.mark.parametrize("archived", [False, True])
def test_pickle_in_a_file_of_torch_is_not_unpickled(
    steps: Path, tmp_path: Path, archived: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A manifest may list files of torch.save; their pickles only give positions of the data."""
    canary, step = tmp_path / "canary", steps / "step-00000002"
    file = step / "__0_0.distcp"
    file.write_bytes(pickled(canary))
    if archived:
        torch.save({"x": Payload(canary)}, file)
    place = torch_save_position(0, file.stat().st_size)

    def change(manifest: dict[str, Any]) -> None:
        listed(manifest, file, file.name)
        for record in manifest["tensors"].values():
            for piece in record["pieces"]:
                shape = tuple(piece["shape"])
                piece["key"] = rectangle_key(place, (0,) * len(shape), shape, shape)

    (step / DATA).unlink()
    rewrite(step, change)
    with pytest.raises(UserError, match="no tensor can be read"):
        load(find_step(step)[0], A)
    assert run(capsys, "checkpoint", "verify", step, "--numbers")[0] == 1
    assert not canary.exists()
    if archived:
        torch.load(file, weights_only=False)
        assert canary.exists(), "control: who unpickles it runs it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_a_tensor_of_torch_is_found_without_loading_it(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = (torch.arange(24).view(4, 6) % 2).to(dtype)
    for tensor in (whole, whole.t(), whole[1:3, 2:5], whole[0, 0], whole[:0]):
        torch.save(tensor, tmp_path / "x.distcp")
        length = (tmp_path / "x.distcp").stat().st_size
        shape = tuple(tensor.shape)
        with TorchFile(tmp_path / "x.distcp") as file:
            found = file.get_slice(
                rectangle_key(torch_save_position(0, length), (0,) * len(shape), shape, shape)
            )
            assert torch.equal(found[...], tensor) and found[...].dtype == dtype


def test_a_name_that_steers_the_terminal_is_shown_and_not_obeyed(
    steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "weights/\x1b]0;title\x07\x1b[2J"

    def rename(manifest: dict[str, Any]) -> None:
        record = manifest["tensors"].pop("scalar")
        record["pieces"][0]["key"] = name
        manifest["tensors"][name] = record

    rewrite(steps / "step-00000002", rename)
    _, said, _ = run(capsys, "checkpoint", "inspect", steps / "step-00000002", "--tensors")
    assert "title" in said and "\x1b" not in said and "\x07" not in said
    elsewhere = steps.rename(tmp_path / "\x1b[2Jsteps")
    for words in (["inspect"], ["verify"], ["prune", "--keep", "1"]):
        _, said, complaint = run(capsys, "checkpoint", *words, elsewhere)
        assert "\\x1b[2Jsteps" in said + complaint and "\x1b" not in said + complaint


def test_tensors_of_a_library_are_data(steps: Path) -> None:
    """Control: an unchanged step is loaded."""
    found, _ = find_step(steps)
    assert load(found, A)[A].shape == (3, 4)
    assert json.loads((steps / "step-00000002" / "manifest.json").read_text())["step"] == 2
