"""`pentatron data`: shows training samples; describes, verifies, merges and seals prepared data."""

import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.cli.checkpoint_settings import adopt_named_checkpoint
from pentatron.cli.configure import count_epoch_samples, download_tokenizer, set_vocabulary_size
from pentatron.cli.options import Options, option, options_help, parse_options_and_settings, synopsis, usage
from pentatron.cli.output import say, say_json, show_report
from pentatron.cli.subcommands import T, parse_options_and_paths, run_subcommand
from pentatron.errors import UserError
from pentatron.monitor.terminal import ignore_output_errors
from pentatron.settings.data_paths import training_files_flag
from pentatron.settings.entry_points import EntryPoint
from pentatron.settings.files import read_data_files
from pentatron.settings.resolve import Resolved, gather, resolve
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import ProcessFacts, is_unset

if TYPE_CHECKING:
    from pentatron.data.loader import SampleSource
    from pentatron.data.tokenizer import Tokenizer

_PARTS = ("train", "valid", "test")


def _samples(written: str, flag: str) -> range:
    first, colon, stop = written.partition(":")
    try:
        begin = int(first or 0)
        end = int(stop) if colon else begin + 1
    except ValueError:
        begin, end = 0, 0
    if begin < 0 or end < 0:
        raise UserError(f"{flag} numbers samples from 0, as in 0:8 or 3, so '{written}' is not a sample")
    if begin >= end:
        raise UserError(f"{flag} must be samples such as 0:8 or 3, not '{written}'")
    return range(begin, end)


@dataclass(frozen=True)
class ShowOptions(Options):
    index: range | None = option(
        None, "samples A to B - 1 in training order, or the one sample A (0:8)", value="A:B", parse=_samples
    )
    part: str = option("train", "split to show: training, validation or test", choices=_PARTS)
    json: bool = option(False, "print a JSON list of objects with tokens, labels, loss_mask and position_ids")


SHOW_USAGE = f"""{usage("pentatron data show", ShowOptions, "[--train-samples N] [--setting value ...]")}

Prints the samples that training with the same settings reads: text, token ids, loss mask and positions. Settings of
`pentatron train` about data, sample order and tokenizer have the same effect (--data-path, --split, --seq-length, --seed,
--tokenizer-type, --sft, --config FILE, ...); settings of the model and the machine are ignored.

{options_help(ShowOptions)}

The sample order depends on the length of the run: --train-iters, or --train-samples N.

In the text, ⟦ ⟧ enclose tokens without a loss.

  pentatron data show --data-path my_text_document --tokenizer-model my_tokenizer --seq-length 1024 --train-samples 10000
  pentatron data show --sft --data-path chats.jsonl --tokenizer-model my_model --seq-length 4096 --index 3
"""

# No model is built, but the rules need one.
_SMALLEST_MODEL = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
SHOW = EntryPoint("pentatron data show", "Show the samples of a run.", defaults=_SMALLEST_MODEL)
_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
_MAX_VOCAB_SIZE = 2**31 - 1
# Sections of settings that do not affect the samples; this command runs in one process.
_IGNORED = ("optim", "parallel", "precision", "memory", "kernels", "launch", "checkpoint", "loop", "log")
_WIDTH = 110
_MOST_REPEATED = 8


def show_samples(words: Sequence[str]) -> int:
    import torch

    from pentatron.checkpoint.state import TrainState
    from pentatron.data.open_data import build_datasets, open_data, resolve_epochs
    from pentatron.files import scratch_folder
    from pentatron.monitor.display import PlainLines
    from pentatron.parallel.world import single_process

    if words and (file := Path(words[0]) / "config.yaml").is_file():
        raise UserError(f"'{words[0]}' is not a flag; to show the samples of that run use --config {file}")
    options, settings = parse_options_and_settings(ShowOptions, words, SHOW)
    indices = options.index or range(8)
    resolved, world = _resolve(settings, options.part, indices.stop), single_process(torch.device("cpu"))
    # Notices go to stderr, because stdout may be JSON.
    display = PlainLines(sys.stderr)
    with scratch_folder("show") as folder:
        resolved = resolve_epochs(resolved, world, folder, display)
        config = resolved.config
        for notice in resolved.notices:
            display.say(f"note: {notice}")
        opened = open_data(config, world, folder, display)
        datasets = build_datasets(opened, config, world, TrainState(), folder, display)
        source: SampleSource | None = getattr(datasets, options.part)
        if source is None:
            if options.part == "test" and datasets.no_test:
                raise UserError(f"{datasets.no_test}; give it a larger share")
            purpose, share = {"valid": ("validation", "second"), "test": ("test", "third")}[options.part]
            by_share = f"--split {config.data.split} a {share} share"
            advice = f"--{options.part}-data-path" if config.data.train_data_path else by_share
            raise UserError(f"there are no {purpose} samples; give {advice}")
        # Data without a length are endless.
        number, sentence = indices.stop, ""
        if isinstance(source, Sized):
            number, sentence = len(source), f"there are {len(source)} samples"
        total = config.schedule_lengths.total
        if options.part == "train" and not (isinstance(source, Sized) and total >= number):
            number, length = total, "--train-iters, --train-samples, --epochs"
            sentence = f"a run of this length ({length}) reads {number} samples"
        if options.index is not None and options.index.stop > number:
            given = str(indices.start) if len(indices) == 1 else f"{indices.start}:{indices.stop}"
            raise UserError(f"{sentence}, so --index must be from 0 to {number - 1}, not '{given}'")
        samples = {i: source[i] for i in indices if i < number}
    # Masks are 0 or 1, so that the conversion to integers is exact.
    rows = [{"index": i, **{n: v.astype(int).tolist() for n, v in s.items()}} for i, s in samples.items()]
    if options.json:
        say_json(rows, indent=None)
        return 0
    if opened.depends_on_length:
        say(f"samples of a run of {config.schedule_lengths.total} samples (--train-samples)\n")
    say("\n\n".join(_sample_text(row, datasets.tokenizer) for row in rows))
    return 0


def _resolve(words: Sequence[str], part: str, stop: int) -> Resolved:
    draft, facts = gather(words, SHOW), ProcessFacts(1)
    for name, item in all_settings().items():
        if item.section in _IGNORED and name != "load":
            draft.assign("default", **{name: item.default})
    read_data_files(draft)
    download_tokenizer(draft)
    set_vocabulary_size(draft)
    adopt_named_checkpoint(draft, facts)
    if is_unset(draft.vocab_size) and training_files_flag(draft) and "vocab_size" not in draft.wrong:
        draft.assign("default", vocab_size=_MAX_VOCAB_SIZE)
    count_epoch_samples(draft)
    if all(getattr(draft, name) is None for name in ("train_iters", "train_samples", "epochs")):
        draft.assign("default", train_iters=stop)
    if part == "train":
        draft.assign("default", eval_iters=0)
    return resolve(draft, facts)


def _sample_text(row: Mapping[str, Any], tokenizer: "Tokenizer | None") -> str:
    """Formats a sample as text, token ids, labels, loss mask and positions."""
    tokens, labels, mask, positions = (row[name] for name in _FIELDS)
    lines = [f"sample {row['index']}: {len(tokens)} tokens, {sum(mask)} labels in the loss"]
    if tokenizer is not None:
        text = "".join(_pieces(tokens, labels, mask, tokenizer))
        # Control characters would be interpreted by the terminal.
        text = "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
        lines += [f"  | {line}" for line in text.split("\n")]
    lines += _wrapped("tokens", " ".join(map(str, tokens))) + _wrapped("labels", " ".join(map(str, labels)))
    lines += _wrapped("loss mask", ", ".join(f"{value} × {len(list(run))}" for value, run in groupby(mask)))
    lines += _wrapped("positions", ", ".join(_ranges(positions)))
    return "\n".join(lines)


def _pieces(
    tokens: Sequence[int], labels: Sequence[int], mask: Sequence[int], tokenizer: "Tokenizer"
) -> Iterator[str]:
    """Yields the decoded text: the first token, then every label. Where the next input is another token, a
    new text begins."""
    entries: list[tuple[bool, int]] = []
    for before, token, label, in_loss in zip([None, *labels], tokens, labels, mask):
        entries += [(False, token)] if before != token else []
        entries.append((bool(in_loss), label))
    for in_loss, run in groupby(entries, lambda entry: entry[0]):
        ids = [token for _, token in run]
        yield tokenizer.decode(ids) if in_loss else f"⟦{_shortened(ids, tokenizer)}⟧"


def _shortened(ids: Sequence[int], tokenizer: "Tokenizer") -> str:
    """Decodes tokens, with a long run of one token at the end, such as padding, as its length."""
    last = ids[-1]
    repeated = next((n for n, token in enumerate(reversed(ids)) if token != last), len(ids))
    if repeated <= _MOST_REPEATED:
        return tokenizer.decode(ids)
    return f"{tokenizer.decode(ids[: len(ids) - repeated])} token {last} × {repeated} "


def _ranges(positions: Sequence[int]) -> Iterator[str]:
    """Yields the ranges in which positions increase by one, as in `0-11`, `0-4`."""
    for _, run in groupby(enumerate(positions), lambda entry: entry[1] - entry[0]):
        values = [position for _, position in run]
        yield f"{values[0]}-{values[-1]}" if len(values) > 1 else str(values[0])


def _wrapped(title: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH, initial_indent=f"  {title + ':':<11}", subsequent_indent=" " * 13)
    return lines or [f"  {title}: none"]


@dataclass(frozen=True)
class DescribeOptions(Options):
    json: bool = option(False, "print JSON")


@dataclass(frozen=True)
class VerifyDataOptions(Options):
    vocab_size: int | None = option(None, "check that every token id is below N")


@dataclass(frozen=True)
class MergeOptions(Options):
    overwrite: bool = option(False, "overwrite an existing OUT")


USAGE = f"""usage: pentatron data COMMAND [...]

PREFIX is the path of a .bin/.idx pair without the extension.

  describe PREFIX ... {synopsis(DescribeOptions)}          print sizes, type, documents, lengths, tokenizer
  verify PREFIX ... {synopsis(VerifyDataOptions)}    check the structure, every checksum, and that token ids are in the vocabulary; exit code 1 if a check fails
  merge OUT PREFIX ... {synopsis(MergeOptions)}    concatenate the documents of several pairs to the pair OUT
  show --data-path PREFIX [...]         print the samples that training with the same settings reads; `pentatron data show --help`
  seal PREFIX ...                       write checksums (.meta) for pairs that another program made or changed
"""


COMMANDS = {
    "show": "data.show_samples",
    "describe": "data.describe_pairs",
    "verify": "data.verify_pairs",
    "merge": "data.merge_pairs",
    "seal": "data.seal_pairs",
}


def data_command(words: Sequence[str]) -> int:
    asks_help = "--help" in words or "-h" in words
    if words[:1] == ["show"] and (len(words) == 1 or asks_help):
        say(SHOW_USAGE)
    elif not words or words[0] == "help" or asks_help:
        say(USAGE)
    else:
        return run_subcommand("data", COMMANDS, words)
    return 0


def _read(cls: type[T], words: Sequence[str], call: str, least: int = 1) -> tuple[T, list[str]]:
    """Parses options and at least `least` prefixes; removes a file extension, which a shell may complete."""
    options, prefixes = parse_options_and_paths(cls, words, f"data {call}", least)
    return options, [p.removesuffix(".bin").removesuffix(".idx").removesuffix(".meta") for p in prefixes]


def describe_pairs(words: Sequence[str]) -> int:
    from pentatron.data.inspect import describe, format_description

    options, prefixes = _read(DescribeOptions, words, "describe PREFIX")
    pairs = list(map(describe, prefixes))
    show_report(pairs, options.json, lambda pairs: "\n\n".join(map(format_description, pairs)), list)
    return 0


def verify_pairs(words: Sequence[str]) -> int:
    from pentatron.data.inspect import verify

    options, prefixes = _read(VerifyDataOptions, words, "verify PREFIX")
    code = 0
    for prefix in prefixes:
        try:
            say(f"{prefix}: {verify(prefix, options.vocab_size or None)}")
        except UserError as error:
            code = 1
            say(f"{prefix}: WRONG: {error}")
    return code


def merge_pairs(words: Sequence[str]) -> int:
    from pentatron.data.indexed_writer import merge

    options, (output, *sources) = _read(MergeOptions, words, "merge OUT PREFIX", least=2)
    ignore_output_errors()
    if output in sources:
        raise UserError(f"{output} is both input and output; choose another name for the output")
    for source, count in Counter(str(Path(source).resolve()) for source in sources).items():
        if count > 1:
            times = f"{count} times"
            say(f"note: {source} is given {times}, so {output} has each of its documents {times}")
    metadata = merge(sources, output, options.overwrite)
    held = f"{metadata.documents:,} documents, {metadata.sequences:,} sequences, {metadata.tokens:,} tokens"
    say(f"{output}: {held} from {len(sources)} pairs")
    return 0


def seal_pairs(words: Sequence[str]) -> int:
    from pentatron.data.inspect import seal

    _, prefixes = _read(Options, words, "seal PREFIX")
    ignore_output_errors()
    for prefix in prefixes:
        metadata = seal(prefix)
        held = f"{metadata.tokens:,} tokens in {metadata.documents:,} documents"
        say(f"{prefix}.meta: checksums of the current {held}")
    return 0
