"""Adopts settings from the checkpoint to load: architecture, tokenizer, layout and batch size."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.errors import UserError
from pentatron.settings.data_paths import training_files_flag
from pentatron.settings.loaded_architecture import LOADED_PREFIX, NOT_IN_WEIGHTS, adopt_architecture
from pentatron.settings.resolve import derived_settings
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import (
    KEPT_PREFIX,
    Draft,
    ProcessFacts,
    Settings,
    Start,
    is_unset,
    other_run_error,
)
from pentatron.text import divisors, plural

if TYPE_CHECKING:
    from pentatron.generate.source import ModelLocation

TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
_TOKENIZER_FILE = "tokenizer.json"
LAYOUT_OF_STEP = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    "sequence_parallel",
)
# Batch settings per rank, from which the global batch size follows.
_BY_RANK = ("rank_batch_size", "micro_batch_size", "gradient_accumulation_steps", "num_microbatches")


def adopt_checkpoint_settings(draft: Draft, facts: ProcessFacts, start: Start) -> None:
    """Adopts the settings of the checkpoint to load, and marks contradicting settings as wrong."""
    save = Path(derived_settings(draft, facts).save)
    use_named_step(draft, save)
    # Imported late: the libraries that read checkpoints take a second to import.
    if start is Start.RESUME and save.is_dir():
        from pentatron.generate.source import find_source

        own = find_source(save)
        if own is not None and not own.is_foreign:
            _adopt_from_own_run(draft, facts, own)
            return
    if not is_unset(draft.load) and Path(draft.load).resolve() == save.resolve():
        # This may be another program's model, in the folder the run saves to. The run's own steps are handled
        # above.
        from pentatron.generate.source import find_source

        source = find_source(save, megatron=draft.ckpt_format is not None)
        if source is None or (start is Start.RESUME and not source.is_foreign):
            if draft.given("load"):
                _require_checkpoint(draft, save)
            return
    adopt_named_checkpoint(draft, facts)


def _adopt_from_own_run(draft: Draft, facts: ProcessFacts, own: "ModelLocation") -> None:
    """Adopts the settings of the run in the folder.

    Contradictions in a default folder may mean that it holds another run.
    """
    advice = "choose another --run-dir, or start from scratch with --fresh"
    if draft.given("load"):
        # --load names this folder, which --fresh would move aside.
        advice = "choose another --load, and another --save"
    known = set(draft.wrong)
    settings = _adopt_source(draft, facts, own, advice, is_own=True)
    if not (draft.given("run_dir") or draft.given("save")):
        for name in draft.wrong.keys() - known:
            other_run = other_run_error(derived_settings(draft, facts).run_dir)
            draft.wrong[name] = f"{other_run}: {draft.wrong[name]}"
    keep_global_batch(draft, facts, settings, str(own.folder))


def settings_from_checkpoint(draft: Draft) -> set[str]:
    """Returns the settings that stay unknown if the checkpoint to load is not found."""
    known = {
        name for name, item in all_settings().items() if item.section in ("model", "moe")
    } - NOT_IN_WEIGHTS
    layout = LAYOUT_OF_STEP if draft.use_mp_args_from_checkpoint_args else ()
    return {"load", "vocab_size", *known, *TOKENIZER, *layout}


def adopt_named_checkpoint(draft: Draft, facts: ProcessFacts) -> bool:
    """Adopts the settings of the model that `--load` names; returns False if there is nothing to load.

    Raises at once if it cannot be loaded, because further checks would only report the missing architecture.
    """
    if is_unset(draft.load):
        return False
    from pentatron.generate.source import find_source, named_source

    megatron = draft.ckpt_format is not None
    if draft.load == draft.save and find_source(Path(draft.load), megatron) is None:
        # `--load` and `--save` name the same folder, which is empty at the first start.
        return False
    replace_hub_name(draft, "load")
    _adopt_source(draft, facts, named_source(draft.load, megatron), "or load another model")
    return True


def replace_hub_name(draft: Draft, name: str) -> None:
    """Replaces a hub model name by the folder of its download.

    Every process of a machine may call this: the locks of the cache let one of them download while the others
    wait.
    """
    from pentatron.hf.hub import TOKENIZER_FILES, WANTED_FILES, is_hub_id, resolve_folder

    written: str | None = getattr(draft, name)
    if written is None or not is_hub_id(written):
        return
    folder = resolve_folder(written, files=TOKENIZER_FILES if name == "tokenizer_model" else WANTED_FILES)
    draft.assign(draft.source(name), **{name: str(folder)})
    draft.notices.append(f"{written} is in {folder}")


def _adopt_source(
    draft: Draft, facts: ProcessFacts, source: "ModelLocation", advice: str, is_own: bool = False
) -> Mapping[str, Any]:
    """Adopts layout, architecture and tokenizer of a checkpoint; returns its settings."""
    settings = source.architecture(is_own)
    if not source.is_huggingface:
        adopt_layout(draft, settings, str(source.folder))
    adopt_architecture(draft, facts, settings, str(source.folder), advice)
    folder = source.small_files
    has_tokenizer = any(getattr(draft, name) is not None for name in TOKENIZER)
    if not has_tokenizer and training_files_flag(draft) and (folder / _TOKENIZER_FILE).is_file():
        draft.assign(f"{LOADED_PREFIX}{folder}", tokenizer_model=str(folder))
        draft.notices.append(f"tokenizer from {folder}")
    return settings


def keep_global_batch(draft: Draft, facts: ProcessFacts, saved: Mapping[str, Any], origin: str) -> None:
    """Keeps the global batch size of a run that resumes on another number of ranks.

    Does nothing if the command line changes a batch setting, per rank or global.
    """
    before = Settings.defaults(**saved)
    total, ranks = before.global_batch_size, before.data_parallel_size
    if is_unset(total) or not is_unset(draft.global_batch_size) or draft.step_batch_size_schedule:
        return
    now = derived_settings(draft, facts)
    compared = [name for name in _BY_RANK if draft.given(name) or name == "rank_batch_size"]
    is_changed = any(getattr(draft, name) != getattr(before, name) for name in compared)
    data = now.data_parallel_size
    if is_changed or now.global_batch_size in (None, total):
        return
    if not draft.given("micro_batch_size"):
        # The largest size that divides the samples of a rank and needs no more memory than before.
        micro = max(d for d in divisors(total // data or 1) if d <= before.micro_batch_size)
        draft.derive(f"{KEPT_PREFIX} {origin}", micro_batch_size=micro)
    draft.derive(f"{KEPT_PREFIX} {origin}", global_batch_size=total)
    had = f"{ranks} {plural(ranks or 0, 'data-parallel rank')}"
    others = f"its batch settings per rank would give {now.global_batch_size}"
    kept = f"the run keeps its global batch size of {total} from {had}"
    draft.notices.append(f"{kept}; on {data}, {others} (--global-batch-size changes it)")


def use_named_step(draft: Draft, own_checkpoints: Path) -> None:
    """Replaces `--load` by the folder of the step that `--ckpt-step` names."""
    number = draft.ckpt_step
    if number is None or not draft.given("load"):
        return
    from pentatron.checkpoint.find import find_megatron_checkpoint, find_steps_folder
    from pentatron.checkpoint.retention import step_number
    from pentatron.checkpoint.store import CheckpointStore

    load, origin = draft.load, draft.source("load")
    folder = find_steps_folder(Path(load))
    steps = [] if folder is None else CheckpointStore(folder, keep=None).steps()
    # A step that was saved again has a suffix; the last one is the newest.
    chosen = [step for step in steps if step_number(step) == number]
    megatron_folder = Path(load) / f"iter_{number:07d}"
    if not chosen and draft.ckpt_format is not None and find_megatron_checkpoint(megatron_folder):
        draft.assign(origin, load=str(megatron_folder))
        return
    if folder is None or not chosen:
        known = ", ".join(step.name for step in steps) or "none"
        raise UserError(f"--ckpt-step {number}: {load} has no such step; choose one of its steps ({known})")
    if folder.resolve() != own_checkpoints.resolve():
        draft.assign(origin, load=str(chosen[-1]))
    elif chosen[-1] != steps[-1]:
        ways = f"give another --run-dir and --save to resume from step {number}"
        problem = f"this run has continued to {steps[-1].name}, and a run resumes only from its newest step"
        raise UserError(f"--ckpt-step {number}: {problem}; {ways}")


def _require_checkpoint(draft: Draft, save: Path) -> None:
    """Raises if the given `--load` holds the checkpoint of another program, or none yet with
    `--exit-on-missing-checkpoint`."""
    from pentatron.checkpoint.find import refuse_other_formats

    refuse_other_formats(save)
    if draft.exit_on_missing_checkpoint:
        ways = "check the path, or leave that flag out for the first start"
        problem = f"--load {draft.load} holds no checkpoint yet, and --exit-on-missing-checkpoint is given"
        raise UserError(f"{problem}; {ways}")


def adopt_layout(draft: Draft, saved: Mapping[str, Any], origin: str) -> None:
    """Takes parallel sizes that are not given from the checkpoint (`--use-mp-args-from-checkpoint-args`)."""
    if not draft.use_mp_args_from_checkpoint_args:
        return
    known = [name for name in LAYOUT_OF_STEP if name in saved and not draft.given(name)]
    adopted = {name: saved[name] for name in known if getattr(draft, name) != saved[name]}
    draft.assign(f"{LOADED_PREFIX}{origin}", **adopted)
    if adopted:
        shown = " ".join(all_settings()[name].written(value) for name, value in adopted.items())
        draft.notices.append(f"layout from {origin}: {shown}")
