"""Going on where an earlier process stopped."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentatron.checkpoint.load import load_fragments
from pentatron.checkpoint.store import CheckpointStore, Found
from pentatron.config.errors import AgreedError, UserError
from pentatron.config.resolve import Resolved
from pentatron.config.run import RunConfig, build, table
from pentatron.optim.build import AnyOptimizer
from pentatron.parallel.collectives import broadcast_object, on_some_ranks
from pentatron.parallel.world import World
from pentatron.train.parallel_model import ParallelModel
from pentatron.train.random_state import restore_random_state
from pentatron.train.state import TrainState

# These belong to the machine or to the output, not to the numbers a run computes.
_FREE_SECTIONS = frozenset({"launch", "log", "checkpoint", "parallel"})
_DRAW_THE_ORDER = frozenset({"train_iters", "global_batch_size", "seed", "split", "seq_length"})
_FREE_SETTINGS = frozenset(
    {"preset", "config", "run_dir", "fresh", "sample_prompt", "sample_tokens", "padded_vocab_size"}
)
_MODEL_SIZE = "_model_parallel_size"
# They belong to the architecture's settings but leave no trace in the weights.
_NOT_IN_THE_WEIGHTS = frozenset(
    {
        "padded_vocab_size",
        "make_vocab_size_divisible_by",
        "hidden_dropout",
        "attention_dropout",
        "moe_router_dtype",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_bias_update_rate",
        "moe_token_dispatcher_type",
        "moe_grouped_gemm",
        "moe_use_legacy_grouped_gemm",
        "moe_expert_capacity_factor",
        "moe_token_drop_policy",
        "moe_per_layer_logging",
    }
)


def starting_point(
    resolved: Resolved,
    world: World,
    model: ParallelModel,
    optimizer: AnyOptimizer,
    store: CheckpointStore,
    data_fingerprint: str,
) -> tuple[TrainState, list[str]]:
    """The newest valid checkpoint of the run itself, else of --load, else the beginning; and what to tell of it."""
    config = resolved.config
    own, other = store.folder, Path(config.checkpoint.load or store.folder)
    notes: list[str] = []
    for folder in dict.fromkeys((own, other)):
        # Only in our own folder may anything be renamed: another run may be using the other one.
        there = CheckpointStore(folder, keep=None)
        found, complaints = _find(there, config.checkpoint.verify_checkpoint, folder == own, world)
        notes += complaints
        if found is not None:
            state, changes = _resume(found, config, model, optimizer, world, data_fingerprint)
            return state, [*notes, *changes]
    if resolved.given("load") and other != own:
        raise AgreedError(
            f"--load {other} holds no checkpoint; check the path, or leave it out to start from scratch"
        )
    return TrainState(data_fingerprint=data_fingerprint), notes


def _find(
    store: CheckpointStore, verify: bool, set_aside: bool, world: World
) -> tuple[Found | None, list[str]]:
    """Rank 0 looks and verifies; every rank gets the same answer, or the same error."""

    def look() -> tuple[Found | None, list[str]]:
        found, complaints = store.newest_valid(verify, set_aside)
        if found is None and (complaints or store.damaged()):
            reason = complaints[0] if complaints else f"{store.damaged()[0]} and others were set aside"
            raise UserError(
                f"no checkpoint in {store.folder} is usable ({reason}); put a good one back, or start anew with --fresh"
            )
        return found, complaints

    return broadcast_object(on_some_ranks(world.is_first, look, world.everyone), world.everyone)


def _resume(
    found: Found,
    config: RunConfig,
    model: ParallelModel,
    optimizer: AnyOptimizer,
    world: World,
    data_fingerprint: str,
) -> tuple[TrainState, list[str]]:
    """Loads weights, optimizer and random state; returns where the run stands and which settings have changed."""
    state = TrainState(**found.manifest.run_state)

    def load() -> None:
        # Each rank judges the data it sees itself: on another machine that may be other data.
        if state.data_fingerprint != data_fingerprint:
            raise UserError(
                f"the data is not what {found.folder} was trained on; bring it back, or start anew with --fresh or "
                f"another --run-dir"
            )
        require_same_model(found.folder, found.manifest.config, config)
        wanted = itertools.chain(
            optimizer.fragments(owned_only=False), model.routers.fragments(owned_only=False)
        )
        load_fragments(found.folder, found.manifest, wanted)
        restore_random_state(found, world)

    on_some_ranks(True, load, world.everyone)
    optimizer.loaded(state.step)
    different = [
        difference
        for difference in _differences(found.manifest.config, config.nested())
        if difference[0] not in _FREE_SECTIONS and difference[1] not in _FREE_SETTINGS
    ]
    changes = [
        f"resuming with {section}.{name} = {now} (the checkpoint was made with {before})"
        for section, name, before, now in different
    ]
    before, now = _layout(found.manifest.config), _layout(config.nested())
    if before != now:
        changes.insert(0, f"the checkpoint was made on {before}; it goes on on {now}")
    if any(name in _DRAW_THE_ORDER for _, name, _, _ in different):
        changes.append(
            "samples are ordered for the length of a run: from here on the order may be another one"
        )
    return state, changes


def _layout(config: Mapping[str, Any]) -> str:
    """`2 tensor × 2 pipeline × 1 context × 1 data ranks`."""
    parallel = config["parallel"]
    sizes = {
        name: parallel.get(f"{name}{rest}", 1)
        for name, rest in (
            ("tensor", _MODEL_SIZE),
            ("pipeline", _MODEL_SIZE),
            ("context", "_parallel_size"),
            ("data", "_parallel_size"),
        )
    }
    return f"{' × '.join(f'{size} {name}' for name, size in sizes.items())} ranks"


def require_same_model(folder: Path, saved: Mapping[str, Any], config: RunConfig) -> None:
    # Positions that are not learned leave no trace in the weights: such a model may go on with longer sequences.
    length = {"seq_length", "max_position_embeddings"}
    learned = config.model.position_embedding_type == "learned_absolute"
    free = _NOT_IN_THE_WEIGHTS | ({"seq_length"} if learned else length)
    # Settings of experts say nothing about a model that has none; some may be younger than the checkpoint.
    dense = config.moe.num_experts is None and saved.get("moe", {}).get("num_experts") is None
    sections = ("model",) if dense else ("model", "moe")
    different = [d for d in _differences(saved, config.nested()) if d[0] in sections and d[1] not in free]
    if different:
        shown = "; ".join(f"{name} was {before}, is {now}" for _, name, before, now in different)
        raise UserError(
            f"{folder} holds another model ({shown}); use the settings it was made with, choose another --run-dir, "
            f"or start anew with --fresh"
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, Any, Any]]:
    """A setting younger than the checkpoint had its default there."""
    younger = build({name: item.default for name, item in table().items()}).nested()
    pairs = (
        (section, name, before.get(section, {}).get(name, younger[section][name]), value)
        for section, fields in now.items()
        for name, value in fields.items()
    )
    return [pair for pair in pairs if pair[2] != pair[3]]
