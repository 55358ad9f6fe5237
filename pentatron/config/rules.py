"""All cross-field rules. Each returns a sentence with the equation filled in and the fix; all are asked every time."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pentatron.config.address import meeting_point
from pentatron.config.draft import Facts
from pentatron.config.limits import not_available, out_of_limits
from pentatron.config.run import table
from pentatron.layout.batch import batch_problem
from pentatron.layout.divisors import divisors, either
from pentatron.layout.ranks import world_size_problem

Values = Mapping[str, Any]
Rule = Callable[[Values, Facts], str | None]


def problems_of(
    values: Values, facts: Facts, sources: Mapping[str, str] | None = None, unsound: Collection[str] = ()
) -> list[str]:
    """Every reason why this run cannot start.

    A rule that looks at an unsound value, one already known to be wrong, has nothing to add and is not heard.
    """
    wrong = out_of_limits(values)
    found = [*wrong.values(), *not_available(values, sources or {})]
    usable = {**values, **dict.fromkeys(wrong, 1)}
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


def _processes_here(v: Values, facts: Facts) -> str | None:
    if not facts.launcher or v["nproc_per_node"] == facts.local_processes:
        return None
    return (
        f"--nproc-per-node {v['nproc_per_node']} does not match the {facts.local_processes} process(es) that "
        f"{facts.launcher} started on this machine; leave --nproc-per-node out"
    )


def _meeting_point(v: Values, facts: Facts) -> str | None:
    if v["init_method"] is None or meeting_point(v["init_method"]) is not None:
        return None
    return (
        f"--init-method {v['init_method']} must look like tcp://HOST:PORT, for example tcp://localhost:12345"
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
    return (
        f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}; "
        f"use {either(divisors(heads))} groups"
    )


def _groups_per_rank(v: Values, facts: Facts) -> str | None:
    groups, tp = v["num_query_groups"], v["tensor_model_parallel_size"]
    # As many groups as heads is no grouping; the rule about heads says it all.
    if groups % tp == 0 or tp % groups == 0 or groups == v["num_attention_heads"]:
        return None
    return (
        f"--num-query-groups {groups} is neither a multiple nor a divisor of --tensor-model-parallel-size {tp}; "
        f"use a tensor parallel size of {either(divisors(groups))}"
    )


def _grouping(v: Values, facts: Facts) -> str | None:
    if v["group_query_attention"] or v["num_query_groups"] == v["num_attention_heads"]:
        return None
    return (
        f"--no-group-query-attention and --num-query-groups {v['num_query_groups']} contradict each other; "
        f"leave one of them out"
    )


def _head_width(v: Values, facts: Facts) -> str | None:
    hidden, heads, width = v["hidden_size"], v["num_attention_heads"], v["kv_channels"]
    if hidden % heads == 0 or width != max(1, hidden // heads):
        return None
    return (
        f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}; "
        f"use {either(divisors(hidden))} heads, or give --kv-channels"
    )


def _mlp_per_rank(v: Values, facts: Facts) -> str | None:
    width, tp = v["ffn_hidden_size"], v["tensor_model_parallel_size"]
    if width % tp == 0:
        return None
    return (
        f"--ffn-hidden-size {width} is not divisible by --tensor-model-parallel-size {tp}; "
        f"use --ffn-hidden-size {math.ceil(width / tp) * tp}"
    )


def _layers_per_stage(v: Values, facts: Facts) -> str | None:
    layers, stages = v["num_layers"], v["pipeline_model_parallel_size"]
    if layers >= stages:
        return None
    return (
        f"--num-layers {layers} cannot fill the {stages} stages of --pipeline-model-parallel-size {stages}; "
        f"use {stages} layers or more, or at most {layers} stage{'s' if layers > 1 else ''}"
    )


def _sequence_per_rank(v: Values, facts: Facts) -> str | None:
    length, cp, tp = v["seq_length"], v["context_parallel_size"], v["tensor_model_parallel_size"]
    factors = [f"2 × {cp} (context)"] if cp > 1 else []
    multiple = 2 * cp if cp > 1 else 1
    if v["sequence_parallel"] and tp > 1:
        factors.append(f"{tp} (tensor, for --sequence-parallel)")
        multiple = math.lcm(multiple, cp * tp)
    if length % multiple == 0:
        return None
    up = math.ceil(length / multiple) * multiple
    down = f"{up - multiple} or " if up > multiple else ""
    return f"--seq-length {length} is not divisible by {multiple}, as {' and '.join(factors)} need; use {down}{up}"


def _experts(v: Values, facts: Facts) -> str | None:
    experts, ep, topk = v["num_experts"], v["expert_model_parallel_size"], v["moe_router_topk"]
    if experts is None:
        return f"--expert-model-parallel-size {ep} needs experts; give --num-experts" if ep > 1 else None
    if experts % ep:
        return (
            f"--num-experts {experts} is not divisible by --expert-model-parallel-size {ep}; "
            f"use {either(divisors(experts))}"
        )
    if topk > experts:
        return f"--moe-router-topk {topk} is more than --num-experts {experts}; use at most {experts}"
    return None


def _rotary(v: Values, facts: Facts) -> str | None:
    if v["position_embedding_type"] != "rope" or int(v["kv_channels"] * v["rotary_percent"]) % 2 == 0:
        return None
    return (
        f"the rotated part of a head, {v['kv_channels']} × {v['rotary_percent']} (--rotary-percent) = "
        f"{int(v['kv_channels'] * v['rotary_percent'])}, must be even; change --kv-channels or --num-attention-heads"
    )


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


def _vocabulary(v: Values, facts: Facts) -> str | None:
    # A vocabulary file will tell it, once such files can be read.
    if v["vocab_size"] is not None or v["vocab_file"] is not None:
        return None
    return "the vocabulary size is unknown; give --vocab-size, or --tokenizer-model with a folder that has a tokenizer.json"


def _padded_vocabulary(v: Values, facts: Facts) -> str | None:
    size, padded, tp = v["vocab_size"], v["padded_vocab_size"], v["tensor_model_parallel_size"]
    if size is None or (padded >= size and padded % tp == 0):
        return None
    enough = math.ceil(max(size, padded) / tp) * tp
    if padded < size:
        return (
            f"--padded-vocab-size {padded} is smaller than --vocab-size {size}; use {enough} or leave it out"
        )
    return (
        f"--padded-vocab-size {padded} is not divisible by --tensor-model-parallel-size {tp}; "
        f"use {enough} or leave it out"
    )


def _tokenizer(v: Values, facts: Facts) -> str | None:
    needs_a_path = v["tokenizer_type"] in ("HuggingFaceTokenizer", "HFTokenizer") and v["data_path"]
    if not needs_a_path or v["tokenizer_model"] is not None:
        return None
    return (
        f"--tokenizer-type {v['tokenizer_type']} needs --tokenizer-model, a folder that has a tokenizer.json"
    )


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


def _split(v: Values, facts: Facts) -> str | None:
    try:
        numbers = [float(p) for p in str(v["split"]).split(",")]
    except ValueError:
        numbers = []
    sound = 1 <= len(numbers) <= 3 and all(math.isfinite(n) and n >= 0 for n in numbers)
    if sound and numbers[0] > 0:
        return None
    return f"--split {v['split']} must be up to three numbers with a training share above 0, such as 969,30,1"


def _how_long(v: Values, facts: Facts) -> str | None:
    if v["train_iters"] is not None:
        return None
    if v["epochs"] is not None:
        return (
            f"how many steps --epochs {v['epochs']} are is known for synthetic samples (--dataset-size) only; "
            f"give --train-iters instead"
        )
    return "the length of the run is unknown; give --train-iters"


def _warmup(v: Values, facts: Facts) -> str | None:
    if v["lr_decay_iters"] is None or v["lr_warmup_iters"] < v["lr_decay_iters"]:
        return None
    return (
        f"--lr-warmup-iters {v['lr_warmup_iters']} must be smaller than the {v['lr_decay_iters']} steps of the decay "
        f"(--lr-decay-iters or --train-iters)"
    )


def _min_lr(v: Values, facts: Facts) -> str | None:
    if v["min_lr"] <= v["lr"]:
        return None
    return f"--min-lr {v['min_lr']} is above --lr {v['lr']}; lower the first or raise the second"


def _fresh(v: Values, facts: Facts) -> str | None:
    if not v["fresh"] or v["load"] == v["save"]:
        return None
    return f"--fresh starts anew, --load {v['load']} goes on from a checkpoint; leave one of them out"


RULES: tuple[Rule, ...] = (
    _world,
    _expected_world,
    _data_parallel,
    _processes_here,
    _meeting_point,
    _heads_per_rank,
    _groups,
    _groups_per_rank,
    _grouping,
    _head_width,
    _mlp_per_rank,
    _layers_per_stage,
    _sequence_per_rank,
    _experts,
    _rotary,
    _batch,
    _positions,
    _vocabulary,
    _padded_vocabulary,
    _tokenizer,
    _precision,
    _data,
    _blend,
    _split,
    _how_long,
    _warmup,
    _min_lr,
    _fresh,
)
