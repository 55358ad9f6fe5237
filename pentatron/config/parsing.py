"""JSON that a stranger may have written."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """What a text holds; whatever is wrong with it is a ValueError, also that it is nested without end."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested without end") from None
