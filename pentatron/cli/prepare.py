"""`pentatron prepare`: tokenizes text files to `.bin/.idx` pairs."""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pentatron.cli.options import Options, option, options_help, options_without_effect, parse_options
from pentatron.cli.output import print_error, say, with_help
from pentatron.data.text_files import TEXT_DOCUMENTS, expand_inputs
from pentatron.data.tokenizer import TOKENIZER_TYPES, TokenizerSettings
from pentatron.errors import UserError
from pentatron.launch.machine import usable_cores
from pentatron.monitor.terminal import ignore_output_errors
from pentatron.settings.declaration import ONE_OR_MORE
from pentatron.text import format_abbreviated, format_count, plural

if TYPE_CHECKING:
    from rich.progress import Progress

    from pentatron.data.prepare import Counts, PrepareJob, PrepareOutcome

_PADDED = "the vocabulary is padded by the model, not in the data"
_NO_SPLITTER = "this command does not split sentences"


@dataclass(frozen=True)
class InputOptions(Options):
    input: tuple[str, ...] = option(
        (),
        "text files: .jsonl (one object per line) or .txt, optionally compressed (.gz, .zst); glob patterns are accepted",
        value="FILE ...",
        missing="name the text files",
    )
    output_prefix: str = option(
        "", "prefix of the output PREFIX_<key>_document", value="PREFIX", missing="name the output"
    )
    json_keys: tuple[str, ...] = option(
        ("text",), "keys to tokenize, one output pair per key; a list value holds sentences", value="KEY ..."
    )
    text_documents: str = option("file", "document boundaries in .txt files", choices=TEXT_DOCUMENTS)
    append_eod: bool = option(False, "append the end-of-document id to every document")
    split_sentences: bool = option(False, "require lists of sentences; the output is PREFIX_<key>_sentence")
    skip_bad_lines: bool = option(
        False, "skip lines that are not JSON objects with the keys, count them and print the first"
    )


@dataclass(frozen=True)
class TokenizerOptions(Options):
    tokenizer_type: str = option(
        "",
        f"type of the tokenizer: {', '.join(TOKENIZER_TYPES)}",
        value="TYPE",
        missing=f"give one of {', '.join(TOKENIZER_TYPES)}",
    )
    tokenizer_model: str | None = option(
        None, "tokenizer.json or .model file, its folder, or a model of the hub", value="PATH"
    )
    vocab_file: str | None = option(None, "vocab.json of GPT-2", value="PATH")
    merge_file: str | None = option(None, "merges.txt of GPT-2", value="PATH")
    vocab_size: int | None = option(None, "vocabulary size for NullTokenizer")


@dataclass(frozen=True)
class WorkOptions(Options):
    workers: int | None = option(None, "tokenizer processes (one for each core)", limit=ONE_OR_MORE)
    log_interval: int | None = option(
        None, "documents between progress lines instead of a bar (a line every ten seconds without terminal)"
    )
    overwrite: bool = option(False, "overwrite output that was made from other inputs or settings")


@dataclass(frozen=True)
class IdleOptions(Options):
    """Flags of other preprocessing programs that have no effect, with the reason."""

    partitions: int | None = option(None, "", notice="the input is split into chunks while it is read")
    keep_sequential_samples: bool = option(False, "", notice="documents always keep their order")
    keep_newlines: bool = option(False, "", notice=f"{_NO_SPLITTER}, so texts are unchanged")
    lang: str | None = option(None, "", notice=_NO_SPLITTER)
    chunk_size: int | None = option(None, "", notice="the size of chunks is fixed in bytes")
    make_vocab_size_divisible_by: int | None = option(None, "", notice=_PADDED)
    tensor_model_parallel_size: int | None = option(None, "", notice=_PADDED)
    rank: int | None = option(None, "", notice="data is prepared on one machine")
    dataset_impl: str | None = option(None, "", notice="there is only one output format")
    vocab_extra_ids: int | None = option(None, "", notice="the ids of the tokenizer are used")


@dataclass(frozen=True)
class PrepareOptions(IdleOptions, WorkOptions, TokenizerOptions, InputOptions):
    pass


USAGE = f"""usage: pentatron prepare --input FILE ... --output-prefix PREFIX --tokenizer-type TYPE [...]

Turns text into the .bin/.idx pairs that --data-path takes: PREFIX_text_document.bin, .idx and .meta (checksums and the tokenizer's
fingerprint). The output is the same for any number of workers and appears only when it is complete. The same command resumes after
an interruption.

{options_help(InputOptions)}

{options_help(TokenizerOptions)}

{options_help(WorkOptions)}
"""
_NO_SEARCH = "is not available; use --workers N, or the default of one worker per core, usually the fastest"
_NO_TIKTOKEN = "is not available; use --tokenizer-type HuggingFaceTokenizer with the model's tokenizer.json"
_TIKTOKEN = ("tiktoken-pattern", "tiktoken-num-special-tokens", "tiktoken-special-tokens")
REFUSED = {
    **dict.fromkeys(("find-optimal-num-workers", "workers-to-check"), _NO_SEARCH),
    "max-documents": "is not available; give --input a shorter file",
    **dict.fromkeys(_TIKTOKEN, _NO_TIKTOKEN),
}
_SECONDS_BETWEEN_LINES = 10.0


@with_help(USAGE)
def prepare_command(words: Sequence[str]) -> int:
    from pentatron.data.encode import EncodingSettings
    from pentatron.data.prepare import PrepareJob, prepare

    ignore_output_errors()
    stray = "'{word}' is not a flag; write --input {word}"
    options, _ = parse_options(PrepareOptions, words, "pentatron prepare", REFUSED, stray)
    for notice in options_without_effect(options):
        say(f"note: {notice}")
    model, files = _resolve_tokenizer(options.tokenizer_model), (options.vocab_file, options.merge_file)
    choice = TokenizerSettings(options.tokenizer_type, model, options.vocab_size or None, *files)
    job = PrepareJob(
        expand_inputs(options.input),
        Path(options.output_prefix),
        EncodingSettings(choice, options.json_keys, options.append_eod, options.split_sentences),
        options.workers or usable_cores(),
        options.text_documents,
        options.skip_bad_lines,
        options.overwrite,
    )
    # Threads of the tokenizer in every worker process would oversubscribe the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with closing(_open_progress(options.log_interval or 0)) as progress:
            outcome = prepare(job, progress.report, progress.say)
    except KeyboardInterrupt:
        print_error("stopped; the same command resumes from here")
        return 130
    _print_summary(job, outcome)
    return 0


def _resolve_tokenizer(name: str | None) -> str | None:
    """Returns an existing path unchanged, and for a model of the hub the folder of its downloaded
    tokenizer."""
    if not name or Path(name).exists():
        return name
    from pentatron.hf.hub import TOKENIZER_FILES, is_hub_id, resolve_folder

    if not is_hub_id(name):
        return name
    try:
        folder = resolve_folder(name, files=TOKENIZER_FILES)
    except UserError as error:
        raise UserError(f"Tokenizer not found: {error}; check --tokenizer-model") from error
    say(f"note: {name} is in {folder}")
    return str(folder)


def _print_summary(job: "PrepareJob", outcome: "PrepareOutcome") -> None:
    from pentatron.data.indexed import IndexedDataset
    from pentatron.data.inspect import document_lengths, histogram_lines

    if outcome.already_there:
        names = ", ".join(map(str, job.outputs))
        same = "already prepared from the same inputs with the same settings"
        say(f"{names}: {same} (--overwrite prepares them again)")
    else:
        counts = outcome.counts
        speed = outcome.tokens_now / max(outcome.seconds, 1e-9)
        resumed = ", resumed after an interruption" if outcome.resumed else ""
        done = f"{format_count(counts.documents, 'document')}, {counts.tokens:,} tokens"
        rate = f"{speed:,.0f} tokens/s, {job.workers} {plural(job.workers, 'worker')}"
        say(f"{done} in {outcome.seconds:.1f} s ({rate}){resumed}")
        if counts.blank_lines:
            say(f"{format_count(counts.blank_lines, 'blank line')} skipped")
        if counts.bad_lines:
            lines = [f"{format_count(counts.bad_lines, 'bad line')} skipped, the first:", *outcome.bad]
            say("\n  ".join(lines))
    for prefix in job.outputs:
        lengths = document_lengths(IndexedDataset(prefix))
        if not lengths.tokens:
            say(f"\n{prefix}: no tokens, because the input has no text; it cannot be trained on")
            continue
        count, mean = format_count(lengths.documents, "document"), lengths.tokens / lengths.documents
        span = f"{lengths.shortest:,} to {lengths.longest:,} tokens, {mean:,.1f} on average"
        say("\n".join([f"\n{prefix}: {count} of {span}", *histogram_lines(lengths.powers)]))


class _Progress:
    """Progress as a bar on a terminal, or as lines at intervals for logs."""

    def __init__(self, every_documents: int, bar: "Progress | None") -> None:
        self._every, self._bar = every_documents, bar
        self._started = self._last = time.monotonic()
        self._marks, self._before = 0, -1
        if bar is not None:
            bar.add_task("", total=None, facts="starting workers")
            bar.start()

    def say(self, text: str) -> None:
        if self._bar is None:
            say(text)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def report(self, counts: "Counts", total: int) -> None:
        if self._before < 0:
            self._before = counts.tokens
        now = time.monotonic()
        speed = (counts.tokens - self._before) / max(now - self._started, 1e-9)
        if self._bar is not None:
            facts = f"{counts.documents:,} documents, {format_abbreviated(counts.tokens)} tokens, {format_abbreviated(speed)}/s"
            self._bar.update(self._bar.task_ids[0], completed=counts.read, total=total, facts=facts)
            return
        marks = counts.documents // self._every if self._every else 0
        if marks > self._marks or (not self._every and now - self._last >= _SECONDS_BETWEEN_LINES):
            self._last = now
            text = f"{100 * counts.read / max(1, total):.0f} %  {counts.documents:,} documents, {counts.tokens:,} tokens"
            say(f"{text}, {speed:,.0f} tokens/s" if speed else text)
        self._marks = marks

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _open_progress(log_interval: int) -> _Progress:
    bar = None
    if sys.stdout.isatty() and not log_interval:
        try:
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            title, facts = TextColumn("[bold]preparing"), TextColumn("{task.fields[facts]}")
            columns = (title, BarColumn(bar_width=20), TaskProgressColumn(), facts, TimeRemainingColumn())
            bar = Progress(*columns, transient=True)
        except ImportError:
            say("no progress bar: the rich library is not installed (pip install rich)")
    return _Progress(log_interval, bar)
