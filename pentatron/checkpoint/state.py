"""The training state in a checkpoint besides tensors: step, consumed samples, schedules."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pentatron.errors import UserError

# Limit of counters: beyond any run, and below the limits of all libraries.
_LARGEST = 10**15
# Types of the items of collections, where computations depend on them.
_ITEM_TYPES: dict[str, Any] = {
    **dict.fromkeys(("ordered_for", "valid_ordered_for", "drawn"), 0),
    "loss_scaling": 0.0,
    "data_files": {},
    "schedule": {},
}


@dataclass
class TrainState:
    """Everything besides tensors that a resumed run needs."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    # Position in the validation set, where the next evaluation continues.
    consumed_valid_samples: int = 0
    data_fingerprint: str = ""
    # The data files the fingerprint covers, with the checksum of their tokens if known.
    data_files: list[dict[str, Any]] = field(default_factory=list)
    # Lengths in samples the order was built for, initially and after each extension: it grows but never
    # changes.
    ordered_for: list[int] = field(default_factory=list)
    # Lengths of the order of the validation set.
    valid_ordered_for: list[int] = field(default_factory=list)
    # Samples drawn from each dataset.
    drawn: dict[str, int] = field(default_factory=dict)
    # FLOPs of the run, by the formula of the throughput.
    flops: float = 0.0
    # Schedules of learning rate and weight decay.
    schedule: dict[str, Any] = field(default_factory=dict)
    # Samples of steps with an optimizer update: the position in the schedules.
    scheduled_samples: int = 0
    # Updates since the optimizer state was initialised.
    updates: int = 0
    # Steps without an update, and those of them with a NaN or inf loss.
    skipped_steps: int = 0
    nan_steps: int = 0
    # Samples of steps that were not computed (--iterations-to-skip).
    skipped_samples: int = 0
    # Largest loss and gradient norm so far, for spike detection.
    largest_loss: float = 0.0
    largest_norm: float = 0.0
    # State of `LossScaler`.
    loss_scaling: dict[str, float] = field(default_factory=dict)
    # Software and hardware the run was computed with.
    environment: dict[str, Any] = field(default_factory=dict)

    def count_update(self, samples: int) -> None:
        self.updates += 1
        self.scheduled_samples += samples

    def count_skipped(self, is_nan: bool) -> None:
        """Counts a step without an update: schedules do not advance, the data does."""
        self.skipped_steps += 1
        self.nan_steps += is_nan

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "TrainState":
        """Restores the state from a checkpoint. Raises UserError for values that cannot be valid."""
        fresh = vars(cls())
        known = {name: value for name, value in saved.items() if name in fresh}
        for name, value in known.items():
            _require_kind(name, value, fresh[name])
            if name in _ITEM_TYPES:
                for item in value.values() if isinstance(value, dict) else value:
                    _require_kind(name, item, _ITEM_TYPES[name])
        state = cls(**known)
        if state.ordered_for and state.consumed_samples > max(state.ordered_for):
            # The order of samples covers the whole run, and is extended before a longer run starts.
            raise _invalid(
                f"consumed_samples {state.consumed_samples} of samples that were ordered for {max(state.ordered_for)}"
            )
        return state

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _require_kind(name: str, value: Any, like: Any) -> None:
    """Checks the type and range of a value.

    A checkpoint may have been edited, and the error would otherwise appear steps later.
    """
    if isinstance(like, float):
        valid = is_number(value)
    elif isinstance(like, int):
        valid = type(value) is int and 0 <= value <= _LARGEST
    else:
        valid = isinstance(value, type(like))
    if not valid:
        raise _invalid(f"{name} {value!r:.60}")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float represents: not NaN, not inf."""
    return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max


def _invalid(what: str) -> UserError:
    return UserError(
        f"the checkpoint has {what}, which is invalid; resume from another step, or load only the weights with --finetune"
    )
