"""Needs of the settings: each returns why a setting has no effect in a run, or an empty string if it has one.

Each docstring names the condition under which the setting has an effect. The reason completes the notice
`--flag value: …`.
"""

from contextlib import suppress

from pentatron.errors import UserError
from pentatron.layout.schedules import uses_groups
from pentatron.settings.data_paths import NAMED, Blend, is_counted_in_run, training_files_flag, why_no_epochs
from pentatron.settings.declaration import Need, Settings, first_reason, flag_of, requires
from pentatron.settings.entry_points import GRAD_SCALER
from pentatron.settings.layer_patterns import windowed_layers

# --- data, validation, tokenizers and conversations ---


READER_PROCESSES = requires(
    lambda s: s.num_workers, "there are no data loading processes (--num-workers 0), so nothing is prefetched"
)


def one_data_source(s: Settings) -> str:
    """Data that is split by weights."""
    reasons = {
        "each split has separate files (--train-data-path), so nothing is split": s.train_data_path,
        "mock data is split in three equal parts": s.mock_data,
        "synthetic data is not split, so this has no effect": not s.data_path and not s.corpus,
    }
    return first_reason(reasons)


CORPUS = requires(lambda s: s.corpus, "there is no --corpus, so this has no effect")


def data_sources(s: Settings) -> list[str]:
    """Returns the flags in effect that name data. Without any, samples are synthetic."""
    return [flag_of(n) for n in ("corpus", "data_path", "train_data_path", "mock_data") if getattr(s, n)]


SYNTHETIC_DATA = requires(
    lambda s: not data_sources(s),
    lambda s: f"the data comes from {data_sources(s)[0]}, so no synthetic samples are generated",
)


def countable_epochs(s: Settings) -> str:
    """Data with samples that are counted before the run starts."""
    if s.is_synthetic or s.epoch_samples is not None:
        return ""
    why = why_no_epochs(s)
    if is_counted_in_run(s) or (s.facts.launcher and not why):
        how = "tokenized" if is_counted_in_run(s) else "counted"
        return f"the number of steps is known once the run has {how} its data"
    return f"{why or 'the data is not read here'}; --train-iters {s.train_iters} sets the length"


def validating(s: Settings) -> str:
    """Evaluations during training."""
    if s.eval_interval == 0:
        return ""
    if s.skip_train:
        return "there is no training (--skip-train), only one evaluation"
    return "there are no validation steps (--eval-iters 0)" if s.eval_iters == 0 else no_validation_data(s)


def evaluation_steps(s: Settings) -> str:
    """Evaluations with a limited number of steps."""
    if s.eval_iters == 0:
        return ""
    if s.eval_interval == 0 and not s.skip_train:
        return "there is no validation (--eval-interval 0)"
    if s.full_validation and not (s.is_synthetic or s.sft):
        return "every validation sample is read once (--full-validation)"
    return no_validation_data(s)


def evaluation(s: Settings) -> str:
    """Evaluations, on validation data."""
    if s.eval_iters == 0 or (s.eval_interval == 0 and not s.skip_train):
        return "there is no validation (--eval-interval or --eval-iters is 0)"
    return no_validation_data(s)


def no_validation_data(s: Settings) -> str:
    """Returns why there is no validation data, or an empty string."""
    if s.train_data_path:
        return "" if s.valid_data_path else "there is no --valid-data-path, so there is no validation"
    weights = [float(weight) for weight in s.split.split(",")]
    if (s.data_path or s.corpus) and (len(weights) < 2 or weights[1] == 0):
        return f"--split {s.split} leaves no validation data"
    return ""


EVAL_ITERS = requires(lambda s: s.eval_iters, "nothing is evaluated (--eval-iters 0), so it is not read")


def a_tokenizer(s: Settings) -> str:
    """A checkpoint and a tokenizer, which generating text needs."""
    if not s.save_checkpoints:
        return "text is generated with the last checkpoint, but no checkpoint is saved"
    named = s.corpus or (training_files_flag(s) and (s.tokenizer_type or s.tokenizer_model))
    return "" if named else "there is no tokenizer, so no text can be generated"


def sample_prompt(s: Settings) -> str:
    """A prompt to continue."""
    return "there is no --sample-prompt" if s.sample_prompt is None else a_tokenizer(s)


def tokenizing(s: Settings) -> str:
    """A tokenizer that is used."""
    if s.corpus:
        return "a tokenizer is trained for the corpus"
    used = training_files_flag(s) or s.source("vocab_size").startswith("derived: tokenizer")
    return "" if used else "synthetic data consists of tokens, and --vocab-size is given"


def gpt2_tokenizer(s: Settings) -> str:
    """The GPT-2 tokenizer."""
    kind = s.tokenizer_type or ("HuggingFaceTokenizer" if s.tokenizer_model else None)
    if kind is not None and kind != "GPT2BPETokenizer":
        return f"only GPT2BPETokenizer uses it, but the tokenizer is a {kind}"
    return tokenizing(s)


def a_validation_set(s: Settings) -> str:
    """A validation set of a finite length."""
    if not s.full_validation:
        return ""
    if s.is_synthetic or s.sft:
        kind = "conversations" if s.sft else "synthetic data"
        return f"validation on {kind} always takes --eval-iters steps"
    return evaluation(s)


CACHED_ORDER = requires(lambda s: not s.is_synthetic, "synthetic samples have no cached order")


def a_choice_of_order(s: Settings) -> str:
    """Data that can be read in several orders."""
    what = "conversations" if s.sft else "synthetic samples" if s.is_synthetic else ""
    return f"{what} are always reshuffled in every epoch" if what and s.dataloader_type == "cyclic" else ""


def weighted_data(s: Settings) -> str:
    """Data with weights."""
    with suppress(UserError):
        if not any(Blend.parse(getattr(s, name)).weights for name in NAMED if getattr(s, name)):
            return "no dataset has a weight, so no additional samples are built"
    return ""


def document_ends(s: Settings) -> str:
    """Text with end-of-document tokens between documents."""
    if not (s.corpus or s.data_path or s.mock_data):
        return "every synthetic sample is one document, so this has no effect"
    loss = "with --sft every conversation is one document, and only answers have a loss"
    return f"{loss}, so this has no effect" if s.sft else ""


CONVERSATIONS = requires(lambda s: s.sft, "there are no conversations (--sft), so this has no effect")


def chat_template(s: Settings) -> str:
    """Conversations that are formatted by a template."""
    none = "texts are concatenated without a template (--sft-tokenizer-prompt-format identity)"
    return CONVERSATIONS(s) or (none if s.sft_tokenizer_prompt_format == "identity" else "")


# --- architecture: positions, windows, biases, experts ---


ROPE = requires(
    lambda s: s.position_embedding_type == "rope",
    lambda s: f"positions are {s.position_embedding_type}, not rope, so this has no effect",
)


def _scaling(*kinds: str) -> Need:
    """Builds the need for rotary positions with one of these kinds of scaling."""

    def check(s: Settings) -> str:
        kind = s.rope_scaling_type
        if (reason := ROPE(s)) or kind in kinds:
            return reason
        if kind is None:
            return "rotary frequencies are not scaled (--rope-scaling-type), so this has no effect"
        return f"it is for {' and '.join(kinds)}, not for --rope-scaling-type {kind}, so this has no effect"

    return check


ROPE_SCALING = _scaling("linear", "llama3", "yarn")
ORIGINAL_LENGTH = _scaling("llama3", "yarn")
LLAMA3_SCALING = _scaling("llama3")
YARN = _scaling("yarn")
NO_FACTOR = requires(lambda s: s.yarn_attention_factor is None, "--yarn-attention-factor is given instead")
MSCALES = requires(
    lambda s: s.yarn_mscale and s.yarn_mscale_all_dim,
    "--yarn-mscale and --yarn-mscale-all-dim have an effect only if both are above 0",
)
WINDOW = requires(lambda s: s.window_size, "no layer has a window (--window-size), so this has no effect")


def a_shorter_window(s: Settings) -> str:
    """A window shorter than the sequence, in at least one layer."""
    window, length = s.window_size, s.seq_length
    if window and (window[0] == -1 or window[0] >= length - 1):
        return f"it covers all {length} tokens of a sequence (--seq-length), so attention is not limited"
    # A rule reports an invalid pattern.
    with suppress(ValueError):
        if window and not any(windowed_layers(s.window_attn_skip_freq, s.num_layers)):
            return f"--window-attn-skip-freq {s.window_attn_skip_freq} leaves no layer with a window"
    return ""


def sole_bias(name: str) -> Need:
    """Builds the need of an additional bias, if it is on, for linear layers without bias."""
    reason = "every linear layer has a bias already"
    return requires(lambda s: not (getattr(s, name) and s.add_bias_linear), reason)


PADDING_NOT_GIVEN = requires(
    lambda s: not s.given("padded_vocab_size"),
    lambda s: f"--padded-vocab-size {s.padded_vocab_size} is given, so no value is computed",
)

EXPERTS = requires(lambda s: s.num_experts, "there are no experts (--num-experts), so this has no effect")
EXPERT_BIAS = requires(
    lambda s: s.moe_router_enable_expert_bias, "there is no bias to update (--moe-router-enable-expert-bias)"
)
SOFTMAX_SCORES = requires(
    lambda s: not s.moe_router_pre_softmax or s.moe_router_score_function == "softmax",
    "the scores are a sigmoid, so there is no softmax",
)
BALANCING_WEIGHT = requires(
    lambda s: s.moe_router_load_balancing_type == ("none",) or any(s.moe_aux_loss_coeff),
    "its weight is 0 (--moe-aux-loss-coeff), so it has no effect",
)
BALANCING = requires(
    lambda s: s.moe_router_load_balancing_type != ("none",) or not any(s.moe_aux_loss_coeff),
    "there is no load-balancing loss (--moe-router-load-balancing-type none)",
)


# --- optimizer, schedules and precision ---


DECAY = requires(lambda s: s.lr_decay_style != "constant", "there is no decay (--lr-decay-style constant)")


def a_decay(s: Settings) -> str:
    """A learning rate decay, or a warm-up given as a fraction of it."""
    return DECAY(s) if s.lr_warmup_fraction is None else ""


WSD = requires(lambda s: s.lr_decay_style == "WSD", "only --lr-decay-style WSD uses it")
WARMUP = requires(
    lambda s: s.lr_warmup_iters or s.lr_warmup_samples or s.lr_warmup_fraction,
    "there is no warm-up (--lr-warmup-iters)",
)


def one_weight_decay(s: Settings) -> str:
    """A weight decay that is not given by its start and end."""
    ends = s.given("start_weight_decay") and s.given("end_weight_decay")
    changes = s.weight_decay_incr_style != "constant" and ends
    return "--start-weight-decay and --end-weight-decay are used instead" if changes else ""


def changing_weight_decay(s: Settings) -> str:
    """A weight decay with different values at start and end."""
    start, end = s.start_weight_decay, s.end_weight_decay
    same = s.weight_decay_incr_style != "constant" and start == end
    return f"start and end are both {start} (--start-weight-decay, --end-weight-decay)" if same else ""


GROWING_BATCH = requires(
    lambda s: s.rampup_batch_size[:1] != (s.global_batch_size,),
    "it starts at the global batch size, so every batch has that size",
)
ADAM = requires(lambda s: s.optimizer == "adam", lambda s: f"--optimizer {s.optimizer} does not use it")
SGD = requires(lambda s: s.optimizer == "sgd", "--optimizer adam uses --adam-beta1 instead")


def dynamic_loss_scale(name: str) -> Need:
    """Builds the need for dynamic loss scaling in fp16. A default of an entry point gets no notice."""

    def check(s: Settings) -> str:
        is_default = not s.by_flag(name) and getattr(s, name) == GRAD_SCALER.get(name)
        if s.loss_scale and not is_default:
            return f"the loss scale is static (--loss-scale {s.loss_scale:g})"
        return "" if s.fp16 or is_default else "there is no dynamic loss scale without --fp16"

    return check


def nonzero_loss_scale(s: Settings) -> str:
    """A loss scale other than 0."""
    effect = "the loss scale is dynamic" if s.fp16 else "the loss is not scaled"
    return f"0 means no loss scale, so {effect}" if s.loss_scale == 0 else ""


# --- layout: ranks to shard over, pipeline stages, recompute ---


TENSOR_AXIS = requires(
    lambda s: not s.sequence_parallel or s.tensor_model_parallel_size > 1,
    "there is one tensor rank (--tensor-model-parallel-size 1), so this has no effect",
)
PIPELINE = requires(lambda s: s.pipeline_model_parallel_size > 1, "one pipeline stage needs no schedule")
STAGES = requires(
    lambda s: s.pipeline_model_parallel_size > 1 or s.virtual_stages > 1,
    "there is one pipeline stage, which holds all layers",
)
GROUPED_MICRO_BATCHES = requires(
    lambda s: uses_groups(s.pipeline_schedule, s.virtual_stages),
    lambda s: f"{s.pipeline_schedule} does not group micro-batches, only interleaved does",
)
SPLIT_SEQUENCES = requires(
    lambda s: s.context_parallel_size > 1,
    "sequences are not split (--context-parallel-size 1), so nothing is exchanged",
)


REPLICATED_GRADIENTS = requires(
    lambda s: s.data_parallel_size * s.context_parallel_size > 1, "one data-parallel rank reduces nothing"
)
BUCKETS = requires(lambda s: s.zero_stage != 3, "ZeRO 3 reduces gradients per layer, not in buckets")


def ranks_to_shard_over(s: Settings) -> str:
    """Several ranks that hold the same parameters."""
    # Experts may be replicated across tensor ranks, and are then sharded over these.
    replicated_experts = s.num_experts is not None and s.tensor_model_parallel_size > 1
    alone = s.data_parallel_size * s.context_parallel_size == 1 and not replicated_experts
    return "there is one data-parallel rank, so nothing is sharded" if alone and s.zero_stage > 0 else ""


def hybrid_shards(s: Settings) -> str:
    """Hybrid sharding: ZeRO 3 within groups of ranks that each hold the whole model."""
    count, stage = s.num_distributed_optimizer_instances, s.zero_stage
    groups = "so there are no groups to shard in"
    nothing = f"nothing is sharded over data-parallel ranks (--zero-stage 0), {groups}"
    every = f"ZeRO {stage} shards over all data-parallel ranks; hybrid sharding in groups is for ZeRO 3"
    alone = s.data_parallel_size * s.context_parallel_size == count
    single = "every data-parallel rank is a group, so nothing is sharded"
    return first_reason({nothing: stage == 0, every: stage < 3, single: alone}) if count > 1 else ""


RECOMPUTE = requires(lambda s: s.recompute_granularity, "nothing is recomputed (--recompute-granularity)")


def recomputed_modules(s: Settings) -> str:
    """Selective recompute, and experts for the modules of experts."""
    if s.recompute_granularity == "full":
        return "full recompute covers whole layers, so modules are not selected"
    modules = s.recompute_modules
    if not modules or s.recompute_granularity is None:
        return RECOMPUTE(s) if modules else ""
    names = ", ".join(n for n in ("moe", "moe_act", "shared_experts") if n in modules and not s.num_experts)
    return f"there are no experts (--num-experts), so {names} cannot be recomputed" if names else ""


# --- processes, checkpoints, logs, profiles and the training loop ---


PEERS = requires(lambda s: s.facts.world_size > 1, "one process runs no collectives")


def own_port(s: Settings) -> str:
    """Several processes, and no launcher that provides their rendezvous."""
    if s.facts.launcher:
        return f"{s.facts.launcher} provides the rendezvous"
    return "one process has no rendezvous" if s.facts.world_size == 1 else ""


OWN_PROCESSES = requires(
    lambda s: not s.facts.launcher,
    lambda s: f"{s.facts.launcher} starts the processes, so only it restarts them (torchrun: --max-restarts)",
)
SUPERVISOR = requires(
    lambda s: s.facts.world_size > 1 or s.max_restarts, "one process has no supervisor without --max-restarts"
)


def open_rendezvous(s: Settings) -> str:
    """Processes of a launcher that does not provide their rendezvous."""
    facts = s.facts
    if facts.launcher and facts.has_rendezvous:
        return f"{facts.launcher} provides the rendezvous (MASTER_ADDR), which is used instead"
    if facts.world_size == 1:
        return "one process has no rendezvous"
    here = "processes of this command have their rendezvous on this machine; --master-port sets the port"
    return "" if facts.launcher else here


MEMORY_SAMPLES = requires(
    lambda s: s.monitor_memory_continuously, "memory is not sampled (--monitor-memory-continuously)"
)
A_DASHBOARD = requires(
    lambda s: s.tensorboard_dir is not None or s.wandb_project is not None,
    "neither --tensorboard-dir nor --wandb-project is given",
)
WANDB = requires(lambda s: s.wandb_project is not None, "nothing is logged there without --wandb-project")
PROGRESS_LOG = requires(lambda s: s.log_progress, "it is written to progress.txt, which needs --log-progress")


def checkpoints(s: Settings) -> str:
    """Checkpoints that are saved."""
    why = "(--no-save-checkpoints)" if s.given("save_checkpoints") else "without --save"
    return "" if s.save_checkpoints else f"nothing is saved {why}"


RETENTION = requires(lambda s: s.keep_checkpoints is not None, "all steps are kept (--keep-checkpoints none)")
OWN_FORMAT = requires(
    lambda s: s.ckpt_format != "torch",
    "this format can only be loaded; this run saves in Pentatron's format, which any layout can load",
)
LOAD_GIVEN = requires(lambda s: s.given("load"), "nothing is loaded (--load)")


EXIT_SIGNAL_HANDLER = requires(
    lambda s: s.exit_signal_handler,
    "every signal saves and stops a run; with --exit-signal-handler this one gives exit code 0",
)


def stop_at_nan(s: Settings) -> str:
    """A run that stops at NaN or inf instead of skipping the step."""
    if s.fp16 and not s.loss_scale:
        return "with a dynamic loss scale in fp16 such steps are expected: they are skipped and counted"
    off = not s.check_for_nan_in_loss_and_grad
    return "such steps are skipped (--no-check-for-nan-in-loss-and-grad)" if off else ""


def no_loss_scale_search(s: Settings) -> str:
    """No dynamic loss scale, which needs overflows."""
    return stop_at_nan(s) if s.fp16 and not s.loss_scale else ""


def skipped_steps_in_run(s: Settings) -> str:
    """Steps to skip that the run reaches."""
    last, steps = s.train_iters, s.iterations_to_skip
    never = steps and last is not None and min(steps) > last
    return f"the run has {last} steps, so none of these is reached" if never else ""


PROFILE = requires(lambda s: s.profile, "nothing is profiled (--profile)")


def profiled_rank_exists(s: Settings) -> str:
    """A profiled rank that exists."""
    ranks = s.facts.world_size
    none = f"the ranks are 0 to {ranks - 1}, so none of these exists"
    return "" if min(s.profile_ranks, default=0) < ranks else none


def profile_in_run(s: Settings) -> str:
    """A profile that begins before the last step."""
    last = s.train_iters
    late = s.profile and last is not None and s.profile_step_start >= last
    return f"the run ends with step {last}, before --profile-step-start" if late else ""


MANUAL_GC = requires(lambda s: s.manual_gc, "Python collects garbage automatically (--manual-gc)")


REPLICAS = requires(
    lambda s: s.facts.world_size > 1 or not s.check_weight_hash_across_dp_replicas_interval,
    "one process has no replicas to compare",
)
MEMORY_HISTORY = requires(lambda s: s.record_memory_history, "nothing is recorded (--record-memory-history)")
