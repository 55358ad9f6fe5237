"""config.json, read and written: the same settings both ways, every key accounted for."""

import json
from typing import Any

import pytest
from transformers import AutoConfig

from pentatron.hf.architecture import config_of, settings_of
from pentatron.hf.families import FAMILIES
from tests.hf.support import configs


def default(model_type: str, **more: Any) -> dict[str, Any]:
    """As save_pretrained would write it."""
    found: dict[str, Any] = json.loads(AutoConfig.for_model(model_type, **more).to_json_string())
    return found


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name != "mistral"])
def test_defaults_are_those_of_transformers_and_the_way_back_is_the_same(model_type: str) -> None:
    written = default(model_type)
    settings = settings_of(written)
    assert settings_of({"model_type": model_type}) == settings
    again = config_of(*configs(settings), original=written)
    assert settings_of(again) == settings
    assert config_of(*configs(settings_of(again)), original=again) == again
    theirs = AutoConfig.for_model(**again).to_dict()
    # Where they say null, hidden / heads, ours is a number.
    assert {key: theirs[key] for key in written if written[key] is not None} == {
        key: value for key, value in written.items() if value is not None
    }
