"""Needs of processes, checkpoints, logs, profiles and the training loop."""

from pentatron.config.needs.data import no_validation_data
from pentatron.config.needs.need import Settings, unless

SEVERAL_PROCESSES = unless(lambda s: s.facts.world_size > 1, "one process waits for nobody")


def own_port(s: Settings) -> str:
    """Several processes, whose rendezvous no launcher has chosen."""
    if s.facts.launcher:
        return f"{s.facts.launcher} has chosen the meeting point already"
    return _no_rendezvous(s)


def own_processes(s: Settings) -> str:
    """Processes that Pentatron starts, and so can start again."""
    if not s.facts.launcher:
        return ""
    return f"{s.facts.launcher} starts the processes, so it must start them again (torchrun: --max-restarts)"


def a_supervisor(s: Settings) -> str:
    """Processes that a launcher supervises."""
    if s.facts.world_size > 1 or s.max_restarts:
        return ""
    return "one process runs in place, and nobody watches it; --max-restarts N starts it under a launcher"


def open_rendezvous(s: Settings) -> str:
    """Processes of a launcher that has not chosen their rendezvous."""
    if s.facts.launcher and s.facts.has_rendezvous:
        return f"{s.facts.launcher} has said where to meet (MASTER_ADDR), which counts"
    if not s.facts.launcher and s.facts.world_size > 1:
        return "the processes started here meet on this machine; --master-port chooses the port"
    return _no_rendezvous(s)


def _no_rendezvous(s: Settings) -> str:
    return "one process has nobody to meet" if s.facts.world_size == 1 else ""


MEMORY_SAMPLES = unless(
    lambda s: s.monitor_memory_continuously, "memory is not sampled (--monitor-memory-continuously)"
)
A_DASHBOARD = unless(
    lambda s: s.tensorboard_dir is not None or s.wandb_project is not None,
    "neither --tensorboard-dir nor --wandb-project is given",
)
WANDB = unless(lambda s: s.wandb_project is not None, "nothing is sent without --wandb-project")
PROGRESS_FILE = unless(
    lambda s: s.log_progress, "it is written to progress.txt, which --log-progress asks for"
)
CHECKPOINTS = unless(
    lambda s: s.save_checkpoints,
    lambda s: (
        "nothing is saved (--no-save-checkpoints)"
        if s.given("save_checkpoints")
        else "nothing is saved without --save"
    ),
)
RETENTION = (
    CHECKPOINTS,
    unless(lambda s: s.keep_checkpoints is not None, "every checkpoint is kept (--keep-checkpoints none)"),
)
OWN_FORMAT = unless(
    lambda s: s.ckpt_format != "torch",
    "checkpoints of that kind are read; what this run saves is in our own format, which any layout loads",
)
LOADED = unless(lambda s: s.given("load"), "nothing is named to be loaded (--load)")


def evaluation(s: Settings) -> str:
    """Evaluations, on validation data."""
    if s.eval_iters == 0 or (s.eval_interval == 0 and not s.skip_train):
        return "there is no validation (--eval-interval or --eval-iters is 0)"
    return no_validation_data(s)


EXIT_SIGNAL_HANDLER = unless(
    lambda s: s.exit_signal_handler,
    "any signal saves and ends a run here; --exit-signal-handler makes this one end it with exit code 0",
)


def stop_at_nan(s: Settings) -> str:
    """Steps with NaN or inf stop the run, rather than being skipped."""
    if s.fp16 and not s.loss_scale:
        return "in fp16 such steps are how the loss scale is found: they are left out and counted"
    off = not s.check_for_nan_in_loss_and_grad
    return "such steps are left out (--no-check-for-nan-in-loss-and-grad)" if off else ""


def no_loss_scale_search(s: Settings) -> str:
    """A loss scale that is not searched for by overflows."""
    return stop_at_nan(s) if s.fp16 and not s.loss_scale else ""


def steps_within_the_run(s: Settings) -> str:
    """Steps to skip that the run reaches."""
    last, steps = s.train_iters, s.iterations_to_skip
    never = steps and last is not None and min(steps) > last
    return f"the run has {last} steps, so none of these is met" if never else ""


PROFILE = unless(lambda s: s.profile, "nothing is profiled (--profile)")
PROFILED_RANK = (
    PROFILE,
    unless(
        lambda s: min(s.profile_ranks, default=0) < s.facts.world_size,
        lambda s: (
            f"the last of the {s.facts.world_size} ranks is {s.facts.world_size - 1}, so none of these is there"
        ),
    ),
)


def profile_within_the_run(s: Settings) -> str:
    """A profile that begins before the last step."""
    last = s.train_iters
    late = s.profile and last is not None and s.profile_step_start >= last
    return f"the run ends with step {last}, before --profile-step-start" if late else ""


MANUAL_GC = unless(lambda s: s.manual_gc, "Python collects its garbage by itself (--manual-gc)")


def replicas_to_compare(s: Settings) -> str:
    """Several processes with copies of weights."""
    asked = s.check_weight_hash_across_dp_replicas_interval
    return "one process has nobody to compare with" if asked and s.facts.world_size == 1 else ""


MEMORY_HISTORY = unless(
    lambda s: s.record_memory_history, "no allocations are recorded (--record-memory-history)"
)
