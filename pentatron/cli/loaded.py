"""What a command line leaves to the checkpoint or the folder it starts from: the architecture and the tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.cli.kept_batch import keep_global_batch
from pentatron.cli.loaded_step import LAYOUT_OF_STEP, adopt_layout, nothing_to_load, use_named_step
from pentatron.config.blend import names_files
from pentatron.config.draft import Draft
from pentatron.config.loaded import LOADED, NOT_IN_WEIGHTS, adopt
from pentatron.config.resolve import foreseen
from pentatron.config.run import table
from pentatron.config.settings import Facts, unset
from pentatron.config.start import Start, another_run

if TYPE_CHECKING:
    from pentatron.train.sources import Source

TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
_TOKENIZER_FILE = "tokenizer.json"


def learn_from_loaded(draft: Draft, facts: Facts, start: Start) -> None:
    """Fills the draft with what is known of the model a run will load; what contradicts it is wrong."""
    save = Path(foreseen(draft, facts).save)
    use_named_step(draft, save)
    # The libraries that read checkpoints take a second to import, so they wait until there may be one.
    if start is Start.RESUME and save.is_dir():
        from pentatron.train.sources import find_source

        own = find_source(save)
        if own is not None and not own.is_foreign:
            settings = _learn_from_own(draft, facts, own)
            keep_global_batch(draft, facts, settings, str(own.folder))
            return
    if unset(draft.load):
        return
    if Path(draft.load).resolve() == save.resolve():
        # It may be a model of others that the run will save beside; steps of its own are seen to above.
        from pentatron.train.sources import find_source

        there = find_source(save, megatron=draft.ckpt_format is not None)
        if there is None or (start is Start.RESUME and not there.is_foreign):
            if draft.given("load"):
                from pentatron.checkpoint.find import refuse_other_formats

                refuse_other_formats(save)
            nothing_to_load(draft)
            return
    learn_from_named(draft, facts)


def _learn_from_own(draft: Draft, facts: Facts, own: "Source") -> Mapping[str, Any]:
    """The same from the run in the folder; where nobody chose the folder, what contradicts it may be another run."""
    way_out = "choose another --run-dir, or start anew with --fresh"
    if draft.given("load"):
        # It names this folder, and --fresh would move that aside.
        way_out = "choose another --load, and another --save"
    known = set(draft.wrong)
    settings = _learn(draft, facts, own, way_out, is_own=True)
    if not (draft.given("run_dir") or draft.given("save")):
        for name in draft.wrong.keys() - known:
            draft.wrong[name] = f"{another_run(foreseen(draft, facts).run_dir)}: {draft.wrong[name]}"
    return settings


def told_by_a_model(draft: Draft) -> set[str]:
    """The settings that nobody knows while what was to be loaded is not found."""
    known = {name for name, item in table().items() if item.section in ("model", "moe")} - NOT_IN_WEIGHTS
    layout = LAYOUT_OF_STEP if draft.use_mp_args_from_checkpoint_args else ()
    return {"load", "vocab_size", *known, *TOKENIZER, *layout}


def learn_from_named(draft: Draft, facts: Facts) -> bool:
    """The same from what `--load` names alone; returns whether there was anything to learn from.

    What cannot be loaded is told at once: without an architecture, further checks would only complain of its absence.
    """
    if unset(draft.load):
        return False
    from pentatron.train.sources import find_source, named_source

    megatron = draft.ckpt_format is not None
    if draft.load == draft.save and find_source(Path(draft.load), megatron) is None:
        # A run may load what it will save; at first there is nothing.
        return False
    use_hub_folder(draft, "load")
    _learn(draft, facts, named_source(draft.load, megatron), "or load another model")
    return True


def use_hub_folder(draft: Draft, name: str) -> None:
    """Puts the downloaded folder in place of a model's name on the hub.

    Every process of a machine may ask: the cache's locks let one of them download, and the others find it done.
    """
    from pentatron.hf.hub import TOKENIZER_FILES, WANTED_FILES, is_hub_id, resolve_folder

    written: str | None = getattr(draft, name)
    if written is None or not is_hub_id(written):
        return
    files = TOKENIZER_FILES if name == "tokenizer_model" else WANTED_FILES
    folder = resolve_folder(written, files=files)
    draft.assign(draft.source(name), **{name: str(folder)})
    draft.notices.append(f"{written} is in {folder}")


def _learn(
    draft: Draft, facts: Facts, source: "Source", way_out: str, is_own: bool = False
) -> Mapping[str, Any]:
    """Returns all settings of what is loaded."""
    settings = source.architecture(is_own)
    if not source.is_huggingface:
        adopt_layout(draft, settings, str(source.folder))
    adopt(draft, facts, settings, str(source.folder), way_out)
    _learn_tokenizer(draft, source.small_files)
    return settings


def _learn_tokenizer(draft: Draft, folder: Path) -> None:
    """The tokenizer of the model, where text may be met and nobody named one."""
    named = any(getattr(draft, name) is not None for name in TOKENIZER)
    if named or not names_files(draft) or not (folder / _TOKENIZER_FILE).is_file():
        return
    draft.assign(f"{LOADED}{folder}", tokenizer_model=str(folder))
    draft.notices.append(f"tokenizer from {folder}")
