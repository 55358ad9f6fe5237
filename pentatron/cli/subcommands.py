"""Commands of the groups `checkpoint` and `data`: reads their options and paths, and runs them."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pentatron.cli.main import run_function
from pentatron.cli.options import Options, parse_options
from pentatron.errors import UserError, describe_os_error
from pentatron.monitor.terminal import OutputLost
from pentatron.settings.command_line import did_you_mean

T = TypeVar("T", bound=Options)
_NAMED = {"checkpoint": "a checkpoint", "data": "a prefix of data"}


def parse_options_and_paths(
    cls: type[T], words: Sequence[str], call: str, least: int, most: int | None = None
) -> tuple[T, list[str]]:
    """Parses options and between `least` and `most` paths. `call`: the group, the command and its paths."""
    group = call.partition(" ")[0]
    options, paths = parse_options(cls, words, f"pentatron {group}")
    if len(paths) < least or (most is not None and len(paths) > most):
        raise UserError(f"expected {_NAMED[group]}: pentatron {call}")
    return options, paths


def run_subcommand(group: str, commands: Mapping[str, str], words: Sequence[str]) -> int:
    """Runs the command that the first word names; an `OSError` about one of its files becomes a `UserError`.

    `commands`: `module.function` in this package for each name, imported when it runs.
    """
    if words[0] not in commands:
        guess = did_you_mean(words[0], commands)
        fix = f"`pentatron {group} --help` lists the commands"
        raise UserError(f"unknown command '{group} {words[0]}'{guess}; {fix}")
    try:
        return run_function(commands[words[0]], words[1:])
    except OutputLost:
        # An OSError too, but about standard output, which `run_guarded` handles.
        raise
    except OSError as error:
        raise UserError(describe_os_error(error)) from error
