"""What a program may ask for anywhere while its run is under way."""

from typing import Any

from pentatron.data.tokenizer import Tokenizer
from pentatron.megatron.arguments import Arguments
from pentatron.megatron.state import current
from pentatron.megatron.timers import Timers


def get_args() -> Arguments:
    """Every setting of the run by name."""
    return current().args


def get_timers() -> Timers:
    return current().timers


def get_tokenizer() -> Tokenizer | None:
    """The tokenizer that was named; None where the data needs none."""
    return current().tokenizer


def get_tensorboard_writer() -> Any:
    """None: the session writes its scalars itself."""
    return None


def get_wandb_writer() -> Any:
    """None: the session writes its scalars itself, and ends its run."""
    return None


def get_one_logger() -> Any:
    """None: there is no such logger here, and programs that ask for one do without."""
    return None
