"""The form of a need: a function from the settings to the reason why a setting has no effect."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pentatron.config.settings import Settings as Settings
else:
    # The declarations name needs, and Settings consists of the declarations.
    Settings = Any

# The reason why the setting has no effect with these settings, or an empty text if it has one.
Need = Callable[[Settings], str]


def unless(met: Callable[[Settings], Any], reason: str | Callable[[Settings], str]) -> Need:
    """A need that is met if `met` holds; `reason` completes the notice `--flag value: …`."""

    def check(s: Settings) -> str:
        if met(s):
            return ""
        return reason if isinstance(reason, str) else reason(s)

    return check


def first_unmet(needs: tuple[Need, ...], s: Settings) -> str:
    """The reason of the first need that is not met, or an empty text."""
    return next((reason for need in needs if (reason := need(s))), "")
