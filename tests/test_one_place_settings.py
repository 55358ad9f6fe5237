"""Settings are read as typed attributes, and no assertion is about the value of a setting."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from pentatron.settings.run_config import all_settings

PACKAGE = Path(__file__).parent.parent / "pentatron"
# Mappings whose keys are names of settings and whose values are not values of settings.
OTHER_MAPPINGS = {
    "wrong": "sentences about settings that cannot be used",
    "other": "another line of results",
    "row": "one line of metrics.jsonl, or of the results of a benchmark",
    "content": "the sections of a manifest",
    "tokenizer": "a tokenizer as a data file describes it",
    "tokenizer_config": "tokenizer_config.json",
    "schedule": "the schedule in a checkpoint",
    "scheduler": "the state of Megatron-LM's scheduler",
    "common": "the common state in a checkpoint of Megatron-LM",
}
# Foreign configurations: `config.json` of Hugging Face and Megatron-LM's arguments share names with settings
# of Pentatron.
FOREIGN = {"config", "args", "arguments", "theirs", "written", "content"}
TRANSLATES = ("hf", "interchange")


def string_keys(path: Path, source: str) -> Iterator[str]:
    """Yields reads of a setting by a string: `x["lr"]`, `x.get("lr")`."""
    translates = path.relative_to(PACKAGE).parts[0] in TRANSLATES
    for node in ast.walk(ast.parse(source)):
        mapping: ast.expr | None = None
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            mapping, key = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            mapping, key = node.func.value, node.args[0] if node.args else None
        if not (isinstance(key, ast.Constant) and key.value in all_settings()):
            continue
        if isinstance(mapping, ast.Call) and getattr(mapping.func, "id", "") == "all_settings":
            # A declaration, not a value.
            continue
        name = getattr(mapping, "attr", getattr(mapping, "id", ""))
        if name in OTHER_MAPPINGS or (translates and name in FOREIGN):
            continue
        yield f"{path.relative_to(PACKAGE)}:{key.lineno} {name}[{key.value!r}]"


def assertions(path: Path, source: str) -> Iterator[str]:
    """Yields assertions about a setting, such as `assert config.optim.lr is not None`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assert):
            continue
        for part in ast.walk(node.test):
            if not (isinstance(part, ast.Attribute) and part.attr in all_settings()):
                continue
            # `options.zero_stage` is what an optimizer is built with; `self.config` is a section or a run.
            if part.attr != "config" and getattr(part.value, "id", "") != "options":
                yield f"{path.relative_to(PACKAGE)}:{node.lineno} assert … {part.attr}"


def found(search: object) -> list[str]:
    assert callable(search)
    return [line for p in sorted(PACKAGE.rglob("*.py")) for line in search(p, p.read_text(encoding="utf-8"))]


def test_no_setting_is_read_by_a_string() -> None:
    assert found(string_keys) == []


def test_no_assertion_is_about_a_setting() -> None:
    assert found(assertions) == []


@pytest.mark.parametrize("source", ["draft['lr']", "values.get('lr')", "config.flat()['seed']"])
def test_a_string_key_is_seen(source: str) -> None:
    assert list(string_keys(PACKAGE / "train" / "x.py", source))


def test_other_mappings_are_distinguished() -> None:
    source = "draft.wrong['lr'] = 'x'\ndraft.wrong['lr']\nrow['loss']\nsettings['lr'] = 3"
    assert not list(string_keys(PACKAGE / "train" / "x.py", source))
    assert not list(string_keys(PACKAGE / "hf" / "x.py", "config['hidden_size']"))
    assert list(string_keys(PACKAGE / "train" / "x.py", "config['hidden_size']")), "control"


def test_an_assertion_is_seen() -> None:
    source = "assert config.train.train_iters is not None and x"
    assert list(assertions(PACKAGE / "train" / "x.py", source))
