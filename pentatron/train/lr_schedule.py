"""Chooses between the learning-rate and weight-decay schedule of the command and that of the checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pentatron.checkpoint.state import TrainState, is_number
from pentatron.errors import UserError
from pentatron.optim.lr_schedules import LearningRate, WeightDecay, learning_rate, weight_decay
from pentatron.settings.run_config import RunConfig, all_settings
from pentatron.settings.settings import Settings

_USE, _OVERRIDE = "--use-checkpoint-opt-param-scheduler", "--override-opt-param-scheduler"
# Names of the fields of a schedule in messages.
_WORDS = {
    "learning_rate": {
        "style": "--lr-decay-style",
        "peak": "--lr",
        "floor": "--min-lr",
        "warmup_samples": "samples of warm-up",
        "decay_samples": "samples of decay",
        "init": "--lr-warmup-init",
        "wsd_style": "--lr-wsd-decay-style",
        "wsd_samples": "samples of the decay of WSD",
    },
    "weight_decay": {
        "style": "--weight-decay-incr-style",
        "start": "first weight decay",
        "end": "last weight decay",
        "samples": "samples of the weight-decay schedule",
    },
}
# Valid values of the fields that are not numbers.
_STYLES = {
    "style": (*all_settings()["lr_decay_style"].choices, *all_settings()["weight_decay_incr_style"].choices),
    "wsd_style": tuple(all_settings()["lr_wsd_decay_style"].choices),
}


@dataclass(frozen=True)
class OptimizerSchedule:
    """The schedules in samples, so that a change of the batch size does not shift them."""

    learning_rate: LearningRate
    weight_decay: WeightDecay

    @classmethod
    def of(cls, config: RunConfig) -> "OptimizerSchedule":
        return cls(learning_rate(config), weight_decay(config))

    @classmethod
    def from_json(cls, schedule: Mapping[str, Any]) -> "OptimizerSchedule":
        try:
            for values in (schedule["learning_rate"], schedule["weight_decay"]):
                for name, value in values.items():
                    if not (value in _STYLES[name] if name in _STYLES else is_number(value) and value >= 0):
                        raise ValueError(f"{name} is {value!r:.60}")
            rate = LearningRate(**schedule["learning_rate"])
            decay = WeightDecay(**schedule["weight_decay"])
            for style, length in ((rate.style, rate.decay_samples), (decay.style, decay.samples)):
                if style != "constant" and length == 0:
                    raise ValueError(f"{style} over 0 samples")
            return cls(rate, decay)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                f"the checkpoint's schedule cannot be read ({type(error).__name__}: {error}); resume from another step, or load the weights "
                f"alone with --finetune"
            ) from None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, other: "OptimizerSchedule") -> Iterator[str]:
        """Yields the differences to `other`, the schedule of this command."""
        saved, now = self.to_json(), other.to_json()
        for part, words in _WORDS.items():
            for name, word in words.items():
                if saved[part][name] != now[part][name] and self._has_effect(part, name, other):
                    yield f"{word}: {_plain(saved[part][name])} (this command: {_plain(now[part][name])})"

    def _has_effect(self, part: str, name: str, other: "OptimizerSchedule") -> bool:
        """Whether a field has an effect: a constant has no length or end, only WSD has its own decay."""
        if part == "weight_decay":
            constant = self.weight_decay.style == other.weight_decay.style == "constant"
            return not constant or name not in ("samples", "start")
        styles = {self.learning_rate.style, other.learning_rate.style}
        if name.startswith("wsd"):
            return "WSD" in styles
        return styles != {"constant"} or name not in ("floor", "decay_samples")


def _plain(value: Any) -> str:
    """Formats a number of samples as an integer, and rates as they are."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def saved_schedule(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the schedule from the settings of a checkpoint, with defaults for missing ones."""
    values = {name: settings.get(name, item.default) for name, item in all_settings().items()}
    return OptimizerSchedule.of(RunConfig.of(Settings(values))).to_json()


def update_schedule(config: RunConfig, state: TrainState) -> list[str]:
    """Stores the schedule of the run in `state`; returns notes about a changed schedule."""
    chosen, now = config.checkpoint, OptimizerSchedule.of(config)
    if not state.schedule:
        state.schedule = now.to_json()
        given = [_USE] * chosen.use_checkpoint_opt_param_scheduler
        given += [_OVERRIDE] * chosen.override_opt_param_scheduler
        return [f"{flag}: no schedule is loaded, so this has no effect" for flag in given]
    before = OptimizerSchedule.from_json(state.schedule)
    different = list(before.differences(now))
    if chosen.use_checkpoint_opt_param_scheduler:
        return [f"{_USE}: the checkpoint's schedule is kept; {'; '.join(different)}"] if different else []
    state.schedule = now.to_json()
    if not different or chosen.override_opt_param_scheduler:
        return []
    rate, rate_before = (f"{s.learning_rate(state.scheduled_samples):.3e}" for s in (now, before))
    # If the current rates are equal, the note names the fields that differ later.
    later = f"as before; different are {'; '.join(different)}"
    effect = f"not {rate_before}" if rate != rate_before else later
    return [
        f"the schedule of this command is not the checkpoint's: the learning rate continues at {rate}, {effect} "
        f"({_USE} keeps the checkpoint's; {_OVERRIDE} uses this one and hides this note)"
    ]
