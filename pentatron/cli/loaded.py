"""What a command line leaves to the checkpoint or the folder it starts from: the architecture and the tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.errors import UserError
from pentatron.settings.data_paths import names_files
from pentatron.settings.loaded import LOADED, NOT_IN_WEIGHTS, adopt
from pentatron.settings.resolve import foreseen
from pentatron.settings.run import table
from pentatron.settings.settings import KEPT, Draft, Facts, Settings, Start, another_run, unset
from pentatron.text import divisors, plural

if TYPE_CHECKING:
    from pentatron.generate.source import Source

# A run that goes on with another number of processes keeps its batch: the same samples a step, divided among
# more ranks or fewer.


# Ways to say how much a rank does, from which the batch of a step follows.
_BY_RANK = ("rank_batch_size", "micro_batch_size", "gradient_accumulation_steps", "num_microbatches")


def keep_global_batch(draft: Draft, facts: Facts, saved: Mapping[str, Any], origin: str) -> None:
    """Takes the batch size of the run itself where this command says the same as it did, on another number of ranks.

    Who says something else, such as another size for a rank or one for the whole step, wants that.
    """
    before = Settings.defaults(**saved)
    total, ranks = before.global_batch_size, before.data_parallel_size
    if unset(total) or not unset(draft.global_batch_size) or draft.step_batch_size_schedule:
        return
    now = foreseen(draft, facts)
    says_the_same = all(
        getattr(draft, name) == getattr(before, name)
        for name in _BY_RANK
        if draft.given(name) or name == "rank_batch_size"
    )
    data = now.data_parallel_size
    if not says_the_same or now.global_batch_size in (None, total):
        return
    if not draft.given("micro_batch_size"):
        micro = max(d for d in divisors(total // data or 1) if d <= before.micro_batch_size)
        draft.derive(f"{KEPT} {origin}", micro_batch_size=micro)
    draft.derive(f"{KEPT} {origin}", global_batch_size=total)
    had = f"{ranks} {plural(ranks or 0, 'data-parallel rank')}"
    draft.notices.append(
        f"the run keeps its {total} samples a step, which it had on {had}; on {data}, what is said of a rank would make "
        f"{now.global_batch_size} (--global-batch-size changes it)"
    )


# Flags that choose among what can be loaded: which step, whether there must be one, and its layout.


LAYOUT_OF_STEP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)


def use_named_step(draft: Draft, own_checkpoints: Path) -> None:
    """Puts the folder of the step that --ckpt-step names in place of what --load names."""
    number = draft.ckpt_step
    if number is None or not draft.given("load"):
        return
    from pentatron.checkpoint.find import megatron_step, steps_at
    from pentatron.checkpoint.retention import number_of
    from pentatron.checkpoint.store import CheckpointStore

    load, origin = draft.load, draft.source("load")
    folder = steps_at(Path(load))
    steps = [] if folder is None else CheckpointStore(folder, keep=None).steps()
    # A step that was saved again has a name with an ending; the last one counts.
    chosen = [step for step in steps if number_of(step) == number]
    theirs = Path(load) / f"iter_{number:07d}"
    if not chosen and draft.ckpt_format is not None and megatron_step(theirs):
        draft.assign(origin, load=str(theirs))
        return
    if not chosen:
        known = ", ".join(step.name for step in steps) or "none"
        raise UserError(f"--ckpt-step {number}: {load} has no such step, but {known}; name one of them")
    assert folder is not None
    if folder.resolve() == own_checkpoints.resolve():
        if chosen[-1] != steps[-1]:
            raise UserError(
                f"--ckpt-step {number}: this run has gone on to {steps[-1].name}, and a run does not go back in its own folder; give "
                f"another --run-dir and --save to go on from step {number}"
            )
        return
    draft.assign(origin, load=str(chosen[-1]))


def nothing_to_load(draft: Draft) -> None:
    """A run that loads what it will save finds nothing the first time, which --exit-on-missing-checkpoint forbids."""
    if draft.exit_on_missing_checkpoint and draft.given("load"):
        raise UserError(
            f"--load {draft.load} holds no checkpoint yet, and --exit-on-missing-checkpoint is given; check the path, or leave that "
            f"flag out for the first start"
        )


def adopt_layout(draft: Draft, saved: Mapping[str, Any], origin: str) -> None:
    """Takes the parallel sizes that nobody typed from what is loaded, if that is wished."""
    if not draft.use_mp_args_from_checkpoint_args:
        return
    learned = [
        name
        for name in LAYOUT_OF_STEP
        if name in saved and not draft.given(name) and getattr(draft, name) != saved[name]
    ]
    for name in learned:
        draft.assign(f"{LOADED}{origin}", **{name: saved[name]})
    if learned:
        shown = " ".join(table()[name].written(saved[name]) for name in learned)
        draft.notices.append(f"layout from {origin}: {shown}")


TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
_TOKENIZER_FILE = "tokenizer.json"


def learn_from_loaded(draft: Draft, facts: Facts, start: Start) -> None:
    """Fills the draft with what is known of the model a run will load; what contradicts it is wrong."""
    save = Path(foreseen(draft, facts).save)
    use_named_step(draft, save)
    # The libraries that read checkpoints take a second to import, so they wait until there may be one.
    if start is Start.RESUME and save.is_dir():
        from pentatron.generate.source import find_source

        own = find_source(save)
        if own is not None and not own.is_foreign:
            settings = _learn_from_own(draft, facts, own)
            keep_global_batch(draft, facts, settings, str(own.folder))
            return
    if unset(draft.load):
        return
    if Path(draft.load).resolve() == save.resolve():
        # It may be a model of others that the run will save beside; steps of its own are seen to above.
        from pentatron.generate.source import find_source

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
    from pentatron.generate.source import find_source, named_source

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
