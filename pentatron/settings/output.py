"""What a run leaves behind: its folder, checkpoints, logs and generated text."""

from dataclasses import dataclass
from typing import ClassVar

from pentatron.settings.declaration import (
    ABOVE_ZERO,
    FREE,
    ORDER,
    SEED,
    SILENT,
    ZERO_OR_MORE,
    OnResume,
    setting,
)
from pentatron.settings.needs import (
    A_DASHBOARD,
    CHECKPOINTS,
    LOADED,
    MEMORY_SAMPLES,
    OWN_FORMAT,
    PROFILE,
    PROFILED_RANK,
    RETENTION,
    WANDB,
    a_sample,
    a_tokenizer,
    profile_within_the_run,
)


@dataclass(frozen=True)
class RunSettings:
    """Run"""

    preset: str | None = setting(
        None, "named settings to start from (`pentatron presets` lists them)", resume=SILENT
    )
    config: str | None = setting(
        None, "YAML, TOML or JSON file with settings", also="--yaml-cfg", resume=SILENT
    )
    run_dir: str = setting(
        None, "folder of the run (that of --save where it is given, else runs/NAME)", resume=SILENT
    )
    fresh: bool = setting(False, "start anew; an earlier run in the folder is moved aside", resume=SILENT)
    seed: int = setting(1234, "seed of initial weights and sample order", limit=SEED, resume=ORDER)
    sample_prompt: str | None = setting(
        None, "text continued at the end of the run", needs=a_tokenizer, resume=FREE
    )
    sample_tokens: int = setting(
        120, "length of that continuation (0: none)", limit=ZERO_OR_MORE, needs=a_sample, resume=FREE
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints"""

    on_resume: ClassVar[OnResume] = FREE

    save: str = setting(
        None, "folder for checkpoints (RUN_DIR/checkpoints)", needs=CHECKPOINTS, resume=SILENT
    )
    load: str = setting(
        None,
        "checkpoints or Hugging Face folder to start from (the run's own checkpoints)",
        also="--hf",
        resume=SILENT,
    )
    save_interval: int = setting(
        None,
        "steps between checkpoints (a tenth of the run, at least 100); the last step is always saved",
        also="--save_steps",
        limit=ABOVE_ZERO,
        needs=CHECKPOINTS,
    )
    save_checkpoints: bool = setting(
        True, "write checkpoints at all (not to, for runs that only measure: --no-save-checkpoints)"
    )
    keep_checkpoints: int | None = setting(
        3, "how many of the newest to keep (none: all)", limit=ABOVE_ZERO, needs=CHECKPOINTS
    )
    save_retain_interval: int | None = setting(
        None,
        "keep the checkpoint of every such step for good, beside the newest (a multiple of --save-interval)",
        limit=ABOVE_ZERO,
        needs=RETENTION,
    )
    async_save: bool = setting(
        False,
        "write checkpoints in the background; training waits only until the state is copied",
        needs=CHECKPOINTS,
    )
    verify_checkpoint: bool = setting(
        True, "check the checksums before resuming, and of a new checkpoint before the last checked one goes"
    )
    finetune: bool = setting(False, "take the weights alone from what is loaded, and start at step 0")
    no_load_optim: bool = setting(False, "do not take the optimizer's state from what is loaded")
    no_load_rng: bool = setting(False, "do not take random states from what is loaded")
    allow_changed_data: bool = setting(
        False, "go on from a checkpoint although its data has changed since; what changed is told"
    )
    override_opt_param_scheduler: bool = setting(
        False, "go on with the schedule of this command, without a remark that the checkpoint has another"
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False, "go on with the schedule of learning rate and weight decay that the checkpoint has"
    )
    ckpt_step: int | None = setting(
        None, "which step of --load to begin from (the newest)", limit=ZERO_OR_MORE, needs=LOADED
    )
    exit_on_missing_checkpoint: bool = setting(
        False, "refuse to start anew where --load names the run's own folder and it is empty", needs=LOADED
    )
    no_save_optim: bool = setting(
        False,
        "leave the optimizer's state out of checkpoints",
        notice="checkpoints always have it, so that a run can go on; --finetune or an export takes the weights alone",
    )
    no_save_rng: bool = setting(
        False,
        "leave random states out of checkpoints",
        notice="checkpoints always have them, a few kB, so that a run can go on; --no-load-rng leaves them unread",
    )
    use_mp_args_from_checkpoint_args: bool = setting(
        False, "take the parallel sizes that are not typed from what is loaded"
    )
    use_checkpoint_args: bool = setting(
        False,
        "take the architecture from what is loaded",
        notice="what is not typed of the architecture always comes from what is loaded",
    )
    ckpt_format: str | None = setting(
        None,
        "read Megatron-LM's checkpoints too, which hold pickle (torch_dist: and save in its format; torch: its older files, one for "
        "each rank)",
        choices=("torch_dist", "torch"),
        needs=OWN_FORMAT,
    )
    non_persistent_ckpt_type: str | None = setting(
        None, "local checkpoints", choices=("global", "local"), not_yet="non-persistent checkpoints"
    )
    non_persistent_local_ckpt_dir: str | None = setting(
        None, "folder of local checkpoints", not_yet="non-persistent checkpoints"
    )


@dataclass(frozen=True)
class LogConfig:
    """Logging and monitoring"""

    on_resume: ClassVar[OnResume] = FREE

    log_interval: int = setting(10, "steps between lines of train.log", limit=ABOVE_ZERO)
    log_throughput: bool = setting(False, "add TFLOP/s per GPU to the log line")
    log_progress: bool = setting(False, "write every start and checkpoint of the run to SAVE/progress.txt")
    tensorboard_dir: str | None = setting(None, "folder for TensorBoard")
    tensorboard_log_interval: int = setting(
        1, "steps between points of TensorBoard and Weights & Biases", limit=ABOVE_ZERO, needs=A_DASHBOARD
    )
    log_timers_to_tensorboard: bool = setting(
        False, "throughput and time of a step there as well", needs=A_DASHBOARD
    )
    log_memory_to_tensorboard: bool = setting(False, "memory there as well", needs=A_DASHBOARD)
    log_world_size_to_tensorboard: bool = setting(
        False, "the number of processes there as well", needs=A_DASHBOARD
    )
    log_validation_ppl_to_tensorboard: bool = setting(
        False, "perplexity of validations there as well", needs=A_DASHBOARD
    )
    wandb_project: str | None = setting(None, "project of Weights & Biases (WANDB_MODE=offline: no network)")
    wandb_exp_name: str | None = setting(
        None, "name of the run there (that of the run's folder)", needs=WANDB
    )
    wandb_entity: str | None = setting(None, "team or user there", needs=WANDB)
    wandb_save_dir: str | None = setting(None, "folder for its files (RUN_DIR/wandb)", needs=WANDB)
    monitor_memory_continuously: bool = setting(
        False, "write every rank's memory over time to RUN_DIR/memory"
    )
    memory_monitor_interval: float = setting(
        1.0, "seconds between memory samples", limit=ABOVE_ZERO, needs=MEMORY_SAMPLES
    )
    save_performance_summary: bool = setting(
        False, "write RUN_DIR/performance_summary.json at the end of the run"
    )
    console_lines: str = setting(
        "short", "lines on the terminal: for people, or all of train.log", choices=("short", "megatron")
    )
    profile: bool = setting(
        False,
        "profile some steps: a trace in RUN_DIR/profile, or nsys's range on a GPU",
        needs=profile_within_the_run,
    )
    profile_step_start: int = setting(
        10, "steps before the profile begins", limit=ZERO_OR_MORE, needs=PROFILE
    )
    profile_step_end: int = setting(12, "the last step of the profile", limit=ABOVE_ZERO, needs=PROFILE)
    profile_ranks: tuple[int, ...] = setting(
        (0,), "ranks that are profiled", limit=ZERO_OR_MORE, needs=PROFILED_RANK
    )
    use_pytorch_profiler: bool = setting(
        False,
        "on a GPU: torch's profiler and its trace, instead of a range for nsys",
    )
    progress_bar: str = setting("auto", "live progress bar", choices=("auto", "on", "off"))
