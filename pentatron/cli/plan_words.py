"""The command to copy from a plan: the user's own words, and the settings of the layout."""

import shlex
from collections.abc import Sequence
from typing import Any

from pentatron.config.flags import is_flag
from pentatron.config.run import table
from pentatron.plan.search import LAYOUT, SIZES, Layout, Search

# Settings of this command, or of what is not trained here: they are no part of the command to copy.
_NOT_COPIED = ("world_size", "nproc_per_node", "dataset_size", "train_iters")
_DATA = (
    *("data_path", "train_data_path", "data_path_config", "data_args_path", "per_split_data_args_path"),
    *("mock_data", "corpus", "dataset_size"),
)
_STEPS = 100
_WIDTH = 105


def command_block(search: Search, layout: Layout, which: str) -> str:
    lines = [f"To train {which}", "", *(f"  {line}" for line in command(search, layout))]
    if not names_data(search):
        lines.append("  (with data of yours: --data-path PREFIX instead of --mock-data)")
    if search.world > search.per_machine:
        machines = search.world // search.per_machine
        lines.append(
            f"  on each of {machines} machines, with MASTER the name of the first; `pentatron launch slurm` writes a job"
        )
    return "\n".join(lines)


def command(search: Search, layout: Layout) -> list[str]:
    """The words to copy, in lines."""
    parts = [_phrases(part) for part in _settings(search, layout)]
    lines = [_launcher(search), *(line for part in parts for line in _filled(part))]
    return [
        f"{'    ' if i else ''}{line}{' ' + chr(92) if i < len(lines) - 1 else ''}"
        for i, line in enumerate(lines)
    ]


def _phrases(words: Sequence[str]) -> list[str]:
    """Every flag with its values."""
    found: list[list[str]] = []
    for word in words:
        if is_flag(word) or not found:
            found.append([])
        found[-1].append(word)
    return [shlex.join(phrase) for phrase in found]


def _filled(phrases: Sequence[str]) -> list[str]:
    """In lines of a terminal's width."""
    lines: list[str] = []
    for phrase in phrases:
        if lines and len(lines[-1]) + len(phrase) < _WIDTH:
            lines[-1] += f" {phrase}"
        else:
            lines.append(phrase)
    return lines


def settings_words(search: Search, layout: Layout) -> list[str]:
    """What `pentatron train` is given, beside the number of processes."""
    return [word for part in _settings(search, layout) for word in part]


def names_data(search: Search) -> bool:
    draft = search.draft
    return any(draft.given(name) or draft.source(name).startswith("preset") for name in _DATA)


def _settings(search: Search, layout: Layout) -> tuple[list[str], list[str]]:
    """Of the layout, and of everything else."""
    draft = search.draft
    of_layout = [
        word
        for name, value in layout.settings.items()
        if value != table()[name].default
        for word in words_of(name, value)
    ]
    of_layout += [
        word for name, value in _against_a_file(search, layout).items() for word in words_of(name, value)
    ]
    if "micro_batch_size" not in layout.settings and draft.given("micro_batch_size"):
        of_layout += words_of("micro_batch_size", draft.micro_batch_size)
    rest = [
        word
        for name in table()
        if draft.source(name).startswith("flag") and name not in (*LAYOUT, *_NOT_COPIED)
        for word in words_of(name, getattr(draft, name))
    ]
    if not names_data(search):
        rest.append("--mock-data")
    rest += words_of("train_iters", draft.train_iters if draft.given("train_iters") else _STEPS)
    if search.device.name == "CPU process" and not draft.given("device"):
        rest += ["--device", "cpu"]
    return of_layout, rest


def _against_a_file(search: Search, layout: Layout) -> dict[str, Any]:
    """Sizes of this layout that are not written because they are usual, and others in a file that the command names."""
    draft, parallel = search.draft, layout.config.parallel
    in_file = [n for n in SIZES if draft.given(n) and not draft.source(n).startswith("flag")]
    own = {name: getattr(parallel, name) for name in in_file if name not in layout.settings}
    return {
        name: value for name, value in own.items() if isinstance(value, int) and value != getattr(draft, name)
    }


def words_of(name: str, value: Any) -> list[str]:
    item = table()[name]
    if isinstance(value, bool):
        return [item.written(value)]
    values: Sequence[Any] = value if isinstance(value, tuple) else (value,)
    return [item.flag, *map(str, values)]


def _launcher(search: Search) -> str:
    if search.world <= search.per_machine:
        return f"pentatron train --nproc-per-node {search.world}"
    machines = -(-search.world // search.per_machine)
    return (
        f"torchrun --nnodes {machines} --nproc_per_node {search.per_machine} --rdzv_backend c10d "
        f"--rdzv_endpoint $MASTER:29500 -m pentatron train"
    )
