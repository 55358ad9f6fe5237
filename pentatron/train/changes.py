"""What is not as it was when a checkpoint was made: refused where it makes another model, told where it may change numbers."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.config.loaded import architecture, differences
from pentatron.config.run import RunConfig, table
from pentatron.config.setting import FREE, ORDER, SILENT, OnResume
from pentatron.config.settings import Settings
from pentatron.errors import UserError

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

    `loaded`: settings that were taken from what is loaded. The tokenizer kept there has another path than the one it is a copy of.
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
