"""`pentatron config` shows resolved settings and their origins, `pentatron presets` lists the presets."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pentatron.cli.configure import Prepared, prepare
from pentatron.cli.layout_report import batch_table
from pentatron.cli.options import Options, flags_of, option, options_help, parse_options_and_settings, usage
from pentatron.cli.output import say, show_report, with_help
from pentatron.errors import UserError
from pentatron.settings.command_line import did_you_mean
from pentatron.settings.entry_points import ENTRY_POINTS, TRAIN, EntryPoint
from pentatron.settings.presets import presets
from pentatron.settings.run_config import all_settings, sections

_SCRIPTS = ", ".join(name for name in ENTRY_POINTS if name.endswith(".py"))


def _entry_named(written: str, flag: str) -> str:
    if written not in ENTRY_POINTS:
        guess = did_you_mean(written, ENTRY_POINTS)
        raise UserError(f"{flag} must be one of {', '.join(ENTRY_POINTS)}, not '{written}'{guess}")
    return written


@dataclass(frozen=True)
class ConfigOptions(Options):
    all: bool = option(False, "also print settings at their default")
    json: bool = option(False, "print all settings as JSON")
    as_: str = option(TRAIN.name, f"parse flags like SCRIPT: {_SCRIPTS}", value="SCRIPT", parse=_entry_named)

    @property
    def entry(self) -> EntryPoint:
        entry = ENTRY_POINTS[self.as_]
        return dataclasses.replace(entry, own=flags_of(ConfigOptions), own_help="pentatron config")


CONFIG_USAGE = f"""{usage("pentatron config", ConfigOptions, "[--setting value ...]")}

Shows the settings that `pentatron train` resolves from the same flags, with the origin of each value. Nothing is started.

{options_help(ConfigOptions)}

`pentatron train --help` lists the settings.
"""

_PRESET_COLUMNS = {
    "num_layers": "layers", "hidden_size": "hidden", "ffn_hidden_size": "ffn", "num_attention_heads": "heads",
    "num_query_groups": "groups", "vocab_size": "vocab",
}  # fmt: skip
_NAME_WIDTH = 38
PRESETS_USAGE = """usage: pentatron presets

Lists the presets. Use one with: pentatron train --preset NAME
"""


@with_help(CONFIG_USAGE)
def config_command(words: Sequence[str]) -> int:
    """Prints the settings that a training command with the same words resolves to."""
    options, settings = parse_options_and_settings(ConfigOptions, words, lambda options: options.entry)
    prepared = prepare(settings, options.entry)
    show_report(prepared, options.json, lambda prepared: _setting_lines(prepared, options.all), _json)
    return 0


def _json(prepared: Prepared) -> dict[str, Any]:
    values, sources = prepared.resolved.config.flat(), prepared.resolved.sources
    return {name: {"value": values[name], "source": sources[name]} for name in values}


def _setting_lines(prepared: Prepared, everything: bool) -> Iterator[str]:
    values, sources = prepared.resolved.config.flat(), prepared.resolved.sources
    shown = [name for name in all_settings() if everything or sources[name] != "default"]
    width = max(_NAME_WIDTH, *(len(name) for name in shown))
    for section, cls in sections().items():
        names = [name for name in shown if all_settings()[name].section == section]
        if names:
            yield f"{cls.__doc__}"
            for name in names:
                yield f"  {name:<{width}} {_formatted(values[name]):<28} {sources[name]}"
            yield ""
    if sizes := batch_table(prepared.resolved.config, prepared.resolved.config.train.train_iters):
        yield f"{sizes}\n"
    for notice in prepared.resolved.notices:
        yield f"note: {notice}"
    if not everything:
        yield "settings at their default are not shown; add --all to print them, --json to print all as JSON"


def _formatted(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


@with_help(PRESETS_USAGE)
def presets_command(words: Sequence[str]) -> int:
    if words:
        raise UserError(
            "pentatron presets takes no arguments; use a preset with: pentatron train --preset NAME"
        )
    say(f"{'preset':<20}" + "".join(f"{title:>9}" for title in _PRESET_COLUMNS.values()))
    for name, values in presets().items():
        numbers = "".join(f"{values.get(column, '-')!s:>9}" for column in _PRESET_COLUMNS)
        say(f"{name:<20}{numbers}{unavailable(values)}")
    say("\nuse one with: pentatron train --preset NAME --data-path PREFIX --train-iters N")
    return 0


def unavailable(values: dict[str, Any]) -> str:
    """Returns what a preset needs that is not implemented yet, or the flags that replace it."""
    needed = [all_settings()[n] for n, v in values.items() if all_settings()[n].refuses(v)]
    if not needed:
        return ""
    if any(s.default is None for s in needed):
        return f"  not available yet: {needed[0].not_yet}"
    return f"  for now with {' '.join(f'{s.flag} {s.default}' for s in needed)}"
