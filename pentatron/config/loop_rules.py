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


LOOP_RULES: tuple[Rule, ...] = (_eval_batch,)


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


IDLE_OF_THE_LOOP: dict[str, Callable[[Draft, Facts], str]] = {
    **dict.fromkeys(("eval_global_batch_size", "eval_micro_batch_size"), _no_evaluation),
    "exit_signal": _signal_ends_it_anyway,
}
