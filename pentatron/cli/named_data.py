"""Files of data that are named and not there, told before anything starts."""

from pathlib import Path

from pentatron.config.blend import NAMED, Blend
from pentatron.config.draft import Draft
from pentatron.config.run import table
from pentatron.config.sft_rules import is_weight
from pentatron.data.pair_names import missing_pairs
from pentatron.errors import UserError


def find_data(draft: Draft) -> None:
    """What a run of this machine would read; what is not there is wrong."""
    if draft.mock_data or draft.corpus:
        # The rule about sources says that one of them is too many.
        return
    evaluates = draft.eval_iters and (draft.eval_interval or draft.skip_train)
    for name in NAMED if evaluates else NAMED[:2]:
        words = getattr(draft, name)
        missing = "" if not words else _conversations(words) if draft.sft else _pairs(words, name)
        if missing:
            draft.wrong[name] = missing


def _pairs(words: tuple[str, ...], name: str) -> str:
    try:
        return missing_pairs(Blend.parse(words, table()[name].flag).prefixes)
    except UserError:
        # The rule about blends says what is wrong with them.
        return ""


def _conversations(words: tuple[str, ...]) -> str:
    if any(is_weight(word) for word in words):
        # The rule about conversations says that they have none.
        return ""
    gone = next((Path(word) for word in words if not Path(word).exists()), None)
    if gone is None:
        return ""
    from pentatron.data.conversations import no_file

    return no_file(gone)
