"""When and what a run saves, and what it tells of it."""

import contextlib

from pentatron.checkpoint.saver import Saved, Saver
from pentatron.checkpoint.store import CheckpointStore
from pentatron.config.run import RunConfig
from pentatron.errors import NotSaved
from pentatron.optim.build import AnyOptimizer
from pentatron.parallel.world import World
from pentatron.train.output import Output
from pentatron.train.parallel_model import ParallelModel
from pentatron.train.random_state import random_state
from pentatron.train.state import TrainState

# A timer of what is not a part of every step.
_SAVING = "save-checkpoint"


class Checkpoints:
    """The saves of a run. `saved`: the step that its own folder holds already, if there is one."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        model: ParallelModel,
        optimizer: AnyOptimizer,
        store: CheckpointStore,
        state: TrainState,
        output: Output,
        saved: int | None,
    ) -> None:
        self.config, self.world, self.model, self.optimizer = config, world, model, optimizer
        self.store, self.state, self.output = store, state, output
        self.saver = Saver(store, world.everyone, config.checkpoint.async_save, output.say)
        # The last steps whose save has begun, and ended.
        self._begun = self._saved = saved
        optimizer.before_update(self.saver.wait_until_copied)

    @property
    def last(self) -> str:
        return (
            "no checkpoint is saved yet"
            if self._saved is None
            else f"the last checkpoint is step {self._saved}"
        )

    def save_if_possible(self) -> None:
        """The same for a step that is not the last one: what could not be saved is told, and training goes on."""
        try:
            self.save()
        except NotSaved as failure:
            self._go_on_without(failure)

    def save(self) -> None:
        """Saves this step, or begins to, unless that is done already. What failed before it is told: this one counts now."""
        step = self.state.step
        if self._begun == step or not self.config.checkpoint.save_checkpoints:
            return
        with self.model.timers(_SAVING, 0):
            try:
                self._tell(self.saver.settle_before_next())
            except NotSaved as failure:
                self._go_on_without(failure)
            self.saver.begin(
                step,
                self.optimizer.fragments(owned_only=True),
                self.model.routers.fragments(owned_only=True),
                random_state(self.world),
                self.state.to_json(),
                self.config.nested(),
            )
            if not self.saver.background:
                self._tell(self.saver.settle(wait=True))
        self._begun = step
        if self.saver.background:
            self.output.note(
                f"  scheduled an async checkpoint save at iteration {step:7d} to {self.store.folder}"
            )
        times = self.model.timers.block(self.world.everyone, only=_SAVING)
        if times is not None:
            self.output.note(times)

    def settle(self, wait: bool = False) -> None:
        """Between steps, and with `wait` at the end: what was written in the background is committed.

        Its failure is told as long as there will be another save, and raised at the end.
        """
        try:
            # A step that takes as long as a save would be taken for a hang.
            with self.world.whereabouts.doing("saving") if wait else contextlib.nullcontext():
                self._tell(self.saver.settle(wait))
        except NotSaved as failure:
            if wait:
                raise
            self._go_on_without(failure)

    def _go_on_without(self, failure: NotSaved) -> None:
        """Ending here would lose what was trained since the last checkpoint; if there is room by then, the next one has it."""
        self._begun = self._saved
        self.output.say(
            f"warning: {failure.what}; {self.last}. Training goes on and the next save tries again"
        )

    def settle_after(self, error: Exception) -> None:
        """The same where all ranks end with an error: that one is what is raised, so another one is only told."""
        try:
            self.settle(wait=True)
        except (ValueError, OSError) as another:
            if another is not error:
                self.output.say(f"note: {another}")

    def leave(self) -> None:
        """The program ends: waits for a save that a loop of its own has begun, and not waited for.

        Among several ranks nobody knows whether the others end as well, or what they wait for.
        """
        step = self.saver.under_way
        if step is None:
            return
        if self.world.everyone.size == 1:
            self.settle(wait=True)
        else:
            self.output.say(
                f"note: the program ended while the checkpoint of step {step} was being written, so it is not saved; call "
                f"maybe_finalize_async_save(blocking=True) at its end"
            )

    def _tell(self, saved: Saved | None) -> None:
        if saved is None:
            return
        self._saved = saved.step
        self.output.saved(
            saved.step,
            f"  successfully saved checkpoint from iteration {saved.step:7d} to {saved.folder}",
        )
        if saved.note:
            self.output.say(f"note: {saved.note}")
