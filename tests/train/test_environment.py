"""Tests the environment that a checkpoint records, and the random generators that it restores."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import pentatron.train.preflight as environment_module
from pentatron.checkpoint.find import find_step
from pentatron.checkpoint.format import read_manifest
from pentatron.checkpoint.store import Checkpoint, CheckpointStore
from pentatron.parallel.world import single_process
from pentatron.train.checkpoints import random_state, restore_random_state
from tests.train.test_session import run


def test_changed_thread_count_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread count may change the last bits of a step while the printed loss stays the same."""
    had = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run(tmp_path / "a", "--train-iters 2")
        capsys.readouterr()
        run(tmp_path / "a", "--train-iters 3")
        assert "was made with" not in capsys.readouterr().out, "nothing differs"
        torch.set_num_threads(1)
        monkeypatch.setattr(environment_module, "__version__", "9.9")
        run(tmp_path / "a", "--train-iters 4")
    finally:
        torch.set_num_threads(had)
    line = "was made with Pentatron 0.1.0, 2 threads a process, and this run has Pentatron 9.9, 1 thread a process: numbers may differ"
    assert line in capsys.readouterr().out
    found, _ = find_step(tmp_path / "a")
    assert found.manifest.run_state["environment"]["threads"] == [1]


def draws() -> list[float]:
    """Draws from each generator; two of them also cache the second number of a normal pair."""
    return [random.gauss(0, 1), float(np.random.mtrand.normal()), float(torch.rand(()))]


def test_random_generators_are_restored(tmp_path: Path) -> None:
    world = single_process()
    run(tmp_path / "a", "--train-iters 1")
    draws()
    found, _ = find_step(tmp_path / "a")
    store = CheckpointStore(tmp_path / "b", keep=None)
    folder = store.save(1, [], random_state(world), {}, {}, world.all_ranks)
    expected = draws() + draws()
    restore_random_state(Checkpoint(folder, read_manifest(folder)), world)
    assert draws() + draws() == expected
    restore_random_state(found, world)
    assert draws() + draws() != expected
