"""Whether all ranks were told the same."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pentatron.parallel.collectives import Group, broadcast_object, gather_objects, raise_together


def require_same_settings(settings: Mapping[str, Any], group: Group) -> None:
    """Refuses to go on where ranks were started with different settings, which would train to wrong results or hang.

    `settings` are plain values by the flag that sets them. What travels is a digest, unless something is wrong.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    if len(set(gather_objects(digest, group))) == 1:
        return
    first = broadcast_object(dict(settings), group)
    different = [flag for flag, value in settings.items() if first.get(flag) != value]
    problem = None
    if different:
        flag = different[0]
        more = f" (and {len(different) - 1} other settings)" if len(different) > 1 else ""
        problem = (
            f"rank {group.rank} was started with {flag} {settings[flag]}, rank 0 with {flag} {first.get(flag)}{more}; "
            f"start every process with the same command"
        )
    raise_together(problem, group)
