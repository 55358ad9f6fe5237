"""`pentatron generate RUN_DIR [PROMPT]`"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from pentatron.cli.options import read_options
from pentatron.cli.terminal import say
from pentatron.config.errors import UserError

USAGE = """usage: pentatron generate RUN_DIR [PROMPT] [--max-tokens N] [--temperature X] [--top-k N] [--seed N]

Continues PROMPT with the newest checkpoint in RUN_DIR. Temperature 0 always takes the likeliest token.
"""


DEFAULTS: dict[str, int | float] = {"max-tokens": 120, "temperature": 0.8, "top-k": 40, "seed": 0}


def generate_command(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        say(USAGE)
        return 0
    options, plain = read_options(words, DEFAULTS, "pentatron generate")
    if not plain or len(plain) > 2:
        raise UserError(
            'say which run to use and, in quotes, what to continue: pentatron generate runs/demo "import "'
        )
    for name, least in (("max-tokens", 1), ("temperature", 0), ("top-k", 1), ("seed", 0)):
        if not least <= options[name] < math.inf:
            raise UserError(f"--{name} {options[name]} must be {least} or more")
    folder, prompt = Path(plain[0]), plain[1] if len(plain) == 2 else "\n"
    if not folder.is_dir():
        raise UserError(f"the run folder {folder} does not exist; `pentatron train` makes one")
    from pentatron.train.continue_text import open_continuation

    continuation = open_continuation(folder, prompt, *(options[name] for name in DEFAULTS))
    sys.stdout.write(prompt)
    for text in continuation:
        sys.stdout.write(text)
        sys.stdout.flush()
    say("")
    return 0
