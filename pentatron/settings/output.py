"""Declares the settings of the run folder, checkpoints, logging and profiling."""

from dataclasses import dataclass
from typing import ClassVar

from pentatron.settings import needs
from pentatron.settings.declaration import FREE, NON_NEGATIVE, ORDER, POSITIVE, SEED, SILENT, setting


@dataclass(frozen=True)
class RunSettings:
    """Run"""

    preset: str | None = setting(
        None, "named set of settings, which files and flags override (`pentatron presets` lists them)", SILENT
    )
    config: str | None = setting(None, "YAML, TOML or JSON file of settings", SILENT, also="--yaml-cfg")
    run_dir: str = setting(None, "folder of the run (--save if given, else runs/NAME)", SILENT)
    fresh: bool = setting(False, "start a new run and move an earlier run in the folder aside", SILENT)
    seed: int = setting(1234, "seed of initial weights, sample order and dropout", SEED, ORDER)
    sample_prompt: str | None = setting(
        None, "prompt for a text that is generated at the end of the run", needs.a_tokenizer, FREE
    )
    sample_tokens: int = setting(
        120, "tokens to generate for --sample-prompt (0: none)", NON_NEGATIVE, needs.sample_prompt, FREE
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints"""

    on_resume: ClassVar = FREE

    save: str = setting(None, "checkpoint folder (RUN_DIR/checkpoints)", needs.checkpoints, SILENT)
    load: str = setting(
        None, "run, checkpoint or Hugging Face model to load (checkpoints of the run)", SILENT, also="--hf"
    )
    save_interval: int = setting(
        None,
        "steps between checkpoints (a tenth of the run, at least 100); the last step is always saved",
        POSITIVE,
        needs.checkpoints,
        also="--save_steps",
    )
    save_checkpoints: bool = setting(True, "save checkpoints (--no-save-checkpoints: for benchmarks)")
    keep_checkpoints: int | None = setting(
        3, "number of newest checkpoints to keep (none: all)", POSITIVE, needs.checkpoints
    )
    save_retain_interval: int | None = setting(
        None,
        "also keep checkpoints at multiples of this step permanently (a multiple of --save-interval)",
        POSITIVE,
        needs.checkpoints,
        needs.RETENTION,
    )
    async_save: bool = setting(
        False,
        "save checkpoints in the background; training blocks only until the state is copied to host memory",
        needs.checkpoints,
    )
    verify_checkpoint: bool = setting(
        True,
        "verify checksums before resuming, and of a new checkpoint before the last verified one is deleted",
    )
    finetune: bool = setting(False, "load only the weights and start at step 0")
    no_load_optim: bool = setting(False, "do not load the optimizer state")
    no_load_rng: bool = setting(False, "do not load the states of the random generators")
    allow_changed_data: bool = setting(
        False, "resume although the data has changed since the checkpoint; the changes are reported"
    )
    override_opt_param_scheduler: bool = setting(
        False, "resume with the schedule of this command, without the notice that the checkpoint has another"
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False, "resume with the learning rate and weight decay schedule of the checkpoint"
    )
    ckpt_step: int | None = setting(
        None, "checkpoint step to load from --load (the newest)", NON_NEGATIVE, needs.LOAD_GIVEN
    )
    exit_on_missing_checkpoint: bool = setting(
        False, "exit if --load is the checkpoint folder of the run and has no checkpoint", needs.LOAD_GIVEN
    )
    no_save_optim: bool = setting(
        False,
        "do not save the optimizer state",
        notice="checkpoints always contain it, so that a run can resume; --finetune and exports use only the weights",
    )
    no_save_rng: bool = setting(
        False,
        "do not save the states of the random generators",
        notice="checkpoints always contain them, a few kB, so that a run can resume; --no-load-rng does not load them",
    )
    use_mp_args_from_checkpoint_args: bool = setting(
        False, "take parallel sizes that are not given from the loaded checkpoint"
    )
    use_checkpoint_args: bool = setting(
        False,
        "take the architecture from the loaded checkpoint",
        notice="settings of the architecture that are not given always come from the loaded checkpoint",
    )
    ckpt_format: str | None = setting(
        None,
        "allow loading Megatron-LM's checkpoints, which contain pickle (torch_dist: also save in this format; torch: the older format "
        "with one file per rank)",
        needs.OWN_FORMAT,
        choices=("torch_dist", "torch"),
    )
    non_persistent_ckpt_type: str | None = setting(
        None, "non-persistent checkpoints", choices=("global", "local"), not_yet="non-persistent checkpoints"
    )
    non_persistent_local_ckpt_dir: str | None = setting(
        None, "folder of local non-persistent checkpoints", not_yet="non-persistent checkpoints"
    )


@dataclass(frozen=True)
class LogConfig:
    """Logging and monitoring"""

    on_resume: ClassVar = FREE

    log_interval: int = setting(10, "steps between lines of train.log", POSITIVE)
    log_throughput: bool = setting(False, "add TFLOP/s per GPU to the log lines")
    log_progress: bool = setting(False, "write every start and checkpoint of the run to SAVE/progress.txt")
    tensorboard_dir: str | None = setting(None, "folder of the TensorBoard files")
    tensorboard_log_interval: int = setting(
        1, "steps between points in TensorBoard and Weights & Biases", POSITIVE, needs.A_DASHBOARD
    )
    log_timers_to_tensorboard: bool = setting(
        False, "log throughput and step time to TensorBoard and Weights & Biases", needs.A_DASHBOARD
    )
    log_memory_to_tensorboard: bool = setting(
        False, "log memory to TensorBoard and Weights & Biases", needs.A_DASHBOARD
    )
    log_world_size_to_tensorboard: bool = setting(
        False, "log the world size to TensorBoard and Weights & Biases", needs.A_DASHBOARD
    )
    log_validation_ppl_to_tensorboard: bool = setting(
        False, "log validation perplexity to TensorBoard and Weights & Biases", needs.A_DASHBOARD
    )
    wandb_project: str | None = setting(None, "project of Weights & Biases (WANDB_MODE=offline: no network)")
    wandb_exp_name: str | None = setting(None, "run name in Weights & Biases (the run folder's)", needs.WANDB)
    wandb_entity: str | None = setting(None, "team or user of Weights & Biases", needs.WANDB)
    wandb_save_dir: str | None = setting(None, "folder for Weights & Biases (RUN_DIR/wandb)", needs.WANDB)
    monitor_memory_continuously: bool = setting(False, "write each rank's memory over time to RUN_DIR/memory")
    memory_monitor_interval: float = setting(1.0, "seconds per memory sample", POSITIVE, needs.MEMORY_SAMPLES)
    save_performance_summary: bool = setting(False, "write RUN_DIR/performance_summary.json at the end")
    console_lines: str = setting(
        "short",
        "output in the terminal: a summary (short) or all lines of train.log (megatron)",
        choices=("short", "megatron"),
    )
    profile: bool = setting(
        False, "profile steps: a trace in RUN_DIR/profile, or on a GPU a range for nsys", needs.profile_in_run
    )
    profile_step_start: int = setting(10, "number of steps before the profile", NON_NEGATIVE, needs.PROFILE)
    profile_step_end: int = setting(12, "last step of the profile", POSITIVE, needs.PROFILE)
    profile_ranks: tuple[int, ...] = setting(
        (0,), "ranks to profile", NON_NEGATIVE, needs.PROFILE, needs.profiled_rank_exists
    )
    use_pytorch_profiler: bool = setting(False, "on a GPU, write a torch.profiler trace, not an nsys range")
    progress_bar: str = setting("auto", "live progress bar", choices=("auto", "on", "off"))
