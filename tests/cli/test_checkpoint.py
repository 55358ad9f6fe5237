"""Runs `pentatron checkpoint` through its command line."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pentatron.checkpoint import verify
from pentatron.checkpoint.compare import ComparedTensors, compare_tensor
from pentatron.checkpoint.find import find_step
from pentatron.checkpoint.load import load_tensor
from pentatron.checkpoint.lock import lock_folder
from pentatron.checkpoint.store import CheckpointStore
from pentatron.checkpoint.tensor_file import TensorSpec
from pentatron.cli.main import main
from pentatron.parallel.sharding import region
from tests.checkpoint.steps import ALONE, DATA, save, whole
from tests.checkpoint.test_damage import DAMAGE, in_rows
from tests.hf.support import save as save_theirs
from tests.hf.support import theirs


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    store = CheckpointStore(folder, keep=None)
    for step in (1, 2, 3):
        save(store, step)
    return folder


def test_inspect_lists_the_steps_and_describes_one(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DAMAGE["truncated by one"](steps / "step-00000002")
    code, said = run(capsys, "inspect", steps.parent)
    rows = {line.split()[0]: line for line in said.splitlines() if line.startswith("step-")}
    assert code == 0 and "whole, latest" in rows["step-00000003"] and "damaged" in said
    assert "step-00000002: " in said and "bytes, not" in said, "what is wrong with it is said"
    code, said = run(capsys, "inspect", steps / "step-00000003", "--tensors", "weights/*", "--stats")
    assert code == 0 and "17 parameters as bfloat16, float32" in said
    assert (
        "weights/a  float32 [3, 4]  1 piece  min 3, max 3, mean 3, norm 10.39" in said
        and "exp_avg/a" not in said
    )
    assert "in 1 file\n" in said and "1 files" not in said
    assert run(capsys, "inspect", steps / "latest", "--tensors", "weights/*", "--stats")[1] == said
    assert run(capsys, "verify", steps / "latest")[0] == 0
    (steps / "latest").write_text("../checkpoints/step-00000003\n")
    assert run(capsys, "inspect", steps / "latest")[0] == 2, "a pointer names a step beside it"
    (steps / "latest").write_text("step-00000003\n")
    code, said = run(capsys, "inspect", steps, "--json")
    assert [row["state"] for row in json.loads(said)] == ["whole", "damaged", "whole"]


def test_inspect_counts_nan_and_inf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = torch.tensor([1.0, float("nan"), -3.0, float("inf")])
    step = CheckpointStore(tmp_path, keep=None).save(1, [], {"weights/x": values}, {}, {}, ALONE)
    (row,) = json.loads(run(capsys, "inspect", step, "--stats", "--json")[1])[0]["tensors"]
    assert (row["min"], row["max"], row["mean"], row["nan"], row["inf"]) == (-3.0, 1.0, -1.0, 1, 1)
    assert row["norm"] == pytest.approx(10**0.5)
    assert run(capsys, "verify", step)[0] == 0, "the file is what was saved"
    code, said = run(capsys, "verify", step, "--numbers")
    assert code == 1 and "weights/x has 1 NaN and 1 infinite of 4 elements, the first at [1]" in said


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["iter_0000010/.metadata", "iter_0000010/__0_0.distcp"], "torch_dist format has it .1 step, up to iter"),
        (["iter_0000010/mp_rank_00/model_optim_rng.pt"], "legacy format, a pickled file for each rank"),
        (["config.json", "model.safetensors"], "a Hugging Face folder with 1 safetensors file;"),
        (["config.json", "pytorch_model.bin"], "pickled weights only .pytorch_model.bin.;"),
        (["other.txt"], "it has no step"),
    ],
)  # fmt: skip
def test_a_foreign_folder_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: list[str], kind: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for command in (["inspect"], ["verify"], ["prune", "--keep", "1"]):
        code, said = run(capsys, *command, tmp_path)
        assert code == 2 and said.count("\n") == 1
        assert re.search(kind, said), said


@pytest.mark.parametrize("kind", ["payload bit", "header bit", "missing file", "another step, well signed"])
def test_verify_names_damage(steps: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert run(capsys, "verify", steps)[0] == 0
    DAMAGE[kind](steps / "step-00000002")
    code, said = run(capsys, "verify", steps.parent, "--threads", "3")
    verdicts = [line.split(": ")[1].split()[0] for line in said.splitlines() if line.startswith(str(steps))]
    assert code == 1 and verdicts == ["ok", "DAMAGED", "ok"]
    if kind == "payload bit":
        (problem,) = json.loads(run(capsys, "verify", steps / "step-00000002", "--json")[1])[0]["problems"]
        assert problem["file"] == DATA and problem["tensors"] == ["weights/b"]
        assert (
            len(problem["expected"]) == len(problem["found"]) == 64
            and problem["expected"] != problem["found"]
        )


def test_a_step_that_a_run_removes_meanwhile_is_not_called_damaged(
    steps: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = verify.open_manifest

    def open_late(folder: Path) -> object:
        shutil.rmtree(folder) if folder.name == "step-00000001" else None
        return opened(folder)

    monkeypatch.setattr(verify, "open_manifest", open_late)
    code, said = run(capsys, "verify", steps)
    assert code == 0 and said.count(": ok") == 2
    assert f"note: {steps / 'step-00000001'} was removed during this command" in said


def test_diff_notes_damage_beside_the_answer(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(steps / "step-00000002", steps.parent / "copy" / "step-00000002")
    DAMAGE["payload bit"](other)
    assert main(["checkpoint", "diff", str(steps / "step-00000002"), str(other), "--json"]) == 1
    told = capsys.readouterr()
    assert len(json.loads(told.out)["tensors"]) == 1
    assert re.search(r"^note: .*copy.*sha256 is .*; the difference may be this damage\n$", told.err), told.err


def test_mistakes_get_a_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --tensors?" in run(capsys, "inspect", tmp_path, "--tensor")[1]
    assert "it has no step; name a run, its checkpoints, or one step" in run(capsys, "inspect", tmp_path)[1]


def test_diff_of_a_step_with_itself_in_other_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [save(CheckpointStore(tmp_path / name, keep=None), 5) for name in "ab"]
    in_rows(folders[1], lambda pieces: None)
    code, said = run(capsys, "diff", *folders)
    assert code == 0 and "same: 5 of 5 tensors are equal bit by bit" in said


def test_diff_lists_differences(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("diff", steps / "step-00000001", steps / "step-00000003", "--json")
    code, said = run(capsys, *words)
    found = json.loads(said)
    assert code == 1 and not found["same"] and found["run_state"] == [{"name": "step", "a": 1, "b": 3}]
    by_name = {row["name"]: row for row in found["tensors"]}
    assert set(by_name) == {"weights/a", "weights/b", "exp_avg/a", "scalar"}
    assert by_name["weights/a"]["differing"] == 12 and by_name["weights/a"]["largest"] == 2
    assert by_name["weights/a"]["relative_norm"] == 2 and by_name["weights/a"]["ulps"] == 12582912
    weights = json.loads(run(capsys, *words, "--weights-only")[1])
    assert [row["name"] for row in weights["tensors"]] == ["weights/a", "weights/b"] and not weights[
        "run_state"
    ]
    assert run(capsys, *words, "--weights-only", "--tolerance", "0.7")[0] == 0
    assert run(capsys, *words, "--weights-only", "--tolerance", "0.6")[0] == 1


def test_numbers_of_a_difference() -> None:
    def side(values: torch.Tensor) -> ComparedTensors:
        outline = TensorSpec(values.dtype, tuple(values.shape))
        return ComparedTensors("", {"x": outline}, lambda name, start, size: region(values, start, size))

    one = torch.tensor([1.0, 0.0, float("nan"), -2.0])

    def compared(other: torch.Tensor) -> tuple[int, int | None, float]:
        found = compare_tensor("x", side(one), side(other), lambda _: None)
        return found.differing, found.ulps, found.largest

    assert compared(one.clone()) == (0, None, 0.0), "a NaN is what it was"
    near = torch.nextafter(one, torch.tensor(9.0))
    assert compared(torch.where(one == 1, near, one))[:2] == (1, 1)
    assert compared(torch.tensor([1.0, -0.0, float("nan"), -2.0])) == (1, 0, 0.0), (
        "bits differ, numbers do not"
    )
    assert compared(torch.tensor([1.0, 0.0, 5.0, -2.0]))[2] == float("inf")
    wide = compare_tensor("x", side(one), side(one.double()), lambda _: None)
    assert wide.differing == 0 and not wide.is_equal and wide.within(0) and "equal values" in wide.sentence()


def test_diff_with_a_hugging_face_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_theirs(theirs("qwen2", num_hidden_layers=1), tmp_path / "theirs")
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    assert run(capsys, "diff", tmp_path / "ours", folder)[0] == 0
    other = save_theirs(theirs("qwen2", num_hidden_layers=1), tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    save_file(weights, other / "model.safetensors")
    code, said = run(capsys, "diff", tmp_path / "ours", other)
    assert code == 1 and "weights/final_norm.weight: 32 of 32" in said


def test_prune_dry_run_and_lock(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, "prune", steps, "--keep", "1", "--keep-every", "2", "--dry-run")
    assert code == 0 and "would remove step-00000001" in said and len(list(steps.glob("step-*"))) == 3
    with lock_folder(steps):
        code, said = run(capsys, "prune", steps, "--keep", "1")
    assert code == 2 and "wait for it, or let it remove old steps itself" in said and "--run-dir" not in said
    assert len(list(steps.glob("step-*"))) == 3
    code, said = run(
        capsys, "prune", steps, "--keep-checkpoints", "1", "--save-retain-interval", "2", "--json"
    )
    data = json.loads(said)
    assert (
        list(data["removed"]) == ["step-00000001"]
        and data["bytes"] > 0
        and data["verified"] == "step-00000003"
    )
    assert sorted(p.name for p in steps.glob("step-*")) == ["step-00000002", "step-00000003"]
    code, said = run(capsys, "prune", steps, "--keep", "0")
    assert code == 2 and "at least the newest step" in said
    assert "removed 1 step, " in run(capsys, "prune", steps, "--keep", "1")[1]


def test_large_tensors_are_compared_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads at most one block of each side: with tiny blocks, small reads find the element that differs."""
    import pentatron.checkpoint.tensor_file as tensor_file

    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 64)
    values = torch.arange(600, dtype=torch.float32).view(20, 30)
    changed = values.clone()
    changed[13, 29] += 1
    largest = 0

    def side(of: torch.Tensor) -> ComparedTensors:
        def read(name: str, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
            nonlocal largest
            block = region(of, start, size)
            largest = max(largest, block.nbytes)
            return block

        return ComparedTensors("", {"x": TensorSpec(torch.float32, (20, 30))}, read)

    found = compare_tensor("x", side(values), side(changed), lambda _: None)
    assert (found.differing, found.first, found.elements) == (1, [13, 29], 600) and largest <= 64


def test_export_and_reshard_take_the_step_before_a_damaged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Falls back to the previous step with a note, as training does; a named damaged step is refused."""
    folder = save_theirs(theirs("qwen2", num_hidden_layers=1), tmp_path / "theirs")
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    found = find_step(tmp_path / "ours")[0]
    number, manifest = found.manifest.step, found.manifest
    parts = [whole(name, load_tensor(found.folder, manifest, name)) for name in manifest.tensors]
    store = CheckpointStore(found.folder.parent, keep=None)
    state = {**manifest.run_state, "step": number + 1}
    later = store.save(number + 1, parts, {}, state, manifest.config, ALONE)
    DAMAGE["payload bit"](later)
    for words in (["export"], ["checkpoint", "reshard"]):
        out = tmp_path / words[-1]
        assert main([*words, str(later), str(out)]) == 2 and not out.exists()
        capsys.readouterr()
        assert main([*words, str(later.parent), str(out)]) == 0
        said = capsys.readouterr().out
        assert f"note: {later / DATA}: sha256 is " in said and f"; {found.folder.name} is " in said
