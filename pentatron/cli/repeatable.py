"""--deterministic-mode: what cannot be repeated to the bit is refused in a sentence."""

import re

from pentatron.errors import UserError

_SIGN = "does not have a deterministic implementation"


def unrepeatable(error: RuntimeError) -> UserError | None:
    """Torch's refusal of a kernel, in a sentence; None if the error is another one."""
    found = re.search(rf"(\S+)[^.]*{_SIGN}", str(error))
    if found is None:
        return None
    return UserError(
        f"--deterministic-mode: {found[1]} {_SIGN} on this device, and the run needs it; leave the flag out, or the setting that asks for it"
    )
