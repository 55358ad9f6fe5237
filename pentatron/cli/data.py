"""`pentatron data`: looking at prepared data, checking and joining it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.cli.file_errors import file_errors_told
from pentatron.cli.options import Options, option, read, synopsis
from pentatron.cli.report_output import show
from pentatron.cli.terminal import say
from pentatron.config.flags import did_you_mean
from pentatron.errors import UserError
from pentatron.monitor.terminal import outlive_output


@dataclass(frozen=True)
class DescribeOptions(Options):
    json: bool = option(False, "the same for machines")


@dataclass(frozen=True)
class VerifyOptions(Options):
    vocab_size: int | None = option(None, "what every token must be below")


@dataclass(frozen=True)
class MergeOptions(Options):
    overwrite: bool = option(False, "replace what OUT has")


USAGE = f"""usage: pentatron data COMMAND [...]

A PREFIX is the name of a .bin/.idx pair without its ending.

  describe PREFIX ... {synopsis(DescribeOptions)}          sizes, type, documents, lengths, tokenizer
  verify PREFIX ... {synopsis(VerifyOptions)}    structure, every checksum, every token below the vocabulary; ends with code 1 if anything is wrong
  merge OUT PREFIX ... {synopsis(MergeOptions)}    the documents of several pairs, one after another, as the pair OUT
  show --data-path PREFIX [...]         the samples that training with the same settings reads; `pentatron data show --help`
  seal PREFIX ...                       write checksums (.meta) for pairs that another program made or changed
"""


def data_command(words: Sequence[str]) -> int:
    with file_errors_told():
        return _run(words)


def _run(words: Sequence[str]) -> int:
    if words[:1] == ["show"]:
        return _show(words[1:])
    if not words or words[0] in ("--help", "-h", "help") or "--help" in words or "-h" in words:
        say(USAGE)
        return 0
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        guess = did_you_mean(command, [*COMMANDS, "show"])
        raise UserError(
            f"unknown command 'data {command}'{guess}; `pentatron data --help` lists the commands"
        )
    return COMMANDS[command](rest)


def _show(words: Sequence[str]) -> int:
    from pentatron.cli.data_show import USAGE as SHOW_USAGE
    from pentatron.cli.data_show import show

    if not words or "--help" in words or "-h" in words:
        say(SHOW_USAGE)
        return 0
    return show(words)


def _describe(words: Sequence[str]) -> int:
    from pentatron.data.inspect import describe, described

    options, prefixes = read(DescribeOptions, words, "pentatron data")
    _need(prefixes, 1, "describe PREFIX")
    pairs = [describe(_stem(prefix)) for prefix in prefixes]
    show(pairs, options.json, lambda pairs: "\n\n".join(map(described, pairs)), lambda pairs: pairs)
    return 0


def _verify(words: Sequence[str]) -> int:
    from pentatron.data.inspect import verify

    options, prefixes = read(VerifyOptions, words, "pentatron data")
    _need(prefixes, 1, "verify PREFIX")
    wrong = 0
    for prefix in map(_stem, prefixes):
        try:
            say(f"{prefix}: {verify(prefix, options.vocab_size or None)}")
        except UserError as error:
            wrong += 1
            say(f"{prefix}: WRONG: {error}")
    return 1 if wrong else 0


def _merge(words: Sequence[str]) -> int:
    from pentatron.data.merge import merge

    options, prefixes = read(MergeOptions, words, "pentatron data")
    _need(prefixes, 2, "merge OUT PREFIX")
    outlive_output()
    output, *sources = map(_stem, prefixes)
    if output in sources:
        raise UserError(f"{output} cannot be merged into itself; choose another name for the result")
    for source, times in Counter(str(Path(source).resolve()) for source in sources).items():
        if times > 1:
            say(
                f"note: {source} is named {times} times, so each of its documents is in {output} {times} times"
            )
    facts = merge(sources, output, options.overwrite)
    say(
        f"{output}: {facts.documents:,} documents, {facts.sequences:,} sequences, {facts.tokens:,} tokens from {len(sources)} pairs"
    )
    return 0


def _seal(words: Sequence[str]) -> int:
    from pentatron.data.inspect import seal

    _, prefixes = read(Options, words, "pentatron data")
    _need(prefixes, 1, "seal PREFIX")
    outlive_output()
    for prefix in map(_stem, prefixes):
        facts = seal(prefix)
        say(
            f"{prefix}.meta: checksums of {facts.tokens:,} tokens in {facts.documents:,} documents, as they are now"
        )
    return 0


def _need(prefixes: Sequence[str], least: int, example: str) -> None:
    if len(prefixes) < least:
        raise UserError(f"say which data to use: pentatron data {example}")


def _stem(word: str) -> str:
    """People complete file names with the tab key; either file of a pair means the pair."""
    return word.removesuffix(".bin").removesuffix(".idx").removesuffix(".meta")


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "describe": _describe,
    "verify": _verify,
    "merge": _merge,
    "seal": _seal,
}
