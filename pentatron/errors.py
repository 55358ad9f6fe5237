"""Errors meant for the user."""

import errno
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class UserError(ValueError):
    """An error the user can fix. Its text is the whole message: one sentence with the fix, no stack trace."""

    exit_code = 2


class AgreedError(UserError):
    """An error that all ranks of a run raise with the same text, so it is printed once."""


class SaveError(AgreedError):
    """A checkpoint could not be written, for lack of space or permissions.

    Earlier checkpoints are intact, and a later save may succeed. `what` is the failure alone, without the
    advice for a run that ends with it.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(f"{what}; {advice}" if advice else what)
        self.what = what


class FolderLost(AgreedError):
    """The folder that a run writes to was moved, removed, or taken over by another job."""


class NonFiniteError(AgreedError):
    """A loss or gradient was NaN or inf.

    The exit code is Megatron-LM's: whether the result is reproducible.
    """

    REPRODUCIBLE = 16
    TRANSIENT = 17

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ConfigError(UserError):
    """Contains all problems of a configuration at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            lines = "\n".join(f"  {i}. {p}" for i, p in enumerate(self.problems, 1))
            super().__init__(f"{len(self.problems)} problems in the configuration:\n{lines}")


@contextmanager
def explained(
    kinds: type[Exception] | tuple[type[Exception], ...], problem: str, advice: str
) -> Iterator[None]:
    """Converts an error of the given kinds inside the block to a UserError: `problem (error); advice`."""
    try:
        yield
    except kinds as error:
        raise UserError(f"{problem} ({error}); {advice}") from error


def import_package(name: str, user: str) -> Any:
    """Imports an optional package that `user` needs; raises UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{user} needs the package {name}; run: pip install {name}") from error


def describe_os_error(error: OSError) -> str:
    """Formats an OSError as one sentence, with the fix for a full disk or missing permissions."""
    reason, name = error.strerror or str(error), error.filename or "a file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{name} cannot be written ({reason}); make room, or choose another folder"
    if isinstance(error, PermissionError):
        return f"{name} cannot be opened ({reason}); choose another place, or ask its owner"
    return f"{name}: {reason}"
