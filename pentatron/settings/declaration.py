"""Declares settings: dataclass fields with help, spellings of the flag, limits and conditions.

Each setting is declared once, by `setting(...)`. Flags, files, presets, help, checks and the saved
configuration all read that declaration.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from pentatron.errors import UserError


@dataclass(frozen=True)
class Limit:
    """A range of allowed numbers. `words` complete the error message `--flag value must be …`."""

    holds: Callable[[float], bool]
    words: str

    def allows(self, value: Any) -> bool:
        """Whether a number, or each number of a list, is within the limit. None is always allowed."""
        numbers = () if value is None else value if isinstance(value, tuple) else (value,)
        return all(self.holds(number) for number in numbers)


POSITIVE = Limit(lambda x: x > 0, "more than 0")
NON_NEGATIVE = Limit(lambda x: x >= 0, "0 or more")
BELOW_ONE = Limit(lambda x: 0 <= x < 1, "at least 0 and below 1")
ONE_OR_MORE = Limit(lambda x: x >= 1, "1 or more")
FRACTION = Limit(lambda x: 0 < x <= 1, "above 0 and at most 1")
# Seeds of NumPy's generators have 32 bits.
SEED = Limit(lambda x: 0 <= x < 2**32, "from 0 to 4294967295")


if TYPE_CHECKING:
    from pentatron.settings.settings import Settings as Settings
else:
    # A circular import otherwise: declarations name needs, and Settings inherits the declarations.
    Settings = Any

# Returns why the setting that has this need has no effect, or an empty string if the need is met.
Need = Callable[[Settings], str]


def requires(met: Callable[[Settings], Any], reason: str | Callable[[Settings], str]) -> Need:
    """Builds a need from a predicate. `reason` completes the notice `--flag value: …`."""

    def check(s: Settings) -> str:
        return "" if met(s) else reason if isinstance(reason, str) else reason(s)

    return check


def first_reason(reasons: Mapping[str, object]) -> str:
    """Returns the first reason that holds, or an empty string."""
    return next((reason for reason, holds in reasons.items() if holds), "")


class OnResume(Enum):
    """How a resumed run reports a setting that differs from its checkpoint."""

    RESULTS = "may change losses and weights: a notice"
    ORDER = "may change the order of samples: a notice"
    FREE = "cannot change losses or weights: a line in the log"
    SILENT = "a path or name that may differ between starts: nothing"


ORDER, FREE, SILENT = OnResume.ORDER, OnResume.FREE, OnResume.SILENT


@dataclass(frozen=True)
class Spelling:
    """One spelling of a flag. If `takes_value` is False it takes no argument and means `sets`."""

    flag: str
    takes_value: bool = True
    sets: Any = None


class SettingOptions(TypedDict, total=False):
    """What `setting` accepts by keyword and `Setting` has under the same name."""

    choices: tuple[Any, ...]
    not_yet: str
    available: tuple[Any, ...]
    notice: str
    names_code: bool
    in_weights: bool


@dataclass(frozen=True)
class Setting:
    """A declared setting; see `setting` for its fields."""

    name: str
    section: str
    annotation: Any
    default: Any
    help: str
    spellings: tuple[Spelling, ...]
    limit: Limit | None
    needs: tuple[Need, ...]
    resume: OnResume
    choices: tuple[Any, ...] = ()
    not_yet: str = ""
    available: tuple[Any, ...] = ()
    notice: str = ""
    names_code: bool = False
    in_weights: bool = True

    @property
    def flag(self) -> str:
        return f"--{self.spellings[0].flag}"

    @property
    def base_type(self) -> type:
        """The type one written value is converted to: `int | None` → int, `tuple[str, ...]` → str."""
        first = next(t for t in _members(self.annotation) if t is not type(None))
        return typing.cast(type, typing.get_args(first)[0] if typing.get_origin(first) is tuple else first)

    @property
    def is_list(self) -> bool:
        return any(typing.get_origin(t) is tuple for t in _members(self.annotation))

    @property
    def optional(self) -> bool:
        """Whether the setting may be unset.

        One that is derived if unset is declared with its derived type.
        """
        return self.default is None or type(None) in _members(self.annotation)

    def unmet_need(self, s: Settings) -> str:
        """Returns the reason of the first unmet need, or an empty string."""
        return next(filter(None, (need(s) for need in self.needs)), "")

    def refuses(self, value: Any) -> bool:
        """Whether `value` requests a feature that is not implemented."""
        if not self.not_yet or value == self.default:
            return False
        return not set(value if isinstance(value, tuple) else (value,)) <= set(self.available)

    def written(self, value: Any, source: str = "") -> str:
        """Returns `--flag value`, in the spelling that the user typed if `source` names it."""
        default = f"--no-{self.spellings[0].flag}" if value is False else self.flag
        flag = source.removeprefix("flag ") if source.startswith("flag ") else default
        switches = {s.flag for s in self.spellings if not s.takes_value}
        if isinstance(value, bool) or _bare(flag) in switches:
            return flag
        return f"{flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if is_union else (annotation,)


def setting(
    default: Any,
    help: str,
    *conditions: Limit | Need | OnResume | None,
    also: str = "",
    sets: Mapping[str, Any] | None = None,
    **options: Unpack[SettingOptions],
) -> Any:
    """Declares a setting as a dataclass field.

    `conditions`: the `Limit` of a number, independent of other settings; needs, under which the setting has
    an effect (a notice gives the reason of the first unmet one); and how a difference from the checkpoint is
    reported (default: `on_resume` of the section, else `RESULTS`). `also` lists further spellings, `sets`
    spellings without an argument and the value of each. `not_yet` names a missing feature: every value but
    the default and those in `available` is refused. `notice` is printed if the setting is given, for settings
    that never have an effect. `names_code`: the value is imported and called, so only the command line may
    set it. `in_weights`: whether weights depend on this setting of the architecture. If not, it may differ in
    a loaded model.
    """
    declared = {"help": help, "limit": None, "needs": tuple(filter(callable, conditions)), **options}
    for condition in conditions:
        if isinstance(condition, Limit | OnResume):
            declared["limit" if isinstance(condition, Limit) else "resume"] = condition
    spelled = {"also": also.split(), "sets": sets or {}}
    return field(default=default, metadata={"declared": declared, **spelled})


def _bare(flag: str) -> str:
    """Normalizes a flag or name: `--batch_size` → `batch-size`."""
    return flag.lstrip("-").replace("_", "-")


def flag_of(name: str) -> str:
    """Returns the flag of a setting: `train_iters` → `--train-iters`."""
    return f"--{_bare(name)}"


def settings_of(section: str, cls: type) -> list[Setting]:
    """Returns the settings that the dataclass of a section declares."""
    hints = typing.get_type_hints(cls)
    resume = {"resume": getattr(cls, "on_resume", OnResume.RESULTS)}
    return [
        Setting(
            name=f.name,
            section=section,
            annotation=hints[f.name],
            default=f.default,
            spellings=_spellings(f, is_switch=hints[f.name] is bool),
            **resume | f.metadata["declared"],
        )
        for f in dataclasses.fields(cls)
    ]


def _spellings(f: "dataclasses.Field[Any]", is_switch: bool) -> tuple[Spelling, ...]:
    own = _bare(f.name)
    spellings = {own: Spelling(own, not is_switch, True)}
    if is_switch and not own.startswith("no-"):
        spellings[f"no-{own}"] = Spelling(f"no-{own}", False, False)
    for flag in map(_bare, f.metadata["also"]):
        spellings[flag] = Spelling(flag, not is_switch, True)
    for flag, value in f.metadata["sets"].items():
        # A flag that stands for a value comes last, where one of the same name is declared too.
        spellings.pop(_bare(flag), None)
        spellings[_bare(flag)] = Spelling(_bare(flag), False, value)
    return tuple(spellings.values())


def coerce(setting: Setting, value: Any, what: str) -> Any:
    """Converts a written value (text of a flag, scalar of a file) to the type of the setting.

    `what` names the value in error messages: the flag as typed, or the file and the key in it.
    """
    if setting.is_list:
        items = value if isinstance(value, list | tuple) else str(value or "").split()
        if setting.base_type in (int, float):
            items = [number for item in items for number in _split_numbers(item)]
        return tuple(_coerce_one(setting, item, what) for item in items)
    if setting.optional and (value is None or str(value).lower() in ("none", "null")):
        return None
    return _coerce_one(setting, value, what)


def _split_numbers(item: Any) -> list[Any]:
    """Splits `4095,0` into two numbers, as Megatron writes pairs."""
    return item.strip("()").replace(",", " ").split() if isinstance(item, str) and "," in item else [item]


def _coerce_one(setting: Setting, value: Any, what: str) -> Any:
    kind = setting.base_type
    if value is None or value == "":
        raise UserError(f"{what} needs a value")
    if isinstance(value, list | tuple | dict):
        raise UserError(f"{what} must be {_WANTED[kind]}, not {'several' if value else 'an empty list'}")
    if isinstance(value, bool) and "on" in setting.choices:
        # YAML parses the words on and off as booleans.
        value = "on" if value else "off"
    try:
        if isinstance(value, bool) and kind is not bool:
            raise ValueError
        converted = _CONVERTERS[kind](value)
    except (KeyError, ValueError, TypeError, OverflowError):
        raise UserError(f"{what} must be {_WANTED[kind]}, not '{value}'") from None
    if setting.choices and converted not in setting.choices:
        one_of = "one of " if len(setting.choices) > 1 else ""
        raise UserError(f"{what} must be {one_of}{', '.join(map(str, setting.choices))}, not '{value}'")
    return converted


def _to_int(value: Any) -> int:
    if isinstance(value, int):
        return value
    number = float(str(value).replace("_", ""))
    if number != int(number):
        raise ValueError
    return int(str(value)) if str(value).lstrip("+-").isdigit() else int(number)


def _to_float(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


_SWITCHES = dict.fromkeys("true 1 yes on".split(), True) | dict.fromkeys("false 0 no off".split(), False)
_CONVERTERS: dict[type, Callable[[Any], Any]] = {
    int: _to_int,
    float: _to_float,
    bool: lambda value: _SWITCHES[str(value).lower()],
    str: str,
}
_WANTED: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
