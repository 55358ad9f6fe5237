"""`pentatron config` and `pentatron presets`."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from pentatron.cli.batch_table import batch_table
from pentatron.cli.prepare import Prepared, prepare
from pentatron.cli.terminal import say
from pentatron.config.entry import ENTRY_POINTS, TRAIN, EntryPoint
from pentatron.config.flags import did_you_mean
from pentatron.config.presets import presets
from pentatron.config.run import sections, table
from pentatron.errors import UserError

CONFIG_USAGE = f"""usage: pentatron config [--all] [--json] [--as SCRIPT] [--setting value ...]

Shows what `pentatron train` with the same words would use, and where each value came from. Nothing is started.

  --all         also the settings left at their default
  --json        everything, for machines
  --as SCRIPT   with the names and defaults of one of {", ".join(n for n in ENTRY_POINTS if n.endswith(".py"))}

`pentatron train --help` lists the settings.
"""

_PRESET_COLUMNS = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn",
    "num_attention_heads": "heads",
    "num_query_groups": "groups",
    "vocab_size": "vocab",
}
_NAME_WIDTH = 38
PRESETS_USAGE = """usage: pentatron presets

Lists the named starting points; use one with: pentatron train --preset NAME
"""


def config_command(words: Sequence[str]) -> int:
    """Prints what a training command with the same words would use."""
    if "--help" in words or "-h" in words:
        say(CONFIG_USAGE)
        return 0
    as_json, everything = "--json" in words, "--all" in words
    entry, settings = _entry([w for w in words if w not in ("--json", "--all")])
    prepared = prepare(
        settings, dataclasses.replace(entry, own=("all", "json", "as"), own_help="pentatron config")
    )
    if as_json:
        _print_json(prepared)
    else:
        _print_text(prepared, everything)
    return 0


def _entry(words: Sequence[str]) -> tuple[EntryPoint, list[str]]:
    """The entry point named by `--as SCRIPT`, and the other words."""
    rest = list(words)
    place = next((i for i, w in enumerate(rest) if w == "--as" or w.startswith("--as=")), None)
    if place is None:
        return TRAIN, rest
    word = rest.pop(place)
    name = word.partition("=")[2] if "=" in word else rest.pop(place) if place < len(rest) else ""
    if name not in ENTRY_POINTS:
        guess = did_you_mean(name, ENTRY_POINTS)
        raise UserError(f"--as wants one of {', '.join(ENTRY_POINTS)}, not '{name}'{guess}")
    return ENTRY_POINTS[name], rest


def _print_json(prepared: Prepared) -> None:
    values, sources = prepared.resolved.config.flat(), prepared.resolved.sources
    say(json.dumps({name: {"value": values[name], "source": sources[name]} for name in values}, indent=1))


def _print_text(prepared: Prepared, everything: bool) -> None:
    values, sources = prepared.resolved.config.flat(), prepared.resolved.sources
    shown = [name for name in table() if everything or sources[name] != "default"]
    width = max(_NAME_WIDTH, *(len(name) for name in shown))
    for section, cls in sections().items():
        names = [name for name in shown if table()[name].section == section]
        if names:
            say(f"{cls.__doc__}")
            for name in names:
                say(f"  {name:<{width}} {_text(values[name]):<28} {sources[name]}")
            say("")
    if sizes := batch_table(prepared.resolved.config, prepared.resolved.config.train.train_iters):
        say(f"{sizes}\n")
    for notice in prepared.resolved.notices:
        say(f"note: {notice}")
    if not everything:
        say("settings left at their default are not shown; add --all to see them, --json for machines")


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def presets_command(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        say(PRESETS_USAGE)
        return 0
    if words:
        raise UserError("pentatron presets takes no words; use one with: pentatron train --preset NAME")
    say(f"{'preset':<20}" + "".join(f"{title:>9}" for title in _PRESET_COLUMNS.values()))
    for name, values in presets().items():
        numbers = "".join(f"{values.get(column, '-')!s:>9}" for column in _PRESET_COLUMNS)
        say(f"{name:<20}{numbers}{remark(values)}")
    say("\nuse one with: pentatron train --preset NAME --data-path PREFIX --train-iters N")
    return 0


def remark(values: dict[str, Any]) -> str:
    """What a preset needs that is not there yet, or the flags that do without it."""
    needed = [table()[n] for n, v in values.items() if table()[n].refuses(v)]
    if not needed:
        return ""
    if any(s.default is None for s in needed):
        return f"  not available yet: {needed[0].not_yet}"
    return f"  for now with {' '.join(f'{s.flag} {s.default}' for s in needed)}"
