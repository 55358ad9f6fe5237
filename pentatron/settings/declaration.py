"""A setting is a dataclass field that also knows its help, its spellings and whether its feature is here yet.

Every setting is declared once, as a field made by `setting(...)`; flags, files, presets, help, checks and the
saved configuration all read that one declaration.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from pentatron.errors import UserError

# Limits that a declaration sets on the value of its setting.


@dataclass(frozen=True)
class Limit:
    """`holds` judges one number; `words` complete the sentence `--flag value must be …`."""

    holds: Callable[[float], bool]
    words: str

    def allows(self, value: Any) -> bool:
        """Whether a value, or each number of a list, is within the limit; an unset value is."""
        numbers = () if value is None else value if isinstance(value, tuple) else (value,)
        return all(self.holds(number) for number in numbers)


ABOVE_ZERO = Limit(lambda x: x > 0, "more than 0")
ZERO_OR_MORE = Limit(lambda x: x >= 0, "0 or more")
BELOW_ONE = Limit(lambda x: 0 <= x < 1, "at least 0 and below 1")
ONE_OR_MORE = Limit(lambda x: x >= 1, "1 or more")
TOKENS_OR_ALL = Limit(lambda x: x >= -1, "-1 or more")
ABOVE_ONE = Limit(lambda x: x > 1, "more than 1")
BETWEEN = Limit(lambda x: 0 < x < 1, "more than 0 and below 1")
SHARE = Limit(lambda x: 0 < x <= 1, "above 0 and at most 1")
# NumPy's generators take no larger ones.
SEED = Limit(lambda x: 0 <= x < 2**32, "from 0 to 4294967295")
PORT = Limit(lambda x: 1 <= x <= 65535, "a port from 1 to 65535")


# The form of a need: a function from the settings to the reason why a setting has no effect.


if TYPE_CHECKING:
    from pentatron.settings.settings import Settings as Settings
else:
    # The declarations name needs, and Settings consists of the declarations.
    Settings = Any

# The reason why the setting has no effect with these settings, or an empty text if it has one.
Need = Callable[[Settings], str]


def unless(met: Callable[[Settings], Any], reason: str | Callable[[Settings], str]) -> Need:
    """A need that is met if `met` holds; `reason` completes the notice `--flag value: …`."""

    def check(s: Settings) -> str:
        if met(s):
            return ""
        return reason if isinstance(reason, str) else reason(s)

    return check


def first_unmet(needs: tuple[Need, ...], s: Settings) -> str:
    """The reason of the first need that is not met, or an empty text."""
    return next((reason for need in needs if (reason := need(s))), "")


class OnResume(Enum):
    """How a run treats a setting that differs from the checkpoint it resumes from."""

    NUMBERS = "it may change the numbers of the run: a notice says so"
    ORDER = "it may change the order of samples: a notice says so"
    FREE = "it has no part in the numbers: the log mentions it"
    SILENT = "it names a place, which differs from start to start"


ORDER, FREE, SILENT = OnResume.ORDER, OnResume.FREE, OnResume.SILENT


@dataclass(frozen=True)
class Spelling:
    """One way to write a flag. With `sets`, the flag takes no argument and stands for that value."""

    flag: str
    takes_value: bool = True
    sets: Any = None


@dataclass(frozen=True)
class Setting:
    name: str
    section: str
    annotation: Any
    default: Any
    help: str
    spellings: tuple[Spelling, ...]
    choices: tuple[Any, ...] = ()
    not_yet: str = ""
    available: tuple[Any, ...] = ()
    notice: str = ""
    names_code: bool = False
    limit: Limit | None = None
    needs: tuple[Need, ...] = ()
    resume: OnResume = OnResume.NUMBERS
    in_weights: bool = True

    @property
    def flag(self) -> str:
        return f"--{self.spellings[0].flag}"

    @property
    def base_type(self) -> type:
        """`int | None` → int, `tuple[str, ...]` → str: what one written value is converted to."""
        options = [t for t in _members(self.annotation) if t is not type(None)]
        first = options[0]
        if typing.get_origin(first) is tuple:
            first = typing.get_args(first)[0]
        return typing.cast(type, first)

    @property
    def is_list(self) -> bool:
        return any(typing.get_origin(t) is tuple for t in _members(self.annotation))

    @property
    def optional(self) -> bool:
        """Whether it may be unset. A setting that is derived when unset is declared with the type it then has."""
        return self.default is None or type(None) in _members(self.annotation)

    def refuses(self, value: Any) -> bool:
        """Whether `value` asks for a feature that has not been built."""
        if not self.not_yet or value == self.default:
            return False
        return not set(value if isinstance(value, tuple) else (value,)) <= set(self.available)

    def written(self, value: Any, source: str = "") -> str:
        """`--flag value`; the flag is the one the user typed, where `source` tells."""
        own = f"--no-{self.spellings[0].flag}" if value is False else self.flag
        flag = source.removeprefix("flag ") if source.startswith("flag ") else own
        alone = {s.flag for s in self.spellings if not s.takes_value}
        if isinstance(value, bool) or _bare(flag) in alone:
            return flag
        return f"{flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def _members(annotation: Any) -> tuple[Any, ...]:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return typing.get_args(annotation)
    return (annotation,)


def setting(
    default: Any,
    help: str,
    *,
    also: str = "",
    sets: Mapping[str, Any] | None = None,
    choices: Sequence[Any] = (),
    not_yet: str = "",
    available: Sequence[Any] = (),
    notice: str = "",
    names_code: bool = False,
    limit: Limit | None = None,
    needs: Need | tuple[Need, ...] = (),
    resume: OnResume | None = None,
    in_weights: bool = True,
) -> Any:
    """A dataclass field with what the command line, the files and the checks need to know about it.

    `also` lists further spellings, `sets` spellings without an argument and the value each stands for.
    `not_yet` names the missing feature: every value but the default and `available` is refused.
    `notice` is the one line printed when the setting is given but cannot change anything.
    `names_code`: the value is imported and called, so only the command line may set it.
    `limit`: what a number must be, whatever the other settings are.
    `needs`: what it takes for the setting to have an effect. A notice gives the reason of the first unmet need.
    `resume`: how a difference from the checkpoint is reported. Default: that of the section, else as a possible
    change of numbers.
    `in_weights`: for the architecture, whether weights belong to one value. If not, a loaded model may get another.
    """
    extra = {
        "help": help,
        "also": tuple(_bare(flag) for flag in also.split()),
        "sets": {_bare(flag): value for flag, value in (sets or {}).items()},
        "choices": tuple(choices),
        "not_yet": not_yet,
        "available": tuple(available),
        "notice": notice,
        "names_code": names_code,
        "limit": limit,
        "needs": needs if isinstance(needs, tuple) else (needs,),
        "resume": resume,
        "in_weights": in_weights,
    }
    return field(default=default, metadata=extra)


def _bare(flag: str) -> str:
    """`--batch_size` → `batch-size`: dashes and underscores are the same."""
    return flag.lstrip("-").replace("_", "-")


def flag_of(name: str) -> str:
    """`train_iters` → `--train-iters`."""
    return f"--{_bare(name)}"


def settings_of(section: str, cls: type) -> list[Setting]:
    """The settings declared by one section's dataclass."""
    hints = typing.get_type_hints(cls)
    of_section = getattr(cls, "on_resume", OnResume.NUMBERS)
    return [_setting(section, f, hints[f.name], of_section) for f in dataclasses.fields(cls)]


def _setting(section: str, f: "dataclasses.Field[Any]", annotation: Any, on_resume: OnResume) -> Setting:
    is_switch = annotation is bool
    own = _bare(f.name)
    spellings = [Spelling(own, takes_value=not is_switch, sets=True)]
    if is_switch and not own.startswith("no-"):
        spellings.append(Spelling(f"no-{own}", takes_value=False, sets=False))
    for flag in f.metadata["also"]:
        spellings.append(Spelling(flag, takes_value=not is_switch, sets=True))
    for flag, value in f.metadata["sets"].items():
        spellings = [s for s in spellings if s.flag != flag]
        spellings.append(Spelling(flag, takes_value=False, sets=value))
    return Setting(
        name=f.name,
        section=section,
        annotation=annotation,
        default=f.default,
        help=f.metadata["help"],
        spellings=tuple(spellings),
        choices=f.metadata["choices"],
        not_yet=f.metadata["not_yet"],
        available=f.metadata["available"],
        notice=f.metadata["notice"],
        names_code=f.metadata["names_code"],
        limit=f.metadata["limit"],
        needs=f.metadata["needs"],
        resume=f.metadata["resume"] or on_resume,
        in_weights=f.metadata["in_weights"],
    )


def coerce(setting: Setting, value: Any, what: str) -> Any:
    """Turns a written value (text of a flag, scalar of a file) into the setting's type, or says what is wrong.

    `what` names the value in the complaint: the flag as typed, or the file and the key in it.
    """
    if setting.is_list:
        items = value if isinstance(value, list | tuple) else str(value or "").split()
        if setting.base_type in (int, float):
            items = [number for item in items for number in _separated(item)]
        return tuple(_coerce_one(setting, item, what) for item in items)
    nothing = value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    if setting.optional and nothing:
        return None
    return _coerce_one(setting, value, what)


def _separated(item: Any) -> list[Any]:
    """`4095,0` is two numbers, as Megatron writes pairs."""
    return item.strip("()").replace(",", " ").split() if isinstance(item, str) and "," in item else [item]


def _coerce_one(setting: Setting, value: Any, what: str) -> Any:
    kind = setting.base_type
    if value is None or value == "":
        raise UserError(f"{what} needs a value")
    if isinstance(value, list | tuple | dict):
        raise UserError(f"{what} wants {_WANTED[kind]}, not {'several' if value else 'an empty list'}")
    if isinstance(value, bool) and "on" in setting.choices:
        # YAML reads the words on and off as true and false.
        value = "on" if value else "off"
    try:
        converted = _CONVERTERS[kind](value)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise UserError(f"{what} wants {_WANTED[kind]}, not '{value}'") from None
    if setting.choices and converted not in setting.choices:
        options = ", ".join(str(c) for c in setting.choices)
        wanted = f"one of {options}" if len(setting.choices) > 1 else options
        raise UserError(f"{what} wants {wanted}, not '{value}'")
    return converted


def _to_int(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, int):
        return value
    number = float(str(value).replace("_", ""))
    if number != int(number):
        raise ValueError
    return int(str(value)) if str(value).lstrip("+-").isdigit() else int(number)


def _to_float(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError
    return number


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return {
        "true": True,
        "1": True,
        "yes": True,
        "on": True,
        "false": False,
        "0": False,
        "no": False,
        "off": False,
    }[str(value).lower()]


def _to_text(value: Any) -> str:
    if isinstance(value, bool):
        raise ValueError
    return str(value)


_CONVERTERS: dict[type, Any] = {int: _to_int, float: _to_float, bool: _to_bool, str: _to_text}
_WANTED: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
