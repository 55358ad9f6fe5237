"""Tests untrusted models: code in a Hugging Face folder, settings or a tokenizer is never executed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pentatron.checkpoint.state import TrainState
from pentatron.cli.main import main
from pentatron.data.chat_template import find_chat_template, special_tokens
from pentatron.data.identity import DataIdentity
from pentatron.data.tokenizer import FileTokenizer
from pentatron.errors import UserError
from pentatron.train.lr_schedule import OptimizerSchedule
from tests.checkpoint.test_damage import rewrite
from tests.data.test_chat_template import TALK, template
from tests.hf.support import save, theirs
from tests.hf.test_folder import change_config
from tests.security.canary import pickled, refused, run
from tests.support import resolved

CODE = "import pathlib; pathlib.Path({canary!r}).touch()\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(theirs("qwen2", num_hidden_layers=1), tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def of_remote_code(folder: Path, canary: Path) -> None:
    code = CODE.format(canary=str(canary))
    (folder / "modeling_evil.py").write_text(code)
    (folder / "configuration_evil.py").write_text(code)
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})


def of_another_kind(folder: Path, canary: Path) -> None:
    of_remote_code(folder, canary)
    change_config(folder, model_type="evil")


def of_pickle(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickled(canary))


def of_pickle_renamed(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickled(canary))


def of_no_end(folder: Path, canary: Path) -> None:
    change_config(folder, num_hidden_layers=10**9, layer_types=None)


def of_great_width(folder: Path, canary: Path) -> None:
    change_config(folder, hidden_size=10**9, head_dim=8)


def of_depth(folder: Path, canary: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 200_000)


def of_a_name(folder: Path, canary: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, f"\x1b[2J$(touch {canary})\n": weights["model.norm.weight"].clone()}, folder / "model.safetensors")  # fmt: skip


HUGGING_FACE: dict[str, Callable[[Path, Path], None]] = {
    "code beside the weights": of_remote_code,
    "a family of its own": of_another_kind,
    "pickled weights": of_pickle,
    "pickle under another name": of_pickle_renamed,
    "layers without end": of_no_end,
    "a width without end": of_great_width,
    "a nested configuration": of_depth,
    "a tensor named like a command": of_a_name,
}


@pytest.mark.parametrize("attack", HUGGING_FACE)
def test_a_folder_of_hugging_face_runs_nothing(
    folder: Path, tmp_path: Path, attack: str, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = tmp_path / "canary"
    HUGGING_FACE[attack](folder, canary)
    before = sorted(folder.iterdir())
    refused(capsys, "import", folder, tmp_path / "out")
    refused(capsys, "generate", folder, "--tokens", "1,2")
    assert not canary.exists() and not (tmp_path / "out").exists() and sorted(folder.iterdir()) == before


def test_an_honest_folder_is_imported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control."""
    assert run(capsys, "import", folder, tmp_path / "out")[0] == 0


@pytest.fixture
def imported(folder: Path, tmp_path: Path) -> Path:
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    return tmp_path / "ours" / "step-00000000"


SETTINGS: dict[str, dict[str, Any]] = {
    "uses a custom layer spec, which is code": {"spec": ["evil_layers", "make"]},
    "another kind of value": {"num_layers": "1"},
    "a list for a number": {"hidden_size": [32]},
    "an object for a text": {"normalization": {"__class__": "os.system"}},
    "no number": {"rotary_base": "{{ 7 * 7 }}"},
    "layers without end": {"num_layers": 10**9},
    "a width without end": {"ffn_hidden_size": 10**12},
    "a vocabulary without end": {"vocab_size": 10**12},
}


@pytest.mark.parametrize("attack", SETTINGS)
def test_settings_of_a_step_are_data(
    imported: Path,
    tmp_path: Path,
    attack: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "evil_layers.py").write_text(CODE.format(canary=str(canary)) + "def make(): return None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rewrite(imported, lambda m: m["config"]["model"].update(SETTINGS[attack]))
    refused(capsys, "generate", imported, "--tokens", "1,2")
    refused(capsys, "checkpoint", "reshard", imported, tmp_path / "resharded")
    refused(capsys, "train", "--load", imported, "--run-dir", tmp_path / "run", "--dataset-size", "8", "--seq-length", "8",
            "--global-batch-size", "1", "--train-iters", "1", "--device", "cpu")  # fmt: skip
    assert not canary.exists() and not (tmp_path / "resharded").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "state", [{"step": "3"}, {"consumed_samples": -1}, {"drawn": []}, {"flops": "x"}, {"ordered_for": 3}, {"step": True},
              {"ordered_for": ["3"]}, {"valid_ordered_for": [-3]}, {"drawn": {"a": "b"}}, {"loss_scaling": {"scale": None}},
              {"data_files": ["a"]}, {"schedule": {"learning_rate": 3}}]
)  # fmt: skip
def test_a_state_of_another_kind_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="which is invalid"):
        TrainState.from_json(state)
    assert TrainState.from_json({"count_update": 1, "step": 3}).step == 3, "what is not known is left alone"
    # `overflows_left` becomes negative when overflows continue.
    assert TrainState.from_json({"loss_scaling": {"overflows_left": -2}}).loss_scaling["overflows_left"] == -2


def test_a_schedule_or_files_of_another_kind_are_refused() -> None:
    with pytest.raises(UserError, match=r"schedule cannot be read .*weight_decay"):
        OptimizerSchedule.from_json(
            {"learning_rate": OptimizerSchedule.of(resolved().config).to_json()["learning_rate"]}
        )
    with pytest.raises(UserError, match=r"of the data in the checkpoint cannot be read .*made_up"):
        DataIdentity.from_json("x", [{"made_up": 3}])


TEMPLATES = {
    "classes": "{{ ''.__class__.__base__.__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "by a filter": "{{ ''|attr('__class__')|attr('__base__') }}",
    "by a format": "{{ '{0.__class__.__base__}'.format('') }}",
    "by a mapped format": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "by an import": "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "by a namespace": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "loops without end": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("attack", TEMPLATES)
def test_a_chat_template_stays_in_its_sandbox(tmp_path: Path, attack: str) -> None:
    canary = tmp_path / "canary"
    source = TEMPLATES[attack].replace("CANARY", str(canary))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": source, "auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    (tmp_path / "evil.py").write_text(CODE.format(canary=str(canary)))
    found = find_chat_template(tmp_path)
    assert found is not None and special_tokens(tmp_path) == {}
    try:
        # Some forbidden attributes are undefined, which renders as nothing.
        assert template(found[0]).render(TALK).text == ""
    except UserError as error:
        assert "\n" not in str(error)
    assert not canary.exists()
    assert template("{% for m in messages %}{{ m.content }}{% endfor %}").render(TALK).text, "control"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{" * 100_000, '{"version": "1.0", "model": {"type": "BPE"}}', "\x80", "__import__('os')"],
)
def test_a_broken_tokenizer_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="is not a readable tokenizer"):
        FileTokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{" * 100_000, "[" * 100_000, "3", '{"eos_token": {"content": ["x"]}}'])
def test_a_broken_configuration_of_a_tokenizer_is_one_sentence(tmp_path: Path, content: str) -> None:
    library = pytest.importorskip("tokenizers")
    library.Tokenizer(library.models.WordLevel({"a": 0, "</s>": 1}, "a")).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "tokenizer_config.json").write_text(content)
    try:
        assert FileTokenizer(tmp_path).eod == 1
        find_chat_template(tmp_path)
    except UserError as error:
        assert "\n" not in str(error) and "tokenizer_config.json is not" in str(error)
