"""The running script as an entry point."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentatron.megatron.training.arguments import defaults_of
from pentatron.settings.entry import PRETRAIN_GPT, EntryPoint
from pentatron.settings.run import table

_WITHOUT_EFFECT = {
    "process_non_loss_data_func": "nothing but losses is collected while evaluating",
    "non_loss_data_func": "nothing but losses is collected while evaluating",
    "get_embedding_ranks": "where the embedding lies follows from the layout",
    "get_position_embedding_ranks": "where the embedding lies follows from the layout",
}


def entry_of(args_defaults: Mapping[str, Any]) -> tuple[EntryPoint, dict[str, Any]]:
    """The script's name and defaults, and those of its defaults that are no settings."""
    settings, others = defaults_of(args_defaults, table())
    script = Path(sys.argv[0])
    defaults = {**PRETRAIN_GPT.defaults, "run_dir": f"runs/{script.stem}", **settings}
    return dataclasses.replace(PRETRAIN_GPT, name=script.name, defaults=defaults), others


def notes_of(**given: Any) -> list[str]:
    """What to say of functions that are not called here."""
    return [
        f"{name} is not called: {_WITHOUT_EFFECT[name]}" for name, value in given.items() if value is not None
    ]
