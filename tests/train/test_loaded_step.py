"""Tests --ckpt-step, a required checkpoint, its layout, and errors for another model."""

from pathlib import Path

import pytest
import torch

from pentatron.checkpoint.load import load_fragments
from pentatron.checkpoint.store import CheckpointStore
from pentatron.errors import UserError
from pentatron.generate.source import ModelLocation
from pentatron.parallel.sharding import Fragment
from pentatron.parallel.world import single_process
from pentatron.train.session import run_training
from tests.train.test_loaded import losses, prepared, train

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("base") / "run"
    train(folder, f"{SHAPE} --train-iters 6 --keep-checkpoints 9")
    return folder


def test_a_step_is_chosen_by_its_number(base: Path, tmp_path: Path) -> None:
    train(tmp_path / "a", f"--load {base} --ckpt-step 4 --train-iters 6")
    assert len(losses(tmp_path / "a")) == 2 and losses(tmp_path / "a") == losses(base)[4:]
    # A restart of that run resumes from its own steps.
    train(tmp_path / "a", f"--load {base} --ckpt-step 4 --train-iters 7")
    assert len(losses(tmp_path / "a")) == 3
    with pytest.raises(
        UserError, match=r"--ckpt-step 5: .* has no such step; choose one of its steps \(step-00000002, "
    ):
        prepared(tmp_path / "b", f"--load {base} --ckpt-step 5 --train-iters 6")


def test_a_run_does_not_go_back_in_its_own_folder(base: Path) -> None:
    words = f"--load {base / 'checkpoints'} --train-iters 6"
    assert prepared(base, f"{words} --ckpt-step 6").config.model.num_layers == 2
    with pytest.raises(UserError, match=r"has continued to step-00000006, .* another --run-dir"):
        prepared(base, f"{words} --ckpt-step 4")


def test_an_empty_folder_of_its_own_can_be_refused(tmp_path: Path) -> None:
    words = f"{SHAPE} --train-iters 2 --load {tmp_path / 'a' / 'checkpoints'}"
    with pytest.raises(UserError, match="holds no checkpoint yet, and --exit-on-missing-checkpoint is given"):
        prepared(tmp_path / "a", f"{words} --exit-on-missing-checkpoint")
    train(tmp_path / "a", words)
    prepared(tmp_path / "a", f"{words} --exit-on-missing-checkpoint")


def test_the_layout_comes_along_if_wished(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"--load {base} --train-iters 8"
    wished = f"{words} --use-mp-args-from-checkpoint-args"
    assert prepared(tmp_path / "a", wished, world=2).config.parallel.tensor_model_parallel_size == 1
    saved = ModelLocation.architecture
    monkeypatch.setattr(
        ModelLocation,
        "architecture",
        lambda source, is_own=False: {**saved(source), "tensor_model_parallel_size": 2},
    )
    found = prepared(tmp_path / "a", wished, world=2)
    assert found.config.parallel.tensor_model_parallel_size == 2
    assert f"layout from {base / 'checkpoints'}: --tensor-model-parallel-size 2" in found.notices
    for other in (f"{wished} --tensor-model-parallel-size 1", words):
        assert prepared(tmp_path / "a", other, world=2).config.parallel.tensor_model_parallel_size == 1


def test_weights_alone_begin_a_new_run(base: Path, tmp_path: Path) -> None:
    train(tmp_path / "a", f"--load {base} --finetune --no-load-optim --no-load-rng --train-iters 2")
    assert len(losses(tmp_path / "a")) == 2
    state = CheckpointStore(tmp_path / "a" / "checkpoints", keep=None).newest_valid(False, False)[0]
    assert (
        state is not None and state.manifest.step == 2 and state.manifest.run_state["consumed_samples"] == 8
    )


def test_keys_that_do_not_match_come_with_advice(base: Path) -> None:
    found = CheckpointStore(base / "checkpoints", keep=None).newest_valid(False, False)[0]
    assert found is not None
    name, record = next((n, r) for n, r in found.manifest.tensors.items() if n.startswith("weights/"))
    advice = r"check the parameters it was converted or trained with: .* tensor and pipeline sizes need not"
    absent = Fragment("weights/layers.9.x", (2,), (0,), torch.zeros(2))
    with pytest.raises(UserError, match=rf"lacks 1 tensors .* weights/layers\.9\.x; {advice}"):
        load_fragments(found.folder, found.manifest, [absent])
    wider = (record.shape[0] + 1, *record.shape[1:])
    with pytest.raises(UserError, match=advice):
        load_fragments(
            found.folder, found.manifest, [Fragment(name, wider, (0,) * len(wider), torch.zeros(wider))]
        )


def test_another_model_than_the_checkpoints_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--num-layers 3"):
        run_training(
            prepared(tmp_path / "a", f"--load {base} --num-layers 3 --train-iters 2"), single_process(), True
        )
