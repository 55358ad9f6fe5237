"""Checks all settings: limits, missing features and cross-field rules.

Each rule returns None or an error message with the numbers and a fix. All problems are reported at once.
"""

import re
from collections.abc import Collection
from typing import Any

from pentatron.settings.data_paths import NAMED, Blend, training_files_flag
from pentatron.settings.decisions import requires_graphs, why_not_capturable
from pentatron.settings.declaration import Setting, flag_of
from pentatron.settings.layout_rules import LAYOUT_RULES, ZERO_RULES, Rule, error_of, indivisible, refuse_if
from pentatron.settings.model_rules import MOE_RULES, POSITION_RULES, PRECISION_RULES
from pentatron.settings.needs import data_sources
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import Settings, is_unset
from pentatron.settings.training_rules import LOOP_RULES, SCHEDULE_RULES, SFT_RULES
from pentatron.text import divisors, format_count, join_choices, parse_rendezvous_url


def problems_of(s: Settings, unsound: Collection[str] = ()) -> list[str]:
    """Returns all errors in the settings.

    Rules that read an `unsound` setting, or one that is reported already, are skipped.
    """
    wrong = out_of_limits(s)
    usable = s.changed(**{name: (1,) if isinstance(getattr(s, name), tuple) else 1 for name in wrong})
    problems = [*wrong.values(), *unsupported_features(s)]
    for rule in RULES.values():
        tracker = _ReadTracker(usable)
        problem = rule(tracker)
        if problem is not None and tracker._read.isdisjoint((*wrong, *unsound)):
            problems.append(problem)
    return problems


class _ReadTracker(Settings):
    """Settings that record which of them were read."""

    def __init__(self, settings: Settings) -> None:
        self.__dict__.update(settings.__dict__)
        self._read: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            self._read.add(name)
        return super().__getattribute__(name)


def out_of_limits(s: Settings) -> dict[str, str]:
    """Maps each setting whose value is out of its limits to the error."""
    return {
        name: f"{item.written(getattr(s, name))} must be {item.limit.words}"
        for name, item in all_settings().items()
        if item.limit is not None and not item.limit.allows(getattr(s, name))
    }


def unsupported_features(s: Settings) -> list[str]:
    """Returns an error for each requested feature that is not implemented."""
    wanted: dict[str, list[Setting]] = {}
    for name, item in all_settings().items():
        if item.refuses(getattr(s, name)):
            wanted.setdefault(item.not_yet, []).append(item)
    return [_missing(feature, items, s) for feature, items in wanted.items()]


def _missing(feature: str, items: list[Setting], s: Settings) -> str:
    written = ", ".join(i.written(getattr(s, i.name), s.source(i.name)) for i in items)
    verb, fix = ("needs", "leave it out") if len(items) == 1 else ("need", "leave them out")
    inherited = [i for i in items if s.source(i.name).startswith("preset ")]
    if any(i.default in (None, ()) or i.default is False for i in inherited):
        fix = "choose another preset"
    elif inherited:
        fix = f"add {' '.join(f'{i.flag} {i.default}' for i in inherited)} to disable it"
    return f"{written} {verb} {feature}, which this version does not have yet; {fix}"


def _graphs(s: Settings) -> str | None:
    if not requires_graphs(s.cuda_graphs):
        return None
    reason = "the run is on a CPU" if s.device == "cpu" else why_not_capturable(s)
    error = f"--cuda-graphs on is not possible: {reason}; leave it out, or use --cuda-graphs auto"
    return error if reason else None


def _groups(s: Settings) -> str | None:
    advice = f"{join_choices(divisors(s.num_attention_heads))} groups"
    return indivisible(s, "num_attention_heads", "num_query_groups", advice)


# The file that each type of tokenizer with a folder reads.
_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_TOKENIZER_FILES = {
    **dict.fromkeys(("HuggingFaceTokenizer", "HFTokenizer", "SFTTokenizer"), "tokenizer.json"),
    **dict.fromkeys(_SENTENCEPIECE, "tokenizer.model"),
}


def _tokenizer(s: Settings) -> str | None:
    file = _TOKENIZER_FILES.get(s.tokenizer_type or "")
    if file is None or not training_files_flag(s) or s.tokenizer_model is not None:
        return None
    return f"--tokenizer-type {s.tokenizer_type} needs --tokenizer-model, a folder that has a {file}"


def _spec(s: Settings) -> str | None:
    words = s.spec
    if len(words) in (0, 2):
        return None
    return f"--spec {' '.join(words)} has {format_count(len(words), 'value')}, but needs two: MODULE FUNCTION"


def _data(s: Settings) -> str | None:
    sources = data_sources(s)
    if len(sources) > 1:
        return f"{' and '.join(sources)} are different sources of data; choose one"
    path = "--data-path PREFIX (of PREFIX.bin and PREFIX.idx)"
    others = "--corpus python, --dataset-size N for synthetic samples, or --mock-data"
    is_missing = not sources and s.dataset_size is None
    return f"no data is named; give {path}, {others}" if is_missing else None


def _blend(s: Settings) -> str | None:
    named = () if s.sft else tuple(name for name in NAMED if getattr(s, name))
    errors = (error_of(Blend.parse, getattr(s, name), flag_of(name)) for name in named)
    return next(filter(None, errors), None)


def _per_split(s: Settings) -> str | None:
    named = [flag_of(name) for name in ("valid_data_path", "test_data_path") if getattr(s, name)]
    if not named or s.train_data_path:
        return None
    return f"{named[0]} needs --train-data-path beside it; give both, or --data-path for all splits"


def _split(s: Settings) -> str | None:
    # The parser of the data accepts no signs and no exponents.
    written = [part.strip() for part in str(s.split).split(",")]
    plain = all(re.fullmatch(r"\d+\.?\d*|\.\d+", part) for part in written)
    numbers = [float(part) for part in written] if plain else []
    if 1 <= len(numbers) <= 3 and numbers[0] > 0:
        return None
    return f"--split {s.split} must be up to three numbers with a training weight above 0, such as 969,30,1"


RULES: dict[str, Rule] = {
    **LAYOUT_RULES,
    **MOE_RULES,
    **ZERO_RULES,
    **POSITION_RULES,
    **SFT_RULES,
    "graphs": _graphs,
    **PRECISION_RULES,
    **LOOP_RULES,
    "rendezvous": refuse_if(
        lambda s: s.init_method is not None and parse_rendezvous_url(s.init_method) is None,
        "--init-method {s.init_method} must look like tcp://HOST:PORT, for example tcp://localhost:12345",
    ),
    "groups": _groups,
    "grouping": refuse_if(
        lambda s: not s.group_query_attention and s.num_query_groups != s.num_attention_heads,
        "--no-group-query-attention and --num-query-groups {s.num_query_groups} contradict each other; "
        "leave one of them out",
    ),
    "positions": refuse_if(
        lambda s: s.max_position_embeddings < s.seq_length,
        "--seq-length {s.seq_length} is longer than --max-position-embeddings {s.max_position_embeddings}; "
        "raise the latter or shorten the sequence",
    ),
    # The size of --vocab-file is read before the rules are checked.
    "vocabulary": refuse_if(
        lambda s: is_unset(s.vocab_size) and s.vocab_file is None,
        "the vocabulary size is unknown; give --vocab-size, or --tokenizer-model with a folder that has a "
        "tokenizer.json",
    ),
    "tokenizer": _tokenizer,
    "spec": _spec,
    "data": _data,
    "blend": _blend,
    "per_split": _per_split,
    "split": _split,
    **SCHEDULE_RULES,
}
