"""Hooks for a logger that is not here: they do nothing, as they do in Megatron without its package."""

import time
from typing import Any


def get_timestamp_in_ms() -> int:
    return round(time.time() * 1000)


def on_pretrain_start() -> None:
    """Nothing."""


def track_config_flags(*flags: Any, **named: Any) -> None:
    """Nothing."""


def finish() -> None:
    """Nothing."""
