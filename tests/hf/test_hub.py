"""Tests names of the hub: their meaning, the downloaded files, and messages without network."""

import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from pentatron.errors import UserError
from pentatron.hf.hub import UNWANTED_FILES, WANTED_FILES, is_hub_id, resolve_folder

NAME = "Qwen/Qwen2.5-7B"
ADVICE = r"`hf download Qwen/Qwen2.5-7B --local-dir DIR`"


def in_cache(cache: Path) -> Path:
    """Creates a model as in the hub library's cache, a snapshot of links."""
    model = cache / "models--Qwen--Qwen2.5-7B"
    snapshot = model / "snapshots" / "abc123"
    for folder in (snapshot, model / "blobs", model / "refs"):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text("abc123")
    (model / "blobs" / "1").write_text(json.dumps({"model_type": "qwen2"}))
    (snapshot / "config.json").symlink_to("../../blobs/1")
    return snapshot


def test_paths_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(NAME)
    assert not any(map(is_hub_id, ("folder", "/a/b", "a/b/c", "./a", "../b", "a/", "~/b")))
    (tmp_path / NAME).mkdir(parents=True)
    assert not is_hub_id(NAME)
    assert resolve_folder(NAME) == Path(NAME)
    with pytest.raises(UserError, match=r"a/b/c is not a folder; name a folder with config.json"):
        resolve_folder("a/b/c")
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match=r"there is no mime in the folder runs.*; check the path"):
        resolve_folder("runs/mime", network=False)


def test_cached_model_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=f"not in the cache.*{ADVICE}"):
        resolve_folder(NAME, network=False)
    snapshot = in_cache(tmp_path)
    assert resolve_folder(NAME, network=False) == snapshot


def test_weights_settings_and_tokenizers_are_downloaded_and_nothing_else() -> None:
    wanted = "config.json model-00001-of-00002.safetensors tokenizer.model merges.txt vocab.json chat_template.jinja".split()
    unwanted = (
        "pytorch_model.bin modeling_qwen.py original/model.safetensors onnx/config.json README.md".split()
    )
    found = filter_repo_objects(
        [*wanted, *unwanted], allow_patterns=list(WANTED_FILES), ignore_patterns=list(UNWANTED_FILES)
    )
    assert list(found) == wanted


@pytest.mark.parametrize(
    "error", [ConnectionError("no route"), PermissionError(13, "denied"), ValueError("odd\nmore")]
)
def test_every_failure_is_a_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=ADVICE) as told:
        resolve_folder(NAME)
    assert "\n" not in str(told.value)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=f"pip install huggingface-hub.*{ADVICE}"):
        resolve_folder(NAME)
