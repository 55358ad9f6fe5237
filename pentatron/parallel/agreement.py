"""Whether all ranks were told the same."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pentatron.parallel.collectives import Group, broadcast_object, gather_objects, raise_together


def require_same_settings(settings: Mapping[str, Any], versions: Mapping[str, str], group: Group) -> None:
    """Refuses to go on where ranks were started with different settings, which would train to wrong results or hang.

    `settings` are plain values by the flag that sets them, `versions` those of the libraries, by name. What travels is a
    digest, unless something is wrong.
    """
    digest = hashlib.sha256(json.dumps([settings, versions], sort_keys=True).encode()).hexdigest()
    if len(set(gather_objects(digest, group))) == 1:
        return
    first, first_versions = broadcast_object((dict(settings), dict(versions)), group)
    other = [name for name, version in versions.items() if first_versions.get(name) != version]
    raise_together(
        f"rank {group.rank} runs {other[0]} {versions[other[0]]}, rank 0 runs {other[0]} {first_versions.get(other[0])}; "
        f"install the same versions on every machine"
        if other
        else None,
        group,
    )
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
