"""Tests custom layers (--spec) with the documented example: layouts, checkpoints and mistakes."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from pentatron.cli.main import main
from pentatron.compare.trial import Trajectory, gaps
from pentatron.errors import AgreedError, UserError
from pentatron.hf.model_config import config_from_settings
from pentatron.parallel.world import single_process
from pentatron.settings.files import saved_values
from pentatron.train.model import ParallelModel, build_parallel_model
from pentatron.train.preflight import fp8_notices
from pentatron.train.session import run_training
from tests.harness import run_distributed
from tests.parity.cases import SHAPE
from tests.parity.reshard import Continued, load_on_a_rank, save_on_a_rank
from tests.parity.trajectory import on_a_rank, run
from tests.parity.verdicts import disagreements, failures
from tests.support import LLAMA, resolved
from tests.train.test_session import final_state, losses, settings

DOCUMENT = Path(__file__).parents[2] / "docs/how-it-works/specs.md"
LAYOUT = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --micro-batch-size 2"
)


def example(folder: Path, name: str, *changes: tuple[str, str]) -> str:
    """Writes the example as module `name`, since modules are imported once; returns its --spec flag."""
    found = re.search(r"```python\n# my_layers.py\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    text = found[1]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / f"{name}.py").write_text(text)
    return f"--spec {name} layer_spec"


def trial(folder: Path, words: str) -> Trajectory:
    os.chdir(folder)
    return on_a_rank(words)


def saved(folder: Path, words: str) -> Continued:
    os.chdir(folder)
    return save_on_a_rank(words, folder / "checkpoints")


def test_own_layers_train_alike_in_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"{SHAPE} {LLAMA} {example(tmp_path, 'own_layers')}"
    monkeypatch.chdir(tmp_path)
    alone = run(words, 1)
    spread = run_distributed(trial, 4, folder=tmp_path, words=f"{words} {LAYOUT}")
    judged = gaps(spread, alone)
    assert failures(judged) == [] and disagreements(spread) == []
    names = {name for name, *_ in alone.fragments["weights"]}
    assert {"weights/layers.0.mlp.gain", "weights/layers.0.mlp.mlp.linear_fc1.weight"} <= names
    plain = run(f"{SHAPE} {LLAMA}", 1)
    assert max(abs(a - b) for a, b in zip(alone.losses, plain.losses)) > 1e-3, "the layers are the user's"


def test_a_wrong_declaration_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parity net catches a gradient that is declared whole on every rank, which has only a part of it."""
    forgotten = example(tmp_path, "forgetful_layers", (", axes.tensor.partial_axes", ""))
    words = f"{SHAPE} {LLAMA} {forgotten}"
    monkeypatch.chdir(tmp_path)
    spread = run_distributed(trial, 4, folder=tmp_path, words=f"{words} {LAYOUT}")
    assert any("mlp.gain" in failure for failure in failures(gaps(spread, run(words, 1))))


def test_a_checkpoint_of_own_layers_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"{SHAPE} {LLAMA} {example(tmp_path, 'moving_layers')} --train-iters 7"
    before = run_distributed(saved, 4, folder=tmp_path, words=f"{words} {LAYOUT}")
    monkeypatch.chdir(tmp_path)
    after = load_on_a_rank(f"{words} --micro-batch-size 8", tmp_path / "checkpoints")
    assert after.losses == pytest.approx(before[0].losses, rel=1e-5)
    assert any(name == "weights/layers.1.mlp.gain" for name, *_ in after.state)


def test_a_run_keeps_its_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, other = example(tmp_path, "kept_layers"), example(tmp_path, "other_layers")
    monkeypatch.chdir(tmp_path)
    for folder, parts in (
        ("whole", [""]),
        ("cut", ["--train-iters 3 --lr-decay-iters 6", "--lr-decay-iters 6"]),
    ):
        for part in parts:
            run_training(settings(tmp_path / folder, f"{words} {part}"), single_process(), True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert final_state(tmp_path / "cut") == final_state(tmp_path / "whole")
    written = (tmp_path / "cut" / "config.yaml").read_text()
    assert saved_values(written)["spec"] == ["kept_layers", "layer_spec"]
    assert "spec" not in yaml.safe_load(written)["model"], (
        "another run must not import code that a file names"
    )
    for wrong in (other, ""):
        with pytest.raises(AgreedError, match=r"holds another model .spec was .'kept_layers', 'layer_spec'."):
            run_training(settings(tmp_path / "cut", wrong), single_process(), True)


def test_text_is_generated_by_own_layers_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = example(tmp_path, "speaking_layers")
    monkeypatch.chdir(tmp_path)
    run_training(settings(tmp_path / "run", f"{words} --train-iters 1"), single_process(), True)
    capsys.readouterr()
    command = f"generate run --tokens 1,2 --threads 1 --max-new-tokens 3 --json {words}"
    assert main(command.split()) == 0
    assert len(json.loads(capsys.readouterr().out)[0]["tokens"]) == 3
    assert main(f"generate run {words} a".split()) == 2
    assert "--spec needs two values" in capsys.readouterr().err


def test_a_checkpoint_does_not_choose_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = example(tmp_path, "trusted_layers")
    monkeypatch.chdir(tmp_path)
    run_training(settings(tmp_path / "run", f"{words} --train-iters 1"), single_process(), True)
    (tmp_path / "trusted_layers.py").write_text("raise SystemExit('this file was run')")
    monkeypatch.delitem(sys.modules, "trusted_layers")
    loaded = "train --load run/checkpoints --run-dir other --dataset-size 8 --train-iters 1 --seq-length 16"
    assert main(loaded.split()) == 2
    assert (
        "trained with --spec trusted_layers layer_spec; give that flag again, because code is never loaded from files"
        in (capsys.readouterr().err)
    )
    assert main(["generate", "run", "a"]) == 2
    assert "which is code; if you trust it, add --spec trusted_layers layer_spec" in capsys.readouterr().err
    config = resolved(f"{LLAMA} {words}").config
    with pytest.raises(
        UserError, match=r"closest is llama, except for spec \('trusted_layers', 'layer_spec'\)"
    ):
        config_from_settings(config.model, config.moe)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("settings.yaml", "spec: [file_layers, layer_spec]\n"),
        ("settings.yaml", "model:\n  spec: file_layers layer_spec\n"),
        ("settings.yaml", "language_model:\n  spec: [file_layers, layer_spec]\n"),
        ("settings.toml", 'spec = ["file_layers", "layer_spec"]\n'),
        ("settings.json", '{"spec": ["file_layers", "layer_spec"]}'),
    ],
)
def test_a_settings_file_does_not_choose_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file_layers.py").write_text("raise SystemExit('this file was run')")
    (tmp_path / name).write_text(text)
    words = f"train --config {name} --vocab-size 61 --dataset-size 8 --train-iters 1 --run-dir run"
    assert main(words.split()) == 2
    complaint = capsys.readouterr().err
    assert "spec names code, which only the command line may choose" in complaint
    assert "add --spec file_layers layer_spec to the command" in complaint
    # Every config.yaml of an earlier version has an empty spec.
    (tmp_path / "none.yaml").write_text("model:\n  spec: []\n")
    assert main(f"config {words.replace(name, 'none.yaml').removeprefix('train ')}".split()) == 0


BLOCK = """
from pentatron.models.layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from torch import nn

class Undeclared(nn.Linear):
    def __init__(self, config, layer_number, axes):
        super().__init__(config.hidden_size, config.hidden_size)

class Narrow(nn.Module):
    def __init__(self, config):
        super().__init__()

def block(config):
    return get_gpt_decoder_block_spec(config, False)

def no_argument():
    return get_gpt_layer_local_spec()

one_layer = get_gpt_layer_local_spec()

def number():
    return 3

def with_mlp(mlp):
    from dataclasses import replace
    return replace(one_layer, submodules=replace(one_layer.submodules, mlp=mlp))

def undeclared():
    return with_mlp(Undeclared)

def narrow():
    return with_mlp(Narrow)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"layers_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(BLOCK)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize("given", ["block", "no_argument", "one_layer"])
def test_accepted_forms_of_a_spec(module: str, given: str) -> None:
    """All of these choose the layers that the configuration has anyway."""
    assert run(f"{SHAPE} --spec {module} {given}", 1).losses == run(SHAPE, 1).losses


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("number", "returned a int; it must return a ModuleSpec of a layer"),
        ("nothing", "has no nothing"),
        ("undeclared", "Undeclared does not declare its parameters; derive it from ShardedModule"),
        ("narrow", "ModuleSpec(Narrow): Narrow cannot be built from (config=, layer_number=, axes=)"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(
    module: str, given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--num-layers", "2", "--vocab-size", "61", "--dataset-size", "8", "--train-iters", "1"]
    assert main([*words, "--nproc-per-node", "2", "--spec", module, given]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and "Traceback" not in shown.err and "starting" not in shown.out
    assert not Path("runs").exists()


def test_missing_module_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "train",
                "--vocab-size",
                "61",
                "--dataset-size",
                "8",
                "--train-iters",
                "1",
                "--spec",
                "no_such_layers",
                "f",
            ]
        )
        == 2
    )
    assert "--spec no_such_layers f: module no_such_layers cannot be imported" in capsys.readouterr().err


def test_parts_of_own_layers_are_built_as_their_axes_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts built without axes are built as on one process, and a note names them in fp8."""
    monkeypatch.chdir(tmp_path)

    def built(spec: str) -> ParallelModel:
        asked = f"{LLAMA} --num-layers 1 --bf16 --fp8 hybrid --recompute-granularity selective {spec}"
        return build_parallel_model(resolved(asked).config, single_process())

    model = built(example(tmp_path, "handing_layers"))
    mlp = model.stages[0].layers["0"].mlp.mlp  # type: ignore[union-attr]
    assert mlp.linear_fc1.fp8 is not None and mlp.fuses_gate
    assert fp8_notices(model.decisions.fp8, model.stages.values()) == []
    model = built(example(tmp_path, "keeping_layers", ("MLP(config, layer_number, axes)", "MLP(config)")))
    assert fp8_notices(model.decisions.fp8, model.stages.values()) == [
        "--fp8: matrices of custom layers that are built without `axes` stay in bf16: mlp.mlp.linear_fc1, mlp.mlp.linear_fc2"
    ]
