"""Errors meant for the user."""

import errno
from collections.abc import Sequence


class UserError(ValueError):
    """Something the user can mend. Its text is the whole message: one sentence with the fix, no traceback."""

    exit_code = 2


class AgreedError(UserError):
    """One that every rank of a run raises alike; the first one speaks for all."""


class NotSaved(AgreedError):
    """A checkpoint could not be written, for want of room or rights. Those before it are whole, and a later one may succeed.

    `what` is that alone, without what to do where a run ends with it.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(f"{what}; {advice}" if advice else what)
        self.what = what


class FolderLost(AgreedError):
    """The folder that a run writes to is not its own any more: moved, removed, or taken by another job."""


class BadNumbers(AgreedError):
    """A step gave numbers that are none. The exit code tells whoever restarts runs what was found out, as Megatron's does."""

    REPRODUCIBLE = 16
    TRANSIENT = 17

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ConfigError(UserError):
    """All problems of a configuration at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            lines = "\n".join(f"  {i}. {p}" for i, p in enumerate(self.problems, 1))
            super().__init__(f"{len(self.problems)} problems in the configuration:\n{lines}")


def file_sentence(error: OSError) -> str:
    """What the system says of a file; a write names none, and a full disk is the one thing that it may often meet."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{error.filename or 'a file'} cannot be written ({reason}); make room, or choose another folder"
        )
    if isinstance(error, PermissionError):
        return f"{error.filename or 'a file'} cannot be opened ({reason}); choose another place, or ask its owner"
    return f"{error.filename or 'a file'}: {reason}"
