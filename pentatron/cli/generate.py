"""`pentatron generate RUN_DIR [PROMPT]`"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.cli.terminal import say
from pentatron.config.errors import UserError
from pentatron.config.flags import did_you_mean, is_flag, normal

USAGE = """usage: pentatron generate RUN_DIR [PROMPT] [--max-tokens N] [--temperature X] [--top-k N] [--seed N]

Continues PROMPT with the newest checkpoint in RUN_DIR. Temperature 0 always takes the likeliest token.
"""


@dataclass
class Options:
    max_tokens: int = 120
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0


def generate_command(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        say(USAGE)
        return 0
    options, plain = parse(words)
    if not plain or len(plain) > 2:
        raise UserError(
            'say which run to use and, in quotes, what to continue: pentatron generate runs/demo "import "'
        )
    folder, prompt = Path(plain[0]), plain[1] if len(plain) == 2 else "\n"
    if not folder.is_dir():
        raise UserError(f"the run folder {folder} does not exist; `pentatron train` makes one")
    from pentatron.train.continue_text import continue_text

    sys.stdout.write(prompt)
    for text in continue_text(
        folder, prompt, options.max_tokens, options.temperature, options.top_k, options.seed
    ):
        sys.stdout.write(text)
        sys.stdout.flush()
    say("")
    return 0


def parse(words: Sequence[str]) -> tuple[Options, list[str]]:
    options, plain, queue = Options(), [], list(words)
    while queue:
        word = queue.pop(0)
        if not is_flag(word):
            plain.append(word)
            continue
        name = normal(word).replace("-", "_")
        if name not in vars(options):
            guess = did_you_mean(name.replace("_", "-"), [n.replace("_", "-") for n in vars(options)], "--")
            raise UserError(f"unknown flag {word}{guess}; pentatron generate --help lists them")
        written = word.partition("=")[2] or (queue.pop(0) if queue else "")
        kind = type(getattr(options, name))
        try:
            setattr(options, name, kind(written))
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise UserError(f"{word} wants {wanted}, not '{written}'") from None
    return options, plain
