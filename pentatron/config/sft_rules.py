"""What fine-tuning on conversations needs, and why a setting about it may have nothing to act on."""

import datetime
from collections.abc import Callable, Sequence

from pentatron.config.draft import Draft, Facts
from pentatron.config.layout_rules import Rule, Values

_JSON = (".jsonl", ".json", ".ndjson")


def is_weight(word: str) -> bool:
    """Of a blend, as corpora have them."""
    return word.replace(".", "", 1).isdecimal()


def named_text(words: Sequence[str]) -> str | None:
    """The first that names text, where prepared tokens are read."""
    return next((word for word in words if word.removesuffix(".gz").endswith(_JSON)), None)


def _sft_file(v: Values, facts: Facts) -> str | None:
    words = v["data_path"]
    if not v["sft"]:
        text = named_text(words)
        if text is None:
            return None
        return (
            f"--data-path {text} is text; make tokens of it with pentatron prepare --input {text}, or add --sft if it holds "
            "conversations"
        )
    if v["train_data_path"]:
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


def _sft_tokenizer(v: Values, facts: Facts) -> str | None:
    named = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    if not v["sft"] or any(v[name] is not None for name in named):
        return None
    return "--sft needs a tokenizer to read conversations with; give --tokenizer-model FOLDER, with a chat template in it"


def _sft_day(v: Values, facts: Facts) -> str | None:
    try:
        datetime.date.fromisoformat(v["sft_date"])
    except ValueError:
        return f"--sft-date {v['sft_date']} is no day; write it as in 2024-07-26"
    return None


SFT_RULES: tuple[Rule, ...] = (_sft_file, _sft_tokenizer, _sft_day)


def _no_conversations(draft: Draft, facts: Facts) -> str:
    return "" if draft["sft"] else "there are no conversations (--sft), so this changes nothing"


def _no_template(draft: Draft, facts: Facts) -> str:
    as_they_are = draft["sft_tokenizer_prompt_format"] == "identity"
    return _no_conversations(draft, facts) or (
        "texts follow each other as they are (--sft-tokenizer-prompt-format identity)" if as_they_are else ""
    )


def documents_of_conversations(draft: Draft) -> str:
    """Why the flags about ends of documents do nothing to conversations."""
    return (
        "with --sft a conversation is a document by itself and its loss is on the answers, so this changes nothing"
        if draft["sft"]
        else ""
    )


IDLE_OF_SFT: dict[str, Callable[[Draft, Facts], str]] = {
    "sft_packing": _no_conversations,
    "sft_tokenizer_prompt_format": _no_conversations,
    "chat_template": _no_template,
    "sft_date": _no_template,
}
