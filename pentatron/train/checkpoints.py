"""Saves of a run: random generator states, foreground and background saves, and their log lines."""

import contextlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pentatron.checkpoint.load import load_tensor
from pentatron.checkpoint.save import SavedStep, Saver
from pentatron.checkpoint.state import TrainState
from pentatron.checkpoint.store import Checkpoint, CheckpointStore
from pentatron.errors import SaveError
from pentatron.optim.build import AnyOptimizer
from pentatron.parallel.world import World
from pentatron.train.model import ParallelModel
from pentatron.train.output import Output

# NumPy's global generator, behind the functions of `numpy.random`.
_NUMPY: Any = np.random.mtrand
_TWISTER = "MT19937"
_SAVE_TIMER = "save-checkpoint"


def seed_generators(seed: int) -> None:
    """Seeds the global generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    _NUMPY.seed(seed % 2**32)


def random_state(world: World) -> dict[str, Tensor]:
    """Returns the states of this rank's global generators for a checkpoint.

    Attention dropout uses torch's generator; a user's program may use any of them. All other random numbers
    are functions of the seed and a name and need no state.
    """
    version, words, gauss = random.getstate()
    python = torch.cat((torch.tensor([version, *words]), _bits(float("nan") if gauss is None else gauss)))
    _, twister, *rest, gauss = _NUMPY.get_state(legacy=True)
    numpy = torch.cat((torch.from_numpy(twister.astype(np.int64)), torch.tensor(rest), _bits(gauss)))
    state = {"torch_cpu": torch.get_rng_state(), "python": python, "numpy": numpy}
    if world.device.type == "cuda":
        state["torch_cuda"] = torch.cuda.get_rng_state(world.device)
    return {_name(generator, world): values for generator, values in state.items()}


def restore_random_state(found: Checkpoint, world: World) -> None:
    """Restores the states of this rank. A rank that the saved run did not have keeps its initial states."""
    stored: Mapping[str, object] = found.manifest.tensors

    def saved_state(generator: str) -> Tensor | None:
        name = _name(generator, world)
        return load_tensor(found.folder, found.manifest, name) if name in stored else None

    if (state := saved_state("torch_cpu")) is not None:
        torch.set_rng_state(state)
    if world.device.type == "cuda" and (state := saved_state("torch_cuda")) is not None:
        torch.cuda.set_rng_state(state, world.device)
    if (state := saved_state("python")) is not None:
        version, *words = state[:-1].tolist()
        gauss = state[-1:].view(torch.float64).item()
        random.setstate((version, tuple(words), None if np.isnan(gauss) else gauss))
    if (state := saved_state("numpy")) is not None:
        twisted, (position, has_gauss) = state[:-3].numpy().astype(np.uint32), state[-3:-1].tolist()
        gauss = state[-1:].view(torch.float64).item()
        _NUMPY.set_state((_TWISTER, twisted, position, has_gauss, gauss))


def _bits(number: float) -> Tensor:
    """Reinterprets a float64 as an int64, as all elements of a state tensor have one dtype."""
    return torch.tensor([number], dtype=torch.float64).view(torch.int64)


def _name(generator: str, world: World) -> str:
    return f"rng/{generator}/rank-{world.all_ranks.rank:05d}"


@dataclass(eq=False)
class Checkpoints:
    """Saves checkpoints of a run. `saved`: the step of the newest checkpoint in its own folder, if any."""

    model: ParallelModel
    optimizer: AnyOptimizer
    store: CheckpointStore
    state: TrainState
    output: Output
    saved: int | None

    def __post_init__(self) -> None:
        self.config, self.world = self.model.config, self.model.world
        background = self.config.checkpoint.async_save
        self.saver = Saver(self.store, self.world.all_ranks, background, self.output.say)
        # The step of the last started save.
        self._started = self.saved
        self.optimizer.update.before = self.saver.wait_until_copied

    @property
    def last(self) -> str:
        step = self.saved
        return "no checkpoint is saved yet" if step is None else f"the last checkpoint is step {step}"

    def save_or_warn(self) -> None:
        """Saves an intermediate step; warns instead of failing if it cannot be saved."""
        try:
            self.save()
        except SaveError as failure:
            self._warn(failure)

    def save(self) -> None:
        """Saves this step, or starts a background save, unless that is done already.

        A failure of the previous background save is only a warning, as this save replaces it.
        """
        step = self.state.step
        if self._started == step or not self.config.checkpoint.save_checkpoints:
            return
        with self.model.timers(_SAVE_TIMER, 0):
            try:
                self._log(self.saver.wait_for_previous())
            except SaveError as failure:
                self._warn(failure)
            routers, rng = self.model.routers.fragments(owned_only=True), random_state(self.world)
            state, config = self.state.to_json(), self.config.nested()
            self.saver.begin(step, self.optimizer.fragments(owned_only=True), routers, rng, state, config)
            if not self.saver.background:
                self._log(self.saver.commit_pending(wait=True))
        self._started = step
        if self.saver.background:
            self.output.note(
                f"  scheduled an async checkpoint save at iteration {step:7d} to {self.store.folder}"
            )
        self.output.note(self.model.timers.block(self.world.all_ranks, only=_SAVE_TIMER))

    def commit_pending(self, wait: bool = False) -> None:
        """Commits a finished background save. Called between steps, and with `wait` at the end of the run.

        A failure is a warning between steps, as a later save follows, and an error at the end.
        """
        try:
            # The hang detection allows a save more time than a step.
            with self.world.status.doing("saving") if wait else contextlib.nullcontext():
                self._log(self.saver.commit_pending(wait))
        except SaveError as failure:
            if wait:
                raise
            self._warn(failure)

    def _warn(self, failure: SaveError) -> None:
        """Training continues: the next save may succeed; stopping would lose the steps since the last."""
        self._started = self.saved
        self.output.say(
            f"warning: {failure.what}; {self.last}. Training continues and the next save tries again"
        )

    def commit_pending_after_error(self, error: Exception) -> None:
        """Finishes a background save while all ranks end with `error`; a second error is only logged."""
        try:
            self.commit_pending(wait=True)
        except (ValueError, OSError) as second:
            if second is not error:
                self.output.say(f"note: {second}")

    def finish_on_exit(self) -> None:
        """Called at the exit of a program with its own loop: finishes a background save it has not waited
        for.

        With several ranks that would need a collective, which other ranks may never reach: it only logs a
        note.
        """
        step = self.saver.under_way
        if step is None:
            return
        if self.world.all_ranks.size == 1:
            self.commit_pending(wait=True)
        else:
            self.output.say(
                f"note: the program ended while the checkpoint of step {step} was being written, so it is not saved; call "
                f"maybe_finalize_async_save(blocking=True) at its end"
            )

    def _log(self, saved: SavedStep | None) -> None:
        if saved is None:
            return
        self.saved = saved.step
        line = f"  successfully saved checkpoint from iteration {saved.step:7d} to {saved.folder}"
        self.output.saved(saved.step, line)
        if saved.note:
            self.output.say(f"note: {saved.note}")
