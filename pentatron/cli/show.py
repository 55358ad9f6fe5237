"""`pentatron config` and `pentatron presets`."""

import json
from collections.abc import Sequence

from pentatron.cli.prepare import prepare
from pentatron.cli.terminal import say
from pentatron.config.entry import TRAIN
from pentatron.config.errors import UserError
from pentatron.config.presets import presets
from pentatron.config.run import sections, table


def config_command(words: Sequence[str]) -> int:
    """Prints what `pentatron train` with the same words would use."""
    as_json, everything = "--json" in words, "--all" in words
    prepared = prepare([w for w in words if w not in ("--json", "--all")], TRAIN)
    values, sources = prepared.resolved.config.flat(), prepared.resolved.sources
    if as_json:
        say(json.dumps({name: {"value": values[name], "source": sources[name]} for name in values}, indent=1))
        return 0
    for section, cls in sections().items():
        shown = [
            n for n, s in table().items() if s.section == section and (everything or sources[n] != "default")
        ]
        if shown:
            say(f"{cls.__doc__}")
            for name in shown:
                value = " ".join(map(str, values[name])) if isinstance(values[name], tuple) else values[name]
                say(f"  {name:<38} {value!s:<28} {sources[name]}")
            say("")
    for notice in prepared.resolved.notices:
        say(f"note: {notice}")
    if not everything:
        say("settings left at their default are not shown; add --all to see them, --json for machines")
    return 0


def presets_command(words: Sequence[str]) -> int:
    if words:
        raise UserError("pentatron presets takes no words; use one with: pentatron train --preset NAME")
    columns = (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "vocab_size",
    )
    say(f"{'preset':<18}" + "".join(f"{c.removeprefix('num_').replace('_', ' '):>18}" for c in columns))
    for name, values in presets().items():
        say(f"{name:<18}" + "".join(f"{values.get(c, '-')!s:>18}" for c in columns))
    say("\nuse one with: pentatron train --preset NAME --data-path PREFIX --train-iters N")
    return 0
