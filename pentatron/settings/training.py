"""Data, batches, the optimizer and its schedule."""

from dataclasses import dataclass
from typing import ClassVar

from pentatron.settings.declaration import (
    ABOVE_ZERO,
    BELOW_ONE,
    FREE,
    ORDER,
    SILENT,
    ZERO_OR_MORE,
    OnResume,
    setting,
)
from pentatron.settings.needs import (
    ADAM,
    CONVERSATIONS,
    DECAY,
    EXIT_SIGNAL_HANDLER,
    MANUAL_GC,
    SGD,
    TEMPLATE,
    WARMUP,
    WSD,
    a_choice_of_order,
    a_corpus,
    a_kept_order,
    a_test,
    a_validation_set,
    changing_weight_decay,
    countable_epochs,
    decay_or_fraction,
    documents,
    evaluation,
    evaluation_steps,
    evaluations,
    gpt2_tokenizer,
    growing_batch,
    no_loss_scale_search,
    one_data_source,
    one_weight_decay,
    reader_processes,
    replicas_to_compare,
    steps_within_the_run,
    stop_at_nan,
    synthetic_data,
    text_or_ids,
    weighted_data,
)


@dataclass(frozen=True)
class DataConfig:
    """Data and tokenizer"""

    corpus: str | None = setting(
        None,
        "a corpus made on this machine: the source text of Python's standard library",
        choices=("python",),
    )
    corpus_bytes: int = setting(8_000_000, "how much of the corpus to take", limit=ABOVE_ZERO, needs=a_corpus)
    data_path: tuple[str, ...] = setting(
        (), "prefix of a .bin/.idx pair, or several (P1 P2 … or, with weights, W1 P1 W2 P2 …)"
    )
    train_data_path: tuple[str, ...] = setting(
        (), "the same for training alone, with --valid-data-path for validation; then nothing is split"
    )
    valid_data_path: tuple[str, ...] = setting((), "the same for validation alone")
    test_data_path: tuple[str, ...] = setting((), "the same for tests", needs=a_test)
    data_path_config: str | None = setting(
        None, "YAML file with entries {weight: W, path: P}, for all splits or under train, valid, test"
    )
    data_args_path: str | None = setting(None, "file with the words of --data-path")
    per_split_data_args_path: str | None = setting(
        None, "JSON file with one --data-path for each of train, valid, test"
    )
    mid_level_dataset_surplus: float = setting(
        0.005,
        "share of samples that a dataset with a weight is built for beyond what it should give",
        limit=ZERO_OR_MORE,
        needs=weighted_data,
        resume=ORDER,
    )
    data_cache_path: str | None = setting(
        None,
        "folder for the orders of samples (in the run's folder, and only if they are large)",
        needs=a_kept_order,
        resume=SILENT,
    )
    split: str = setting(
        "969,30,1", "shares of training, validation and test documents", needs=one_data_source, resume=ORDER
    )
    mock_data: bool = setting(False, "counting tokens instead of a corpus, for tests of speed")
    dataset_size: int | None = setting(
        None, "number of synthetic samples, when no data is given", limit=ABOVE_ZERO, needs=synthetic_data
    )
    reset_position_ids: bool = setting(
        False, "count positions from 0 in every document of a sequence", needs=documents
    )
    reset_attention_mask: bool = setting(
        False, "let a token see its own document of a sequence alone", needs=documents
    )
    eod_mask_loss: bool = setting(
        False, "leave out the loss of what follows the end of a document", needs=documents
    )
    tokenizer_type: str | None = setting(
        None,
        "kind of tokenizer",
        choices=(
            *("HuggingFaceTokenizer", "HFTokenizer", "GPT2BPETokenizer", "SentencePieceTokenizer"),
            *(
                "GPTSentencePieceTokenizer",
                "Llama2Tokenizer",
                "ByteTokenizer",
                "NullTokenizer",
                "SFTTokenizer",
            ),
        ),
        needs=text_or_ids,
    )
    tokenizer_model: str | None = setting(
        None, "tokenizer.json or .model file, or the folder that holds it", needs=text_or_ids
    )
    vocab_file: str | None = setting(None, "GPT-2 vocabulary (vocab.json)", needs=gpt2_tokenizer)
    merge_file: str | None = setting(None, "GPT-2 merges (merges.txt)", needs=gpt2_tokenizer)
    num_workers: int = setting(0, "processes that read data for one rank", limit=ZERO_OR_MORE)
    prefetch_factor: int = setting(
        2, "batches each of them reads ahead", limit=ABOVE_ZERO, needs=reader_processes
    )
    dataloader_type: str = setting(
        "single",
        "order of samples: for the whole run at once, or shuffled anew in every epoch",
        choices=("single", "cyclic", "external"),
        not_yet="a loader of your own",
        available=("single", "cyclic"),
        needs=a_choice_of_order,
        resume=ORDER,
    )
    sft: bool = setting(False, "fine-tune on the answers of conversations (--data-path FILE.jsonl ...)")
    sft_packing: bool = setting(
        False, "put several conversations into a sequence, each seeing itself alone", needs=CONVERSATIONS
    )
    sft_tokenizer_prompt_format: str = setting(
        "default",
        "how conversations are written: by the chat template, or texts as they are (identity)",
        choices=("default", "identity", "nemotron-h-aligned", "nemotron-nano-v2"),
        not_yet="prompt formats by name (--chat-template FILE takes any template)",
        available=("default", "identity"),
        needs=CONVERSATIONS,
    )
    chat_template: str | None = setting(
        None, "file with a Jinja template to use instead of that of the tokenizer's folder", needs=TEMPLATE
    )
    sft_date: str = setting(
        "2024-07-26",
        "the day a chat template is told that asks for today, the same in every run",
        needs=TEMPLATE,
    )


@dataclass(frozen=True)
class TrainConfig:
    """Batches, length and evaluation"""

    micro_batch_size: int = setting(None, "samples one rank computes at once (1)", limit=ABOVE_ZERO)
    global_batch_size: int = setting(
        None, "samples per optimizer step (micro-batch × data-parallel size)", limit=ABOVE_ZERO
    )
    gradient_accumulation_steps: int | None = setting(
        None, "micro-batches per step, instead of the global batch", limit=ABOVE_ZERO
    )
    num_microbatches: int | None = setting(None, "micro-batches a rank's batch is cut into", limit=ABOVE_ZERO)
    rank_batch_size: int | None = setting(
        None, "samples of one data-parallel rank, before it is cut up", limit=ABOVE_ZERO
    )
    rampup_batch_size: tuple[int, ...] = setting(
        (),
        "START INCREMENT SAMPLES: grow the global batch to its size within so many samples",
        limit=ABOVE_ZERO,
        needs=growing_batch,
    )
    step_batch_size_schedule: tuple[str, ...] = setting(
        (), "TOKENS:SIZE ... instead of the global batch: its size from so many tokens on (0:768 250B:1536)"
    )
    train_iters: int = setting(None, "optimizer steps", also="--train-steps --max_steps", limit=ZERO_OR_MORE)
    train_samples: int | None = setting(None, "samples, instead of optimizer steps", limit=ABOVE_ZERO)
    epochs: int | None = setting(
        None,
        "passes over the training data, in whole steps; the nearer of this and --train-iters ends the run",
        limit=ABOVE_ZERO,
        needs=countable_epochs,
    )
    eval_interval: int = setting(
        1000, "steps between validations (0: never)", limit=ZERO_OR_MORE, needs=evaluations
    )
    eval_iters: int = setting(
        10, "validation steps each time (0: never validate)", limit=ZERO_OR_MORE, needs=evaluation_steps
    )
    full_validation: bool = setting(
        False,
        "validate on every validation sample once, whatever its weight, instead of --eval-iters steps",
        needs=a_validation_set,
    )
    eval_global_batch_size: int | None = setting(
        None, "samples of one validation step (global batch)", limit=ABOVE_ZERO, needs=evaluation
    )
    eval_micro_batch_size: int | None = setting(
        None, "samples one rank evaluates at once (micro-batch)", limit=ABOVE_ZERO, needs=evaluation
    )
    skip_train: bool = setting(
        False, "evaluate what is loaded, on the validation and the test set, and end", resume=FREE
    )
    calculate_per_token_loss: bool = setting(
        True,
        "weigh every token of a step equally",
        notice="every token of a step always weighs the same here",
    )


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer"""

    optimizer: str = setting(
        "adam",
        "the rule of updates: AdamW, or gradient descent with momentum",
        choices=("adam", "sgd"),
    )
    sgd_momentum: float = setting(0.9, "momentum of gradient descent", limit=BELOW_ONE, needs=SGD)
    lr: float = setting(3e-4, "learning rate", also="--learning_rate", limit=ZERO_OR_MORE)
    min_lr: float = setting(0.0, "learning rate at the end of the decay", limit=ZERO_OR_MORE, needs=DECAY)
    lr_decay_style: str = setting(
        "cosine",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = setting(
        None, "steps until the decay ends (train-iters)", limit=ABOVE_ZERO, needs=decay_or_fraction
    )
    lr_decay_samples: int | None = setting(
        None, "the same in samples", limit=ABOVE_ZERO, needs=decay_or_fraction
    )
    lr_wsd_decay_style: str = setting(
        "exponential",
        "shape of the decay at the end of WSD (warm-up, stable, decay)",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        needs=WSD,
    )
    lr_wsd_decay_iters: int | None = setting(
        None, "steps of that decay, the last ones of the schedule", limit=ABOVE_ZERO, needs=WSD
    )
    lr_wsd_decay_samples: int | None = setting(None, "the same in samples", limit=ABOVE_ZERO, needs=WSD)
    lr_warmup_iters: int = setting(
        0, "steps of linear warm-up", also="--warmup_steps --lr-warmup-steps", limit=ZERO_OR_MORE
    )
    lr_warmup_samples: int | None = setting(None, "the same in samples", limit=ZERO_OR_MORE)
    lr_warmup_fraction: float | None = setting(
        None, "warm-up as a share of the decay's samples", limit=BELOW_ONE
    )
    lr_warmup_init: float = setting(
        0.0, "learning rate at the beginning of the warm-up", limit=ZERO_OR_MORE, needs=WARMUP
    )
    weight_decay: float = setting(
        0.01,
        "weight decay, decoupled in AdamW; norms and biases have none",
        limit=ZERO_OR_MORE,
        needs=one_weight_decay,
    )
    start_weight_decay: float = setting(
        None, "weight decay at the first step (weight-decay)", limit=ZERO_OR_MORE
    )
    end_weight_decay: float = setting(
        None, "weight decay at the end of the run (weight-decay)", limit=ZERO_OR_MORE
    )
    weight_decay_incr_style: str = setting(
        "constant",
        "how it gets from one to the other",
        choices=("constant", "linear", "cosine"),
        needs=changing_weight_decay,
    )
    clip_grad: float = setting(
        1.0,
        "largest gradient norm (0: never clip)",
        also="--gradient-clip-val --max_grad_norm",
        limit=ZERO_OR_MORE,
    )
    adam_beta1: float = setting(0.9, "decay of Adam's first moment", limit=BELOW_ONE, needs=ADAM)
    adam_beta2: float = setting(0.999, "decay of Adam's second moment", limit=BELOW_ONE, needs=ADAM)
    adam_eps: float = setting(1e-8, "Adam's epsilon", limit=ABOVE_ZERO, needs=ADAM)
    fused_update: bool = setting(
        True,
        "on a GPU, clip, update by AdamW and round the weights in one pass over memory, without waiting for the norm; off: torch's "
        "operators one after the other, the reference",
    )


# When a run ends early, what is watched while it trains, and what is measured.


SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class LoopConfig:
    """Early ends, checks, timers and profiles"""

    on_resume: ClassVar[OnResume] = FREE

    exit_interval: int | None = setting(
        None, "save and end at every multiple of so many steps", limit=ABOVE_ZERO
    )
    exit_duration_in_mins: float | None = setting(
        None, "save and end after so many minutes, the start included", limit=ABOVE_ZERO
    )
    exit_signal_handler: bool = setting(
        False, "take --exit-signal for a wish: save and end with exit code 0 (without: 128 + its number)"
    )
    exit_signal: str = setting(
        "SIGTERM",
        "the signal that --exit-signal-handler is about",
        choices=SIGNALS,
        needs=EXIT_SIGNAL_HANDLER,
    )
    check_for_nan_in_loss_and_grad: bool = setting(
        True,
        "stop before an update with numbers that are none (otherwise such a step is left out)",
        needs=no_loss_scale_search,
    )
    rerun_mode: str = setting(
        "validate_results",
        "compute a step with numbers that are none again, to see whether that repeats and where it begins",
        choices=("disabled", "validate_results", "report_stats"),
        not_yet="statistics of repeated steps",
        available=("disabled", "validate_results"),
        needs=stop_at_nan,
    )
    check_for_spiky_loss: bool = setting(False, "warn of a loss over ten times the largest one before")
    check_for_large_grads: bool = setting(
        False, "warn of a gradient norm over ten times the largest one before"
    )
    iterations_to_skip: tuple[int, ...] = setting(
        (),
        "steps, by their number in the log, whose samples are read but not trained on",
        limit=ABOVE_ZERO,
        needs=steps_within_the_run,
    )
    check_weight_hash_across_dp_replicas_interval: int | None = setting(
        None,
        "steps between comparisons of the weights that several ranks hold (never)",
        limit=ABOVE_ZERO,
        needs=replicas_to_compare,
    )
    timing_log_level: int = setting(
        0,
        "which parts of a step are timed: 0 none, 1 the large ones, 2 computing and messages",
        choices=(0, 1, 2),
    )
    timing_log_option: str = setting(
        "minmax", "of the ranks' times: the largest, both ends, or all", choices=("max", "minmax", "all")
    )
    manual_gc: bool = setting(False, "collect Python's garbage at chosen steps, on all ranks together")
    manual_gc_interval: int = setting(
        0, "steps between collections (0: before the first step alone)", limit=ZERO_OR_MORE, needs=MANUAL_GC
    )
    manual_gc_eval: bool = setting(True, "collect around each evaluation too", needs=MANUAL_GC)
    enable_one_logger: bool = setting(
        False,
        "NVIDIA's one-logger",
        sets={"--no-one-logger": False},
        notice="the package is not part of this program; app_metrics.json has the times it would report",
    )
    retro_project_dir: str | None = setting(
        None, "retrieval data", notice="models with retrieval are not built here, so this changes nothing"
    )
    retro_cyclic_train_iters: int | None = setting(
        None,
        "samples before the data begins again",
        notice="data begins again by itself where it ends (--dataloader-type), so this changes nothing",
        limit=ABOVE_ZERO,
    )
