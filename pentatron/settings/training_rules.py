"""Rules of evaluation, profiles, fine-tuning on conversations, the length of a run and its schedules."""

import datetime
from collections.abc import Sequence

from pentatron.errors import UserError
from pentatron.layout.batch import BatchSizeSchedule, batch_size_problem
from pentatron.settings.data_paths import is_counted_in_run, training_files_flag, why_no_epochs
from pentatron.settings.declaration import flag_of
from pentatron.settings.layout_rules import Rule, error_of, refuse_if
from pentatron.settings.run_length import ScheduleLengths, batch_plan_of, schedule_lengths_of
from pentatron.settings.settings import Settings, is_unset

# --- evaluation, profiles and retained checkpoints ---


def _eval_batch(s: Settings) -> str | None:
    total = s.eval_global_batch_size or s.global_batch_size
    micro = s.eval_micro_batch_size or s.micro_batch_size
    is_given = s.eval_global_batch_size is not None or s.eval_micro_batch_size is not None
    if not is_given or total is None or micro is None:
        return None
    problem = batch_size_problem(total, micro, s.data_parallel_size)
    return problem and f"in evaluation (--eval-global-batch-size, --eval-micro-batch-size): {problem}"


def _retained_steps(s: Settings) -> str | None:
    every, interval = s.save_retain_interval, s.save_interval
    if every is None or interval is None or every % interval == 0:
        return None
    multiple, never = -(-every // interval) * interval, "most of these steps would never be saved"
    error = f"--save-retain-interval {every} is not a multiple of --save-interval {interval}, so {never}"
    return f"{error}; use a multiple, such as {multiple}"


LOOP_RULES: dict[str, Rule] = {
    "eval_batch": _eval_batch,
    "profiled_steps": refuse_if(
        lambda s: s.profile and s.profile_step_start >= s.profile_step_end,
        "--profile-step-start {s.profile_step_start} must be smaller than --profile-step-end {s.profile_step_end}; "
        "the steps after the former up to the latter are profiled",
    ),
    "retained_steps": _retained_steps,
}


# --- fine-tuning on conversations (SFT) ---


_JSON = (".jsonl", ".json", ".ndjson")


def is_weight(word: str) -> bool:
    """Whether a word is a weight of a blend."""
    return word.replace(".", "", 1).isdecimal()


def first_text_file(words: Sequence[str]) -> str | None:
    """Returns the first word that names a text file rather than tokenized data, or None."""
    return next((word for word in words if word.removesuffix(".gz").endswith(_JSON)), None)


def _sft_file(s: Settings) -> str | None:
    words = s.data_path
    if not s.sft:
        text = first_text_file(words)
        fix = f"tokenize it with pentatron prepare --input {text}, or add --sft if it holds conversations"
        return None if text is None else f"--data-path {text} is text; {fix}"
    if s.train_data_path:
        return "--sft reads files of conversations, which --split divides; give --data-path FILE.jsonl instead of files for each split"
    if not words:
        return "--sft reads files of conversations, and none is named; give --data-path FILE.jsonl"
    weight = next(filter(is_weight, words), None)
    fix = "give --data-path FILES alone (a file named twice counts twice)"
    error = f"--sft reads every conversation once in an epoch, so the weight {weight} has no meaning; {fix}"
    return None if weight is None else error


SFT_RULES: dict[str, Rule] = {
    "sft_file": _sft_file,
    "sft_tokenizer": refuse_if(
        lambda s: s.sft and not any((s.tokenizer_type, s.tokenizer_model, s.vocab_file, s.merge_file)),
        "--sft needs a tokenizer for conversations; give --tokenizer-model FOLDER, which contains a chat template",
    ),
    "sft_date": refuse_if(
        lambda s: error_of(datetime.date.fromisoformat, s.sft_date),
        "--sft-date {s.sft_date} is not a date; write it like 2024-07-26",
    ),
}


# --- length of the run and its schedules ---


def _plan(s: Settings) -> str | None:
    is_ramp = s.rampup_batch_size and not is_unset(s.global_batch_size)
    return error_of(batch_plan_of, s) if s.step_batch_size_schedule or is_ramp else None


def _run_length(s: Settings) -> str | None:
    if not is_unset(s.train_iters) or s.train_samples is not None:
        return None
    if s.epochs is not None:
        if is_counted_in_run(s) or first_text_file(s.data_path or ()):
            # Counted later; or text files without --sft, which another rule reports.
            return None
        try:
            why = why_no_epochs(s)
        except UserError:
            # Another rule reports the invalid data path.
            return None
        if not why and s.facts.launcher and training_files_flag(s):
            # The ranks count the samples of the files later.
            return None
        return f"the number of steps of --epochs {s.epochs} is unknown: {why or 'no data is read'}; give --train-iters instead"
    return "the length of the run is unknown; give --train-iters"


def _lengths(s: Settings) -> tuple[BatchSizeSchedule, ScheduleLengths] | None:
    """Returns the batch plan and the schedule lengths, or None if another rule reports a problem."""
    if is_unset(s.train_iters) or is_unset(s.global_batch_size) or _plan(s) is not None:
        return None
    if s.lr_decay_iters is None and s.lr_decay_samples is None:
        return None
    plan = batch_plan_of(s)
    return plan, schedule_lengths_of(s, plan)


def _warmup(s: Settings) -> str | None:
    lengths = _lengths(s)
    if lengths is None or lengths[1].warmup < lengths[1].decay:
        return None
    if s.lr_warmup_samples is None and s.lr_decay_samples is None:
        decay = f"the {s.lr_decay_iters} steps of the decay (--lr-decay-iters or --train-iters)"
        return f"--lr-warmup-iters {s.lr_warmup_iters} must be smaller than {decay}"
    flags = "--lr-decay-samples, --lr-decay-iters or the length of the run"
    decay = f"the {lengths[1].decay} samples of the decay ({flags})"
    return f"a warm-up of {lengths[1].warmup:.0f} samples must be shorter than {decay}"


def _wsd(s: Settings) -> str | None:
    if s.lr_decay_style != "WSD":
        return None
    if s.lr_wsd_decay_iters is None and s.lr_wsd_decay_samples is None:
        return "--lr-decay-style WSD needs the length of its decay; give --lr-wsd-decay-iters or --lr-wsd-decay-samples"
    found = _lengths(s)
    if found is None:
        return None
    plan, lengths = found
    if lengths.warmup >= lengths.decay or lengths.warmup + lengths.wsd <= lengths.decay:
        return None
    unit, warmup, decay = "samples", int(lengths.warmup), lengths.decay
    both = f"--lr-wsd-decay-samples {lengths.wsd} and the warm-up of {lengths.warmup:.0f}"
    if s.lr_wsd_decay_samples is None:
        unit, warmup, decay = "steps", s.lr_warmup_iters, plan.steps_within(lengths.decay)
        both = f"--lr-wsd-decay-iters {s.lr_wsd_decay_iters} and the warm-up of {warmup}"
    advice = f"use {decay - warmup} or fewer"
    return f"{both} do not fit into the {decay} {unit} until the end of the decay; {advice}"


def _min_lr(s: Settings) -> str | None:
    name = next((name for name in ("min_lr", "lr_warmup_init") if getattr(s, name) > s.lr), None)
    if name is None:
        return None
    return f"{flag_of(name)} {getattr(s, name)} is above --lr {s.lr}; lower the first or raise the second"


def _weight_decay(s: Settings) -> str | None:
    ends = [n for n in ("start_weight_decay", "end_weight_decay") if getattr(s, n) is not None]
    if s.weight_decay_incr_style != "constant" or not ends:
        return None
    advice = "give --weight-decay-incr-style linear or cosine, or --weight-decay instead"
    return f"{flag_of(ends[0])} {getattr(s, ends[0])} needs a changing weight decay; {advice}"


SCHEDULE_RULES: dict[str, Rule] = {
    "plan": _plan,
    "run_length": _run_length,
    "warmup": _warmup,
    "wsd": _wsd,
    "min_lr": _min_lr,
    "weight_decay": _weight_decay,
    "one_schedule_source": refuse_if(
        lambda s: s.override_opt_param_scheduler and s.use_checkpoint_opt_param_scheduler,
        "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other; "
        "give one of them",
    ),
}
