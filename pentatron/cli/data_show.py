"""`pentatron data show`: the samples a training run would read, made by the same code."""

import sys
import textwrap
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pentatron.cli.epoch import learn_epoch
from pentatron.cli.loaded import learn_from_named
from pentatron.cli.options import Options, flags_of, option, options_help, read_among, usage
from pentatron.cli.prepare import find_tokenizer, learn_vocabulary
from pentatron.cli.report_output import say_json
from pentatron.cli.terminal import say
from pentatron.config.blend import names_files
from pentatron.config.data_sources import read_data_files
from pentatron.config.draft import Draft
from pentatron.config.entry import EntryPoint
from pentatron.config.resolve import Resolved, gather, resolve
from pentatron.config.run import table
from pentatron.config.settings import Facts, unset
from pentatron.errors import UserError

if TYPE_CHECKING:
    from pentatron.config.training import DataConfig
    from pentatron.data.boundaries import Sample
    from pentatron.data.loader import SampleSource
    from pentatron.data.tokenizer import Tokenizer

PARTS = ("train", "valid", "test")
FIRST_SAMPLES = range(8)


def _samples(written: str, flag: str) -> range:
    first, colon, stop = written.partition(":")
    try:
        begin = int(first or 0)
        end = int(stop) if colon else begin + 1
    except ValueError:
        begin, end = 0, 0
    if begin < 0 or end < 0:
        raise UserError(f"{flag} counts samples from 0 on, as in 0:8 or 3; '{written}' is before the first")
    if begin >= end:
        raise UserError(f"{flag} wants samples such as 0:8 or 3, not '{written}'")
    return range(begin, end)


@dataclass(frozen=True)
class ShowOptions(Options):
    index: range | None = option(
        None,
        "samples A to B - 1 in the order of training; A alone is one sample (0:8)",
        value="A:B",
        parse=_samples,
    )
    part: str = option("train", "those of the training, of the validation or of the test", choices=PARTS)
    json: bool = option(False, "a list of objects with tokens, labels, loss_mask and position_ids")


USAGE = f"""{usage("pentatron data show", ShowOptions, "[--train-samples N] [--setting value ...]")}

Prints the samples that training with the same settings reads: text, ids, which labels count in the loss, positions. Every setting of
`pentatron train` about data, its order and the tokenizer acts as it does there (--data-path, --split, --seq-length, --seed,
--tokenizer-type, --sft, --config FILE, ...); those about the model and the machine change nothing here.

{options_help(ShowOptions)}

The order of the samples depends on how many the run reads: --train-iters, or --train-samples N.

In the text, ⟦ ⟧ stand around what no loss is taken from.

  pentatron data show --data-path my_text_document --tokenizer-model my_tokenizer --seq-length 1024 --train-samples 10000
  pentatron data show --sft --data-path chats.jsonl --tokenizer-model my_model --seq-length 4096 --index 3
"""

# A model as small as can be: none is built.
SHOW = EntryPoint(
    name="pentatron data show",
    summary="Show the samples of a run.",
    defaults={"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1},
    own=flags_of(ShowOptions),
)
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
ANY_TOKEN = 2**31 - 1
# Settings of these sections are about machines and updates, and this command needs one process only.
ELSEWHERE = ("optim", "parallel", "precision", "memory", "kernels", "launch", "checkpoint", "loop", "log")
WIDTH = 110
LONGEST_REPETITION = 8


def show(words: Sequence[str]) -> int:
    import torch

    from pentatron.launch.local import scratch_folder
    from pentatron.monitor.display import PlainLines
    from pentatron.parallel.world import single_process
    from pentatron.train.datasets import arrange, open_data
    from pentatron.train.epoch_length import settle_epochs
    from pentatron.train.state import TrainState

    if words and (settings_of_run := Path(words[0]) / "config.yaml").is_file():
        raise UserError(f"'{words[0]}' is no flag; the samples of that run: --config {settings_of_run}")
    options, settings = read_among(ShowOptions, words, SHOW)
    wanted = options.index or FIRST_SAMPLES
    resolved, world = _resolve(settings, options.part, wanted.stop), single_process(torch.device("cpu"))
    # What is printed must stay readable by machines.
    display = PlainLines(sys.stderr)
    with scratch_folder("show") as folder:
        resolved = settle_epochs(resolved, world, folder, display)
        config = resolved.config
        for notice in resolved.notices:
            display.say(f"note: {notice}")
        opened = open_data(config, world, folder, display)
        datasets = arrange(opened, config, world, TrainState(), folder, display)
        chosen = {"train": datasets.train, "valid": datasets.valid, "test": datasets.test}[options.part]
        if chosen is None:
            raise UserError(_nothing_there(config.data, options.part, datasets.untested))
        there = _how_many(chosen, config.spans.total if options.part == "train" else None)
        if there is not None and options.index is not None and options.index.stop > there.number:
            raise UserError(
                f"{there.sentence}, so --index can go from 0 to {there.number - 1}, not '{_written(options.index)}'"
            )
        samples = {i: chosen[i] for i in wanted if there is None or i < there.number}
    if options.json:
        say_json([{"index": i, **_as_json(sample)} for i, sample in samples.items()], indent=None)
    else:
        if opened.depends_on_length:
            say(f"samples of a run that reads {config.spans.total} of them (--train-samples)\n")
        say("\n\n".join(_as_text(i, sample, datasets.tokenizer) for i, sample in samples.items()))
    return 0


def _nothing_there(data: "DataConfig", part: str, untested: str) -> str:
    purpose, share = {"valid": ("validate", "second"), "test": ("test", "third")}[part]
    if part == "test" and untested:
        return f"{untested}; give it a larger share"
    if data.train_data_path:
        return f"there is nothing to {purpose} with; give --{part}-data-path"
    return f"there is nothing to {purpose} with; give --split {data.split} a {share} share"


def _written(samples: range) -> str:
    return str(samples.start) if len(samples) == 1 else f"{samples.start}:{samples.stop}"


def _resolve(words: Sequence[str], part: str, stop: int) -> Resolved:
    draft, facts = gather(words, SHOW), Facts(1)
    for name, item in table().items():
        if item.section in ELSEWHERE and name != "load":
            draft.assign("default", **{name: item.default})
    read_data_files(draft)
    find_tokenizer(draft)
    learn_vocabulary(draft)
    learn_from_named(draft, facts)
    if unset(draft.vocab_size) and names_files(draft) and "vocab_size" not in draft.wrong:
        draft.assign("default", vocab_size=ANY_TOKEN)
    learn_epoch(draft)
    _set_length(draft, stop)
    if part == "train":
        draft.assign("default", eval_iters=0)
    return resolve(draft, facts)


def _set_length(draft: Draft, stop: int) -> None:
    """How many samples the order is made for, if nobody says."""
    if all(getattr(draft, name) is None for name in ("train_iters", "train_samples", "epochs")):
        draft.assign("default", train_iters=stop)


class _There(NamedTuple):
    number: int
    sentence: str


def _how_many(source: "SampleSource", read: int | None) -> _There | None:
    """How many samples can be shown, and in words; None where there is no end. `read`: by the whole run."""
    known = len(source) if isinstance(source, Sized) else None
    if read is not None and (known is None or read < known):
        return _There(
            read, f"a run of this length (--train-iters, --train-samples, --epochs) reads {read} samples"
        )
    return None if known is None else _There(known, f"there are {known} samples")


def _as_json(sample: "Sample") -> dict[str, list[int]]:
    """Masks are 0 or 1, so whole numbers are exact; documents that see themselves alone are told where there are some."""
    return {name: values.astype(int).tolist() for name, values in sample.items()}


def _as_text(index: int, sample: "Sample", tokenizer: "Tokenizer | None") -> str:
    tokens, labels, mask, positions = (sample[name].astype(int).tolist() for name in FIELDS)
    lines = [f"sample {index}: {len(tokens)} tokens, {sum(mask)} labels in the loss"]
    if tokenizer is not None:
        text = "".join(_pieces(tokens, labels, mask, tokenizer))
        lines += [f"  | {_printable(line)}" for line in text.split("\n")]
    for title, values in (("tokens", tokens), ("labels", labels)):
        lines += _wrapped(title, " ".join(map(str, values)))
    lines += _wrapped("loss mask", _counted(mask, "{value} × {count}"))
    lines += _wrapped("positions", ", ".join(_ranges(positions)))
    return "\n".join(lines)


def _pieces(
    tokens: Sequence[int], labels: Sequence[int], mask: Sequence[int], tokenizer: "Tokenizer"
) -> Iterator[str]:
    """The first token, then every label; where the next input is another token, a new text begins there."""
    seen: list[tuple[bool, int]] = []
    for place, token in enumerate(tokens):
        if place == 0 or labels[place - 1] != token:
            seen.append((False, token))
        seen.append((bool(mask[place]), labels[place]))
    for learned, run in groupby(seen, lambda entry: entry[0]):
        ids = [token for _, token in run]
        yield tokenizer.decode(ids) if learned else f"⟦{_shortened(ids, tokenizer)}⟧"


def _shortened(ids: Sequence[int], tokenizer: "Tokenizer") -> str:
    """Padding can be long."""
    last = ids[-1]
    same = next((n for n, token in enumerate(reversed(ids)) if token != last), len(ids))
    if same <= LONGEST_REPETITION:
        return tokenizer.decode(ids)
    return f"{tokenizer.decode(ids[: len(ids) - same])} token {last} × {same} "


def _printable(line: str) -> str:
    """A terminal would obey control characters."""
    return "".join(c if c.isprintable() or c == "\t" else "·" for c in line)


def _counted(values: Sequence[int], form: str) -> str:
    return ", ".join(form.format(value=value, count=len(list(run))) for value, run in groupby(values))


def _ranges(positions: Sequence[int]) -> Iterator[str]:
    """`0-11, 0-4`: where they count on by one."""
    begin = 0
    for place in range(1, len(positions) + 1):
        if place == len(positions) or positions[place] != positions[place - 1] + 1:
            first, last = positions[begin], positions[place - 1]
            yield f"{first}-{last}" if last > first else str(first)
            begin = place


def _wrapped(title: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {title + ':':<11}", subsequent_indent=" " * 13) or [
        f"  {title}: none"
    ]
