"""`pretrain`: a user's model, data and forward step through our session."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pentatron.cli.main import train_by
from pentatron.config.entry import PRETRAIN_GPT, EntryPoint
from pentatron.config.errors import UserError
from pentatron.config.run import table
from pentatron.megatron.core.enums import ModelType
from pentatron.megatron.datasets import DatasetProvider
from pentatron.megatron.program import ForwardStep, UserProgram
from pentatron.megatron.state import started_as
from pentatron.megatron.training.arguments import ExtraArguments, defaults_of, take_extra_arguments

_WITHOUT_EFFECT = {
    "process_non_loss_data_func": "nothing but losses is collected while evaluating",
    "non_loss_data_func": "nothing but losses is collected while evaluating",
    "get_embedding_ranks": "where the embedding lies follows from the layout",
    "get_position_embedding_ranks": "where the embedding lies follows from the layout",
}


def pretrain(
    train_valid_test_dataset_provider: DatasetProvider | None,
    model_provider: Callable[..., Any],
    model_type: ModelType,
    forward_step_func: ForwardStep,
    process_non_loss_data_func: Any = None,
    extra_args_provider: ExtraArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    non_loss_data_func: Any = None,
) -> None:
    """Trains as the command line says. Returns when training is done; ends the process where there is nothing to go on with.

    That is so after an error, after `--help`, and in a process that only started the workers.
    """
    others = {
        "process_non_loss_data_func": process_non_loss_data_func,
        "get_embedding_ranks": get_embedding_ranks,
        "get_position_embedding_ranks": get_position_embedding_ranks,
        "non_loss_data_func": non_loss_data_func,
    }
    notes = [f"{name}: {_WITHOUT_EFFECT[name]}" for name, value in others.items() if value is not None]
    entry, extra = entry_of(args_defaults or {})
    script = sys.argv[0]
    programs: list[UserProgram] = []

    def program(words: list[str]) -> tuple[list[str], UserProgram]:
        if model_type is not ModelType.encoder_or_decoder:
            raise UserError(f"models here are decoders (ModelType.encoder_or_decoder), not {model_type}")
        left, added = take_extra_arguments(words, extra_args_provider, entry)
        made = UserProgram(
            train_valid_test_dataset_provider, model_provider, forward_step_func, {**extra, **added}, notes
        )
        programs.append(made)
        return left, made

    code = train_by(program, entry, list(started_as()) or [script])
    if code or not any(made.has_run for made in programs):
        sys.exit(code)


def entry_of(args_defaults: Mapping[str, Any]) -> tuple[EntryPoint, dict[str, Any]]:
    """The running script as an entry point, and defaults that are no settings."""
    settings, others = defaults_of(args_defaults, table())
    script = Path(sys.argv[0])
    defaults = {**PRETRAIN_GPT.defaults, "run_dir": f"runs/{script.stem}", **settings}
    return dataclasses.replace(PRETRAIN_GPT, name=script.name, defaults=defaults), others
