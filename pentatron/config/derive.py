"""Values that follow from others. Each derivation records its reason, which `pentatron config` shows."""

import math
from pathlib import Path

from pentatron.config.derive_layout import derive_layout
from pentatron.config.derive_positions import derive_positions
from pentatron.config.derive_schedule import plan_so_far, settle_stepwise_batch
from pentatron.config.draft import Draft
from pentatron.config.settings import KEPT, unset
from pentatron.config.start import is_inside
from pentatron.layout.divisors import divisors, either

_HEAD_WIDTHS = (64, 32, 16, 8)
_ENOUGH_HEADS = 8


def derive(draft: Draft) -> list[str]:
    """Fills in the open values but the length of the run; returns the problems met on the way."""
    derive_layout(draft)
    _processes(draft)
    problems = _attention(draft)
    _widths(draft)
    problems += derive_positions(draft)
    _experts(draft)
    _recompute(draft)
    problems += _batches(draft)
    return problems + _folders(draft)


def _processes(draft: Draft) -> None:
    facts = draft.facts
    if draft.nproc_per_node != facts.local_processes and not draft.given("nproc_per_node"):
        reason = f"started by {facts.launcher}" if facts.launcher else "processes on this machine"
        draft.derive(reason, nproc_per_node=facts.local_processes)
    if unset(draft.max_restarts):
        several = facts.world_size > 1 and not facts.launcher
        reason = "several processes" if several else facts.launcher or "one process"
        draft.derive(reason, max_restarts=3 if several else 0)
    if unset(draft.threads_per_process):
        threads = max(1, facts.cores // max(1, facts.local_processes))
        draft.derive(f"{facts.cores} cores / {facts.local_processes} processes", threads_per_process=threads)


def _attention(draft: Draft) -> list[str]:
    hidden = draft.hidden_size
    if unset(draft.num_attention_heads):
        _heads(draft, "")
    elif _preset_heads_do_not_fit(draft):
        _heads(draft, f"; {draft.source('num_attention_heads')} has {draft.num_attention_heads}")
    heads = draft.num_attention_heads
    problems = []
    if unset(draft.kv_channels):
        if hidden % heads and draft.wrong.keys().isdisjoint(("hidden_size", "num_attention_heads")):
            problems = [
                f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}; "
                f"use {either(divisors(hidden))} heads, or give --kv-channels"
            ]
        draft.derive(f"{hidden} hidden / {heads} heads", kv_channels=max(1, hidden // heads))
    _groups(draft)
    return problems


def _preset_heads_do_not_fit(draft: Draft) -> bool:
    """Whoever changes the width of a preset should not have to work out its heads."""
    typed = draft.given("hidden_size") and not draft.given("num_attention_heads")
    return typed and unset(draft.kv_channels) and draft.hidden_size % draft.num_attention_heads != 0


def _heads(draft: Draft, remark: str) -> None:
    """Wide heads, but enough of them to be shared by eight ranks. The layout itself is not asked: the same words must
    mean the same model in every one."""
    hidden = draft.hidden_size
    fitting = [w for w in _HEAD_WIDTHS if hidden % w == 0]
    enough = [w for w in fitting if hidden // w >= _ENOUGH_HEADS]
    width = enough[0] if enough else fitting[-1] if fitting else hidden
    draft.derive(f"{hidden} hidden / {width} per head{remark}", num_attention_heads=max(1, hidden // width))


def _groups(draft: Draft) -> None:
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
    if unset(draft.ffn_hidden_size):
        if draft.gated_linear_unit:
            draft.derive("8/3 × hidden, in 64s", ffn_hidden_size=max(64, int(4 * hidden * 2 / 3 / 64) * 64))
        else:
            draft.derive("4 × hidden", ffn_hidden_size=4 * hidden)
    if unset(draft.max_position_embeddings):
        draft.derive("seq-length", max_position_embeddings=draft.seq_length)
    if unset(draft.vocab_size) and not unset(draft.padded_vocab_size):
        draft.derive("padded-vocab-size", vocab_size=draft.padded_vocab_size)
    if unset(draft.padded_vocab_size) and not unset(draft.vocab_size):
        multiple = draft.make_vocab_size_divisible_by * draft.tensor_model_parallel_size
        padded = math.ceil(draft.vocab_size / multiple) * multiple
        draft.derive(f"{draft.vocab_size} up to a multiple of {multiple}", padded_vocab_size=padded)


def _experts(draft: Draft) -> None:
    if draft.num_experts is None:
        return
    if unset(draft.moe_ffn_hidden_size):
        draft.derive("ffn-hidden-size", moe_ffn_hidden_size=draft.ffn_hidden_size)
    if unset(draft.expert_tensor_parallel_size):
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
    if method != "block" and unset(draft.recompute_num_layers):
        draft.derive("every layer by itself", recompute_num_layers=1)


def _batches(draft: Draft) -> list[str]:
    """Settles micro and global batch from whichever way the user chose to say it."""
    problems = settle_stepwise_batch(draft)
    if problems:
        return problems
    if KEPT in draft.source("global_batch_size"):
        # What a rank was to do is recorded all the same: the next start compares it with what it is told.
        return _micro_and_global(draft, None)
    if draft.rank_batch_size is not None:
        explicit = [n for n in ("micro_batch_size", "global_batch_size") if draft.given(n)]
        if explicit and draft.given("rank_batch_size"):
            return [
                "--batch_size and --micro-batch-size/--global-batch-size say the same thing twice; give one of them"
            ]
        if not explicit:
            return _batches_of_a_rank(draft, draft.rank_batch_size)
    accumulated, cuts = draft.gradient_accumulation_steps, draft.num_microbatches
    if accumulated is not None and cuts not in (None, accumulated):
        return [
            f"--gradient-accumulation-steps {accumulated} and --num-microbatches {cuts} both say how many "
            f"micro-batches a step has; give one of them"
        ]
    return _micro_and_global(draft, accumulated or cuts)


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
    common = _in_every_batch(draft, total)
    if common % (micro * dp) and common % dp == 0 and not draft.given("micro_batch_size"):
        fewer = max(d for d in divisors(common // dp) if d <= micro)
        draft.derive(f"a divisor of {common} / {dp} ranks; the preset has {micro}", micro_batch_size=fewer)
    return []


def _in_every_batch(draft: Draft, total: int) -> int:
    """What every size is a multiple of that the batch has on its way to `total`."""
    plan = plan_so_far(draft)
    return total if plan is None else plan.common_divisor


def _micro_from_global(draft: Draft, total: int, dp: int, steps: int | None) -> list[str]:
    ranks, common = draft.pipeline_model_parallel_size, _in_every_batch(draft, total)
    if steps is None and ranks > 1 and common % dp == 0:
        # A pipeline works on several micro-batches at a time.
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
    cuts, accumulation = draft.num_microbatches or 1, draft.gradient_accumulation_steps or 1
    if batch % cuts:
        return [
            f"--batch_size {batch} is not divisible by --num_microbatches {cuts}; "
            f"use {either(divisors(batch))} micro-batches"
        ]
    draft.derive(f"{batch} per rank / {cuts} micro-batches", micro_batch_size=batch // cuts)
    draft.derive(
        f"{batch} per rank × {dp} ranks × {accumulation} accumulated",
        global_batch_size=batch * dp * accumulation,
    )
    return []


def _folders(draft: Draft) -> list[str]:
    if draft.given("save") and not draft.given("save_checkpoints") and not draft.save_checkpoints:
        draft.derive("--save is given", save_checkpoints=True)
    if draft.given("save") and draft.save_checkpoints and not draft.given("run_dir"):
        # Two runs of one script are told apart by this alone; their logs must not run into each other.
        draft.derive("beside the checkpoints of --save", run_dir=draft.save)
    if unset(draft.save):
        draft.derive("the run folder", save=f"{draft.run_dir}/checkpoints")
    if unset(draft.load):
        draft.derive("the run's own checkpoints", load=draft.save)
    for name, rest in draft.in_run_folder.items():
        place = Path(draft.run_dir) / rest
        same_kind = place.absolute() if Path(getattr(draft, name)).is_absolute() else place
        draft.assign(draft.source(name), **{name: str(same_kind)})
    return _moved_aside(draft)


def _moved_aside(draft: Draft) -> list[str]:
    """`--fresh` moves the run's folders away; what is to be loaded must not be in them."""
    if not draft.fresh or not draft.given("load") or unset(draft.load):
        return []
    load, places = draft.load, [getattr(draft, name) for name in ("run_dir", "save")]
    inside = [place for place in places if is_inside(load, place)]
    if not inside:
        return []
    return [f"--fresh would move {inside[0]} aside, and --load {load} with it; leave one of them out"]
