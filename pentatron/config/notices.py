"""One line for every setting that was given but cannot change anything in this run."""

from collections.abc import Callable, Mapping
from typing import Any

from pentatron.config.data_notices import IDLE_OF_DATA
from pentatron.config.decided import Decisions
from pentatron.config.document_notices import IDLE_OF_DOCUMENTS
from pentatron.config.draft import Draft, Facts
from pentatron.config.flags import is_written
from pentatron.config.loop_rules import IDLE_OF_THE_LOOP
from pentatron.config.model_notices import IDLE_OF_THE_MODEL
from pentatron.config.precision_rules import IDLE_OF_PRECISION
from pentatron.config.run import RunConfig, table
from pentatron.config.schedule_notices import IDLE_OF_SCHEDULES
from pentatron.config.setting import Setting
from pentatron.config.sft_rules import IDLE_OF_SFT
from pentatron.layout.schedules import takes_groups

# Why a setting has nothing to act on, or nothing at all where it acts.
Reason = Callable[[Draft, Facts], str]


def notices_for(draft: Draft, facts: Facts, decisions: Decisions) -> list[str]:
    """`decisions`: as far as the settings alone decide them."""
    found = []
    for name, item in table().items():
        if not _asked_for(item, draft[name], draft.source(name)):
            continue
        reason = item.notice if draft[name] != item.default else ""
        reason = reason or decisions.idle.get(name, "")
        reason = reason or (IDLE[name](draft, facts) if name in IDLE else "")
        if reason:
            found.append(f"{item.written(draft[name], draft.source(name))}: {reason}")
    if draft["attention_dropout"] > 0:
        found.append(
            f"--attention-dropout {draft['attention_dropout']}: which attention weights are dropped depends on the "
            f"layout, so other parallel sizes give other losses (hidden dropout does not depend on it)"
        )
    found += [*_every_layer_recomputed(draft), *_idle_pipeline(draft), *_no_bias_in_experts(draft)]
    found += _without_checkpoints(draft)
    return [*found, *decisions.remarks]


def _without_checkpoints(draft: Draft) -> list[str]:
    if draft["save_checkpoints"] or draft.given("save_checkpoints") or draft["skip_train"]:
        return []
    return ["no checkpoint is written, as --save is not given"]


def _no_bias_in_experts(draft: Draft) -> list[str]:
    if draft["num_experts"] is None or not (draft["add_bias_linear"] or draft["add_mlp_bias"]):
        return []
    if not draft["add_bias_linear"]:
        return [
            "experts have no bias here; --add-mlp-bias acts on MLPs without experts and on shared experts"
        ]
    return [
        "experts have no bias here; the other linear layers have one (--disable-bias-linear takes it away there too)"
    ]


def _every_layer_recomputed(draft: Draft) -> list[str]:
    """Megatron refuses full recompute without a method; here there is a usual one, and it is named."""
    if draft["recompute_granularity"] != "full" or draft.given("recompute_method"):
        return []
    written = table()["recompute_granularity"].written("full", draft.source("recompute_granularity"))
    each = draft["recompute_num_layers"]
    return [
        f"{written}: no --recompute-method is given, so uniform is used: every {each} layers are recomputed together"
        if each > 1
        else f"{written}: no --recompute-method is given, so uniform is used: every layer is recomputed by itself"
    ]


def _idle_pipeline(draft: Draft) -> list[str]:
    """A pipeline with few micro-batches waits most of the time, which is rarely what anyone wants."""
    ranks, virtual = draft["pipeline_model_parallel_size"], draft["virtual_pipeline_model_parallel_size"] or 1
    total, micro, copies = (draft[n] for n in ("global_batch_size", "micro_batch_size", "data_parallel_size"))
    if ranks == 1 or not total or not micro or total % (micro * copies) or total >= ranks * micro * copies:
        return []
    count = total // (micro * copies)
    # The usual estimate: every rank waits while the others fill and drain the pipeline.
    waiting = (ranks - 1) / (ranks - 1 + count * virtual)
    batches = "1 micro-batch a step leaves" if count == 1 else f"{count} micro-batches a step leave"
    return [
        f"{batches} {ranks} pipeline ranks waiting {waiting:.0%} of the time; a smaller --micro-batch-size or a larger "
        f"--global-batch-size gives more micro-batches"
    ]


def _asked_for(item: Setting, value: Any, source: str) -> bool:
    """A file may list every setting there is; only a flag, or a value of its own, is a wish."""
    return source.startswith("flag") or (is_written(source) and value != item.default)


def notices_of_decisions(config: RunConfig, sources: Mapping[str, str], decisions: Decisions) -> list[str]:
    """One line for every setting that was given and that these decisions leave nothing to change."""
    found = []
    for name, item in table().items():
        value, source = getattr(getattr(config, item.section), name), sources[name]
        reason = decisions.idle.get(name)
        if reason and _asked_for(item, value, source):
            found.append(f"{item.written(value, source)}: {reason}")
    return [*found, *decisions.remarks]


def _no_tensor_axis(draft: Draft, facts: Facts) -> str:
    if not draft["sequence_parallel"] or draft["tensor_model_parallel_size"] > 1:
        return ""
    return "there is no tensor axis to split over (--tensor-model-parallel-size 1), so this changes nothing"


def _one_stage(draft: Draft, facts: Facts) -> str:
    one = draft["pipeline_model_parallel_size"] == 1
    return "there is one pipeline stage, so no schedule is needed" if one else ""


def _nothing_divided(draft: Draft, facts: Facts) -> str:
    one = draft["pipeline_model_parallel_size"] == 1 and draft["virtual_pipeline_model_parallel_size"] in (
        None,
        1,
    )
    return "there is one pipeline stage, which holds all layers" if one else ""


def _not_interleaved(draft: Draft, facts: Facts) -> str:
    """One rank needs no schedule; with several, only virtual stages take micro-batches in groups."""
    if _one_stage(draft, facts):
        return _one_stage(draft, facts)
    kind, virtual = draft["pipeline_schedule"], draft["virtual_pipeline_model_parallel_size"] or 1
    return (
        ""
        if takes_groups(kind, virtual)
        else f"{kind} does not take micro-batches in groups, only interleaved does"
    )


def _whole_sequences(draft: Draft, facts: Facts) -> str:
    whole = draft["context_parallel_size"] == 1
    return "sequences are not split (--context-parallel-size 1), so nothing is exchanged" if whole else ""


def _no_experts(draft: Draft, facts: Facts) -> str:
    return "there are no experts (--num-experts), so this changes nothing" if not draft["num_experts"] else ""


def _fixed_bias(draft: Draft, facts: Facts) -> str:
    none = not draft["moe_router_enable_expert_bias"]
    return _no_experts(draft, facts) or (
        "there is no bias to move (--moe-router-enable-expert-bias)" if none else ""
    )


def _no_softmax(draft: Draft, facts: Facts) -> str:
    other = draft["moe_router_pre_softmax"] and draft["moe_router_score_function"] != "softmax"
    return _no_experts(draft, facts) or (
        "scores are sigmoid, so there is no softmax to place" if other else ""
    )


def _weighs_nothing(draft: Draft, facts: Facts) -> str:
    idle = draft["moe_router_load_balancing_type"] != ("none",) and not any(draft["moe_aux_loss_coeff"])
    return _no_experts(draft, facts) or (
        "its weight is 0 (--moe-aux-loss-coeff), so it balances nothing" if idle else ""
    )


def _nothing_to_weigh(draft: Draft, facts: Facts) -> str:
    idle = draft["moe_router_load_balancing_type"] == ("none",) and any(draft["moe_aux_loss_coeff"])
    return _no_experts(draft, facts) or (
        "no loss balances the experts (--moe-router-load-balancing-type none)" if idle else ""
    )


def _padding_is_given(draft: Draft, facts: Facts) -> str:
    size = draft["padded_vocab_size"]
    return (
        f"--padded-vocab-size {size} is given and used as it is" if draft.given("padded_vocab_size") else ""
    )


def _one_replica(draft: Draft) -> bool:
    return bool(draft["data_parallel_size"] * draft["context_parallel_size"] == 1)


def _one_copy(draft: Draft, facts: Facts) -> str:
    return "one data-parallel rank has nothing to reduce" if _one_replica(draft) else ""


def _bucketless(draft: Draft, facts: Facts) -> str:
    in_shards = draft["zero_stage"] == 3 and not _one_replica(draft)
    return "ZeRO 3 sums gradients layer by layer, not in buckets" if in_shards else _one_copy(draft, facts)


def _instances(draft: Draft, facts: Facts) -> str:
    count, stage = draft["num_distributed_optimizer_instances"], draft["zero_stage"]
    if count == 1:
        return ""
    if stage == 0:
        return "nothing is divided between data-parallel ranks (--zero-stage 0), so there are no groups to divide it in"
    if stage < 3:
        return f"ZeRO {stage} divides between all data-parallel ranks; groups that each hold everything are for ZeRO 3"
    if draft["data_parallel_size"] * draft["context_parallel_size"] == count:
        return "every data-parallel rank is a group by itself, so each keeps everything"
    return ""


def _nobody_to_share_with(draft: Draft, facts: Facts) -> str:
    # Experts may have copies on tensor ranks, which then share those.
    of_experts = draft["num_experts"] is not None and draft["tensor_model_parallel_size"] > 1
    alone = draft["zero_stage"] > 0 and _one_replica(draft) and not of_experts
    return "one data-parallel rank has nobody to share with, so it keeps everything" if alone else ""


def _alone(draft: Draft, facts: Facts) -> str:
    return "one process waits for nobody" if facts.world_size == 1 else ""


def _port(draft: Draft, facts: Facts) -> str:
    if facts.launcher:
        return f"{facts.launcher} has chosen the meeting point already"
    return _no_meeting(facts)


def _restarts(draft: Draft, facts: Facts) -> str:
    if not facts.launcher:
        return ""
    return f"{facts.launcher} starts the processes, so it must start them again (torchrun: --max-restarts)"


def _unwatched(draft: Draft, facts: Facts) -> str:
    if facts.world_size > 1 or draft["max_restarts"]:
        return ""
    return "one process runs in place, and nobody watches it; --max-restarts N starts it under a launcher"


def _meeting_point(draft: Draft, facts: Facts) -> str:
    if facts.launcher and facts.has_meeting_point:
        return f"{facts.launcher} has said where to meet (MASTER_ADDR), which counts"
    if not facts.launcher and facts.world_size > 1:
        return "the processes started here meet on this machine; --master-port chooses the port"
    return _no_meeting(facts)


def _no_meeting(facts: Facts) -> str:
    return "one process has nobody to meet" if facts.world_size == 1 else ""


def _not_monitored(draft: Draft, facts: Facts) -> str:
    return (
        "memory is not sampled (--monitor-memory-continuously)"
        if not draft["monitor_memory_continuously"]
        else ""
    )


def _nobody_draws(draft: Draft, facts: Facts) -> str:
    none = draft["tensorboard_dir"] is None and draft["wandb_project"] is None
    return "neither --tensorboard-dir nor --wandb-project is given" if none else ""


def _no_wandb(draft: Draft, facts: Facts) -> str:
    return "nothing is sent without --wandb-project" if draft["wandb_project"] is None else ""


def _nothing_saved(draft: Draft, facts: Facts) -> str:
    if draft["save_checkpoints"]:
        return ""
    return (
        "nothing is saved (--no-save-checkpoints)"
        if draft.given("save_checkpoints")
        else "nothing is saved without --save"
    )


def _read_only(draft: Draft, facts: Facts) -> str:
    if draft["ckpt_format"] != "torch":
        return ""
    return (
        "checkpoints of that kind are read; what this run saves is in our own format, which any layout loads"
    )


def _all_are_kept(draft: Draft, facts: Facts) -> str:
    everything = (
        "every checkpoint is kept (--keep-checkpoints none)" if draft["keep_checkpoints"] is None else ""
    )
    return _nothing_saved(draft, facts) or everything


def _no_progress_file(draft: Draft, facts: Facts) -> str:
    return "" if draft["log_progress"] else "it is written to progress.txt, which --log-progress asks for"


def _nothing_recomputed(draft: Draft, facts: Facts) -> str:
    off = draft["recompute_granularity"] is None
    return "nothing is recomputed without --recompute-granularity" if off else ""


def _modules_not_recomputed(draft: Draft, facts: Facts) -> str:
    if draft["recompute_granularity"] == "full":
        return "full recompute covers whole layers, so no modules are chosen"
    modules = draft["recompute_modules"]
    if not modules or draft["recompute_granularity"] is None:
        return _nothing_recomputed(draft, facts) if modules else ""
    absent = [name for name in ("moe", "moe_act", "shared_experts") if name in modules]
    if not absent or draft["num_experts"] is not None:
        return ""
    return f"there are no experts (--num-experts), so {', '.join(absent)} cannot run again"


IDLE: dict[str, Reason] = {
    **dict.fromkeys((n for n, s in table().items() if s.section == "moe"), _no_experts),
    "num_experts": lambda draft, facts: "",
    "expert_tensor_parallel_size": _no_experts,
    "moe_router_bias_update_rate": _fixed_bias,
    "moe_router_pre_softmax": _no_softmax,
    "moe_router_load_balancing_type": _weighs_nothing,
    "moe_aux_loss_coeff": _nothing_to_weigh,
    "sequence_parallel": _no_tensor_axis,
    "pipeline_schedule": _one_stage,
    "microbatch_group_size_per_virtual_pipeline_stage": _not_interleaved,
    **dict.fromkeys(
        (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "pipeline_model_parallel_layout",
        ),
        _nothing_divided,
    ),
    "zero_stage": _nobody_to_share_with,
    "cp_comm_type": _whole_sequences,
    **IDLE_OF_THE_MODEL,
    **IDLE_OF_DOCUMENTS,
    **IDLE_OF_SFT,
    "make_vocab_size_divisible_by": _padding_is_given,
    **IDLE_OF_DATA,
    **IDLE_OF_THE_LOOP,
    **dict.fromkeys(("save", "save_interval", "keep_checkpoints", "async_save"), _nothing_saved),
    "save_retain_interval": _all_are_kept,
    "ckpt_format": _read_only,
    **IDLE_OF_SCHEDULES,
    "ddp_bucket_size": _bucketless,
    "num_distributed_optimizer_instances": _instances,
    "distributed_timeout_minutes": _alone,
    "distributed_timeout_seconds_after_init": _alone,
    "master_port": _port,
    "max_restarts": _restarts,
    "heartbeat_timeout": _unwatched,
    "init_method": _meeting_point,
    **dict.fromkeys(("recompute_method", "recompute_num_layers"), _nothing_recomputed),
    "recompute_modules": _modules_not_recomputed,
    **IDLE_OF_PRECISION,
    "memory_monitor_interval": _not_monitored,
    **dict.fromkeys(
        (
            "tensorboard_log_interval",
            "log_timers_to_tensorboard",
            "log_memory_to_tensorboard",
            "log_world_size_to_tensorboard",
            "log_validation_ppl_to_tensorboard",
        ),
        _nobody_draws,
    ),
    **dict.fromkeys(("wandb_exp_name", "wandb_entity", "wandb_save_dir"), _no_wandb),
    "job_id": _no_progress_file,
}
