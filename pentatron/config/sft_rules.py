"""Rules about fine-tuning on conversations."""

import datetime
from collections.abc import Sequence

from pentatron.config.layout_rules import Rule
from pentatron.config.settings import Settings

_JSON = (".jsonl", ".json", ".ndjson")


def is_weight(word: str) -> bool:
    """Of a blend, as corpora have them."""
    return word.replace(".", "", 1).isdecimal()


def named_text(words: Sequence[str]) -> str | None:
    """The first that names text, where prepared tokens are read."""
    return next((word for word in words if word.removesuffix(".gz").endswith(_JSON)), None)


def _sft_file(s: Settings) -> str | None:
    words = s.data_path
    if not s.sft:
        text = named_text(words)
        if text is None:
            return None
        return (
            f"--data-path {text} is text; make tokens of it with pentatron prepare --input {text}, or add --sft if it holds "
            "conversations"
        )
    if s.train_data_path:
        return "--sft reads files of conversations, which --split divides; give --data-path FILE.jsonl instead of files for each split"
    if not words:
        return "--sft reads files of conversations, and none is named; give --data-path FILE.jsonl"
    weight = next((word for word in words if is_weight(word)), None)
    if weight is not None:
        return (
            f"--sft reads every conversation once in an epoch, so the weight {weight} has nothing to weigh; give --data-path FILES alone "
            "(a file named twice counts twice)"
        )
    return None


def _sft_tokenizer(s: Settings) -> str | None:
    named = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    if not s.sft or any(getattr(s, name) is not None for name in named):
        return None
    return "--sft needs a tokenizer to read conversations with; give --tokenizer-model FOLDER, with a chat template in it"


def _sft_day(s: Settings) -> str | None:
    try:
        datetime.date.fromisoformat(s.sft_date)
    except ValueError:
        return f"--sft-date {s.sft_date} is no day; write it as in 2024-07-26"
    return None


SFT_RULES: tuple[Rule, ...] = (_sft_file, _sft_tokenizer, _sft_day)
