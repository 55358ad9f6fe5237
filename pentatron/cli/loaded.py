"""What a command line leaves to the checkpoint or the folder it starts from: the architecture and the tokenizer."""

from pathlib import Path
from typing import TYPE_CHECKING

from pentatron.config.draft import Draft, Facts
from pentatron.config.errors import UserError
from pentatron.config.flags import Assigned
from pentatron.config.loaded import adopt
from pentatron.config.resolve import foreseen

if TYPE_CHECKING:
    from pentatron.train.sources import Source

_TOKENIZER = "tokenizer.json"


def learn_from_loaded(draft: Draft, facts: Facts, starts_afresh: bool) -> None:
    """Fills the draft with what is known of the model a run will load; what contradicts it is wrong."""
    save = Path(foreseen(draft, facts)["save"])
    # The libraries that read checkpoints take a second to import, so they wait until there may be one.
    if not starts_afresh and save.is_dir():
        from pentatron.train.sources import find_source

        own = find_source(save)
        if own is not None and not own.is_huggingface:
            _learn(draft, facts, own, "choose another --run-dir, or start anew with --fresh")
            return
    # A run may load what it will save; at first there is nothing.
    if draft["load"] is not None and Path(draft["load"]).resolve() != save.resolve():
        learn_from_named(draft, facts)


def learn_from_named(draft: Draft, facts: Facts) -> bool:
    """The same from what `--load` names alone; returns whether there was anything to learn from."""
    if draft["load"] is None:
        return False
    from pentatron.train.sources import named_source

    try:
        source = named_source(draft["load"])
        _learn(draft, facts, source, "or load another model")
    except UserError as error:
        draft.wrong["load"] = str(error)
        return False
    return True


def _learn(draft: Draft, facts: Facts, source: "Source", way_out: str) -> None:
    adopt(draft, facts, source.architecture(), str(source.folder), way_out)
    _learn_tokenizer(draft, source.small_files)


def _learn_tokenizer(draft: Draft, folder: Path) -> None:
    """The tokenizer of the model, where text may be met and nobody named one."""
    named = draft["tokenizer_model"] is not None or draft["tokenizer_type"] is not None
    if named or not draft["data_path"] or not (folder / _TOKENIZER).is_file():
        return
    draft.values["tokenizer_model"] = Assigned(str(folder), f"loaded from {folder}")
    draft.notices.append(f"tokenizer from {folder}")
