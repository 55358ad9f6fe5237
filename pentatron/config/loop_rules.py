"""Rules about evaluation, profiles and retained checkpoints."""

from pentatron.config.layout_rules import Rule
from pentatron.config.settings import Settings
from pentatron.layout.batch import batch_problem


def _eval_batch(s: Settings) -> str | None:
    if s.eval_global_batch_size is None and s.eval_micro_batch_size is None:
        return None
    total = s.eval_global_batch_size or s.global_batch_size
    micro = s.eval_micro_batch_size or s.micro_batch_size
    if total is None or micro is None:
        return None
    problem = batch_problem(total, micro, s.data_parallel_size)
    return problem and f"of --eval-global-batch-size and --eval-micro-batch-size: {problem}"


def _profiled_steps(s: Settings) -> str | None:
    if not s.profile or s.profile_step_start < s.profile_step_end:
        return None
    return (
        f"--profile-step-start {s.profile_step_start} must be smaller than --profile-step-end {s.profile_step_end}; the steps after the "
        f"first up to the second are profiled"
    )


def _retained_steps(s: Settings) -> str | None:
    every, interval = s.save_retain_interval, s.save_interval
    if every is None or interval is None or every % interval == 0:
        return None
    return (
        f"--save-retain-interval {every} is not a multiple of --save-interval {interval}, so most of these steps would never be saved; "
        f"make it one, such as {-(-every // interval) * interval}"
    )


LOOP_RULES: tuple[Rule, ...] = (_eval_batch, _profiled_steps, _retained_steps)
