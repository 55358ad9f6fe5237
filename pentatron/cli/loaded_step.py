"""Flags that choose among what can be loaded: which step, whether there must be one, and its layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentatron.config.draft import Draft
from pentatron.config.loaded import LOADED
from pentatron.config.run import table
from pentatron.errors import UserError

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
