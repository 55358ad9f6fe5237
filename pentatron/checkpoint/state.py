"""Where a run stands."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pentatron.errors import UserError

# No run counts as far, and every larger number is too large for some library.
_LARGEST = 10**15
# What collections have in them, as far as numbers of the run depend on it.
_WITHIN: dict[str, Any] = {
    "ordered_for": 0,
    "valid_ordered_for": 0,
    "drawn": 0,
    "loss_scaling": 0.0,
    "data_files": {},
    "schedule": {},
}


@dataclass
class TrainState:
    """Everything besides tensors that a resumed run must know."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    # Of the validation set: the next validation goes on from there.
    consumed_valid_samples: int = 0
    data_fingerprint: str = ""
    # Of each file that the fingerprint is made of, with the checksum of its tokens where that is known.
    data_files: list[dict[str, Any]] = field(default_factory=list)
    # How many samples the order was built for, first and each time the run was made longer: it grows, and never changes.
    ordered_for: list[int] = field(default_factory=list)
    # The same for the validation set.
    valid_ordered_for: list[int] = field(default_factory=list)
    # How many samples came from each dataset.
    drawn: dict[str, int] = field(default_factory=dict)
    # Floating-point operations of the run, by the formula that throughput is computed with.
    flops: float = 0.0
    # The schedule of learning rate and weight decay that the run follows.
    schedule: dict[str, Any] = field(default_factory=dict)
    # Samples of the steps whose update was made: what schedules are a function of.
    scheduled_samples: int = 0
    # Updates that the optimizer's state has seen since it was new.
    updates: int = 0
    # Steps whose update was left out, and those of them whose loss was no number.
    skipped_steps: int = 0
    nan_steps: int = 0
    # Of steps that were not computed at all (--iterations-to-skip).
    skipped_samples: int = 0
    # The largest numbers so far, which a spike stands out from.
    largest_loss: float = 0.0
    largest_norm: float = 0.0
    # Of `LossScaler`.
    loss_scaling: dict[str, float] = field(default_factory=dict)
    # What the numbers were computed with.
    environment: dict[str, Any] = field(default_factory=dict)

    def count_update(self, samples: int) -> None:
        self.updates += 1
        self.scheduled_samples += samples

    def count_skipped(self, is_nan: bool) -> None:
        """A step without an update: schedules stand still, data does not."""
        self.skipped_steps += 1
        self.nan_steps += is_nan

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "TrainState":
        fresh = vars(cls())
        known = {name: value for name, value in saved.items() if name in fresh}
        for name, value in known.items():
            _require_kind(name, value, fresh[name])
            for inner in _inner_values(value) if name in _WITHIN else ():
                _require_kind(name, inner, _WITHIN[name])
        state = cls(**known)
        if state.ordered_for and state.consumed_samples > max(state.ordered_for):
            # The order of samples is built as far as a run will read, and grows before a longer one begins.
            raise _cannot_be(
                f"consumed_samples {state.consumed_samples} of samples that were ordered for {max(state.ordered_for)}"
            )
        return state

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _inner_values(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _require_kind(name: str, value: Any, like: Any) -> None:
    """Of the state in a checkpoint, which somebody may have edited: a count that is a text fails steps later, and elsewhere."""
    kind = (int, float) if isinstance(like, float) else type(like)
    right = isinstance(value, kind) and not isinstance(value, bool)
    if right and type(like) is int:
        right = 0 <= value <= _LARGEST
    elif right and isinstance(like, float):
        right = is_number(value)
    if not right:
        raise _cannot_be(f"{name} {value!r:.60}")


def is_number(value: Any) -> bool:
    """Whether a value of a checkpoint can be computed with: not NaN, not infinite, not beyond what a float holds."""
    return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max


def _cannot_be(what: str) -> UserError:
    return UserError(
        f"the checkpoint says {what}, which cannot be; go on from another step, or take the weights alone with --finetune"
    )
