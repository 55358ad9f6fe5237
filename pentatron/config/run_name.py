"""The name of a run that is given none: after its model and its data, so that the same command finds the same folder."""

import re
from pathlib import PurePath

from pentatron.config.blend import NAMED, Blend
from pentatron.config.draft import Draft
from pentatron.errors import UserError

_LONGEST_PART = 40
# Folders that are called the same for every model.
_SAID_BY_NO_NAME = re.compile(
    r"checkpoints|latest|huggingface|snapshots|release|step-\d+.*|iter_\d+.*|[0-9a-f]{40}|\.*"
)
_OF_PREPARED_TEXT = "_text_document"


def name_of_run(draft: Draft) -> str:
    """`MODEL-DATA`, such as `qwen3-0.6b-chats`; a preset that brings its own data is named alone."""
    return "-".join(filter(None, (_model(draft), _data(draft)))) or "run"


def _model(draft: Draft) -> str:
    if draft.preset is not None:
        return _plain(draft.preset)
    if draft.given("load") and (named := _named_model(draft.load)):
        return named
    sizes = f"{draft.num_layers}l-{draft.hidden_size}h"
    return f"{sizes}-{draft.num_experts}e" if draft.num_experts else sizes


def _named_model(load: str) -> str:
    """The last part of the path that is a name. The hub's cache says it as `models--OWNER--NAME`."""
    for part in reversed(PurePath(load).parts):
        if part.startswith("models--"):
            return _plain(part.rpartition("--")[2])
        if not _SAID_BY_NO_NAME.fullmatch(part):
            return _plain(part)
    return ""


def _data(draft: Draft) -> str:
    if draft.corpus:
        return "" if draft.preset is not None else _plain(draft.corpus)
    words = next((getattr(draft, name) for name in NAMED[:2] if getattr(draft, name)), ())
    if words:
        return _files(words)
    return "mock" if draft.mock_data else "synthetic" if draft.dataset_size is not None else ""


def _files(words: tuple[str, ...]) -> str:
    """The first file, and how many there are besides."""
    try:
        prefixes = Blend.parse(words).prefixes
    except UserError:
        # A rule says what is wrong with the words.
        prefixes = words
    first = PurePath(prefixes[0])
    stem = first.name.removesuffix(".jsonl").removesuffix(".json").removesuffix(_OF_PREPARED_TEXT)
    more = f"-and-{len(prefixes) - 1}-more" if len(prefixes) > 1 else ""
    return f"{_plain(stem)}{more}"


def _plain(text: str) -> str:
    """Lower-case letters, digits and `. _ -`, which every file system and every shell takes as they are."""
    kept = re.sub(r"[^\w.]+", "-", text.lower()).strip("-._")
    return kept[:_LONGEST_PART].strip("-._")
