"""Needs of data, validation, tokenizers and conversations."""

from pentatron.errors import UserError
from pentatron.layout.schedules import takes_groups
from pentatron.settings.data_paths import NAMED, Blend, counted_by_the_run, names_files, without_epochs
from pentatron.settings.declaration import Need, Settings, unless
from pentatron.settings.entry import GRAD_SCALER
from pentatron.settings.layers import windowed_layers


def reader_processes(s: Settings) -> str:
    """Processes that read batches ahead."""
    none = s.num_workers == 0
    return "there are no reader processes (--num-workers 0), so nothing is read ahead" if none else ""


def one_data_source(s: Settings) -> str:
    """Data that is split by shares."""
    if s.train_data_path:
        return "each split has files of its own (--train-data-path), so nothing is split"
    if s.mock_data:
        return "mock data is split in three equal parts"
    made = not s.data_path and not s.corpus
    return "synthetic data is not split, so this changes nothing" if made else ""


def a_corpus(s: Settings) -> str:
    """A corpus."""
    return "there is no --corpus, so this changes nothing" if not s.corpus else ""


def synthetic_data(s: Settings) -> str:
    """Synthetic samples."""
    sources = {
        "--corpus": s.corpus,
        "--data-path": s.data_path,
        "--train-data-path": s.train_data_path,
        "--mock-data": s.mock_data,
    }
    named = next((flag for flag, value in sources.items() if value), "")
    return f"the data comes from {named}, so no synthetic samples are made" if named else ""


def countable_epochs(s: Settings) -> str:
    """Data whose samples are counted before the run starts."""
    if s.is_synthetic or s.epoch_samples is not None:
        return ""
    if counted_by_the_run(s):
        return "how many steps they are is known when the run has tokenized its data"
    if not (why := without_epochs(s)) and s.facts.launcher:
        return "how many steps they are is known when the run has counted its data"
    return f"{why or 'the data is not read here'}; --train-iters {s.train_iters} decides"


def evaluations(s: Settings) -> str:
    """Evaluations during training."""
    if s.eval_interval == 0:
        return ""
    if s.skip_train:
        return "nothing is trained (--skip-train); there is one evaluation"
    if s.eval_iters == 0:
        return "there are no validation steps (--eval-iters 0)"
    return no_validation_data(s)


def evaluation_steps(s: Settings) -> str:
    """Evaluations of a chosen number of steps."""
    if s.eval_iters == 0:
        return ""
    if s.eval_interval == 0 and not s.skip_train:
        return "there is no validation (--eval-interval 0)"
    if s.full_validation and not (s.is_synthetic or s.sft):
        return "every validation sample is read once (--full-validation)"
    return no_validation_data(s)


def no_validation_data(s: Settings) -> str:
    """Why there is no validation data, or an empty text."""
    if s.train_data_path:
        return "" if s.valid_data_path else "there is no --valid-data-path, so nothing is validated"
    shares = [float(share) for share in s.split.split(",")]
    no_share = len(shares) < 2 or shares[1] == 0
    from_files = s.data_path or s.corpus
    return f"--split {s.split} leaves nothing to validate" if from_files and no_share else ""


def a_test(s: Settings) -> str:
    """An evaluation on the test set."""
    return "nothing is evaluated (--eval-iters 0), so these files are not read" if s.eval_iters == 0 else ""


def a_tokenizer(s: Settings) -> str:
    """A checkpoint and a tokenizer to continue text with."""
    if not s.save_checkpoints:
        return "the text is continued with the last checkpoint, and none is saved"
    named = s.corpus or (names_files(s) and (s.tokenizer_type or s.tokenizer_model))
    return "" if named else "no tokenizer is known, so no text can be continued"


def a_sample(s: Settings) -> str:
    """A prompt to continue."""
    return "there is no --sample-prompt to continue" if s.sample_prompt is None else a_tokenizer(s)


def text_or_ids(s: Settings) -> str:
    """A tokenizer that is used."""
    if s.corpus:
        return "the corpus gets a tokenizer of its own"
    used = names_files(s) or s.source("vocab_size").startswith("derived: tokenizer")
    return "" if used else "synthetic data is tokens already, and --vocab-size is given"


def gpt2_tokenizer(s: Settings) -> str:
    """The GPT-2 tokenizer."""
    kind = s.tokenizer_type or ("HuggingFaceTokenizer" if s.tokenizer_model else None)
    if kind is not None and kind != "GPT2BPETokenizer":
        return f"only GPT2BPETokenizer reads it, and the tokenizer is a {kind}"
    return text_or_ids(s)


def a_validation_set(s: Settings) -> str:
    """A validation set that ends."""
    if not s.full_validation:
        return ""
    if s.is_synthetic or s.sft:
        kind = "conversations are" if s.sft else "synthetic data is"
        return f"{kind} validated by --eval-iters steps"
    never = s.eval_interval == 0 and not s.skip_train
    if never or s.eval_iters == 0:
        return "there is no validation (--eval-interval or --eval-iters is 0)"
    return no_validation_data(s)


def a_kept_order(s: Settings) -> str:
    """Samples in an order that is kept on disk."""
    return "synthetic samples need no order that could be kept" if s.is_synthetic else ""


def a_choice_of_order(s: Settings) -> str:
    """Data whose order can be chosen."""
    if s.dataloader_type != "cyclic" or not (s.is_synthetic or s.sft):
        return ""
    what = "conversations" if s.sft else "synthetic samples"
    return f"{what} are always shuffled anew in every epoch"


def weighted_data(s: Settings) -> str:
    """Data with weights."""
    try:
        weighted = any(Blend.parse(getattr(s, name)).weights for name in NAMED if getattr(s, name))
    except UserError:
        return ""
    return "" if weighted else "no data has a weight, so nothing is built with a surplus"


def documents(s: Settings) -> str:
    """Text whose documents end at end-of-document tokens."""
    if s.corpus or s.data_path or s.mock_data:
        return documents_of_conversations(s)
    return "synthetic samples are one document each, so this changes nothing"


def documents_of_conversations(s: Settings) -> str:
    """Why flags about ends of documents have no effect on conversations, or an empty text."""
    return (
        "with --sft a conversation is a document by itself and its loss is on the answers, so this changes nothing"
        if s.sft
        else ""
    )


CONVERSATIONS = unless(lambda s: s.sft, "there are no conversations (--sft), so this changes nothing")
TEMPLATE = (
    CONVERSATIONS,
    unless(
        lambda s: s.sft_tokenizer_prompt_format != "identity",
        "texts follow each other as they are (--sft-tokenizer-prompt-format identity)",
    ),
)


# Needs of the architecture: positions, windows, biases, experts.


ROPE = unless(
    lambda s: s.position_embedding_type == "rope",
    lambda s: f"positions are {s.position_embedding_type}, not rope, so this changes nothing",
)


def _scaling(*kinds: str) -> Need:
    """Rotary positions with one of these kinds of scaling."""

    def check(s: Settings) -> str:
        kind = s.rope_scaling_type
        if (reason := ROPE(s)) or kind in kinds:
            return reason
        if kind is None:
            return "rotary frequencies are not stretched (--rope-scaling-type), so this changes nothing"
        return (
            f"it belongs to {' and '.join(kinds)}, not to --rope-scaling-type {kind}, so this changes nothing"
        )

    return check


ROPE_SCALING = _scaling("linear", "llama3", "yarn")
ORIGINAL_LENGTH = _scaling("llama3", "yarn")
LLAMA3_SCALING = _scaling("llama3")
YARN = _scaling("yarn")
MSCALES = (
    YARN,
    unless(lambda s: s.yarn_attention_factor is None, "--yarn-attention-factor is given and used as it is"),
    unless(
        lambda s: s.yarn_mscale and s.yarn_mscale_all_dim,
        "--yarn-mscale and --yarn-mscale-all-dim act together, both above 0",
    ),
)
WINDOW = unless(lambda s: s.window_size, "no layer has a window (--window-size), so this changes nothing")


def a_shorter_window(s: Settings) -> str:
    """A window smaller than the sequence, in at least one layer."""
    window, length = s.window_size, s.seq_length
    if not window:
        return ""
    if window[0] == -1 or window[0] >= length - 1:
        return (
            f"it covers all {length} tokens of a sequence (--seq-length), so every token sees all before it"
        )
    try:
        some = any(windowed_layers(s.window_attn_skip_freq, s.num_layers))
    except ValueError:
        # A rule reports a pattern that cannot be read.
        return ""
    return "" if some else f"--window-attn-skip-freq {s.window_attn_skip_freq} leaves no layer a window"


_BIAS_ALREADY = "every linear layer has a bias already"
QKV_BIAS_ALONE = unless(lambda s: not (s.add_qkv_bias and s.add_bias_linear), _BIAS_ALREADY)
PROJECTION_BIAS_ALONE = unless(lambda s: not (s.add_proj_bias and s.add_bias_linear), _BIAS_ALREADY)
MLP_BIAS_ALONE = unless(lambda s: not (s.add_mlp_bias and s.add_bias_linear), _BIAS_ALREADY)
PADDING_NOT_GIVEN = unless(
    lambda s: not s.given("padded_vocab_size"),
    lambda s: f"--padded-vocab-size {s.padded_vocab_size} is given and used as it is",
)

EXPERTS = unless(lambda s: s.num_experts, "there are no experts (--num-experts), so this changes nothing")
EXPERT_BIAS = (
    EXPERTS,
    unless(
        lambda s: s.moe_router_enable_expert_bias,
        "there is no bias to move (--moe-router-enable-expert-bias)",
    ),
)
SOFTMAX_SCORES = (
    EXPERTS,
    unless(
        lambda s: not s.moe_router_pre_softmax or s.moe_router_score_function == "softmax",
        "scores are sigmoid, so there is no softmax to place",
    ),
)
BALANCING_WEIGHT = (
    EXPERTS,
    unless(
        lambda s: s.moe_router_load_balancing_type == ("none",) or any(s.moe_aux_loss_coeff),
        "its weight is 0 (--moe-aux-loss-coeff), so it balances nothing",
    ),
)
BALANCING = (
    EXPERTS,
    unless(
        lambda s: s.moe_router_load_balancing_type != ("none",) or not any(s.moe_aux_loss_coeff),
        "no loss balances the experts (--moe-router-load-balancing-type none)",
    ),
)


# Needs of optimizer, schedules and precision.


DECAY = unless(
    lambda s: s.lr_decay_style != "constant", "the learning rate does not decay (--lr-decay-style constant)"
)


def decay_or_fraction(s: Settings) -> str:
    """A decay, or a warm-up given as a share of it."""
    return DECAY(s) if s.lr_warmup_fraction is None else ""


WSD = unless(
    lambda s: s.lr_decay_style == "WSD",
    lambda s: f"only --lr-decay-style WSD has such a decay, not {s.lr_decay_style}",
)
WARMUP = unless(
    lambda s: s.lr_warmup_iters or s.lr_warmup_samples or s.lr_warmup_fraction,
    "there is no warm-up (--lr-warmup-iters)",
)


def one_weight_decay(s: Settings) -> str:
    """A weight decay that is not given by both of its ends."""
    ends = s.given("start_weight_decay") and s.given("end_weight_decay")
    changes = s.weight_decay_incr_style != "constant" and ends
    return "--start-weight-decay and --end-weight-decay say what it is" if changes else ""


def changing_weight_decay(s: Settings) -> str:
    """A weight decay with two different ends."""
    start, end = s.start_weight_decay, s.end_weight_decay
    same = s.weight_decay_incr_style != "constant" and start == end
    return f"it begins and ends at {start} (--start-weight-decay, --end-weight-decay)" if same else ""


def growing_batch(s: Settings) -> str:
    """A ramp-up that begins below the global batch size."""
    ramp = s.rampup_batch_size
    same = bool(ramp) and ramp[0] == s.global_batch_size
    return "it begins at the global batch size, so every batch has that size" if same else ""


ADAM = unless(lambda s: s.optimizer == "adam", lambda s: f"--optimizer {s.optimizer} has no such number")
SGD = unless(lambda s: s.optimizer == "sgd", "--optimizer adam has moments of its own (--adam-beta1)")


def loss_scale_search(name: str) -> Need:
    """A loss scale that is searched for in fp16. A value that programs bring by default gets no notice."""

    def check(s: Settings) -> str:
        if not s.source(name).startswith("flag") and getattr(s, name) == GRAD_SCALER.get(name):
            return ""
        if s.loss_scale:
            return f"the loss scale stays as it is (--loss-scale {s.loss_scale:g})"
        return "" if s.fp16 else "no loss scale is looked for without --fp16"

    return check


def nonzero_loss_scale(s: Settings) -> str:
    """A loss scale other than 0."""
    search = "the loss scale is found on the way" if s.fp16 else "the loss is not scaled"
    return f"0 stands for none, so {search}" if s.loss_scale == 0 else ""


# Needs of the layout: ranks to share with, stages to divide over, experts, recomputed layers.


TENSOR_AXIS = unless(
    lambda s: not s.sequence_parallel or s.tensor_model_parallel_size > 1,
    "there is no tensor axis to split over (--tensor-model-parallel-size 1), so this changes nothing",
)
PIPELINE = unless(
    lambda s: s.pipeline_model_parallel_size > 1, "there is one pipeline stage, so no schedule is needed"
)
STAGES = unless(
    lambda s: s.pipeline_model_parallel_size > 1 or (s.virtual_pipeline_model_parallel_size or 1) > 1,
    "there is one pipeline stage, which holds all layers",
)
GROUPED_MICRO_BATCHES = (
    PIPELINE,
    unless(
        lambda s: takes_groups(s.pipeline_schedule, s.virtual_pipeline_model_parallel_size or 1),
        lambda s: f"{s.pipeline_schedule} does not take micro-batches in groups, only interleaved does",
    ),
)
SPLIT_SEQUENCES = unless(
    lambda s: s.context_parallel_size > 1,
    "sequences are not split (--context-parallel-size 1), so nothing is exchanged",
)


def _one_replica(s: Settings) -> bool:
    return bool(s.data_parallel_size * s.context_parallel_size == 1)


_REDUCTION = unless(lambda s: not _one_replica(s), "one data-parallel rank has nothing to reduce")


def buckets(s: Settings) -> str:
    """Gradients that are reduced in buckets."""
    in_shards = s.zero_stage == 3 and not _one_replica(s)
    return "ZeRO 3 sums gradients layer by layer, not in buckets" if in_shards else _REDUCTION(s)


def ranks_to_shard_over(s: Settings) -> str:
    """Several ranks that hold the same parameters."""
    # Experts may have copies on tensor ranks, which then shard those.
    of_experts = s.num_experts is not None and s.tensor_model_parallel_size > 1
    alone = s.zero_stage > 0 and _one_replica(s) and not of_experts
    return "one data-parallel rank has nobody to share with, so it keeps everything" if alone else ""


def hybrid_shards(s: Settings) -> str:
    """ZeRO 3 over groups of ranks that each hold the whole model."""
    count, stage = s.num_distributed_optimizer_instances, s.zero_stage
    if count == 1:
        return ""
    if stage == 0:
        return "nothing is divided between data-parallel ranks (--zero-stage 0), so there are no groups to divide it in"
    if stage < 3:
        return f"ZeRO {stage} divides between all data-parallel ranks; groups that each hold everything are for ZeRO 3"
    if s.data_parallel_size * s.context_parallel_size == count:
        return "every data-parallel rank is a group by itself, so each keeps everything"
    return ""


RECOMPUTE = unless(
    lambda s: s.recompute_granularity is not None,
    "nothing is recomputed without --recompute-granularity",
)


def recomputed_modules(s: Settings) -> str:
    """Selective recompute, with experts for the modules of experts."""
    if s.recompute_granularity == "full":
        return "full recompute covers whole layers, so no modules are chosen"
    modules = s.recompute_modules
    if not modules or s.recompute_granularity is None:
        return RECOMPUTE(s) if modules else ""
    absent = [name for name in ("moe", "moe_act", "shared_experts") if name in modules]
    if not absent or s.num_experts is not None:
        return ""
    return f"there are no experts (--num-experts), so {', '.join(absent)} cannot run again"


# Needs of processes, checkpoints, logs, profiles and the training loop.


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
