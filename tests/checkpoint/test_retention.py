"""Tests which steps are removed: one rule for a run and for `pentatron checkpoint prune`."""

from pathlib import Path

import pytest

from pentatron.checkpoint.lock import lock_folder
from pentatron.checkpoint.retention import Retention, remove_steps, step_number, write_base_record
from pentatron.checkpoint.store import CheckpointStore
from pentatron.cli.checkpoint_prune import plan_pruning, prune
from pentatron.errors import UserError
from tests.checkpoint.steps import save
from tests.checkpoint.test_damage import DAMAGE


def named(*names: str) -> list[Path]:
    return [Path(f"step-{name}") for name in names]


STEPS = named("00000010", "00000020", "00000030", "00000030-again2", "00000040", "00000050")


@pytest.mark.parametrize(
    ("keep", "every", "gone"),
    [
        (None, None, ["00000030"]),
        (2, None, ["00000030", "00000010", "00000020", "00000030-again2"]),
        (1, 20, ["00000030", "00000010", "00000030-again2"]),
        (9, None, ["00000030"]),
    ],
)
def test_outdated_steps(keep: int | None, every: int | None, gone: list[str]) -> None:
    assert Retention(keep, every).outdated(STEPS) == named(*gone)
    assert STEPS[0] not in Retention(keep, every).outdated(STEPS, protected=STEPS[:1])


def test_a_number_is_read_from_whole_names_alone() -> None:
    names = ("step-00000030-again2", "step-00000030.damaged", "step-3", "iter_0000030", "iter_30")
    assert [step_number(Path(name)) for name in names] == [30, None, None, 30, None]


def steps_in(folder: Path) -> list[int | None]:
    return [step_number(step) for step in CheckpointStore(folder, keep=None).steps()]


def pruned(folder: Path, rule: Retention) -> list[str]:
    planned = plan_pruning(folder, rule, 2, lambda _: None)
    remove_steps(folder, planned.removed)
    return [problem.sentence for problem in planned.damaged]


def test_the_last_step_that_is_whole_stays_and_damage_does_not_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    folders = {step: save(store, step) for step in (1, 2, 3, 4)}
    DAMAGE["payload bit"](folders[4])
    (said,) = pruned(tmp_path, Retention(keep=1))
    assert "step-00000004" in said and steps_in(tmp_path) == [3, 4]
    DAMAGE["payload bit"](folders[3])
    with pytest.raises(UserError, match="nothing is removed"):
        pruned(tmp_path, Retention(keep=1))
    assert steps_in(tmp_path) == [3, 4]


def test_base_step_is_kept_and_not_counted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    write_base_record(tmp_path, [save(store, 0)], None)
    for step in (1, 2, 3):
        save(store, step)
    assert pruned(tmp_path, Retention(keep=1)) == [] and steps_in(tmp_path) == [0, 3]


def test_nothing_is_removed_under_a_job_that_runs(tmp_path: Path) -> None:
    steps = tmp_path / "run" / "checkpoints"
    save(CheckpointStore(steps, keep=None), 1)
    with lock_folder(steps), pytest.raises(UserError, match="another job is using"):
        prune([str(steps), "--keep", "1"])
    assert prune([str(steps), "--keep", "1"]) == 0


def test_link_is_removed_but_not_its_target(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    step = save(CheckpointStore(elsewhere, keep=None), 1)
    folder = tmp_path / "steps"
    save(CheckpointStore(folder, keep=None), 2)
    (folder / step.name).symlink_to(step, target_is_directory=True)
    remove_steps(folder, [folder / step.name])
    assert steps_in(folder) == [2] and len(list(step.iterdir())) == 2
