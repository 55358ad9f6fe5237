"""All cross-field rules. Each returns a sentence with the equation filled in and the fix; all are asked every time."""

import re
from collections.abc import Collection, Mapping
from typing import Any, cast

from pentatron.config.address import meeting_point
from pentatron.config.data_sources import NAMED, Blend, names_files
from pentatron.config.decisions import not_recordable, requires_graphs
from pentatron.config.draft import Facts
from pentatron.config.layout_rules import LAYOUT_RULES, Rule, Values
from pentatron.config.limits import not_available, out_of_limits
from pentatron.config.loop_rules import LOOP_RULES
from pentatron.config.moe_rules import MOE_RULES
from pentatron.config.position_rules import POSITION_RULES
from pentatron.config.precision_rules import PRECISION_RULES
from pentatron.config.run import RunConfig, table
from pentatron.config.schedule_rules import SCHEDULE_RULES
from pentatron.config.sft_rules import SFT_RULES
from pentatron.config.zero_rules import ZERO_RULES
from pentatron.errors import UserError
from pentatron.layout.divisors import divisors, either


def problems_of(
    values: Values, facts: Facts, sources: Mapping[str, str] | None = None, unsound: Collection[str] = ()
) -> list[str]:
    """Every reason why this run cannot start."""
    return [
        *out_of_limits(values).values(),
        *not_available(values, sources or {}),
        *broken_rules(values, facts, unsound),
    ]


def broken_rules(values: Values, facts: Facts, unsound: Collection[str] = ()) -> list[str]:
    """What the rules say. One that looks at an unsound value, known to be wrong already, has nothing to add."""
    wrong = out_of_limits(values)
    found = []
    usable = {**values, **{name: (1,) if isinstance(values[name], tuple) else 1 for name in wrong}}
    for rule in RULES:
        asked = _Watched(usable)
        problem = rule(asked, facts)
        if problem is not None and asked.seen.isdisjoint((*wrong, *unsound)):
            found.append(problem)
    return found


class _Watched(dict[str, Any]):
    """Remembers which values were looked at."""

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)


class _Sections:
    """Values by section and name, as a `RunConfig` has them; only those that are asked for are looked at."""

    def __init__(self, values: Values, section: str = "") -> None:
        self._values, self._section = values, section

    def __getattr__(self, name: str) -> Any:
        return self._values[name] if self._section else _Sections(self._values, name)


def _graphs(v: Values, facts: Facts) -> str | None:
    config = cast(RunConfig, _Sections(v))
    if not requires_graphs(config.kernels.cuda_graphs):
        return None
    reason = "the run is on a CPU" if config.launch.device == "cpu" else not_recordable(config)
    if not reason:
        return None
    return f"--cuda-graphs on is not possible: {reason}; leave it out, or use --cuda-graphs auto"


def _meeting_point(v: Values, facts: Facts) -> str | None:
    if v["init_method"] is None or meeting_point(v["init_method"]) is not None:
        return None
    return (
        f"--init-method {v['init_method']} must look like tcp://HOST:PORT, for example tcp://localhost:12345"
    )


def _groups(v: Values, facts: Facts) -> str | None:
    heads, groups = v["num_attention_heads"], v["num_query_groups"]
    if heads % groups == 0:
        return None
    return (
        f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}; "
        f"use {either(divisors(heads))} groups"
    )


def _grouping(v: Values, facts: Facts) -> str | None:
    if v["group_query_attention"] or v["num_query_groups"] == v["num_attention_heads"]:
        return None
    return (
        f"--no-group-query-attention and --num-query-groups {v['num_query_groups']} contradict each other; "
        f"leave one of them out"
    )


def _positions(v: Values, facts: Facts) -> str | None:
    if v["max_position_embeddings"] >= v["seq_length"]:
        return None
    return (
        f"--seq-length {v['seq_length']} is longer than --max-position-embeddings {v['max_position_embeddings']}; "
        f"raise the latter or shorten the sequence"
    )


def _vocabulary(v: Values, facts: Facts) -> str | None:
    # What a vocabulary file holds is read before this.
    if v["vocab_size"] is not None or v["vocab_file"] is not None:
        return None
    return "the vocabulary size is unknown; give --vocab-size, or --tokenizer-model with a folder that has a tokenizer.json"


def _tokenizer(v: Values, facts: Facts) -> str | None:
    files = {
        **dict.fromkeys(("HuggingFaceTokenizer", "HFTokenizer", "SFTTokenizer"), "tokenizer.json"),
        **dict.fromkeys(
            ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"), "tokenizer.model"
        ),
    }
    kind = v["tokenizer_type"]
    if kind not in files or not names_files(v) or v["tokenizer_model"] is not None:
        return None
    return f"--tokenizer-type {kind} needs --tokenizer-model, a folder that has a {files[kind]}"


def _spec(v: Values, facts: Facts) -> str | None:
    words = v["spec"]
    if len(words) in (0, 2):
        return None
    return f"--spec {' '.join(words)} has {len(words)} word{'s' if len(words) > 1 else ''}; it wants two: MODULE FUNCTION"


def _data(v: Values, facts: Facts) -> str | None:
    sources = [table()[n].flag for n in ("corpus", "data_path", "train_data_path", "mock_data") if v[n]]
    if len(sources) > 1:
        return f"{' and '.join(sources)} are different sources of data; choose one"
    if not sources and v["dataset_size"] is None:
        return (
            "no data is named; give --data-path PREFIX (of PREFIX.bin and PREFIX.idx), --corpus python, "
            "--dataset-size N for synthetic samples, or --mock-data"
        )
    return None


def _blend(v: Values, facts: Facts) -> str | None:
    for name in NAMED:
        if v[name] and not v["sft"]:
            try:
                Blend.parse(v[name], table()[name].flag)
            except UserError as error:
                return str(error)
    return None


def _per_split(v: Values, facts: Facts) -> str | None:
    named = next((name for name in ("valid_data_path", "test_data_path") if v[name]), None)
    if named is None or v["train_data_path"]:
        return None
    flag = table()[named].flag
    return f"{flag} needs --train-data-path beside it; give both, or --data-path for all splits"


def _split(v: Values, facts: Facts) -> str | None:
    # As the data is split later: no signs, no exponents.
    written = [part.strip() for part in str(v["split"]).split(",")]
    plain = all(re.fullmatch(r"\d+\.?\d*|\.\d+", part) for part in written)
    numbers = [float(part) for part in written] if plain else []
    sound = 1 <= len(numbers) <= 3
    if sound and numbers[0] > 0:
        return None
    return f"--split {v['split']} must be up to three numbers with a training share above 0, such as 969,30,1"


RULES: tuple[Rule, ...] = (
    *LAYOUT_RULES,
    *MOE_RULES,
    *ZERO_RULES,
    *POSITION_RULES,
    *SFT_RULES,
    _graphs,
    *PRECISION_RULES,
    *LOOP_RULES,
    _meeting_point,
    _groups,
    _grouping,
    _positions,
    _vocabulary,
    _tokenizer,
    _spec,
    _data,
    _blend,
    _per_split,
    _split,
    *SCHEDULE_RULES,
)
