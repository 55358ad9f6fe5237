"""Derives settings that are not given from others. `pentatron config` shows the reason of each derivation."""

import itertools
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from pentatron.layout.schedules import FOLDED
from pentatron.layout.stages import parse_layout
from pentatron.settings.declaration import flag_of
from pentatron.settings.run_length import batch_plan_or_none, derive_stepwise_batch
from pentatron.settings.settings import KEPT_PREFIX, Draft, is_inside, is_unset
from pentatron.text import divisors, join_choices, plural

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
# A flag for one of these chooses a layout, so the parallel sizes of a preset are ignored.
_LAYOUT_FLAGS = (
    *(*_SIZES, "zero_stage", "num_distributed_optimizer_instances"),
    *("overlap_grad_reduce", "overlap_param_gather"),
)
# Preferred widths of a head, and the least number of heads, so that eight tensor ranks can share them.
_HEAD_WIDTHS = (64, 32, 16, 8)
_MIN_HEADS = 8
# Defaults of Llama 3.1 and Megatron.
_LLAMA3_FACTOR = 8.0
_LLAMA3_LENGTH = 8192


def derive(draft: Draft) -> None:
    """Derives all unset values except the length of the run. Problems are added to those of the draft."""
    _fit_inherited_sizes(draft)
    processes, model = draft.facts.world_size, draft.ranks_per_replica
    reason = f"{processes} processes / (tp × pp × cp = {model})"
    draft.fill(reason, data_parallel_size=max(1, processes // model))
    _virtual_stages(draft)
    if draft.virtual_stages > 1 and not draft.given("pipeline_schedule"):
        draft.derive("there are virtual stages", pipeline_schedule="interleaved")
    steps = (_processes, _attention, _groups, _widths, _positions, _experts, _recompute, _batches, _folders)
    for step in steps:
        step(draft)


def _fit_inherited_sizes(draft: Draft) -> None:
    """Reduces the parallel sizes of a preset to fit the processes and the given settings.

    Given sizes are not changed.
    """
    inherited = {name: getattr(draft, name) for name in _SIZES if not draft.given(name)}
    layout_flag = next((name for name in _LAYOUT_FLAGS if draft.given(name)), None)
    if layout_flag is not None:
        for name, size in inherited.items():
            if size > 1:
                reason = f"{flag_of(layout_flag)} is given, so the preset's {size} is ignored"
                draft.derive(reason, **{name: 1})
        return
    choices = [divisors(inherited[n]) if n in inherited else [getattr(draft, n)] for n in _SIZES]
    fitting = [sizes for sizes in itertools.product(*choices) if _fits(draft, *sizes)]
    # If nothing fits, sizes of the preset become 1, and a rule reports the given sizes.
    best = max(fitting, key=lambda sizes: (math.prod(sizes), sizes), default=[each[0] for each in choices])
    for name, size in zip(_SIZES, best):
        if getattr(draft, name) != size:
            processes = draft.facts.world_size
            misfits = processes % draft.ranks_per_replica
            fits = f"{processes} {plural(processes, 'process')}" if misfits else "the given settings"
            draft.derive(f"fits {fits}; the preset has {getattr(draft, name)}", **{name: size})


def _fits(draft: Draft, tensor: int, pipeline: int) -> bool:
    """Whether these sizes divide the number of processes and the sizes of the model."""
    replicas, rest = divmod(draft.facts.world_size, tensor * pipeline * draft.context_parallel_size)
    virtual = draft.virtual_stages
    if rest or draft.data_parallel_size not in (None, replicas) or (virtual > 1 and pipeline == 1):
        return False
    groups = draft.num_query_groups
    widths = (draft.num_attention_heads, draft.ffn_hidden_size, draft.padded_vocab_size)
    divisible = all(width is None or width % tensor == 0 for width in widths)
    divisible = divisible and (groups is None or groups % tensor == 0 or tensor % groups == 0)
    return divisible and draft.num_layers >= pipeline * virtual


def _virtual_stages(draft: Draft) -> None:
    """Derives the number of virtual stages from other settings. The rules check whether it fits."""
    if draft.virtual_pipeline_model_parallel_size is not None:
        return
    ranks, layers = draft.pipeline_model_parallel_size, draft.num_layers
    each, written = draft.num_layers_per_virtual_pipeline_stage, draft.pipeline_model_parallel_layout
    count, reason = 0, ""
    if each is not None:
        count = max(1, layers // (ranks * each))
        reason = f"{layers} layers / ({ranks} ranks × {each} layers)"
    elif written is not None:
        # A rule reports an invalid layout.
        with suppress(ValueError):
            stages = len(parse_layout(written))
            count = stages // ranks if stages > ranks and stages % ranks == 0 else 0
            reason = f"{stages} stages in --pipeline-model-parallel-layout / {ranks} ranks"
    elif draft.pipeline_schedule in FOLDED and ranks > 1:
        count, reason = 2, f"{draft.pipeline_schedule} has two stages on each rank"
    if count:
        draft.derive(reason, virtual_pipeline_model_parallel_size=count)


def _processes(draft: Draft) -> None:
    facts = draft.facts
    if draft.nproc_per_node != facts.local_processes and not draft.given("nproc_per_node"):
        reason = f"started by {facts.launcher}" if facts.launcher else "processes on this machine"
        draft.derive(reason, nproc_per_node=facts.local_processes)
    several = facts.world_size > 1 and not facts.launcher
    reason = "several processes" if several else facts.launcher or "one process"
    draft.fill(reason, max_restarts=3 if several else 0)
    threads = max(1, facts.cores // max(1, facts.local_processes))
    draft.fill(f"{facts.cores} cores / {facts.local_processes} processes", threads_per_process=threads)


def _attention(draft: Draft) -> None:
    hidden = draft.hidden_size
    # A preset of another width does not fix the number of heads.
    is_resized = draft.given("hidden_size") and not draft.given("num_attention_heads")
    if is_unset(draft.num_attention_heads):
        _heads(draft, "")
    elif is_resized and is_unset(draft.kv_channels) and hidden % draft.num_attention_heads:
        _heads(draft, f"; {draft.source('num_attention_heads')} has {draft.num_attention_heads}")
    heads = draft.num_attention_heads
    are_valid = draft.wrong.keys().isdisjoint(("hidden_size", "num_attention_heads"))
    if is_unset(draft.kv_channels) and hidden % heads and are_valid:
        advice = f"use {join_choices(divisors(hidden))} heads, or give --kv-channels"
        indivisible = f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}"
        draft.problems.append(f"{indivisible}; {advice}")
    draft.fill(f"{hidden} hidden / {heads} heads", kv_channels=max(1, hidden // heads))


def _heads(draft: Draft, remark: str) -> None:
    """Derives the number of heads: the widest heads of which there are enough.

    The parallel sizes are not considered: the same flags must mean the same model in every layout.
    """
    hidden = draft.hidden_size
    widths = [w for w in _HEAD_WIDTHS if hidden % w == 0] or [hidden]
    width = next((w for w in widths if hidden // w >= _MIN_HEADS), widths[-1])
    draft.derive(f"{hidden} hidden / {width} per head{remark}", num_attention_heads=max(1, hidden // width))


def _groups(draft: Draft) -> None:
    """Derives grouped-query attention and its number of key/value heads from each other."""
    heads, groups, grouped = draft.num_attention_heads, draft.num_query_groups, draft.group_query_attention
    is_given = draft.given("num_query_groups")
    if not grouped and (groups is None or not is_given):
        draft.derive("as many as heads", num_query_groups=heads)
    elif not grouped and not draft.given("group_query_attention"):
        draft.derive("--num-query-groups is given", group_query_attention=True)
    elif grouped and groups is None:
        draft.derive("one key/value head: Megatron's default without --num-query-groups", num_query_groups=1)
    elif grouped and heads % groups and not is_given:
        fewer = max(d for d in divisors(heads) if d <= groups)
        draft.derive(f"a divisor of {heads} heads; the preset has {groups}", num_query_groups=fewer)


def _widths(draft: Draft) -> None:
    hidden = draft.hidden_size
    if draft.gated_linear_unit:
        width = max(64, int(4 * hidden * 2 / 3 / 64) * 64)
        draft.fill("8/3 × hidden, rounded down to a multiple of 64", ffn_hidden_size=width)
    draft.fill("4 × hidden", ffn_hidden_size=4 * hidden)
    draft.fill("seq-length", max_position_embeddings=draft.seq_length)
    draft.fill("padded-vocab-size", vocab_size=draft.padded_vocab_size)
    if not is_unset(draft.vocab_size):
        multiple = draft.make_vocab_size_divisible_by * draft.tensor_model_parallel_size
        padded = math.ceil(draft.vocab_size / multiple) * multiple
        draft.fill(f"{draft.vocab_size} rounded up to a multiple of {multiple}", padded_vocab_size=padded)


def _positions(draft: Draft) -> None:
    """Derives the settings of rotary scaling, as Megatron's flags imply them."""
    if draft.position_embedding_type == "yarn":
        draft.derive("yarn is rope with --rope-scaling-type yarn", position_embedding_type="rope")
        _imply(draft, "rope_scaling_type", "yarn", "--position-embedding-type yarn")
    factor = draft.rotary_seq_len_interpolation_factor
    if factor is not None and draft.position_embedding_type == "rope":
        words = f"--rotary-seq-len-interpolation-factor {factor}"
        _imply(draft, "rope_scaling_type", "linear", words)
        _imply(draft, "rope_scaling_factor", factor, words)
        # The alias is cleared, so that equal models have equal settings.
        draft.derive(f"{words} is --rope-scaling-type linear", rotary_seq_len_interpolation_factor=None)
    if draft.rope_scaling_type == "llama3":
        draft.fill("llama3, as in Megatron", rope_scaling_factor=_LLAMA3_FACTOR)
        draft.fill("llama3", rope_scaling_original_max_position_embeddings=_LLAMA3_LENGTH)


def _imply(draft: Draft, name: str, value: Any, words: str) -> None:
    """Sets a setting to the value that the flag `words` implies, unless another value is given."""
    written, flag = getattr(draft, name), flag_of(name)
    if draft.given(name) and written not in (None, value):
        both = f"{words} means {flag} {value}, but {flag} {written} is given"
        draft.problems.append(f"{both}; leave one of them out")
    elif written != value:
        draft.derive(words, **{name: value})


def _experts(draft: Draft) -> None:
    if draft.num_experts is None:
        return
    tensor = draft.tensor_model_parallel_size
    draft.fill("ffn-hidden-size", moe_ffn_hidden_size=draft.ffn_hidden_size)
    draft.fill("as dense layers", expert_tensor_parallel_size=tensor)
    if tensor > 1 and not draft.sequence_parallel and not draft.given("sequence_parallel"):
        draft.derive(f"experts on {tensor} tensor ranks need it", sequence_parallel=True)


def _recompute(draft: Draft) -> None:
    if draft.recompute_granularity == "selective" and not draft.recompute_modules:
        draft.derive("as in Megatron", recompute_modules=("core_attn",))
    if draft.recompute_granularity == "full":
        draft.fill("--recompute-granularity full", recompute_method="uniform")
        if draft.recompute_method != "block":
            draft.fill("one layer per chunk", recompute_num_layers=1)


def _batches(draft: Draft) -> None:
    """Derives micro and global batch size from the settings given."""
    if not derive_stepwise_batch(draft):
        return
    explicit = draft.given("micro_batch_size") or draft.given("global_batch_size")
    accumulation, count = draft.gradient_accumulation_steps, draft.num_microbatches
    if KEPT_PREFIX in draft.source("global_batch_size"):
        # --batch_size remains set beside the kept size: the next start compares it with its own flags.
        _micro_and_global(draft, None)
    elif draft.rank_batch_size is not None and not explicit:
        _batches_of_a_rank(draft, draft.rank_batch_size)
    elif draft.rank_batch_size is not None and draft.given("rank_batch_size"):
        both = "--batch_size and --micro-batch-size/--global-batch-size set the same size"
        draft.problems.append(f"{both}; give one of them")
    elif accumulation is not None and count not in (None, accumulation):
        both = f"--gradient-accumulation-steps {accumulation} and --num-microbatches {count}"
        draft.problems.append(f"{both} both set the number of micro-batches per step; give one of them")
    else:
        _micro_and_global(draft, accumulation or count)


def _micro_and_global(draft: Draft, steps: int | None) -> None:
    dp, total = draft.data_parallel_size, draft.global_batch_size
    if is_unset(total):
        draft.fill("one sample per micro-batch", micro_batch_size=1)
        micro = draft.micro_batch_size
        reason = f"{micro} × {dp} ranks × {steps or 1} micro-batches"
        draft.derive(reason, global_batch_size=micro * dp * (steps or 1))
        return
    plan, micro = batch_plan_or_none(draft), draft.micro_batch_size
    common = total if plan is None else plan.common_divisor
    if is_unset(micro):
        _micro_from_global(draft, common, steps)
    elif steps is not None and micro * dp * steps != total:
        product = f"{micro} (micro) × {dp} (data-parallel) × {steps} (micro-batches) = {micro * dp * steps}"
        draft.problems.append(f"--global-batch-size {total} ≠ {product}; leave one of them out")
    elif common % (micro * dp) and common % dp == 0 and not draft.given("micro_batch_size"):
        fewer = max(d for d in divisors(common // dp) if d <= micro)
        draft.derive(f"a divisor of {common} / {dp} ranks; the preset has {micro}", micro_batch_size=fewer)


def _micro_from_global(draft: Draft, common: int, steps: int | None) -> None:
    """Derives the micro-batch size. `common`: greatest common divisor of all batch sizes of the ramp-up."""
    dp, total, ranks = draft.data_parallel_size, draft.global_batch_size, draft.pipeline_model_parallel_size
    is_open, count = steps is None and common % dp == 0, steps or 1
    micro, rest = divmod(total, dp * count)
    reason = f"{total} / ({dp} ranks × {count} micro-batches)"
    if is_open and ranks > 1:
        # A pipeline needs at least as many micro-batches as ranks to be filled.
        micro = max((d for d in divisors(common // dp) if total // dp // d >= ranks), default=1)
        reason = f"{common} / {dp} ranks, split into at least {ranks} micro-batches"
    elif is_open and common < total:
        micro, reason = common // dp, f"{common} (divides every batch size) / {dp} ranks"
    elif rest:
        parts = f"{dp} data-parallel ranks × {count} micro-batches; use a multiple of {dp * count}"
        draft.problems.append(f"--global-batch-size {total} cannot be divided by {parts}")
        return
    draft.derive(reason, micro_batch_size=micro)


def _batches_of_a_rank(draft: Draft, batch: int) -> None:
    dp = draft.data_parallel_size
    count, accumulation = draft.num_microbatches or 1, draft.gradient_accumulation_steps or 1
    if batch % count:
        indivisible = f"--batch_size {batch} is not divisible by --num_microbatches {count}"
        draft.problems.append(f"{indivisible}; use {join_choices(divisors(batch))} micro-batches")
        return
    draft.derive(f"{batch} per rank / {count} micro-batches", micro_batch_size=batch // count)
    reason = f"{batch} per rank × {dp} ranks × {accumulation} accumulated"
    draft.derive(reason, global_batch_size=batch * dp * accumulation)


def _folders(draft: Draft) -> None:
    """Derives the folders of the run and its checkpoints."""
    if draft.given("save") and not draft.given("save_checkpoints") and not draft.save_checkpoints:
        draft.derive("--save is given", save_checkpoints=True)
    if draft.given("save") and draft.save_checkpoints and not draft.given("run_dir"):
        # Two runs of one script may differ in --save alone; they must not share a log.
        draft.derive("same folder as --save", run_dir=draft.save)
    draft.fill("the run folder", save=f"{draft.run_dir}/checkpoints")
    draft.fill("the run's own checkpoints", load=draft.save)
    for name, relative in draft.in_run_folder.items():
        path = Path(draft.run_dir) / relative
        was_absolute = Path(getattr(draft, name)).is_absolute()
        draft.assign(draft.source(name), **{name: str(path.absolute() if was_absolute else path)})
    folder = next((f for f in (draft.run_dir, draft.save) if is_inside(draft.load, f)), None)
    if folder and draft.fresh and draft.given("load"):
        moved = f"--fresh would move {folder} aside, and --load {draft.load} with it"
        draft.problems.append(f"{moved}; leave one of them out")
