"""Derives settings that are not given from others. `pentatron config` shows the reason of each derivation."""

import math
from pathlib import Path
from typing import Any

from pentatron.layout.schedules import FOLDED
from pentatron.layout.stages import parse_layout
from pentatron.settings.run_config import table
from pentatron.settings.schedule import batch_plan_or_none, derive_stepwise_batch
from pentatron.settings.settings import KEPT_PREFIX, Draft, is_inside, is_unset
from pentatron.text import divisors, join_choices

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
# A flag for one of these chooses a layout, so the parallel sizes of a preset are ignored.
_LAYOUT_FLAGS = (
    *_SIZES,
    "zero_stage",
    "num_distributed_optimizer_instances",
    "overlap_grad_reduce",
    "overlap_param_gather",
)
# Preferred widths of a head, and the least number of heads, so that eight tensor ranks can share them.
_HEAD_WIDTHS = (64, 32, 16, 8)
_MIN_HEADS = 8
# Defaults of Llama 3.1 and Megatron.
_LLAMA3_FACTOR = 8.0
_LLAMA3_LENGTH = 8192


def derive(draft: Draft) -> list[str]:
    """Derives all unset values except the length of the run. Returns the problems found."""
    _layout(draft)
    _processes(draft)
    problems = _attention(draft)
    _widths(draft)
    problems += _positions(draft)
    _experts(draft)
    _recompute(draft)
    problems += _batches(draft)
    return problems + _folders(draft)


def _layout(draft: Draft) -> None:
    """Derives parallel sizes, virtual stages and the pipeline schedule."""
    _fit_inherited_sizes(draft)
    _data_parallel(draft)
    _virtual_stages(draft)
    if draft.virtual_stages > 1 and not draft.given("pipeline_schedule"):
        draft.derive("there are virtual stages", pipeline_schedule="interleaved")


def _fit_inherited_sizes(draft: Draft) -> None:
    """Reduces the parallel sizes of a preset to fit the processes and the given settings.

    Given sizes are not changed.
    """
    inherited = [name for name in _SIZES if getattr(draft, name) > 1 and not draft.given(name)]
    if not inherited:
        return
    layout_flag = next((name for name in _LAYOUT_FLAGS if draft.given(name)), None)
    if layout_flag is not None:
        flag = table()[layout_flag].flag
        for name in inherited:
            draft.derive(
                f"{flag} is given, so the preset's {getattr(draft, name)} does not count", **{name: 1}
            )
        return
    tensor_sizes, pipeline_sizes = (
        divisors(getattr(draft, name)) if name in inherited else [getattr(draft, name)] for name in _SIZES
    )
    fitting = [(t * p, t, p) for t in tensor_sizes for p in pipeline_sizes if _fits(draft, t, p)]
    # If nothing fits, sizes of the preset become 1, and a rule reports the given sizes.
    _, tensor, pipeline = max(fitting, default=(0, tensor_sizes[0], pipeline_sizes[0]))
    for name, size in zip(_SIZES, (tensor, pipeline)):
        if getattr(draft, name) != size:
            draft.derive(f"{_reason(draft)}; the preset has {getattr(draft, name)}", **{name: size})


def _reason(draft: Draft) -> str:
    if draft.facts.world_size % draft.ranks_per_replica:
        return f"fits {draft.facts.world_size} process{'es' if draft.facts.world_size > 1 else ''}"
    return "fits the settings given"


def _fits(draft: Draft, tensor: int, pipeline: int) -> bool:
    """Whether these sizes divide the number of processes and the sizes of the model."""
    replicas, rest = divmod(draft.facts.world_size, tensor * pipeline * draft.context_parallel_size)
    if rest or draft.data_parallel_size not in (None, replicas):
        return False
    virtual = draft.virtual_stages
    if draft.num_layers < pipeline * virtual or (virtual > 1 and pipeline == 1):
        return False
    groups = draft.num_query_groups
    widths = (draft.num_attention_heads, draft.ffn_hidden_size, draft.padded_vocab_size)
    divisible = all(width is None or width % tensor == 0 for width in widths)
    return divisible and (groups is None or groups % tensor == 0 or tensor % groups == 0)


def _data_parallel(draft: Draft) -> None:
    if not is_unset(draft.data_parallel_size):
        return
    model = draft.ranks_per_replica
    draft.derive(
        f"{draft.facts.world_size} processes / (tp × pp × cp = {model})",
        data_parallel_size=max(1, draft.facts.world_size // model),
    )


def _virtual_stages(draft: Draft) -> None:
    """Derives the number of virtual stages from other settings. The rules check whether it fits."""
    if draft.virtual_pipeline_model_parallel_size is not None:
        return
    ranks, layers = draft.pipeline_model_parallel_size, draft.num_layers
    each, written = draft.num_layers_per_virtual_pipeline_stage, draft.pipeline_model_parallel_layout
    if each is not None:
        draft.derive(
            f"{layers} layers / ({ranks} ranks × {each} layers)",
            virtual_pipeline_model_parallel_size=max(1, layers // (ranks * each)),
        )
    elif written is not None:
        stages = _number_of_stages(written)
        if stages > ranks and stages % ranks == 0:
            draft.derive(
                f"{stages} stages written out / {ranks} ranks",
                virtual_pipeline_model_parallel_size=stages // ranks,
            )
    elif draft.pipeline_schedule in FOLDED and ranks > 1:
        kind = draft.pipeline_schedule
        draft.derive(f"{kind} has two stages on each rank", virtual_pipeline_model_parallel_size=2)


def _number_of_stages(written: str) -> int:
    try:
        return len(parse_layout(written))
    except ValueError:
        return 0


def _processes(draft: Draft) -> None:
    facts = draft.facts
    if draft.nproc_per_node != facts.local_processes and not draft.given("nproc_per_node"):
        reason = f"started by {facts.launcher}" if facts.launcher else "processes on this machine"
        draft.derive(reason, nproc_per_node=facts.local_processes)
    if is_unset(draft.max_restarts):
        several = facts.world_size > 1 and not facts.launcher
        reason = "several processes" if several else facts.launcher or "one process"
        draft.derive(reason, max_restarts=3 if several else 0)
    if is_unset(draft.threads_per_process):
        threads = max(1, facts.cores // max(1, facts.local_processes))
        draft.derive(f"{facts.cores} cores / {facts.local_processes} processes", threads_per_process=threads)


def _attention(draft: Draft) -> list[str]:
    hidden = draft.hidden_size
    # A preset of another width does not fix the number of heads.
    is_resized = draft.given("hidden_size") and not draft.given("num_attention_heads")
    if is_unset(draft.num_attention_heads):
        _heads(draft, "")
    elif is_resized and is_unset(draft.kv_channels) and hidden % draft.num_attention_heads:
        _heads(draft, f"; {draft.source('num_attention_heads')} has {draft.num_attention_heads}")
    heads = draft.num_attention_heads
    problems = []
    if is_unset(draft.kv_channels):
        if hidden % heads and draft.wrong.keys().isdisjoint(("hidden_size", "num_attention_heads")):
            problems = [
                f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}; "
                f"use {join_choices(divisors(hidden))} heads, or give --kv-channels"
            ]
        draft.derive(f"{hidden} hidden / {heads} heads", kv_channels=max(1, hidden // heads))
    _groups(draft)
    return problems


def _heads(draft: Draft, remark: str) -> None:
    """Derives the number of heads: the widest heads of which there are enough.

    The parallel sizes are not considered: the same flags must mean the same model in every layout.
    """
    hidden = draft.hidden_size
    widths = [w for w in _HEAD_WIDTHS if hidden % w == 0]
    preferred = [w for w in widths if hidden // w >= _MIN_HEADS]
    width = preferred[0] if preferred else widths[-1] if widths else hidden
    draft.derive(f"{hidden} hidden / {width} per head{remark}", num_attention_heads=max(1, hidden // width))


def _groups(draft: Draft) -> None:
    """Derives grouped-query attention and its number of key/value heads from each other."""
    heads, groups = draft.num_attention_heads, draft.num_query_groups
    if not draft.group_query_attention and groups is not None:
        if not draft.given("num_query_groups"):
            draft.derive("as many as heads", num_query_groups=heads)
        elif not draft.given("group_query_attention"):
            draft.derive("--num-query-groups is given", group_query_attention=True)
    elif groups is None and draft.group_query_attention:
        draft.derive("--group-query-attention alone means one, as in Megatron", num_query_groups=1)
    elif groups is None:
        draft.derive("as many as heads", num_query_groups=heads)
    elif heads % groups and not draft.given("num_query_groups"):
        fewer = max(d for d in divisors(heads) if d <= groups)
        draft.derive(f"a divisor of {heads} heads; the preset has {groups}", num_query_groups=fewer)


def _widths(draft: Draft) -> None:
    hidden = draft.hidden_size
    if is_unset(draft.ffn_hidden_size):
        if draft.gated_linear_unit:
            draft.derive("8/3 × hidden, in 64s", ffn_hidden_size=max(64, int(4 * hidden * 2 / 3 / 64) * 64))
        else:
            draft.derive("4 × hidden", ffn_hidden_size=4 * hidden)
    if is_unset(draft.max_position_embeddings):
        draft.derive("seq-length", max_position_embeddings=draft.seq_length)
    if is_unset(draft.vocab_size) and not is_unset(draft.padded_vocab_size):
        draft.derive("padded-vocab-size", vocab_size=draft.padded_vocab_size)
    if is_unset(draft.padded_vocab_size) and not is_unset(draft.vocab_size):
        multiple = draft.make_vocab_size_divisible_by * draft.tensor_model_parallel_size
        padded = math.ceil(draft.vocab_size / multiple) * multiple
        draft.derive(f"{draft.vocab_size} up to a multiple of {multiple}", padded_vocab_size=padded)


def _positions(draft: Draft) -> list[str]:
    """Derives the settings of rotary scaling, as Megatron's flags imply them.

    Returns the contradictions found.
    """
    problems = [*_yarn(draft), *_interpolation(draft)]
    if draft.rope_scaling_type == "llama3":
        if is_unset(draft.rope_scaling_factor):
            draft.derive("llama3, as in Megatron", rope_scaling_factor=_LLAMA3_FACTOR)
        if is_unset(draft.rope_scaling_original_max_position_embeddings):
            draft.derive("llama3", rope_scaling_original_max_position_embeddings=_LLAMA3_LENGTH)
    return problems


def _yarn(draft: Draft) -> list[str]:
    if draft.position_embedding_type != "yarn":
        return []
    draft.derive("yarn is rope with --rope-scaling-type yarn", position_embedding_type="rope")
    return _imply(draft, "rope_scaling_type", "yarn", "--position-embedding-type yarn")


def _interpolation(draft: Draft) -> list[str]:
    factor = draft.rotary_seq_len_interpolation_factor
    if factor is None or draft.position_embedding_type != "rope":
        return []
    words = f"--rotary-seq-len-interpolation-factor {factor}"
    problems = [
        *_imply(draft, "rope_scaling_type", "linear", words),
        *_imply(draft, "rope_scaling_factor", factor, words),
    ]
    # The alias is cleared, so that equal models have equal settings.
    draft.derive(f"{words} is --rope-scaling-type linear", rotary_seq_len_interpolation_factor=None)
    return problems


def _imply(draft: Draft, name: str, value: Any, words: str) -> list[str]:
    """Sets a setting to the value that the flag `words` implies.

    Returns a problem if another value is given.
    """
    written = getattr(draft, name)
    if written == value:
        return []
    if draft.given(name) and written is not None:
        flag = name.replace("_", "-")
        return [f"{words} means --{flag} {value}, but --{flag} {written} is given; leave one of them out"]
    draft.derive(words, **{name: value})
    return []


def _experts(draft: Draft) -> None:
    if draft.num_experts is None:
        return
    if is_unset(draft.moe_ffn_hidden_size):
        draft.derive("ffn-hidden-size", moe_ffn_hidden_size=draft.ffn_hidden_size)
    if is_unset(draft.expert_tensor_parallel_size):
        draft.derive("as dense layers", expert_tensor_parallel_size=draft.tensor_model_parallel_size)
    tensor = draft.tensor_model_parallel_size
    if tensor > 1 and not draft.sequence_parallel and not draft.given("sequence_parallel"):
        draft.derive(f"experts on {tensor} tensor ranks need it", sequence_parallel=True)


def _recompute(draft: Draft) -> None:
    kind, method = draft.recompute_granularity, draft.recompute_method
    if kind == "selective" and not draft.recompute_modules:
        draft.derive("as in Megatron", recompute_modules=("core_attn",))
    if kind != "full":
        return
    if method is None:
        draft.derive("--recompute-granularity full", recompute_method="uniform")
    if method != "block" and is_unset(draft.recompute_num_layers):
        draft.derive("every layer by itself", recompute_num_layers=1)


def _batches(draft: Draft) -> list[str]:
    """Derives micro and global batch size from the settings given. Returns the contradictions found."""
    problems = derive_stepwise_batch(draft)
    if problems:
        return problems
    if KEPT_PREFIX in draft.source("global_batch_size"):
        # --batch_size remains set beside the kept size: the next start compares it with its own flags.
        return _micro_and_global(draft, None)
    if draft.rank_batch_size is not None:
        explicit = [n for n in ("micro_batch_size", "global_batch_size") if draft.given(n)]
        if explicit and draft.given("rank_batch_size"):
            return [
                "--batch_size and --micro-batch-size/--global-batch-size set the same size; give one of them"
            ]
        if not explicit:
            return _batches_of_a_rank(draft, draft.rank_batch_size)
    accumulation, count = draft.gradient_accumulation_steps, draft.num_microbatches
    if accumulation is not None and count not in (None, accumulation):
        return [
            f"--gradient-accumulation-steps {accumulation} and --num-microbatches {count} both set how many "
            f"micro-batches a step has; give one of them"
        ]
    return _micro_and_global(draft, accumulation or count)


def _micro_and_global(draft: Draft, steps: int | None) -> list[str]:
    dp, micro, total = draft.data_parallel_size, draft.micro_batch_size, draft.global_batch_size
    if micro is None and total is None:
        micro = 1
        draft.derive("one sample at a time", micro_batch_size=micro)
    if total is None:
        reason = f"{micro} × {dp} ranks × {steps or 1} micro-batches"
        draft.derive(reason, global_batch_size=micro * dp * (steps or 1))
        return []
    if micro is None:
        return _micro_from_global(draft, total, dp, steps)
    if steps is not None and micro * dp * steps != total:
        return [
            f"--global-batch-size {total} ≠ {micro} (micro) × {dp} (data-parallel) × {steps} (micro-batches) = "
            f"{micro * dp * steps}; leave one of them out"
        ]
    common = _common_divisor(draft, total)
    if common % (micro * dp) and common % dp == 0 and not draft.given("micro_batch_size"):
        fewer = max(d for d in divisors(common // dp) if d <= micro)
        draft.derive(f"a divisor of {common} / {dp} ranks; the preset has {micro}", micro_batch_size=fewer)
    return []


def _common_divisor(draft: Draft, total: int) -> int:
    """Returns the greatest common divisor of all batch sizes of the ramp-up."""
    plan = batch_plan_or_none(draft)
    return total if plan is None else plan.common_divisor


def _micro_from_global(draft: Draft, total: int, dp: int, steps: int | None) -> list[str]:
    ranks, common = draft.pipeline_model_parallel_size, _common_divisor(draft, total)
    if steps is None and ranks > 1 and common % dp == 0:
        # A pipeline needs at least as many micro-batches as ranks to be filled.
        micro = max((d for d in divisors(common // dp) if total // dp // d >= ranks), default=1)
        draft.derive(
            f"{common} / {dp} ranks, cut for {ranks} pipeline ranks at least", micro_batch_size=micro
        )
        return []
    if steps is None and common < total and common % dp == 0:
        draft.derive(f"{common}, in every batch size, / {dp} ranks", micro_batch_size=common // dp)
        return []
    steps = steps or 1
    micro, rest = divmod(total, dp * steps)
    if rest:
        return [
            f"--global-batch-size {total} cannot be divided by {dp} data-parallel ranks × {steps} micro-batches; "
            f"use a multiple of {dp * steps}"
        ]
    draft.derive(f"{total} / ({dp} ranks × {steps} micro-batches)", micro_batch_size=micro)
    return []


def _batches_of_a_rank(draft: Draft, batch: int) -> list[str]:
    dp = draft.data_parallel_size
    count, accumulation = draft.num_microbatches or 1, draft.gradient_accumulation_steps or 1
    if batch % count:
        return [
            f"--batch_size {batch} is not divisible by --num_microbatches {count}; "
            f"use {join_choices(divisors(batch))} micro-batches"
        ]
    draft.derive(f"{batch} per rank / {count} micro-batches", micro_batch_size=batch // count)
    draft.derive(
        f"{batch} per rank × {dp} ranks × {accumulation} accumulated",
        global_batch_size=batch * dp * accumulation,
    )
    return []


def _folders(draft: Draft) -> list[str]:
    """Derives the folders of the run and its checkpoints. Returns the problems found."""
    if draft.given("save") and not draft.given("save_checkpoints") and not draft.save_checkpoints:
        draft.derive("--save is given", save_checkpoints=True)
    if draft.given("save") and draft.save_checkpoints and not draft.given("run_dir"):
        # Two runs of one script may differ in --save alone; they must not share a log.
        draft.derive("beside the checkpoints of --save", run_dir=draft.save)
    if is_unset(draft.save):
        draft.derive("the run folder", save=f"{draft.run_dir}/checkpoints")
    if is_unset(draft.load):
        draft.derive("the run's own checkpoints", load=draft.save)
    for name, relative in draft.in_run_folder.items():
        path = Path(draft.run_dir) / relative
        was_absolute = Path(getattr(draft, name)).is_absolute()
        draft.assign(draft.source(name), **{name: str(path.absolute() if was_absolute else path)})
    return _moved_aside(draft)


def _moved_aside(draft: Draft) -> list[str]:
    """Returns a problem if `--fresh` would move the folder that is to be loaded."""
    if not draft.fresh or not draft.given("load") or is_unset(draft.load):
        return []
    load = draft.load
    inside = [folder for folder in (draft.run_dir, draft.save) if is_inside(load, folder)]
    if not inside:
        return []
    return [f"--fresh would move {inside[0]} aside, and --load {load} with it; leave one of them out"]
