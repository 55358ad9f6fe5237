"""JSON that a stranger may have written."""

import json
import re
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """What a text holds; whatever is wrong with it is a ValueError, also that it is nested without end."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested without end") from None


# An escape that is half of a pair, unless its other half is beside it.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_document(text: str) -> Any:
    """The same of a document whose texts are printed and written again, so all of them must be characters."""
    found = parse_json(text)
    if _SURROGATE.search(text):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text in it has half a surrogate pair, which is no character") from None
    return found
