"""Starting point of a run: its own newest checkpoint, else what --load names, else initial weights."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pentatron.checkpoint.find import default_checkpoint_folder, is_resumable, is_step, saved_settings
from pentatron.checkpoint.load import WEIGHTS, load_fragments
from pentatron.checkpoint.retention import read_base_steps
from pentatron.checkpoint.state import TrainState
from pentatron.checkpoint.store import Checkpoint, CheckpointStore
from pentatron.checkpoint.verify import search_on_all_ranks
from pentatron.data.identity import DataIdentity
from pentatron.data.open_data import OpenedData
from pentatron.errors import UserError
from pentatron.generate.source import ModelLocation, find_source, named_source
from pentatron.hf.folder import open_folder
from pentatron.hf.model_config import settings_from_folder
from pentatron.hf.small_files import copy_model_files
from pentatron.hf.tensor_names import load_weights
from pentatron.optim.build import AnyOptimizer
from pentatron.optim.update_rules import rule_of_checkpoint
from pentatron.parallel.collectives import broadcast_object, run_on_all_ranks, run_on_some_ranks
from pentatron.parallel.sharding import Fragment
from pentatron.parallel.world import World
from pentatron.settings.declaration import FREE, ORDER, SILENT, Setting
from pentatron.settings.loaded_architecture import LOADED_PREFIX, architecture, architecture_differences
from pentatron.settings.output import CheckpointConfig
from pentatron.settings.resolve import Resolved
from pentatron.settings.run_config import RunConfig, all_settings
from pentatron.settings.settings import LOAD_OPTIONS, Settings, Start, is_checkpoint_folder, other_run_error
from pentatron.train.checkpoints import restore_random_state
from pentatron.train.lr_schedule import saved_schedule
from pentatron.train.model import ParallelModel

T = TypeVar("T")


@dataclass(frozen=True)
class StartPoint:
    """The state a run starts with, and notes about it.

    `is_saved`: the run's own folder already holds a checkpoint of it. `resumed_from`: the step that was
    loaded with its training state. `replaces_training`: the run starts at step 0 in a folder with metrics of
    earlier training. `remarks`: lines for the log only.
    """

    state: TrainState
    notes: list[str]
    is_saved: bool
    replaces_training: bool = False
    resumed_from: Path | None = None
    remarks: list[str] = field(default_factory=list)


@dataclass(eq=False)
class StartPointLoader:
    """Loads model and optimizer from the run's newest valid checkpoint, else from what --load names.

    `data`: None if it is opened later; it is compared with that of the checkpoint then.
    """

    resolved: Resolved
    world: World
    model: ParallelModel
    optimizer: AnyOptimizer
    store: CheckpointStore
    data: OpenedData | None
    start: Start

    def __post_init__(self) -> None:
        self.config = self.resolved.config
        # The given flags that choose what is loaded, such as --finetune.
        chosen = self.config.checkpoint
        self.given_choices = [all_settings()[n].flag for n in LOAD_OPTIONS if getattr(chosen, n)]
        # Whether --load names the checkpoint folder of this run, or its run folder.
        load = chosen.load
        self.loads_itself = load is None or is_checkpoint_folder(load, str(self.store.folder))

    def load(self) -> StartPoint:
        """Returns the starting point of the run. Collective."""
        own_steps = ModelLocation(self.store.folder, is_huggingface=False)
        found, complaints = None, list[str]()
        if self.start is not Start.IN_PLACE:
            found, complaints = self._newest_step(own_steps, set_aside=True)
        if found is not None:
            began = self._resume(found) if self._is_own(found) else self._from_unowned_step(found)
            return replace(began, notes=[*complaints, *began.notes])
        load, is_own = self.config.checkpoint.load, self.loads_itself
        if not self.resolved.given("load") or load is None:
            return self._from_initial_weights()
        megatron = self.config.checkpoint.ckpt_format is not None
        source = self._on_first_rank(
            lambda: find_source(Path(load), megatron) if is_own else named_source(load, megatron)
        )
        if source is None or (is_own and not source.is_foreign and self.start is not Start.IN_PLACE):
            # --load may name the folder of --save, which is empty at first.
            return self._from_initial_weights()
        if source.is_huggingface:
            return self._from_huggingface(source)
        # Damaged steps are renamed in the run's own folder only: another run may be using the other folder.
        found, complaints = self._newest_step(source, set_aside=is_own and not source.is_foreign)
        assert found is not None, "a source has steps"
        began = self._from_step(found)
        return replace(began, notes=[*complaints, *began.notes])

    def _newest_step(self, source: ModelLocation, set_aside: bool) -> tuple[Checkpoint | None, list[str]]:
        """Returns the newest valid step, and a message about each newer one that is damaged."""
        verify = self.config.checkpoint.verify_checkpoint
        found, complaints = search_on_all_ranks(
            lambda check: source.newest_step(verify, set_aside, check), self.world.all_ranks
        )
        if found is not None and verify and set_aside:
            self.store.mark_verified(found.folder)
        return found, complaints

    def _on_first_rank(self, action: Callable[[], T]) -> T:
        """Runs an action on the first rank; returns its result, or raises its error, on every rank."""
        local = run_on_some_ranks(self.world.is_first, action, self.world.all_ranks)
        return broadcast_object(local, self.world.all_ranks)

    def _is_own(self, found: Checkpoint) -> bool:
        """Whether this run saved the step, rather than an earlier run or an import."""
        if not is_resumable(found.manifest):
            return False
        bases = self._on_first_rank(lambda: read_base_steps(self.store.folder))
        if bases.is_recorded:
            return found.folder.name not in bases.steps
        return not (self.given_choices and self.loads_itself)

    # --- the five starting points ---

    def _resume(self, found: Checkpoint) -> StartPoint:
        """Resumes the run from its own step."""
        elsewhere = self.resolved.given("load") and not self.loads_itself
        if elsewhere:
            check = partial(require_same_origin, self.store.folder, str(self.config.checkpoint.load))
            run_on_some_ranks(self.world.is_first, check, self.world.all_ranks)
        began = self._load_step(found, optimizer=True, random=True)
        flags = [f"--load {self.config.checkpoint.load}"] * elsewhere + self.given_choices
        if flags:
            began.notes.append(
                f"{' '.join(flags)} has no effect: the run resumes from its own step {began.state.step}"
            )
        return replace(began, is_saved=True)

    def _from_unowned_step(self, found: Checkpoint) -> StartPoint:
        """Starts from a step in the run's folder that this run has not saved, unless --load names another."""

        def require_named() -> None:
            load = self.config.checkpoint.load
            names_another = self.resolved.given("load") and load is not None and not self.loads_itself
            if names_another and Path(load).resolve().parent != self.store.folder.resolve():
                raise UserError(
                    f"{found.folder} holds weights that this run has not saved, and --load {load} names others; choose another "
                    f"--run-dir or --save, or leave --load out to begin with {found.folder.name}"
                )

        run_on_some_ranks(self.world.is_first, require_named, self.world.all_ranks)
        return self._from_step(found)

    def _from_step(self, found: Checkpoint) -> StartPoint:
        """Starts from a step of another run: with its training state, or from its weights alone."""
        chosen = self.config.checkpoint
        has_weights_only = not is_resumable(found.manifest)
        if chosen.finetune or has_weights_only:
            run_on_all_ranks(lambda: self._load_model(found), self.world.all_ranks)
            own_folder = self.store.folder.resolve()
            in_place = found.folder.resolve().parent == own_folder and found.manifest.step > 0
            began = self._new_training(found.folder, has_weights_only, replaces_training=in_place)
            if in_place:
                began.notes.append(
                    f"the steps of earlier training stay in {self.store.folder}; one whose number is saved again gets the ending .before"
                )
        else:
            began = self._load_step(found, not chosen.no_load_optim, not chosen.no_load_rng)
        self._record(found.folder, ModelLocation(found.folder.parent, is_huggingface=False))
        return began

    def _from_huggingface(self, source: ModelLocation) -> StartPoint:
        def load() -> None:
            with open_folder(source.folder) as folder:
                require_same_model(source.folder, settings_from_folder(folder), self.config)
                load_weights(folder, self.config.model, self.config.moe, self._weights(without_prefix=True))

        run_on_all_ranks(load, self.world.all_ranks)
        self._record(source.folder, source)
        return self._new_training(source.folder, has_weights_only=True)

    def _from_initial_weights(self) -> StartPoint:
        notes = self._unused_data_flag()
        if self.config.train.skip_train:
            notes.append(
                "--skip-train: there is no checkpoint, so random weights are evaluated; give a model with --load "
                "or --run-dir"
            )
        if self.given_choices:
            # Recorded for restarts: what this run saves is then its own, whatever these flags choose.
            self._record(None, ModelLocation(self.store.folder, is_huggingface=False))
            notes.append(f"{' '.join(self.given_choices)}: nothing is loaded, so this has no effect")
        return StartPoint(self._initial_state(), notes, is_saved=False)

    # --- their parts ---

    def _new_training(
        self, origin: Path, has_weights_only: bool, replaces_training: bool = False
    ) -> StartPoint:
        self.optimizer.after_load(0)
        notes = [f"the weights come from {origin}; training begins at step 0", *self._unused_data_flag()]
        if has_weights_only and self.given_choices:
            flags = " ".join(self.given_choices)
            notes.append(f"{flags}: there are weights alone in {origin}, so this has no effect")
        return StartPoint(self._initial_state(), notes, False, replaces_training)

    def _unused_data_flag(self) -> list[str]:
        note = "--allow-changed-data: no data was read before, so this has no effect"
        return [note] * self.config.checkpoint.allow_changed_data

    def _initial_state(self) -> TrainState:
        state = TrainState()
        if self.data is not None:
            record_data(state, self.data)
        return state

    def _record(self, origin: Path | None, source: ModelLocation) -> None:
        """Records the origin of the run for restarts, and copies tokenizer and configuration for exports."""

        def write() -> None:
            self.store.record_base_steps(origin)
            copy_model_files(source.small_files, self.store.folder)

        run_on_some_ranks(self.world.is_first, write, self.world.all_ranks)

    def _weights(self, without_prefix: bool = False) -> Iterator[Fragment]:
        for fragment in self.optimizer.fragments(owned_only=False):
            if fragment.tensor.startswith(WEIGHTS):
                name = fragment.tensor.removeprefix(WEIGHTS) if without_prefix else fragment.tensor
                yield replace(fragment, tensor=name)

    def _load_model(self, found: Checkpoint) -> None:
        """Loads the weights and the expert biases of routers, without training state."""
        require_same_model(found.folder, saved_settings(found), self.config)
        routers = self.model.routers.fragments(owned_only=False)
        biases = (f for f in routers if f.tensor.endswith(".bias") and f.tensor in found.manifest.tensors)
        load_fragments(found.folder, found.manifest, itertools.chain(self._weights(), biases))

    def _load_step(self, found: Checkpoint, optimizer: bool, random: bool) -> StartPoint:
        """Loads a step with its training state, to continue from it."""
        state = TrainState.from_json(found.manifest.run_state)
        if not state.ordered_for:
            # Megatron-LM has its own sample order. Ours is taken as made for the length of the saved run.
            saved = Settings.defaults(**saved_settings(found))
            state.ordered_for = [max(1, saved.train_iters) * saved.global_batch_size]
        # A checkpoint of Megatron-LM may lack parts of the schedule: it is rebuilt from the settings.
        state.schedule = state.schedule or saved_schedule(saved_settings(found))
        notes: list[str] = []

        def load() -> None:
            # Each rank compares the data that it sees: another machine may have other data.
            if self.data is not None:
                notes.extend(require_same_data(state, self.data, found.folder, self.config.checkpoint))
            require_same_model(found.folder, saved_settings(found), self.config)
            if optimizer:
                require_same_optimizer(found, self.config)
            fragments = self.optimizer.fragments(owned_only=False) if optimizer else self._weights()
            routers = self.model.routers.fragments(owned_only=False)
            # An imported checkpoint lists no files and may lack router statistics, which then start at 0.
            stored = (f for f in routers if found.manifest.files or f.tensor in found.manifest.tensors)
            load_fragments(found.folder, found.manifest, itertools.chain(fragments, stored))
            if random:
                restore_random_state(found, self.world)

        run_on_all_ranks(lambda: self._mentioning_another_run(found, load), self.world.all_ranks)
        if not optimizer:
            state.updates, state.loss_scaling = 0, {}
        self.optimizer.after_load(state.updates)
        loaded = [name for name, source in self.resolved.sources.items() if source.startswith(LOADED_PREFIX)]
        changed, remarks, settings = changes_since(found.manifest.config, self.config, loaded)
        notes += changed
        if state.loss_scaling and "initial_loss_scale" in settings:
            scale = state.loss_scaling["scale"]
            notes.append(f"--initial-loss-scale is for new runs only: the loss scale continues at {scale:g}")
        return StartPoint(state, notes, is_saved=False, resumed_from=found.folder, remarks=remarks)

    def _mentioning_another_run(self, found: Checkpoint, load: Callable[[], None]) -> None:
        """Loads; if the run folder was not given, an error first says that it may be that of another run."""
        given = self.resolved.given("run_dir") or self.resolved.given("save")
        if given or found.folder.resolve().parent != self.store.folder.resolve():
            load()
            return
        try:
            load()
        except UserError as error:
            raise UserError(f"{other_run_error(str(self.config.run.run_dir))}: {error}") from None


# --- checks of what is loaded ---


def require_same_origin(checkpoints: Path, load: str) -> None:
    """Raises an error if the weights of a run that resumes came from something else than --load names."""
    origin = read_base_steps(checkpoints).origin
    if origin is not None and _is_named(origin, Path(load)):
        return
    began = "new weights" if origin is None else str(origin)
    raise UserError(
        f"the run in {checkpoints} began with {began}, and --load names {load}; leave --load out to resume that run, choose "
        f"another --run-dir or --save for a new one, or start over with --fresh"
    )


def _is_named(origin: Path, load: Path) -> bool:
    """Whether `load` names the recorded origin: the same step, its folder, or the same Hub download."""
    if _in_hub_cache(origin) is not None and _in_hub_cache(origin) == _in_hub_cache(load):
        return True
    if is_step(load):
        return origin.resolve() == load.resolve()
    origins = {origin.resolve(), origin.resolve().parent}
    return not origins.isdisjoint({load.resolve(), default_checkpoint_folder(load).resolve()})


def _in_hub_cache(path: Path) -> tuple[str, ...] | None:
    """Returns model and revision of a folder in a Hugging Face cache, which may have moved."""
    parts = path.parts[-3:]
    return parts if len(parts) == 3 and parts[1] == "snapshots" else None


def record_data(state: TrainState, data: OpenedData) -> None:
    """Stores the identity of the data of a new run in its state."""
    identity = data.identity
    state.data_fingerprint, state.data_files = identity.fingerprint, identity.files_as_json()


def require_same_data(
    state: TrainState, data: OpenedData, origin: Path, chosen: CheckpointConfig
) -> list[str]:
    """Stores the identity of the data in the state of a resumed run, and returns notes.

    `origin`: the checkpoint of the state. Changed data is an error without --allow-changed-data.
    """
    before = DataIdentity.from_json(state.data_fingerprint, state.data_files)
    changed = data.identity.changes_since(before)
    if changed and not chosen.allow_changed_data:
        raise UserError(
            f"the data is not what {origin} was trained on; restore it, resume all the same with --allow-changed-data, load the "
            f"weights alone with --load {origin.parent} --finetune and another --run-dir, or start over with --fresh ({changed})"
        )
    now = data.identity.with_checksums_of(before)
    state.data_fingerprint, state.data_files = now.fingerprint, now.files_as_json()
    if not changed:
        note = "--allow-changed-data: the data has not changed, so this has no effect"
        return [note] * chosen.allow_changed_data
    state.drawn = {**dict.fromkeys(data.names, 0), **state.drawn}
    return [
        f"the data has changed ({changed}); --allow-changed-data: from sample {state.consumed_samples} on, the samples are those of "
        "the new data's order"
    ]


def require_same_model(folder: Path, saved: Mapping[str, Any], config: RunConfig) -> None:
    loaded, now = architecture(saved), config.settings
    if different := architecture_differences(loaded, now):
        shown = "; ".join(f"{n} was {getattr(loaded.settings, n)}, is {getattr(now, n)}" for n in different)
        raise UserError(
            f"{folder} holds another model ({shown}); use the settings it was made with, choose another --run-dir, "
            f"or start over with --fresh"
        )


def require_same_optimizer(found: Checkpoint, config: RunConfig) -> None:
    """Raises an error if the optimizer state is of another optimizer."""
    before = Settings.defaults(**saved_settings(found)).optimizer
    now = config.optim.optimizer
    momentum = now == "sgd" and config.optim.sgd_momentum > 0
    if before == now and (rule_of_checkpoint(found.manifest.tensors) or not momentum):
        return
    lacking = "no momentum, which --sgd-momentum needs"
    content = f"the state of --optimizer {before}" if before != now else lacking
    raise UserError(
        f"{found.folder} holds {content}; resume with the settings it was made with, or keep weights and step but begin with a "
        f"new optimizer state by --load {found.folder.parent} --no-load-optim and another --run-dir"
    )


# --- settings that differ from the checkpoint's ---

# Settings that --use-checkpoint-opt-param-scheduler takes from the checkpoint, which has them in samples.
_SCHEDULE = frozenset(
    name
    for name, item in all_settings().items()
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
    setting: Setting
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.setting.flag} {_plain(self.now)} (was {_plain(self.before)})"


def changes_since(
    saved: Mapping[str, Any], config: RunConfig, loaded: Collection[str] = ()
) -> tuple[list[str], list[str], set[str]]:
    """Describes the settings that differ from those of the checkpoint: notes if results may change, else
    remarks.

    Also returns the names of the settings in the notes, without the layout.

    `loaded`: settings taken from the checkpoint. They may differ in paths, as its tokenizer is a copy.
    """
    ignored = {*loaded, *(_SCHEDULE if config.checkpoint.use_checkpoint_opt_param_scheduler else ())}
    # A setting that is newer than the checkpoint had its default there.
    before, now = RunConfig.of(Settings.defaults()).nested(), config.nested()
    different = [
        _Difference(all_settings()[name], value_before, value)
        for section, fields in now.items()
        for name, value in fields.items()
        for value_before in [saved.get(section, {}).get(name, before[section][name])]
        if name not in ignored and value_before != value
    ]
    layout = [d for d in different if d.setting.section == "parallel"]
    notes = _layout_note(saved, config, layout)
    acting = [d for d in different if d.setting.resume not in (FREE, SILENT) and d not in layout]
    if acting:
        ordering = [d.setting.flag for d in acting if d.setting.resume is ORDER]
        order = (
            f"; {' and '.join(ordering)} {'change' if len(ordering) > 1 else 'changes'} the sample order from here on"
            if ordering
            else ""
        )
        notes.append(f"settings differ from the checkpoint's: {_listed(acting)}{order}")
    others = [d for d in different if d.setting.resume is FREE]
    remark = f"changed since the checkpoint, without an effect on its numbers: {_listed(others)}"
    return notes, [remark] * bool(others), {d.setting.name for d in acting}


def _layout_note(saved: Mapping[str, Any], config: RunConfig, different: list[_Difference]) -> list[str]:
    if not different:
        return []
    before, now = _sizes(saved), _sizes(config.nested())
    further = _listed(d for d in different if d.setting.name not in _SIZES.values())
    if before == now:
        return [f"the layout is not the checkpoint's: {further}; numbers may differ in the last digits"]
    rest = f"; {further}" if further else ""
    return [f"the checkpoint was made on {before}; it resumes on {now}{rest}"]


def _sizes(config: Mapping[str, Any]) -> str:
    """Formats the parallel sizes as `2 tensor × 2 pipeline × 1 context × 1 data ranks`."""
    parallel = config["parallel"]
    return f"{' × '.join(f'{parallel.get(size, 1)} {name}' for name, size in _SIZES.items())} ranks"


def _listed(different: Iterable[_Difference]) -> str:
    return ", ".join(map(str, different))


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unset" if value is None else str(value)
