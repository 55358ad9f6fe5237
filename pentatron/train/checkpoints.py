"""When and what a run saves, and what it tells of it."""

import contextlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pentatron.checkpoint.load import load_tensor
from pentatron.checkpoint.save import Saved, Saver
from pentatron.checkpoint.state import TrainState
from pentatron.checkpoint.store import CheckpointStore, Found
from pentatron.errors import NotSaved
from pentatron.optim.build import AnyOptimizer
from pentatron.parallel.world import World
from pentatron.settings.run import RunConfig
from pentatron.train.model import ParallelModel
from pentatron.train.output import Output

# The states of random generators: attention dropout draws from torch's, a program of the user's from any; all
# else is drawn from names.


# The generator behind NumPy's plain functions, which are what programs of users draw from.
_NUMPY: Any = np.random.mtrand
_TWISTER = "MT19937"


def seed_generators(seed: int) -> None:
    """Those of this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    _NUMPY.seed(seed % 2**32)


def random_state(world: World) -> dict[str, Tensor]:
    """What a checkpoint keeps for this rank."""
    state = {
        _name("torch_cpu", world): torch.get_rng_state(),
        _name("python", world): _of_python(),
        _name("numpy", world): _of_numpy(),
    }
    if world.device.type == "cuda":
        state[_name("torch_cuda", world)] = torch.cuda.get_rng_state(world.device)
    return state


def restore_random_state(found: Found, world: World) -> None:
    """A rank the saving run did not have keeps the state it was started with."""
    stored: Mapping[str, object] = found.manifest.tensors

    def kept(generator: str) -> Tensor | None:
        name = _name(generator, world)
        return load_tensor(found.folder, found.manifest, name) if name in stored else None

    if (state := kept("torch_cpu")) is not None:
        torch.set_rng_state(state)
    if world.device.type == "cuda" and (state := kept("torch_cuda")) is not None:
        torch.cuda.set_rng_state(state, world.device)
    if (state := kept("python")) is not None:
        version, *words = state[:-1].tolist()
        gauss = state[-1:].view(torch.float64).item()
        random.setstate((version, tuple(words), None if np.isnan(gauss) else gauss))
    if (state := kept("numpy")) is not None:
        twisted, (position, has_gauss) = state[:-3].numpy().astype(np.uint32), state[-3:-1].tolist()
        gauss = state[-1:].view(torch.float64).item()
        _NUMPY.set_state((_TWISTER, twisted, position, has_gauss, gauss))


def _of_python() -> Tensor:
    version, words, gauss = random.getstate()
    return torch.cat((torch.tensor([version, *words]), _bits(float("nan") if gauss is None else gauss)))


def _of_numpy() -> Tensor:
    _, words, position, has_gauss, gauss = _NUMPY.get_state(legacy=True)
    return torch.cat(
        (torch.from_numpy(words.astype(np.int64)), torch.tensor([position, has_gauss]), _bits(gauss))
    )


def _bits(number: float) -> Tensor:
    """A number as a whole one of the same bits, as a state has one type."""
    return torch.tensor([number], dtype=torch.float64).view(torch.int64)


def _name(generator: str, world: World) -> str:
    return f"rng/{generator}/rank-{world.everyone.rank:05d}"


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
