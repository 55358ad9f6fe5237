"""Tests options of side commands: parsing and help come from declared fields."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from pentatron.cli.options import (
    Options,
    flags_of,
    option,
    options_help,
    options_without_effect,
    parse_options,
    parse_options_and_settings,
    synopsis,
    usage,
)
from pentatron.errors import ConfigError, UserError
from pentatron.settings.declaration import ONE_OR_MORE
from pentatron.settings.entry_points import TRAIN


def _pair(written: str, flag: str) -> tuple[int, int]:
    try:
        first, second = written.split(":")
        return int(first), int(second)
    except ValueError:
        raise UserError(f"{flag} wants two numbers, not '{written}'") from None


@dataclass(frozen=True)
class Made(Options):
    out_file: str = option(
        "", "where it goes", value="FILE", also="--out", unlisted="--target", missing="name one"
    )
    steps: int = option(4, "how many", limit=ONE_OR_MORE)
    rate: float | None = option(None, "how fast")
    names: tuple[str, ...] = option((), "which", value="NAME ...")
    kind: str = option("fast", "in which way", choices=("fast", "slow"))
    span: tuple[int, int] | None = option(None, "from and to", value="A:B", parse=_pair)
    draw: str | None = option(None, "a picture", value="FILE", alone="")
    as_: str = option("me", "as somebody else", value="WHO")
    everything: bool = option(False, "all of it")
    chunks: int | None = option(None, "", notice="there are none")

    def problems(self) -> Iterable[str]:
        if self.kind == "slow" and self.steps > 5:
            yield "slow and many"


def made(words: str) -> Made:
    return parse_options(Made, f"--out o {words}".split(), "cmd")[0]


def problems(words: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_options(Made, words.split(), "cmd")
    return error.value.problems


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--out_file x", "out_file", "x"),
        ("--target=x", "out_file", "x"),
        ("--out none", "out_file", "none"),
        ("--steps 7 --steps=3", "steps", 3),
        ("--rate -0", "rate", 0.0),
        ("--names a b --steps 2", "names", ("a", "b")),
        ("--names=a b", "names", ("a",)),
        ("--span 1:3", "span", (1, 3)),
        ("--draw", "draw", ""),
        ("--draw --steps 3", "draw", ""),
        ("--draw x.svg", "draw", "x.svg"),
        ("--as you", "as_", "you"),
        ("--everything", "everything", True),
        ("--everything=false", "everything", False),
        ("--everything --no-everything", "everything", False),
        ("--out --unknown-to-us", "out_file", "--unknown-to-us"),
        ("--out --steps=3", "out_file", "--steps=3"),
    ],
)
def test_values(words: str, name: str, value: object) -> None:
    assert getattr(made(words), name) == value


def test_positional_words() -> None:
    options, plain = parse_options(Made, "a --out o b --everything c -- --steps d".split(), "cmd")
    assert plain == ["a", "b", "c", "--steps", "d"] and options.everything and options.steps == 4
    with pytest.raises(ConfigError, match="no place for 'a'"):
        parse_options(Made, ["--out", "o", "a"], "cmd", stray="no place for '{word}'")


def test_unreadable_options_are_reported_before_invalid_values() -> None:
    assert problems("--steps x --outt --rate --kind odd --span 3 --everything=so --old 3 --out") == [
        "--steps must be a whole number, not 'x'",
        "unknown flag --outt (did you mean --out?); cmd --help lists them",
        "--rate needs a value",
        "--kind must be one of fast, slow, not 'odd'",
        "--span wants two numbers, not '3'",
        "--everything must be true or false, not 'so'",
        "unknown flag --old; cmd --help lists them",
        "--out needs a value",
    ]
    assert problems("--steps 0") == ["--out-file is missing; name one", "--steps 0 must be 1 or more"]
    assert problems("--out o --steps 9 --kind slow") == ["slow and many"]


def test_flags_that_are_refused_take_their_values_with_them() -> None:
    with pytest.raises(ConfigError) as error:
        parse_options(Made, "--out o --old a b --steps x".split(), "cmd", {"old": "is gone"})
    assert error.value.problems == ["--old is gone", "--steps must be a whole number, not 'x'"]


def test_among_settings() -> None:
    words = "--tp 2 --out o --data-path a b --everything --names x y --lr 1e-3".split()
    options, rest = parse_options_and_settings(Made, words, TRAIN)
    assert rest == "--tp 2 --data-path a b --lr 1e-3".split()
    assert options.everything and options.names == ("x", "y") and options.out_file == "o"
    with pytest.raises(ConfigError) as error:
        parse_options_and_settings(Made, "--steps x --out --tp 2 --lr many".split(), TRAIN)
    assert error.value.problems == [
        "--lr must be a number, not 'many'",
        "--steps must be a whole number, not 'x'",
        "--out needs a value",
    ]


def test_the_script_may_depend_on_the_options() -> None:
    seen = []
    parse_options_and_settings(
        Made, ["--out", "o", "--lr", "1"], lambda options: seen.append(options.out_file) or TRAIN
    )
    assert seen == ["o"]


def test_options_without_effect() -> None:
    assert options_without_effect(made("")) == [] and options_without_effect(made("--chunks 3")) == [
        "--chunks has no effect: there are none"
    ]


def test_help_lists_the_declared_options() -> None:
    assert synopsis(Made).startswith(
        "--out-file FILE | --out FILE [--steps N] [--rate X] [--names NAME ...] "
    )
    assert "[--kind fast|slow] [--span A:B] [--draw [FILE]] [--as WHO] [--everything]" in synopsis(Made)
    lines = options_help(Made).splitlines()
    assert lines[0] == "  --out-file FILE, --out FILE  where it goes"
    assert lines[1] == "  --steps N                    how many (4)"
    assert not any("chunks" in line or "target" in line for line in lines)
    assert {"target", "as", "no-everything"} <= set(flags_of(Made))
    wrapped = usage("cmd", Made, "[...]").splitlines()
    assert wrapped[0].startswith("usage: cmd --out-file") and wrapped[-1].endswith("[...]")
    assert len(wrapped) == 2 and all(len(line) <= 110 for line in wrapped)
