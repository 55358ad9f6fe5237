"""All cross-field rules. Each returns a sentence with the equation filled in and the fix; all are asked every time."""

from collections.abc import Callable
from typing import Any

from pentatron.config.draft import Facts
from pentatron.config.run import table
from pentatron.layout.batch import batch_problem
from pentatron.layout.divisors import divisors, either
from pentatron.layout.ranks import world_size_problem

Values = dict[str, Any]
Rule = Callable[[Values, Facts], str | None]


def problems_of(values: Values, facts: Facts) -> list[str]:
    """Every reason why this run cannot start."""
    found = [*_not_positive(values), *_not_available(values)]
    if not found:
        # Relations between numbers make sense only once each number does by itself.
        found += [problem for rule in RULES if (problem := rule(values, facts)) is not None]
    else:
        found += [problem for rule in RULES if (problem := _quiet(rule, values, facts)) is not None]
    return found


def _quiet(rule: Rule, values: Values, facts: Facts) -> str | None:
    try:
        return rule(values, facts)
    except (ZeroDivisionError, TypeError):
        return None


_POSITIVE = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups seq_length "
    "max_position_embeddings vocab_size padded_vocab_size make_vocab_size_divisible_by tensor_model_parallel_size "
    "pipeline_model_parallel_size context_parallel_size expert_model_parallel_size data_parallel_size "
    "micro_batch_size global_batch_size gradient_accumulation_steps num_microbatches rank_batch_size train_iters "
    "epochs eval_iters log_interval save_interval keep_checkpoints nproc_per_node threads_per_process dataset_size "
    "corpus_bytes ddp_bucket_size adam_eps distributed_timeout_minutes rotary_base prefetch_factor"
).split()
_NOT_NEGATIVE = (
    "lr min_lr weight_decay clip_grad lr_warmup_iters eval_interval num_workers init_method_std seed sample_tokens"
).split()


def _not_positive(values: Values) -> list[str]:
    found = []
    for name in (*_POSITIVE, *_NOT_NEGATIVE):
        value, least = values[name], 1 if name in _POSITIVE else 0
        if value is None or value > 0 or (least == 0 and value == 0):
            continue
        found.append(f"{table()[name].flag} {value} must be {'more than 0' if least else '0 or more'}")
    return found


def _not_available(values: Values) -> list[str]:
    found = []
    for name, item in table().items():
        value = values[name]
        if item.refuses(value):
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            written = item.flag if value is True else f"{item.flag} {shown}"
            usual = (
                "leave it out"
                if item.default in (None, ()) or item.default is False
                else f"use {item.flag} {item.default}"
            )
            found.append(f"{written} needs {item.not_yet}, which this version does not have yet; {usual}")
    return found


def _world(v: Values, facts: Facts) -> str | None:
    sizes = (v["tensor_model_parallel_size"], v["pipeline_model_parallel_size"], v["context_parallel_size"])
    return world_size_problem(facts.world_size, *sizes)


def _expected_world(v: Values, facts: Facts) -> str | None:
    if v["world_size"] in (None, facts.world_size):
        return None
    return (
        f"--world-size {v['world_size']} does not match the {facts.world_size} process(es) that were started; "
        f"start {v['world_size']} (torchrun --nproc_per_node=... or --nproc-per-node) or leave --world-size out"
    )


def _data_parallel(v: Values, facts: Facts) -> str | None:
    model = v["tensor_model_parallel_size"] * v["pipeline_model_parallel_size"] * v["context_parallel_size"]
    if facts.world_size % model or v["data_parallel_size"] * model == facts.world_size:
        return None
    return (
        f"--data-parallel-size {v['data_parallel_size']} × {model} (tp × pp × cp) = {v['data_parallel_size'] * model}, "
        f"but there are {facts.world_size} processes; use {facts.world_size // model} or leave it out"
    )


def _heads_per_rank(v: Values, facts: Facts) -> str | None:
    heads, tp = v["num_attention_heads"], v["tensor_model_parallel_size"]
    if heads % tp == 0:
        return None
    return (
        f"--num-attention-heads {heads} is not divisible by --tensor-model-parallel-size {tp}; "
        f"use {either(divisors(heads))}"
    )


def _groups(v: Values, facts: Facts) -> str | None:
    heads, groups = v["num_attention_heads"], v["num_query_groups"]
    if heads % groups == 0:
        return None
    return f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}; use {either(divisors(heads))}"


def _groups_per_rank(v: Values, facts: Facts) -> str | None:
    groups, tp = v["num_query_groups"], v["tensor_model_parallel_size"]
    if groups % tp == 0 or tp % groups == 0:
        return None
    return (
        f"--num-query-groups {groups} is neither a multiple nor a divisor of --tensor-model-parallel-size {tp}; "
        f"use a tensor parallel size of {either(divisors(groups))}"
    )


def _head_width(v: Values, facts: Facts) -> str | None:
    hidden, heads, width = v["hidden_size"], v["num_attention_heads"], v["kv_channels"]
    if width != hidden // heads or hidden % heads == 0:
        return None
    return (
        f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}; "
        f"use {either(divisors(hidden))} heads, or give --kv-channels"
    )


def _rotary(v: Values, facts: Facts) -> str | None:
    if v["position_embedding_type"] != "rope":
        return None
    if not 0 < v["rotary_percent"] <= 1:
        return f"--rotary-percent {v['rotary_percent']} must be above 0 and at most 1"
    if int(v["kv_channels"] * v["rotary_percent"]) % 2:
        return f"the rotated part of a head ({v['kv_channels']} × {v['rotary_percent']}) must be even; change --kv-channels"
    return None


def _batch(v: Values, facts: Facts) -> str | None:
    if v["global_batch_size"] is None or v["micro_batch_size"] is None:
        return None
    return batch_problem(v["global_batch_size"], v["micro_batch_size"], v["data_parallel_size"])


def _positions(v: Values, facts: Facts) -> str | None:
    if v["max_position_embeddings"] >= v["seq_length"]:
        return None
    return (
        f"--seq-length {v['seq_length']} is longer than --max-position-embeddings {v['max_position_embeddings']}; "
        f"raise the latter or shorten the sequence"
    )


def _padded_vocabulary(v: Values, facts: Facts) -> str | None:
    if v["vocab_size"] is None or v["padded_vocab_size"] >= v["vocab_size"]:
        return None
    return f"--padded-vocab-size {v['padded_vocab_size']} is smaller than --vocab-size {v['vocab_size']}"


def _vocabulary(v: Values, facts: Facts) -> str | None:
    if v["vocab_size"] is not None:
        return None
    return "the vocabulary size is unknown; give --vocab-size, or --tokenizer-model with a folder that has a tokenizer.json"


def _precision(v: Values, facts: Facts) -> str | None:
    return "--fp16 and --bf16 exclude each other; choose one" if v["fp16"] and v["bf16"] else None


def _data(v: Values, facts: Facts) -> str | None:
    sources = [table()[n].flag for n in ("corpus", "data_path", "mock_data") if v[n]]
    if len(sources) > 1:
        return f"{' and '.join(sources)} are different sources of data; choose one"
    if not sources and v["dataset_size"] is None:
        return (
            "no data is named; give --data-path PREFIX (of PREFIX.bin and PREFIX.idx), --corpus python, "
            "--dataset-size N for synthetic samples, or --mock-data"
        )
    return None


def _blend(v: Values, facts: Facts) -> str | None:
    if len(v["data_path"]) <= 1:
        return None
    return f"--data-path with {len(v['data_path'])} words needs blends, which this version does not have yet; give one prefix"


def _how_long(v: Values, facts: Facts) -> str | None:
    if v["train_iters"] is not None:
        return None
    if v["epochs"] is not None:
        return "--epochs needs a known number of samples (--dataset-size); give --train-iters instead"
    return "the length of the run is unknown; give --train-iters"


def _warmup(v: Values, facts: Facts) -> str | None:
    if v["lr_decay_iters"] is None or v["lr_warmup_iters"] < v["lr_decay_iters"]:
        return None
    return (
        f"--lr-warmup-iters {v['lr_warmup_iters']} must be smaller than the {v['lr_decay_iters']} steps of the decay "
        f"(--lr-decay-iters or --train-iters)"
    )


def _min_lr(v: Values, facts: Facts) -> str | None:
    return f"--min-lr {v['min_lr']} is above --lr {v['lr']}; lower it" if v["min_lr"] > v["lr"] else None


def _split(v: Values, facts: Facts) -> str | None:
    parts = str(v["split"]).split(",")
    try:
        numbers = [float(p) for p in parts]
    except ValueError:
        numbers = []
    if 1 <= len(numbers) <= 3 and all(n >= 0 for n in numbers) and sum(numbers) > 0 and numbers[0] > 0:
        return None
    return f"--split {v['split']} must be up to three numbers with a training share above 0, such as 969,30,1"


RULES: tuple[Rule, ...] = (
    _world,
    _expected_world,
    _data_parallel,
    _heads_per_rank,
    _groups,
    _groups_per_rank,
    _head_width,
    _rotary,
    _batch,
    _positions,
    _vocabulary,
    _padded_vocabulary,
    _precision,
    _data,
    _blend,
    _how_long,
    _warmup,
    _min_lr,
    _split,
)
