"""The `config.yaml` that a run leaves, given to another one: places in the first run's folder become places in the second's."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEADER = "# Every setting of this run and where it came from. Use it again with: --config THIS_FILE"
# Settings that name a file or a folder which a run writes. The run's folder and that of its checkpoints are not taken over at all.
_WRITTEN_TO = ("tensorboard_dir", "wandb_save_dir", "data_cache_path", "memory_snapshot_path")
# A relative path of these already means a place in the folder of the run that uses it.
_BELOW_THE_RUN = ("memory_snapshot_path",)
# One line of the file; values that are not to be taken over are comments.
_LINE = re.compile(r"^  (?:# )?(\w+): (.*?)  # .*$", re.MULTILINE)


def saved_values(text: str) -> dict[str, Any]:
    """Every setting of the run that wrote this text, also those that another run does not take over."""
    found: dict[str, Any] = {}
    for name, written in _LINE.findall(text):
        try:
            found[name] = json.loads(written)
        except ValueError:
            # Changed by hand.
            continue
    return found


def places_in_run(file: str, values: Mapping[str, Any]) -> dict[str, str]:
    """By setting, the path below the run's folder of each place that the run of this file wrote to inside it.

    Empty where the file is not the `config.yaml` of a run. A run that was moved aside since names its first folder.
    """
    path = Path(file)
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.startswith(HEADER):
        return {}
    named = saved_values(text)
    folders = [path.parent, *(Path(named[name]) for name in ("run_dir", "save") if named.get(name))]
    places = {name: Path(values[name]) for name in _WRITTEN_TO if values.get(name) is not None}
    found: dict[str, str] = {}
    for name, place in places.items():
        if name in _BELOW_THE_RUN and not place.is_absolute():
            continue
        for folder in folders:
            if place.resolve().is_relative_to(folder.resolve()):
                found[name] = str(place.resolve().relative_to(folder.resolve()))
                break
    return found
