"""Where a run begins: with what it has saved itself, else with what is loaded, else with new weights."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pentatron.checkpoint.find import checkpoints_of, is_resumable, is_step, saved_settings
from pentatron.checkpoint.load import WEIGHTS, load_fragments
from pentatron.checkpoint.retention import read_bases, read_record
from pentatron.checkpoint.state import TrainState
from pentatron.checkpoint.store import CheckpointStore, Found
from pentatron.checkpoint.verify import searched_together
from pentatron.data.datasets import OpenedData
from pentatron.data.identity import DataIdentity
from pentatron.errors import UserError
from pentatron.generate.source import Source, find_source, named_source
from pentatron.hf.architecture import settings_in
from pentatron.hf.folder import open_folder
from pentatron.hf.names import load_weights
from pentatron.hf.small_files import carry_files
from pentatron.optim.build import AnyOptimizer
from pentatron.optim.update_rules import rule_of
from pentatron.parallel.collectives import broadcast_object, on_some_ranks
from pentatron.parallel.shards import Fragment
from pentatron.parallel.world import World
from pentatron.settings.declaration import FREE, ORDER, SILENT, OnResume
from pentatron.settings.loaded import LOADED, architecture, differences
from pentatron.settings.output import CheckpointConfig
from pentatron.settings.resolve import Resolved
from pentatron.settings.run import RunConfig, table
from pentatron.settings.settings import CHOOSING, Settings, Start, another_run, names_checkpoints
from pentatron.train.checkpoints import restore_random_state
from pentatron.train.model import ParallelModel
from pentatron.train.schedules import saved_schedule

# What a run began with, compared with what `--load` names when it goes on.


def require_same_origin(checkpoints: Path, load: str) -> None:
    """Refuses to go on with a run whose weights come from something else than `--load` names."""
    record = read_record(checkpoints)
    origin = None if record is None else record.origin
    if origin is not None and _is_meant(origin, Path(load)):
        return
    began = "new weights" if origin is None else str(origin)
    raise UserError(
        f"the run in {checkpoints} began with {began}, and --load names {load}; leave --load out to go on with that run, choose "
        f"another --run-dir or --save for a new one, or start anew with --fresh"
    )


def _is_meant(origin: Path, load: Path) -> bool:
    """Whether the step or the folder that a run began with is what a path means now: a folder of steps may have newer ones since."""
    if _in_hub_cache(origin) is not None and _in_hub_cache(origin) == _in_hub_cache(load):
        return True
    if is_step(load):
        return origin.resolve() == load.resolve()
    return not {origin.resolve(), origin.resolve().parent}.isdisjoint(
        {load.resolve(), checkpoints_of(load).resolve()}
    )


def _in_hub_cache(path: Path) -> tuple[str, ...] | None:
    """Model and revision of a downloaded folder, wherever the cache lies."""
    parts = path.parts[-3:]
    return parts if len(parts) == 3 and parts[1] == "snapshots" else None


# A run that goes on reads the data it began with, or is told that it has changed.


def take_data(state: TrainState, data: OpenedData, origin: Path, chosen: CheckpointConfig) -> list[str]:
    """From now on the data of the run is what is there; what was drawn before is not forgotten.

    `origin`: the checkpoint that the state is of. Returns what to tell; data that changed without leave is an
    error.
    """
    before = DataIdentity.from_json(state.data_fingerprint, state.data_files)
    changed = data.identity.changes_since(before)
    if changed and not chosen.allow_changed_data:
        raise UserError(
            f"the data is not what {origin} was trained on; bring it back, go on all the same with --allow-changed-data, take the "
            f"weights alone with --load {origin.parent} --finetune and another --run-dir, or start anew with --fresh ({changed})"
        )
    now = data.identity.knowing(before)
    state.data_fingerprint, state.data_files = now.fingerprint, now.files_as_json()
    if not changed:
        same = "--allow-changed-data: the data is what it was, so this changes nothing"
        return [same] * chosen.allow_changed_data
    state.drawn = {**dict.fromkeys(data.names, 0), **state.drawn}
    return [
        f"the data has changed ({changed}); --allow-changed-data: from sample {state.consumed_samples} on, the samples are those of "
        "the new data's order"
    ]


def first_data(state: TrainState, data: OpenedData) -> None:
    """Of a run that begins."""
    identity = data.identity
    state.data_fingerprint, state.data_files = identity.fingerprint, identity.files_as_json()


# What is not as it was when a checkpoint was made: refused where it makes another model, told where it may
# change numbers.


# What --use-checkpoint-opt-param-scheduler takes from the checkpoint, which has it in samples.
_SCHEDULE = frozenset(
    name
    for name, item in table().items()
    if item.section == "optim" and (name.startswith(("lr", "min_lr")) or "weight_decay" in name)
)
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "data": "data_parallel_size",
}


@dataclass(frozen=True)
class _Difference:
    section: str
    name: str
    before: Any
    now: Any

    @property
    def on_resume(self) -> OnResume:
        return table()[self.name].resume

    def __str__(self) -> str:
        return f"{table()[self.name].flag} {_plain(self.now)} (was {_plain(self.before)})"


@dataclass(frozen=True)
class Changes:
    """In few lines: `told` may change the numbers of the run, `logged` does not. `settings` are the names behind the first."""

    told: list[str]
    logged: list[str]
    settings: frozenset[str]


def changes_since(saved: Mapping[str, Any], config: RunConfig, loaded: Collection[str] = ()) -> Changes:
    """What the user should know of settings that are not those of the checkpoint.

    `loaded`: settings that were taken from what is loaded. The tokenizer kept there has another path than the
    one it is a copy of.
    """
    kept = {*loaded, *(_SCHEDULE if config.checkpoint.use_checkpoint_opt_param_scheduler else ())}
    different = [d for d in _differences(saved, config.nested()) if d.name not in kept]
    free = [d for d in different if d.on_resume in (FREE, SILENT)]
    layout = [d for d in different if d.section == "parallel"]
    acting = [d for d in different if d not in free and d not in layout]
    told = _layout_line(saved, config, layout)
    if acting:
        drawing = [table()[d.name].flag for d in acting if d.on_resume is ORDER]
        order = (
            f"; {' and '.join(drawing)} {'draw' if len(drawing) > 1 else 'draws'} the order of samples, so that from here on "
            "it may be another one"
            if drawing
            else ""
        )
        told.append(f"settings that are not the checkpoint's: {_listed(acting)}{order}")
    others = [d for d in free if d.on_resume is FREE]
    logged = (
        [f"changed since the checkpoint, without a part in its numbers: {_listed(others)}"] if others else []
    )
    return Changes(told, logged, frozenset(d.name for d in acting))


def _layout_line(saved: Mapping[str, Any], config: RunConfig, different: list[_Difference]) -> list[str]:
    if not different:
        return []
    before, now = _sizes(saved), _sizes(config.nested())
    further = [d for d in different if d.name not in _SIZES.values()]
    if before == now:
        return [
            f"the layout is not the checkpoint's: {_listed(further)}; numbers may differ in the last digits"
        ]
    rest = f"; {_listed(further)}" if further else ""
    return [f"the checkpoint was made on {before}; it goes on on {now}{rest}"]


def _sizes(config: Mapping[str, Any]) -> str:
    """`2 tensor × 2 pipeline × 1 context × 1 data ranks`."""
    parallel = config["parallel"]
    return f"{' × '.join(f'{parallel.get(size, 1)} {name}' for name, size in _SIZES.items())} ranks"


def _listed(found: Iterable[_Difference]) -> str:
    return ", ".join(map(str, found))


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unset" if value is None else str(value)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[_Difference]:
    """A setting younger than the checkpoint had its default there."""
    younger = RunConfig.of(Settings.defaults()).nested()
    pairs = (
        _Difference(section, name, before.get(section, {}).get(name, younger[section][name]), value)
        for section, fields in now.items()
        for name, value in fields.items()
    )
    return [pair for pair in pairs if pair.before != pair.now]


def require_same_model(folder: Path, saved: Mapping[str, Any], config: RunConfig) -> None:
    loaded, now = architecture(saved), config.settings
    if different := differences(loaded, now):
        shown = "; ".join(
            f"{name} was {getattr(loaded.settings, name)}, is {getattr(now, name)}" for name in different
        )
        raise UserError(
            f"{folder} holds another model ({shown}); use the settings it was made with, choose another --run-dir, "
            f"or start anew with --fresh"
        )


T = TypeVar("T")


@dataclass(frozen=True)
class Beginning:
    """Where the run stands, what to tell of it, and whether its own folder holds this already.

    `goes_on_from`: the step that was loaded, with its data. `replaces_training`: other training has left its
    metrics in the run's folder, and the run begins at step 0. `remarks`: for the log alone.
    """

    state: TrainState
    notes: list[str]
    is_saved: bool
    replaces_training: bool = False
    goes_on_from: Path | None = None
    remarks: list[str] = field(default_factory=list)


class _Start:
    """One start of a run: what it has, and what it fills."""

    def __init__(
        self,
        resolved: Resolved,
        world: World,
        model: ParallelModel,
        optimizer: AnyOptimizer,
        store: CheckpointStore,
        data: OpenedData | None,
        start: Start,
    ) -> None:
        self.resolved, self.config, self.world, self.start = resolved, resolved.config, world, start
        self.model, self.optimizer, self.store = model, optimizer, store
        self.data = data
        self.asked = [table()[n].flag for n in CHOOSING if getattr(self.config.checkpoint, n)]

    def begin(self) -> Beginning:
        own_steps = Source(self.store.folder, is_huggingface=False)
        found, complaints = None, list[str]()
        if self.start is not Start.IN_PLACE:
            found, complaints = self._find(own_steps, set_aside=True)
        if found is not None:
            began = self._resume(found) if self._is_own(found) else self._from_foreign(found)
            return dataclasses.replace(began, notes=[*complaints, *began.notes])
        load = self.config.checkpoint.load
        if not self.resolved.given("load") or load is None:
            return self._from_scratch()
        megatron = self.config.checkpoint.ckpt_format is not None
        own = self._first_rank(lambda: find_source(Path(load), megatron)) if self._loads_itself() else None
        if self._loads_itself() and (own is None or not (own.is_foreign or self.start is Start.IN_PLACE)):
            # A run may load what it will save; at first there is nothing.
            return self._from_scratch()
        source = own or self._first_rank(lambda: named_source(load, megatron))
        if source.is_huggingface:
            return self._from_huggingface(source)
        # Only in our own folder may anything be renamed: another run may be using the other one.
        found, complaints = self._find(source, set_aside=self._loads_itself() and not source.is_foreign)
        assert found is not None, "a source has steps"
        began = self._from_steps(found)
        return dataclasses.replace(began, notes=[*complaints, *began.notes])

    def _find(self, source: Source, set_aside: bool) -> tuple[Found | None, list[str]]:
        """The newest valid step, and a sentence about each one that is not."""
        verify = self.config.checkpoint.verify_checkpoint
        found, complaints = searched_together(
            lambda check: source.newest_step(verify, set_aside, check), self.world.everyone
        )
        if found is not None and verify and set_aside:
            self.store.trust(found.folder)
        return found, complaints

    def _first_rank(self, action: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank; or its error."""
        found = on_some_ranks(self.world.is_first, action, self.world.everyone)
        told: T = broadcast_object(found, self.world.everyone)
        return told

    def _is_own(self, found: Found) -> bool:
        """Whether this run has saved the step, rather than finding it in its folder when it began."""
        if not is_resumable(found.manifest):
            return False
        bases = self._first_rank(lambda: read_bases(self.store.folder))
        if bases is not None:
            return found.folder.name not in bases
        return not (self.asked and self._loads_itself())

    def _loads_itself(self) -> bool:
        """Whether --load names the folder of this run's checkpoints, or the run that it is in."""
        load = self.config.checkpoint.load
        return load is None or names_checkpoints(load, str(self.store.folder))

    def _from_foreign(self, found: Found) -> Beginning:
        """From weights in the run's folder that are not its own, unless --load names others."""

        def require_named() -> None:
            load = self.config.checkpoint.load
            if not self.resolved.given("load") or load is None or self._loads_itself():
                return
            if Path(load).resolve().parent != self.store.folder.resolve():
                raise UserError(
                    f"{found.folder} holds weights that this run has not saved, and --load {load} names others; choose another "
                    f"--run-dir or --save, or leave --load out to begin with {found.folder.name}"
                )

        on_some_ranks(self.world.is_first, require_named, self.world.everyone)
        return self._from_steps(found)

    def _resume(self, found: Found) -> Beginning:
        """Everything as it was saved."""
        elsewhere = self.resolved.given("load") and not self._loads_itself()
        if elsewhere:
            load = str(self.config.checkpoint.load)
            on_some_ranks(
                self.world.is_first, lambda: require_same_origin(self.store.folder, load), self.world.everyone
            )
        state, changes, remarks = self._go_on(found, optimizer=True, random=True)
        said = [f"--load {self.config.checkpoint.load}"] * elsewhere + self.asked
        if said:
            changes.append(
                f"{' '.join(said)} chose what this run began with; it goes on from its own step {state.step}"
            )
        return Beginning(state, changes, is_saved=True, goes_on_from=found.folder, remarks=remarks)

    def _from_steps(self, found: Found) -> Beginning:
        """From steps of ours, as far as was asked for."""
        chosen = self.config.checkpoint
        alone = not is_resumable(found.manifest)
        if chosen.finetune or alone:
            on_some_ranks(True, lambda: self._load_weights(found), self.world.everyone)
            began = self._new_training(found.folder, alone)
            in_place = (
                found.folder.resolve().parent == self.store.folder.resolve() and found.manifest.step > 0
            )
            began = dataclasses.replace(began, replaces_training=in_place)
            if in_place:
                began.notes.append(
                    f"the steps of earlier training stay in {self.store.folder}; one whose number is saved again gets the ending .before"
                )
        else:
            state, changes, remarks = self._go_on(found, not chosen.no_load_optim, not chosen.no_load_rng)
            began = Beginning(state, changes, is_saved=False, goes_on_from=found.folder, remarks=remarks)
        self._record(found.folder, Source(found.folder.parent, is_huggingface=False))
        return began

    def _from_huggingface(self, source: Source) -> Beginning:
        def load() -> None:
            with open_folder(source.folder) as folder:
                require_same_model(source.folder, settings_in(folder), self.config)
                load_weights(folder, self.config.model, self.config.moe, self._weights(without_prefix=True))

        on_some_ranks(True, load, self.world.everyone)
        self._record(source.folder, source)
        return self._new_training(source.folder, alone=True)

    def _from_scratch(self) -> Beginning:
        notes = self._nothing_to_compare()
        if self.config.train.skip_train:
            notes.append(
                "--skip-train: there is no checkpoint, so random weights are evaluated; name what to evaluate with --load "
                "or --run-dir"
            )
        if self.asked:
            # Recorded, so that later starts do not take what this run saves for what it should begin from.
            self._record(None, Source(self.store.folder, is_huggingface=False))
            notes.append(f"{' '.join(self.asked)}: nothing is loaded, so this changes nothing")
        return Beginning(self._first_state(), notes, is_saved=False)

    def _new_training(self, origin: Path, alone: bool) -> Beginning:
        self.optimizer.loaded(0)
        notes = [f"the weights come from {origin}; training begins at step 0", *self._nothing_to_compare()]
        if alone and self.asked:
            notes.append(
                f"{' '.join(self.asked)}: there are weights alone in {origin}, so this changes nothing"
            )
        return Beginning(self._first_state(), notes, is_saved=False)

    def _nothing_to_compare(self) -> list[str]:
        idle = "--allow-changed-data: no data was read before, so this changes nothing"
        return [idle] * self.config.checkpoint.allow_changed_data

    def _first_state(self) -> TrainState:
        state = TrainState()
        if self.data is not None:
            first_data(state, self.data)
        return state

    def _record(self, origin: Path | None, source: Source) -> None:
        """Keeps for later starts which steps are not the run's own, and for exports the files besides weights."""

        def write() -> None:
            self.store.record_beginning(origin)
            carry_files(source.small_files, self.store.folder)

        on_some_ranks(self.world.is_first, write, self.world.everyone)

    def _naming_another_run(self, found: Found, load: Callable[[], None]) -> None:
        """Where nobody chose the run's folder, what does not fit it may be another run: that comes first in the refusal."""
        chosen = self.resolved.given("run_dir") or self.resolved.given("save")
        if chosen or found.folder.resolve().parent != self.store.folder.resolve():
            load()
            return
        try:
            load()
        except UserError as error:
            raise UserError(f"{another_run(str(self.config.run.run_dir))}: {error}") from None

    def _weights(self, without_prefix: bool = False) -> Iterator[Fragment]:
        for fragment in self.optimizer.fragments(owned_only=False):
            if fragment.tensor.startswith(WEIGHTS):
                name = fragment.tensor.removeprefix(WEIGHTS) if without_prefix else fragment.tensor
                yield dataclasses.replace(fragment, tensor=name)

    def _load_weights(self, found: Found) -> None:
        """What makes the model: its weights, and the bias of routers that have one."""
        require_same_model(found.folder, saved_settings(found), self.config)
        stored = found.manifest.tensors
        routers = (f for f in self.model.routers.fragments(owned_only=False) if f.tensor.endswith(".bias"))
        kept = (f for f in routers if f.tensor in stored)
        load_fragments(found.folder, found.manifest, itertools.chain(self._weights(), kept))

    def _go_on(self, found: Found, optimizer: bool, random: bool) -> tuple[TrainState, list[str], list[str]]:
        """Loads a step to go on from it; returns where the run stands, what has changed, and what the log says besides."""
        state = TrainState.from_json(found.manifest.run_state)
        if not state.ordered_for:
            # Saved by a program that orders its samples itself: taken as ordered for the length of its run.
            saved = Settings.defaults(**saved_settings(found))
            state.ordered_for = [max(1, saved.train_iters) * saved.global_batch_size]
        # A checkpoint of Megatron-LM may lack parts of its schedule: that of its settings is taken.
        state.schedule = state.schedule or saved_schedule(saved_settings(found))

        changes: list[str] = []

        def load() -> None:
            # Each rank judges the data it sees itself: on another machine that may be other data.
            if self.data is not None:
                changes.extend(take_data(state, self.data, found.folder, self.config.checkpoint))
            require_same_model(found.folder, saved_settings(found), self.config)
            if optimizer:
                require_same_rule(found, self.config)
            own = self.optimizer.fragments(owned_only=False) if optimizer else self._weights()
            kept = self.model.routers.fragments(owned_only=False)
            # A checkpoint of others, which lists no files, need not have what routers have counted; they
            # begin anew.
            stored = (f for f in kept if found.manifest.files or f.tensor in found.manifest.tensors)
            load_fragments(found.folder, found.manifest, itertools.chain(own, stored))
            if random:
                restore_random_state(found, self.world)

        on_some_ranks(True, lambda: self._naming_another_run(found, load), self.world.everyone)
        if not optimizer:
            state.updates, state.loss_scaling = 0, {}
        self.optimizer.loaded(state.updates)
        loaded = [name for name, source in self.resolved.sources.items() if source.startswith(LOADED)]
        other = changes_since(found.manifest.config, self.config, loaded)
        changes += other.told
        if state.loss_scaling and "initial_loss_scale" in other.settings:
            scale = state.loss_scaling["scale"]
            changes.append(
                f"--initial-loss-scale is where a new run begins: the loss scale goes on at {scale:g}"
            )
        return state, changes, other.logged


def starting_point(
    resolved: Resolved,
    world: World,
    model: ParallelModel,
    optimizer: AnyOptimizer,
    store: CheckpointStore,
    data: OpenedData | None,
    start: Start = Start.RESUME,
) -> Beginning:
    """Fills model and optimizer with the newest valid checkpoint of the run itself, else with what --load
    names.

    `data`: None where it is not known yet; it is compared with that of the checkpoint when it is opened.
    """
    return _Start(resolved, world, model, optimizer, store, data, start).begin()


def require_same_rule(found: Found, config: RunConfig) -> None:
    """What one rule remembers is nothing to another."""
    before = Settings.defaults(**saved_settings(found)).optimizer
    now = config.optim.optimizer
    momentum = now == "sgd" and config.optim.sgd_momentum > 0
    if before == now and (rule_of(found.manifest.tensors) or not momentum):
        return
    held = (
        f"the state of --optimizer {before}" if before != now else "no momentum, which --sgd-momentum needs"
    )
    raise UserError(
        f"{found.folder} holds {held}; go on with the settings it was made with, or keep weights and step but begin with a "
        f"new optimizer state by --load {found.folder.parent} --no-load-optim and another --run-dir"
    )
