"""Rules of what happens in the loop beside the steps, and why a setting of it has nothing to act on."""

from collections.abc import Callable

from pentatron.config.data_notices import no_validation_data
from pentatron.config.draft import Draft, Facts
from pentatron.config.layout_rules import Rule, Values
from pentatron.layout.batch import batch_problem


def _eval_batch(v: Values, facts: Facts) -> str | None:
    if v["eval_global_batch_size"] is None and v["eval_micro_batch_size"] is None:
        return None
    total = v["eval_global_batch_size"] or v["global_batch_size"]
    micro = v["eval_micro_batch_size"] or v["micro_batch_size"]
    if total is None or micro is None:
        return None
    problem = batch_problem(total, micro, v["data_parallel_size"])
    return problem and f"of --eval-global-batch-size and --eval-micro-batch-size: {problem}"


def _profiled_steps(v: Values, facts: Facts) -> str | None:
    if not v["profile"] or v["profile_step_start"] < v["profile_step_end"]:
        return None
    return (
        f"--profile-step-start {v['profile_step_start']} must be smaller than --profile-step-end {v['profile_step_end']}; the steps after the "
        f"first up to the second are profiled"
    )


def _retained_steps(v: Values, facts: Facts) -> str | None:
    every, interval = v["save_retain_interval"], v["save_interval"]
    if every is None or interval is None or every % interval == 0:
        return None
    return (
        f"--save-retain-interval {every} is not a multiple of --save-interval {interval}, so most of these steps would never be saved; "
        f"make it one, such as {-(-every // interval) * interval}"
    )


LOOP_RULES: tuple[Rule, ...] = (_eval_batch, _profiled_steps, _retained_steps)


def _no_evaluation(draft: Draft, facts: Facts) -> str:
    if draft["eval_iters"] == 0 or (draft["eval_interval"] == 0 and not draft["skip_train"]):
        return "there is no validation (--eval-interval or --eval-iters is 0)"
    return no_validation_data(draft)


def _signal_ends_it_anyway(draft: Draft, facts: Facts) -> str:
    if draft["exit_signal_handler"]:
        return ""
    return (
        "any signal saves and ends a run here; --exit-signal-handler makes this one end it with exit code 0"
    )


def _unchecked(draft: Draft, facts: Facts) -> str:
    if draft["fp16"] and not draft["loss_scale"]:
        return "in fp16 such steps are how the loss scale is found: they are left out and counted"
    off = not draft["check_for_nan_in_loss_and_grad"]
    return "such steps are left out (--no-check-for-nan-in-loss-and-grad)" if off else ""


def _nan_check(draft: Draft, facts: Facts) -> str:
    dynamic = draft["fp16"] and not draft["loss_scale"]
    return _unchecked(draft, facts) if dynamic else ""


def _beyond_the_end(draft: Draft, facts: Facts) -> str:
    last, steps = draft["train_iters"], draft["iterations_to_skip"]
    never = steps and last is not None and min(steps) > last
    return f"the run has {last} steps, so none of these is met" if never else ""


def _unprofiled(draft: Draft, facts: Facts) -> str:
    return "" if draft["profile"] else "nothing is profiled (--profile)"


def _profiles_nobody(draft: Draft, facts: Facts) -> str:
    nobody = min(draft["profile_ranks"], default=0) >= facts.world_size
    reason = f"the last of the {facts.world_size} ranks is {facts.world_size - 1}, so none of these is there"
    return _unprofiled(draft, facts) or (reason if nobody else "")


def _profile_beyond_the_end(draft: Draft, facts: Facts) -> str:
    last = draft["train_iters"]
    late = draft["profile"] and last is not None and draft["profile_step_start"] >= last
    return f"the run ends with step {last}, before --profile-step-start" if late else ""


def _automatic_gc(draft: Draft, facts: Facts) -> str:
    return "" if draft["manual_gc"] else "Python collects its garbage by itself (--manual-gc)"


def _no_copies(draft: Draft, facts: Facts) -> str:
    asked = draft["check_weight_hash_across_dp_replicas_interval"]
    return "one process has nobody to compare with" if asked and facts.world_size == 1 else ""


def _no_history(draft: Draft, facts: Facts) -> str:
    return "" if draft["record_memory_history"] else "no allocations are recorded (--record-memory-history)"


def _nothing_loaded(draft: Draft, facts: Facts) -> str:
    return "" if draft.given("load") else "nothing is named to be loaded (--load)"


IDLE_OF_THE_LOOP: dict[str, Callable[[Draft, Facts], str]] = {
    **dict.fromkeys(("eval_global_batch_size", "eval_micro_batch_size"), _no_evaluation),
    "exit_signal": _signal_ends_it_anyway,
    "check_for_nan_in_loss_and_grad": _nan_check,
    "rerun_mode": _unchecked,
    "iterations_to_skip": _beyond_the_end,
    **dict.fromkeys(("profile_step_start", "profile_step_end"), _unprofiled),
    "profile_ranks": _profiles_nobody,
    "profile": _profile_beyond_the_end,
    **dict.fromkeys(("manual_gc_interval", "manual_gc_eval"), _automatic_gc),
    "check_weight_hash_across_dp_replicas_interval": _no_copies,
    "memory_snapshot_path": _no_history,
    **dict.fromkeys(("ckpt_step", "exit_on_missing_checkpoint"), _nothing_loaded),
}
