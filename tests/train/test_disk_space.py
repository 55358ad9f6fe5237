"""Tests disk space for checkpoints: an exact estimate, and a refusal before the first step."""

import math
from pathlib import Path

import pytest

import pentatron.train.open_folders as space_module
from pentatron.checkpoint.find import find_step
from pentatron.checkpoint.tensor_file import DTYPES
from pentatron.errors import UserError
from pentatron.train.open_folders import saves_left
from tests.support import resolved
from tests.train.test_session import run


def with_free(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "free_bytes", lambda folder: count)


def size_of_one(folder: Path) -> int:
    found, _ = find_step(folder)
    return sum(record.bytes for record in found.manifest.files.values())


def test_checkpoint_larger_than_the_disk_is_refused_and_several_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "known", "--train-iters 1")
    size = size_of_one(tmp_path / "known")
    with_free(size // 2, monkeypatch)
    with pytest.raises(UserError, match=r"a checkpoint takes \d+ KiB and .* has \d+ KiB free.*--save"):
        run(tmp_path / "a", "--fp16")
    assert not (tmp_path / "a" / "metrics.jsonl").exists(), "before the first step"
    run(tmp_path / "a", "--no-save-checkpoints")
    capsys.readouterr()
    # Six steps save three times and keep two checkpoints; for a moment there are three.
    with_free(int(2.9 * size), monkeypatch)
    run(tmp_path / "b", "--keep-checkpoints 2")
    told = "will hold up to 3 more at once"
    assert told in capsys.readouterr().out
    with_free(int(3.1 * size), monkeypatch)
    run(tmp_path / "c", "--keep-checkpoints 2")
    assert told not in capsys.readouterr().out
    # Existing checkpoints need no more space: one is written before one is deleted.
    with_free(int(1.1 * size), monkeypatch)
    run(tmp_path / "c", "--keep-checkpoints 2 --train-iters 12")
    assert "more at once" not in capsys.readouterr().out


def test_those_that_are_kept_for_good_take_room_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "known", "--train-iters 1")
    with_free(int(3.5 * size_of_one(tmp_path / "known")), monkeypatch)
    words = "--train-iters 8 --keep-checkpoints 1 --save-interval 1"
    run(tmp_path / "a", words)
    assert "more at once" not in capsys.readouterr().out
    run(tmp_path / "b", f"{words} --save-retain-interval 2")
    assert "will hold up to 6 more at once" in capsys.readouterr().out


def test_partial_save_is_removed_before_the_space_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "a" / "checkpoints" / ".step-00000002.abcd"
    left.mkdir(parents=True)
    monkeypatch.setattr(space_module, "free_bytes", lambda folder: 0 if left.exists() else 10**12)
    run(tmp_path / "a", "--train-iters 1")


def test_a_step_that_has_weights_twice_takes_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of torch_dist hold the bf16 weights beside the fp32 master weights."""
    words = "--bf16 --ckpt-format torch_dist --train-iters 1"
    run(tmp_path / "known", words)
    found, _ = find_step(tmp_path / "known")
    twice = sum(
        math.prod(r.shape) for name, r in found.manifest.tensors.items() if name.startswith("weights/")
    )
    once = sum(math.prod(r.shape) * DTYPES[r.dtype].itemsize for r in found.manifest.tensors.values())
    with_free(once + twice, monkeypatch)
    with pytest.raises(UserError, match="no checkpoint can be saved"):
        run(tmp_path / "a", words)
    with_free(once + 2 * twice, monkeypatch)
    run(tmp_path / "a", words)


def test_how_many_saves_are_left() -> None:
    def left(step: int, words: str) -> int:
        return saves_left(resolved(words).config, step)

    words = "--train-iters 7 --save-interval 3"
    assert [left(step, words) for step in range(8)] == [3, 3, 3, 2, 2, 2, 1, 0]
    assert left(0, "--train-iters 0 --save-interval 3") == 1
    assert left(0, f"{words} --no-save-checkpoints") == 0
