"""Going on where an earlier process stopped."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pentatron.checkpoint.load import load_into
from pentatron.checkpoint.store import CheckpointStore, Found
from pentatron.config.errors import UserError
from pentatron.config.run import RunConfig
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.collectives import broadcast_object
from pentatron.parallel.world import World
from pentatron.train.state import TrainState

# These belong to the machine or to the output, not to the numbers a run computes.
_FREE_TO_CHANGE = frozenset({"run", "launch", "log", "checkpoint", "parallel"})


def find_checkpoint(store: CheckpointStore, verify: bool, world: World) -> tuple[Found | None, list[str]]:
    """Rank 0 looks and verifies; every rank gets the same answer, or the same error."""
    answer: Any = None
    if world.is_first:
        try:
            answer = store.newest_valid(verify)
        except OSError as error:
            answer = UserError(
                f"the checkpoints in {store.folder} cannot be read ({error.strerror or error})"
            )
    answer = broadcast_object(answer, world.everyone)
    if isinstance(answer, UserError):
        raise answer
    found, complaints = answer
    return found, complaints


def resume(found: Found, config: RunConfig, optimizer: Optimizer, rank: int) -> tuple[TrainState, list[str]]:
    """Loads weights, optimizer and random state; returns where the run stands and which settings have changed."""
    _require_same_model(found.folder, found.manifest.config, config)
    load_into(found.folder, found.manifest, optimizer.state())
    _restore_random_state(found, rank)
    state = TrainState(**found.manifest.run_state)
    optimizer.loaded(state.step)
    changes = [
        f"resuming with {section}.{name} = {now} (the checkpoint was made with {before})"
        for section, name, before, now in _differences(found.manifest.config, config.nested())
        if section not in _FREE_TO_CHANGE
    ]
    return state, changes


def random_state_name(rank: int) -> str:
    return f"rng/torch_cpu/rank-{rank:05d}"


def _restore_random_state(found: Found, rank: int) -> None:
    """A rank the saving run did not have keeps the state it was started with."""
    name = random_state_name(rank)
    if name in found.manifest.tensors:
        state = torch.get_rng_state()
        load_into(found.folder, found.manifest, {name: state})
        torch.set_rng_state(state)


def _require_same_model(folder: Path, saved: Mapping[str, Any], config: RunConfig) -> None:
    different = [
        d for d in _differences(saved, config.nested()) if d[0] == "model" and d[1] not in ("seq_length",)
    ]
    if different:
        shown = "; ".join(f"{name} was {before}, is {now}" for _, name, before, now in different)
        raise UserError(
            f"{folder} holds another model ({shown}); use the settings it was made with, choose another --run-dir, "
            f"or start anew with --fresh"
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, Any, Any]]:
    return [
        (section, name, before.get(section, {}).get(name), value)
        for section, fields in now.items()
        for name, value in fields.items()
        if before.get(section, {}).get(name) != value
    ]
