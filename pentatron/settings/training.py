"""Declares the settings of data, batches, the optimizer, its schedule and the training loop."""

from dataclasses import dataclass
from typing import ClassVar

from pentatron.settings import needs
from pentatron.settings.declaration import BELOW_ONE, FREE, NON_NEGATIVE, ORDER, POSITIVE, SILENT, setting

_TOKENIZERS = (
    *("HuggingFaceTokenizer", "HFTokenizer", "GPT2BPETokenizer", "SentencePieceTokenizer"),
    *("GPTSentencePieceTokenizer", "Llama2Tokenizer", "ByteTokenizer", "NullTokenizer", "SFTTokenizer"),
)


@dataclass(frozen=True)
class DataConfig:
    """Data and tokenizer"""

    corpus: str | None = setting(
        None, "built-in text corpus: python, the source of Python's standard library", choices=("python",)
    )
    corpus_bytes: int = setting(8_000_000, "bytes of --corpus to use", POSITIVE, needs.CORPUS)
    data_path: tuple[str, ...] = setting(
        (), "prefix of a .bin/.idx pair, or a blend of several: P1 P2 ... or W1 P1 W2 P2 ... with weights"
    )
    train_data_path: tuple[str, ...] = setting(
        (), "like --data-path for training only, with --valid-data-path for validation; --split is not used"
    )
    valid_data_path: tuple[str, ...] = setting((), "validation data in the form of --data-path")
    test_data_path: tuple[str, ...] = setting((), "test data in the form of --data-path", needs.EVAL_ITERS)
    data_path_config: str | None = setting(
        None,
        "YAML file of a blend: a list of {weight: W, path: P} for all splits, or one list each under train, valid and test",
    )
    data_args_path: str | None = setting(None, "file that contains the arguments of --data-path")
    per_split_data_args_path: str | None = setting(
        None, "JSON file with the arguments of --data-path for train, valid and test"
    )
    mid_level_dataset_surplus: float = setting(
        0.005,
        "fraction of additional samples built for each weighted dataset of a blend",
        NON_NEGATIVE,
        needs.weighted_data,
        ORDER,
    )
    data_cache_path: str | None = setting(
        None, "folder of the cached sample index (run folder, for large indices)", needs.CACHED_ORDER, SILENT
    )
    split: str = setting(
        "969,30,1",
        "weights by which documents are split into training, validation and test",
        needs.one_data_source,
        ORDER,
    )
    mock_data: bool = setting(False, "use mock sequences 1, 2, 3 ..., for speed tests")
    dataset_size: int | None = setting(
        None, "number of synthetic samples, used if no data is given", POSITIVE, needs.SYNTHETIC_DATA
    )
    reset_position_ids: bool = setting(False, "restart positions at 0 in every document", needs.document_ends)
    reset_attention_mask: bool = setting(False, "mask attention between documents", needs.document_ends)
    eod_mask_loss: bool = setting(False, "mask the loss right after each document's end", needs.document_ends)
    tokenizer_type: str | None = setting(None, "type of the tokenizer", needs.tokenizing, choices=_TOKENIZERS)
    tokenizer_model: str | None = setting(None, "tokenizer.json or .model file, or folder", needs.tokenizing)
    vocab_file: str | None = setting(
        None, "vocabulary of the GPT-2 tokenizer (vocab.json)", needs.gpt2_tokenizer
    )
    merge_file: str | None = setting(None, "merges of the GPT-2 tokenizer (merges.txt)", needs.gpt2_tokenizer)
    num_workers: int = setting(0, "data loading processes per rank", NON_NEGATIVE)
    prefetch_factor: int = setting(
        2, "batches that each data loading process prefetches", POSITIVE, needs.READER_PROCESSES
    )
    dataloader_type: str = setting(
        "single",
        "sample order: one shuffle for the whole run (single) or a new shuffle in every epoch (cyclic)",
        needs.a_choice_of_order,
        ORDER,
        choices=("single", "cyclic", "external"),
        not_yet="a custom data loader",
        available=("single", "cyclic"),
    )
    sft: bool = setting(
        False, "fine-tune on conversations, with a loss on the answers only (--data-path FILE.jsonl ...)"
    )
    sft_packing: bool = setting(
        False, "pack conversations into each sequence, and mask attention between them", needs.CONVERSATIONS
    )
    sft_tokenizer_prompt_format: str = setting(
        "default",
        "format of conversations: the chat template (default) or the concatenated texts (identity)",
        needs.CONVERSATIONS,
        choices=("default", "identity", "nemotron-h-aligned", "nemotron-nano-v2"),
        not_yet="prompt formats by name (--chat-template FILE takes any template)",
        available=("default", "identity"),
    )
    chat_template: str | None = setting(
        None, "Jinja chat template file, instead of the one in the tokenizer's folder", needs.chat_template
    )
    sft_date: str = setting(
        "2024-07-26", "current date for chat templates; fixed for reproducible runs", needs.chat_template
    )


@dataclass(frozen=True)
class TrainConfig:
    """Batches, length and evaluation"""

    micro_batch_size: int = setting(None, "samples per micro-batch of a rank (1)", POSITIVE)
    global_batch_size: int = setting(
        None, "samples per optimizer step over all ranks (micro-batch × data-parallel size)", POSITIVE
    )
    gradient_accumulation_steps: int | None = setting(
        None, "micro-batches per step and data-parallel rank, instead of --global-batch-size", POSITIVE
    )
    num_microbatches: int | None = setting(
        None, "micro-batches that the batch of a data-parallel rank is split into", POSITIVE
    )
    rank_batch_size: int | None = setting(
        None, "samples per data-parallel rank and step, before the split into micro-batches", POSITIVE
    )
    rampup_batch_size: tuple[int, ...] = setting(
        (),
        "START INCREMENT SAMPLES: increase the global batch size from START to its final value within SAMPLES samples",
        POSITIVE,
        needs.GROWING_BATCH,
    )
    step_batch_size_schedule: tuple[str, ...] = setting(
        (),
        "TOKENS:SIZE ... instead of --global-batch-size: batch size SIZE after TOKENS tokens, for example 0:768 250B:1536",
    )
    train_iters: int = setting(None, "optimizer steps", NON_NEGATIVE, also="--train-steps --max_steps")
    train_samples: int | None = setting(None, "training samples, instead of --train-iters", POSITIVE)
    epochs: int | None = setting(
        None,
        "epochs of the training data, in whole steps; the run ends at the smaller of --epochs and --train-iters",
        POSITIVE,
        needs.countable_epochs,
    )
    eval_interval: int = setting(1000, "steps between validations (0: never)", NON_NEGATIVE, needs.validating)
    eval_iters: int = setting(10, "steps per validation (0: never)", NON_NEGATIVE, needs.evaluation_steps)
    full_validation: bool = setting(
        False,
        "validate on every validation sample once, ignoring weights of a blend, instead of --eval-iters steps",
        needs.a_validation_set,
    )
    eval_global_batch_size: int | None = setting(
        None, "samples per validation step (global batch)", POSITIVE, needs.evaluation
    )
    eval_micro_batch_size: int | None = setting(
        None, "samples per micro-batch of validation (micro-batch)", POSITIVE, needs.evaluation
    )
    skip_train: bool = setting(False, "evaluate the loaded model (validation and test), and exit", FREE)
    calculate_per_token_loss: bool = setting(
        True,
        "average the loss over all tokens of a step, not per micro-batch",
        notice="the loss is always the average over all tokens of a step",
    )


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer"""

    optimizer: str = setting("adam", "AdamW (adam) or SGD with momentum (sgd)", choices=("adam", "sgd"))
    sgd_momentum: float = setting(0.9, "momentum of SGD", BELOW_ONE, needs.SGD)
    lr: float = setting(3e-4, "peak learning rate", NON_NEGATIVE, also="--learning_rate")
    min_lr: float = setting(0.0, "learning rate at the end of the decay", NON_NEGATIVE, needs.DECAY)
    lr_decay_style: str = setting(
        "cosine",
        "shape of the learning rate decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = setting(
        None, "step at which the learning rate decay ends (train-iters)", POSITIVE, needs.a_decay
    )
    lr_decay_samples: int | None = setting(
        None, "sample at which the learning rate decay ends", POSITIVE, needs.a_decay
    )
    lr_wsd_decay_style: str = setting(
        "exponential",
        "shape of the final decay of WSD (warmup-stable-decay)",
        needs.WSD,
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = setting(None, "steps of the final decay of WSD", POSITIVE, needs.WSD)
    lr_wsd_decay_samples: int | None = setting(None, "samples of the final decay of WSD", POSITIVE, needs.WSD)
    lr_warmup_iters: int = setting(
        0, "steps of linear learning rate warm-up", NON_NEGATIVE, also="--warmup_steps --lr-warmup-steps"
    )
    lr_warmup_samples: int | None = setting(None, "samples of linear learning rate warm-up", NON_NEGATIVE)
    lr_warmup_fraction: float | None = setting(
        None, "learning rate warm-up as a fraction of the samples until the end of the decay", BELOW_ONE
    )
    lr_warmup_init: float = setting(0.0, "learning rate at the start of warm-up", NON_NEGATIVE, needs.WARMUP)
    weight_decay: float = setting(
        0.01, "weight decay, decoupled in AdamW; skips norms and biases", NON_NEGATIVE, needs.one_weight_decay
    )
    start_weight_decay: float = setting(None, "weight decay at the start (weight-decay)", NON_NEGATIVE)
    end_weight_decay: float = setting(None, "weight decay at the end (weight-decay)", NON_NEGATIVE)
    weight_decay_incr_style: str = setting(
        "constant",
        "shape of the change from --start-weight-decay to --end-weight-decay",
        needs.changing_weight_decay,
        choices=("constant", "linear", "cosine"),
    )
    clip_grad: float = setting(
        1.0, "maximum gradient norm (0: off)", NON_NEGATIVE, also="--gradient-clip-val --max_grad_norm"
    )
    adam_beta1: float = setting(0.9, "decay rate of Adam's first moment", BELOW_ONE, needs.ADAM)
    adam_beta2: float = setting(0.999, "decay rate of Adam's second moment", BELOW_ONE, needs.ADAM)
    adam_eps: float = setting(1e-8, "epsilon of Adam", POSITIVE, needs.ADAM)
    fused_update: bool = setting(
        True,
        "on a GPU, clip gradients, apply AdamW and round the weights in one fused kernel, without waiting for the gradient norm; off: "
        "separate torch operators, the reference",
    )


SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class LoopConfig:
    """Early exit, checks and timers"""

    on_resume: ClassVar = FREE

    exit_interval: int | None = setting(None, "save and exit at the next step divisible by N", POSITIVE)
    exit_duration_in_mins: float | None = setting(
        None, "save and exit after this many minutes, including the startup", POSITIVE
    )
    exit_signal_handler: bool = setting(
        False, "on --exit-signal, save and exit with code 0 (instead of 128 + number of the signal)"
    )
    exit_signal: str = setting(
        "SIGTERM", "signal that --exit-signal-handler handles", needs.EXIT_SIGNAL_HANDLER, choices=SIGNALS
    )
    check_for_nan_in_loss_and_grad: bool = setting(
        True,
        "stop before the update if the loss or a gradient is NaN or inf (off: skip the step)",
        needs.no_loss_scale_search,
    )
    rerun_mode: str = setting(
        "validate_results",
        "recompute a step with NaN or inf, to test whether NaN or inf is reproducible and where it first appears",
        needs.stop_at_nan,
        choices=("disabled", "validate_results", "report_stats"),
        not_yet="statistics of repeated steps",
        available=("disabled", "validate_results"),
    )
    check_for_spiky_loss: bool = setting(False, "warn about a loss above 10 × the earlier maximum")
    check_for_large_grads: bool = setting(False, "warn about a gradient norm above 10 × the earlier maximum")
    iterations_to_skip: tuple[int, ...] = setting(
        (),
        "steps to skip, numbered as in the log: their samples are read but not trained on",
        POSITIVE,
        needs.skipped_steps_in_run,
    )
    check_weight_hash_across_dp_replicas_interval: int | None = setting(
        None, "steps between comparisons of replicated weights across ranks (never)", POSITIVE, needs.REPLICAS
    )
    timing_log_level: int = setting(
        0, "parts of a step to time: 0 none, 1 large, 2 also compute and communication", choices=(0, 1, 2)
    )
    timing_log_option: str = setting(
        "minmax",
        "times to log: of the slowest rank (max), of the fastest and slowest rank (minmax) or of all ranks (all)",
        choices=("max", "minmax", "all"),
    )
    manual_gc: bool = setting(False, "run Python garbage collection manually, at the same steps on all ranks")
    manual_gc_interval: int = setting(
        0, "steps between garbage collections (0: only before the first step)", NON_NEGATIVE, needs.MANUAL_GC
    )
    manual_gc_eval: bool = setting(True, "also collect garbage before and after evaluations", needs.MANUAL_GC)
    enable_one_logger: bool = setting(
        False,
        "accepted for Megatron scripts: NVIDIA's one-logger",
        sets={"--no-one-logger": False},
        notice="this package is not used; app_metrics.json has the times that one-logger would report",
    )
    retro_project_dir: str | None = setting(
        None,
        "accepted for Megatron scripts: retrieval data",
        notice="models with retrieval are not supported, so this has no effect",
    )
    retro_cyclic_train_iters: int | None = setting(
        None,
        "accepted for Megatron scripts: samples before the data repeats",
        POSITIVE,
        notice="data always repeats after its end (--dataloader-type), so this has no effect",
    )
