"""Which files of a folder a run made: those may be moved aside with it, and no others."""

import re
from pathlib import Path

from pentatron.config.saved_config import HEADER, places_in_run, saved_values

_STEP = r"(?:step-\d{8,}|iter_\d{7,}|release)"
_FILES = re.compile(
    r"train\.log|metrics(?:\.\d+)?\.jsonl|app_metrics\.json|loss\.svg|sample\.txt|restarts\.jsonl|job\.json|performance_summary\.json|"
    r"progress\.txt|latest|latest_checkpointed_iteration\.txt|began-from\.json|hang-\d+(?:-\d+)?\.txt|"
    r"\.lock(?:\.\w+)?|\.latest\.\w+|\.writable"
)
_STEPS = re.compile(rf"(?:\.|\.replaced-)?{_STEP}.*")
# What lies in the folders that a run makes beside its steps.
_INSIDE = {
    "ranks": re.compile(r"rank-\d+.*|hang-.*"),
    "memory": re.compile(r"rank-\d+\.csv"),
    "profile": re.compile(r"rank-\d+\.json"),
    "data": re.compile(
        r"\.lock|order|tokenizer\.json|corpus\.json|python_text_document.*|sft-[0-9a-f]{16}.*|\..*"
    ),
    "huggingface": re.compile(
        r"(?:config|generation_config|tokenizer|vocab|merges|special_tokens|added_tokens|chat_template).*|.*\.(?:model|tiktoken)"
    ),
}


def divide_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """What a run made of all that lies in a folder, and the rest."""
    written = _written_to(folder / "config.yaml")
    made = [entry for entry in sorted(folder.iterdir()) if entry.name in written or _is_of_a_run(entry)]
    return made, [entry for entry in sorted(folder.iterdir()) if entry not in made]


def _is_of_a_run(entry: Path) -> bool:
    name = entry.name
    if name == "config.yaml":
        return is_config_of_a_run(entry)
    if not entry.is_dir():
        return bool(_FILES.fullmatch(name))
    if name == "checkpoints":
        return all(_is_of_a_run(inner) for inner in entry.iterdir())
    if name in _INSIDE:
        return all(_INSIDE[name].fullmatch(inner.name) for inner in entry.iterdir())
    return bool(_STEPS.fullmatch(name))


def is_config_of_a_run(file: Path) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8", errors="replace").startswith(HEADER)


def _written_to(config: Path) -> set[str]:
    """The names of further folders, such as that of TensorBoard, which the run of this configuration kept in its own."""
    if not is_config_of_a_run(config):
        return set()
    values = saved_values(config.read_text(encoding="utf-8", errors="replace"))
    places = {Path(place).parts[0] for place in places_in_run(str(config), values).values() if place != "."}
    return places | ({"wandb"} if values.get("wandb_project") else set())
