"""Tests training that begins with weights of a Hugging Face folder, another run or an import."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file
from torch import Tensor

import pentatron.train.resume as resume_module
from pentatron.checkpoint.load import load_tensor
from pentatron.checkpoint.store import Checkpoint, CheckpointStore
from pentatron.cli.checkpoint_settings import adopt_checkpoint_settings
from pentatron.cli.main import main
from pentatron.errors import ConfigError, UserError
from pentatron.hf.small_files import copy_model_files
from pentatron.parallel.collectives import Group
from pentatron.parallel.sharding import Fragment, region
from pentatron.parallel.world import create_groups, single_process
from pentatron.settings.entry_points import TRAIN
from pentatron.settings.loaded_architecture import architecture, architecture_differences
from pentatron.settings.resolve import Resolved, derived_settings, gather, resolve
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import ProcessFacts, Settings, start_of
from pentatron.train.session import run_training
from tests.harness import run_distributed

CPU = torch.device("cpu")
# No architecture: it comes from what is loaded.
RUN = (
    "--dataset-size 64 --seq-length 16 --global-batch-size 4 --micro-batch-size 1 --eval-interval 0 --lr 1e-2 --adam-eps 1e-6 "
    "--save-interval 2 --keep-checkpoints 2 --progress-bar off"
)
LAYOUTS = {
    "tp2 pp2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
    "cp2 zero3": "--context-parallel-size 2 --zero-stage 3",
    "ep2 zero1": "--expert-model-parallel-size 2 --zero-stage 1",
}


def prepared(folder: Path, words: str, world: int = 1, resumes: bool = True) -> Resolved:
    """Resolves settings from flags as a command does."""
    draft, facts = gather(f"{RUN} --run-dir {folder} {words}".split(), TRAIN), ProcessFacts(world, world, 1)
    adopt_checkpoint_settings(
        draft, facts, start_of(derived_settings(draft, facts), draft.given("load"), resumes)
    )
    return resolve(draft, facts)


def train(folder: Path, words: str, resumes: bool = True) -> None:
    """Trains: `resumes` as `pentatron train`, else as Megatron's programs."""
    run_training(prepared(folder, words, resumes=resumes), single_process(), resumes)


def train_on_a_rank(folder: Path, words: str) -> None:
    settings = prepared(folder, words, dist.get_world_size())
    here = create_groups(settings.config.grid, dist.get_rank(), dist.get_rank(), CPU)
    run_training(settings, here, resumes=True)


def newest(folder: Path) -> Checkpoint:
    found, _ = CheckpointStore(folder, keep=None).newest_valid(verify=True, set_aside=False)
    assert found is not None
    return found


def weights(folder: Path) -> dict[str, Tensor]:
    """Returns the weights of the newest step of a run by name."""
    found = newest(folder / "checkpoints")
    names = [name for name in found.manifest.tensors if name.startswith("weights/")]
    return {name.removeprefix("weights/"): load_tensor(found.folder, found.manifest, name) for name in names}


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saves small models of `transformers` as Hugging Face folders."""
    from tests.hf.support import EXPERTS, save, theirs

    made = tmp_path_factory.mktemp("models")
    return {
        "qwen2": save(theirs("qwen2", tie_word_embeddings=True), made / "qwen2"),
        "qwen3_moe": save(theirs("qwen3_moe", **EXPERTS, head_dim=16), made / "qwen3_moe"),
    }


def stored(folder: Path) -> dict[str, Tensor]:
    """Returns the whole tensors of our model after loading the folder."""
    from tests.hf.support import ours_from, targets_of

    found: dict[str, Tensor] = {}
    for f in targets_of(ours_from(folder)[0]):
        whole = found.setdefault(f.tensor, torch.empty(f.shape))
        region(whole, f.start, tuple(f.values.shape)).copy_(f.values)
    return found


def stored_values(folder: Path) -> Tensor:
    """Returns all numbers of the files, sorted, to show that none is lost, changed or added."""
    tensors = [t for file in sorted(folder.glob("*.safetensors")) for t in load_file(file).values()]
    return torch.cat([tensor.flatten() for tensor in tensors]).sort().values


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Returns the losses of one process by family."""
    found = {}
    for family, model in models.items():
        folder = tmp_path_factory.mktemp(family)
        train(folder, f"--hf {model} --train-iters 3")
        found[family] = losses(folder)
        assert found[family][2] < found[family][0]
    return found


def train_twice(folder: Path, words: str) -> None:
    """Trains for 0 steps, which saves the loaded weights, and for 3 steps."""
    train_on_a_rank(folder / "0", f"{words} --train-iters 0")
    train_on_a_rank(folder / "3", f"{words} --train-iters 3")


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen2", "tp2 pp2"), ("qwen2", "cp2 zero3"), ("qwen3_moe", "ep2 zero1"), ("qwen3_moe", "tp2 pp2")],
)
def test_training_begins_with_the_weights_of_the_folder_in_any_layout(
    models: dict[str, Path], alone: dict[str, list[float]], family: str, layout: str, tmp_path: Path
) -> None:
    words = f"--load {models[family]} {LAYOUTS[layout]}"
    run_distributed(train_twice, 4 if "pp2" in layout else 2, folder=tmp_path, words=words)
    expected, found = stored(models[family]), weights(tmp_path / "0")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].equal(values), name
    everything = torch.cat([values.flatten() for values in found.values()]).sort().values
    assert everything.equal(stored_values(models[family]))
    assert losses(tmp_path / "3") == pytest.approx(alone[family], rel=1e-5)
    assert (tmp_path / "3" / "checkpoints" / "huggingface" / "config.json").is_file()


def test_architecture_comes_from_the_folder_and_is_reported(models: dict[str, Path], tmp_path: Path) -> None:
    words = f"--load {models['qwen2']} --train-iters 2"
    settings = prepared(tmp_path / "a", f"{words} --num-layers 2 --rotary-base 1e4 --attention-dropout 0.1")
    model = settings.config.model
    assert (model.hidden_size, model.num_query_groups, model.layernorm_epsilon) == (32, 2, 1e-6)
    assert model.add_qkv_bias and not model.untie_embeddings_and_output_weights
    assert (model.attention_dropout, model.seq_length) == (0.1, 16), "a run chooses them"
    [line] = [notice for notice in settings.notices if notice.startswith("architecture from ")]
    assert f"{models['qwen2']}: --hidden-size 32 --ffn-hidden-size 48 " in line and "--num-layers" not in line
    assert settings.sources["hidden_size"] == f"loaded from {models['qwen2']}"
    assert settings.sources["num_layers"] == "flag --num-layers"
    longer = prepared(tmp_path / "a", f"{words} --seq-length 128")
    assert longer.config.model.max_position_embeddings == 128
    assert any("longer than the 64 positions" in notice for notice in longer.notices)


@pytest.mark.parametrize(
    ("said", "complaints"),
    [
        ("--num-layers 3", ["--num-layers 2, but the command line gives --num-layers 3"]),
        ("--preset qwen2.5-7b", ["--hidden-size 32, but preset qwen2.5-7b gives --hidden-size 3584"]),
        (
            "--norm-epsilon 1e-5 --no-group-query-attention",
            [
                "--layernorm-epsilon 1e-06, but the command line",
                "--num-query-groups 2, but this command resolves to",
            ],
        ),
        ("--num-experts 4", ["no --num-experts, but the command line gives --num-experts 4"]),
        ("--vocab-size 62", ["--vocab-size 61, but"]),
    ],
)
def test_contradiction_of_the_folder_is_refused_with_both_values(
    models: dict[str, Path], tmp_path: Path, said: str, complaints: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        prepared(tmp_path / "a", f"--load {models['qwen2']} --train-iters 2 {said}")
    for complaint in complaints:
        assert any(f"holds a model with {complaint}" in problem for problem in error.value.problems), (
            complaint
        )
    assert not (tmp_path / "a").exists()


def test_words_that_say_the_same_are_no_contradiction(models: dict[str, Path], tmp_path: Path) -> None:
    same = "--group-query-attention --num-query-groups 2 --swiglu --use-rotary-position-embeddings --moe-router-topk 3"
    assert prepared(tmp_path, f"--load {models['qwen2']} --train-iters 2 {same}").config.model.num_layers == 2
    # A folder cannot contradict custom layers; loading shows whether it has their tensors.
    prepared(tmp_path, f"--load {models['qwen2']} --train-iters 2 --spec mine layers")
    every = "--moe-layer-freq [1]*2 --ffn-hidden-size 99"
    prepared(tmp_path, f"--load {models['qwen3_moe']} --train-iters 2 {every}")


def test_windows_and_factors_of_another_model_are_a_contradiction() -> None:
    """Includes a window that covers the sequences of this run, as the run would save another model."""
    base = {name: item.default for name, item in all_settings().items()} | {"position_embedding_type": "rope"}
    base |= {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "seq_length": 2048}

    def found(loaded: dict[str, Any], now: dict[str, Any]) -> list[str]:
        return architecture_differences(architecture(base | loaded), Settings.defaults(**(base | now)))

    narrow, wide = {"window_size": (1023, 0)}, {"window_size": (4095, 0)}
    for loaded, now in ((wide, narrow), (narrow, wide), (wide, {}), ({}, wide)):
        assert found(loaded, now) == ["window_size"]
    assert found(narrow, {**narrow, "window_attn_skip_freq": "2"}) == ["window_attn_skip_freq"]
    everything = {"window_size": (-1, 0), "window_attn_skip_freq": "2"}
    assert found({}, everything) == found(narrow, {**narrow, "window_attn_skip_freq": "[1]*4"}) == []
    scales = {"yarn_mscale": 0.7, "yarn_mscale_all_dim": 0.5}
    assert found(scales, {**scales, "yarn_mscale": 0.0}) == ["yarn_mscale"]
    assert found({}, scales) == list(scales) and found({}, {"yarn_mscale": 0.7}) == []


def test_a_run_may_lie_in_the_folder_it_loads(models: dict[str, Path], tmp_path: Path) -> None:
    whole = Path(shutil.copytree(models["qwen2"], tmp_path / "whole"))
    saved = Path(shutil.copytree(models["qwen2"], tmp_path / "saved"))
    train(whole, f"--load {whole} --train-iters 0")
    train(tmp_path / "run", f"--load {saved} --save {saved} --train-iters 0")
    expected = stored(models["qwen2"])["embedding.word.weight"]
    for found in (newest(whole / "checkpoints"), newest(saved)):
        assert load_tensor(found.folder, found.manifest, "weights/embedding.word.weight").equal(expected)


def test_a_folder_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty holds no checkpoint and no Hugging Face model"):
        prepared(tmp_path / "a", f"--load {tmp_path / 'empty'} --vocab-size 61 --train-iters 2")
    with pytest.raises(UserError, match=r"--load .*none does not exist; check the path"):
        prepared(tmp_path / "a", f"--load {tmp_path / 'none'} --vocab-size 61 --train-iters 2")


MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("base")
    train(folder, f"{MODEL} --train-iters 4")
    return folder


@pytest.fixture
def copied(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "copied"))


def test_resume_takes_the_architecture_from_the_checkpoint(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(copied, "--train-iters 6")
    shown = capsys.readouterr().out
    assert "--num-layers 2 --hidden-size 32" in shown and "resuming at step 4 of 6" in shown
    with pytest.raises(
        ConfigError, match=r"--num-layers 2, but .* 3; leave that out, choose another --run-dir"
    ):
        prepared(copied, "--num-layers 3 --train-iters 6")
    settings = prepared(copied, f"{MODEL} --train-iters 6")
    assert not [notice for notice in settings.notices if notice.startswith("architecture")], "nothing is new"


def test_run_with_only_damaged_steps_suggests_fresh(copied: Path, tmp_path: Path) -> None:
    """Suggests --fresh to the run itself, and another folder to a run that loads the damaged steps."""
    for manifest in copied.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{")
    with pytest.raises(UserError, match=r"is usable .*--fresh"):
        prepared(copied, "--train-iters 4")
    with pytest.raises(UserError, match=r"is usable .*name another folder"):
        prepared(tmp_path / "other", f"--train-iters 4 --load {copied}")


def test_finetuning_loads_only_weights_and_can_be_resumed(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--load {base} --finetune --no-load-optim --no-load-rng --dataset-size 32"
    train(tmp_path / "0", f"{words} --train-iters 0")
    expected, found = weights(base), weights(tmp_path / "0")
    assert all(found[name].equal(values) for name, values in expected.items())
    train(tmp_path / "whole", f"{words} --train-iters 4")
    train(tmp_path / "cut", f"{words} --train-iters 2 --lr-decay-iters 4")
    capsys.readouterr()
    train(tmp_path / "cut", f"{words} --train-iters 4 --lr-decay-iters 4")
    shown = capsys.readouterr().out
    assert "resuming at step 2 of 4" in shown and "the run resumes from its own step 2" in shown
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    earlier = base / "checkpoints" / "step-00000002"
    train(tmp_path / "earlier", f"--load {earlier} --train-iters 4 --lr-decay-iters 4")
    assert losses(tmp_path / "earlier") == losses(base)[2:], "one step may be named"
    train(tmp_path / "late", f"--load {base} --train-iters 3")
    assert f"{base} is at step 4 and --train-iters is 3: nothing is left" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"the data is not what .* --finetune"):
        train(tmp_path / "other", f"--load {base} --dataset-size 32 --train-iters 6")


def test_the_base_in_the_runs_own_folder_is_begun_from_once_and_never_deleted(copied: Path) -> None:
    """Steps of the base have numbers of the new run, and --keep-checkpoints does not delete them."""
    own = copied / "checkpoints"
    words = f"--load {own} --save {own} --finetune --save-interval 1"
    train(copied, f"{words} --train-iters 3 --lr-decay-iters 4")
    assert len(losses(copied)) == 3 and (copied / "metrics.1.jsonl").is_file()
    before = losses(copied)
    train(copied, f"{words} --train-iters 4")
    assert losses(copied)[:3] == before and len(losses(copied)) == 4
    steps = {path.name for path in own.iterdir() if path.is_dir()}
    bases = {"step-00000002.before", "step-00000004.before"}
    assert steps == {*bases, "step-00000003", "step-00000004"}
    assert newest(own).folder.name == "step-00000004"
    # If its own saves are lost, the run is refused instead of silently beginning again.
    for name in ("step-00000003", "step-00000004"):
        (own / name / "manifest.json").unlink()
    for _ in range(2):
        with pytest.raises(UserError, match=r"no checkpoint in .* is usable .*--fresh"):
            train(copied, f"{words} --train-iters 4")


def test_flags_that_load_nothing_do_not_turn_a_restart_into_a_beginning(tmp_path: Path) -> None:
    own = tmp_path / "a" / "checkpoints"
    words = f"{MODEL} --load {own} --finetune"
    train(tmp_path / "a", f"{words} --train-iters 2 --lr-decay-iters 4")
    train(tmp_path / "a", f"{words} --train-iters 4")
    assert len(losses(tmp_path / "a")) == 4


def test_resume_without_optimizer_state_has_new_moments(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[Any] = []
    monkeypatch.setattr(resume_module, "restore_random_state", lambda *found: restored.append(found))
    words = f"--load {copied} --lr-decay-iters 8 --no-load-optim"
    train(tmp_path / "whole", f"{words} --train-iters 8")
    assert len(restored) == 1 and len(losses(tmp_path / "whole")) == 4, "the steps before count"
    train(tmp_path / "with", f"--load {copied} --lr-decay-iters 8 --train-iters 8 --no-load-rng")
    assert len(restored) == 1 and losses(tmp_path / "with")[0] == losses(tmp_path / "whole")[0]
    assert losses(tmp_path / "with")[1] != losses(tmp_path / "whole")[1]
    train(tmp_path / "cut", f"{words} --train-iters 6")
    train(tmp_path / "cut", f"{words} --train-iters 8")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole"), "Adam counts from where its state was new"


def test_weights_alone_in_half_precision_are_a_beginning_too(
    base: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    """Loads a checkpoint as an import writes it.

    It has no optimizer state, the dtype of the source, and files of Hugging Face beside the steps.
    """
    halves = {name: values.bfloat16() for name, values in weights(base).items()}
    own = tmp_path / "a" / "checkpoints"
    fragments = [Fragment(f"weights/{n}", tuple(t.shape), (0,) * t.dim(), t) for n, t in halves.items()]
    CheckpointStore(own, keep=None).save(
        0, fragments, {}, {"imported": True}, newest(base / "checkpoints").manifest.config, Group(0, 1)
    )
    shutil.copytree(models["qwen2"], own / "huggingface")
    train(tmp_path / "elsewhere", f"--load {own} --train-iters 0")
    assert all(found.equal(halves[name].float()) for name, found in weights(tmp_path / "elsewhere").items())
    assert {path.name for path in (tmp_path / "elsewhere" / "checkpoints" / "huggingface").iterdir()} == {
        "config.json",
        "generation_config.json",
    }
    with pytest.raises(
        UserError, match=r"that this run has not saved, and --load .* names others; choose another"
    ):
        train(tmp_path / "a", f"--load {base} --train-iters 4")
    for named, steps in ((own / "step-00000000", 4), (own, 6)):
        train(tmp_path / "a", f"--load {named} --train-iters {steps} --lr-decay-iters 6")
    assert len(losses(tmp_path / "a")) == 6
    assert {path.name for path in own.glob("step-*")} == {"step-00000000", "step-00000004", "step-00000006"}


def test_only_model_files_of_a_run_are_replaced(models: dict[str, Path], tmp_path: Path) -> None:
    """A folder named `huggingface` may be anything, such as the cache of the hub."""
    place = tmp_path / "huggingface"
    place.mkdir()
    (place / "config.json").write_text("of a start that was cut short")
    copy_model_files(models["qwen2"], tmp_path)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    assert before["config.json"] == (models["qwen2"] / "config.json").read_bytes()
    (place / "hub").mkdir()
    with pytest.raises(UserError, match=r"huggingface .* has other content; choose another --save"):
        copy_model_files(models["qwen3_moe"], tmp_path)
    (place / "hub").rmdir()
    assert before == {path.name: path.read_bytes() for path in place.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["huggingface"]


def test_the_commands_say_what_they_will_load(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(models["qwen2"], tmp_path / "model"))
    (model / "tokenizer.json").touch()
    words = (
        f"--load {model} --device cpu --train-iters 2 --data-path corpus --run-dir {tmp_path / 'a'}".split()
    )
    assert main(["config", *words]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"hidden_size +32 +loaded from {model}\n", shown)
    assert f"note: tokenizer from {model}\n" in shown and "note: architecture from " in shown
    assert main(["layout", "--load", str(model), "--pp_size", "2"]) == 0
    assert "made up" not in capsys.readouterr().out
    assert main(["train", *words, "--num-layers", "3"]) == 2
    assert f"{model} holds a model with --num-layers 2, but the command line gives --num-layers 3" in (
        capsys.readouterr().err
    )
    assert main(["config", *words, "--tokenizer-model", str(tmp_path / "none.json")]) == 2
    told = capsys.readouterr().err
    assert "okenizer not found" in told and "holds a model" not in told
    for save in (model, tmp_path / "a" / ".." / "model"):
        assert main(["config", *words, "--fresh", "--save", str(save)]) == 2
        assert f"--fresh would move {save} aside" in capsys.readouterr().err


def test_a_model_of_the_hub_is_its_downloaded_folder(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(models["qwen2"])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    settings = prepared(tmp_path / "a", "--load some/model --train-iters 2")
    assert asked == ["some/model"] and settings.config.checkpoint.load == str(models["qwen2"])
    assert f"some/model is in {models['qwen2']}" in settings.notices
    assert settings.given("load") and settings.config.model.hidden_size == 32
    words = (
        "--mock-data --vocab-size 61 --train-iters 2 --device cpu --tokenizer-model some/tokenizer".split()
    )
    assert main(["config", *words]) == 0 and asked[1:] == ["some/tokenizer"]
    assert re.search(rf"tokenizer_model +{models['qwen2']} +flag --tokenizer-model", capsys.readouterr().out)

    def offline(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError(name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    assert main(["config", *words]) == 2
    shown = capsys.readouterr().err
    assert (
        "Tokenizer not found: some/tokenizer is not a folder and could not be downloaded" in shown
        and "hf download" in shown
    )


def test_a_command_trains_from_a_folder(models: dict[str, Path], tmp_path: Path) -> None:
    words = f"--hf {models['qwen2']} {RUN} --device cpu --train-iters 2 --run-dir {tmp_path}"
    ran = subprocess.run(
        [sys.executable, "-m", "pentatron", "train", *words.split()],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"the weights come from {models['qwen2']}; training begins at step 0" in ran.stdout
    assert len(losses(tmp_path)) == 2
