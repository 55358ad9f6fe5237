"""A setting without effect gives one notice if it was given; one with an effect gives none."""

from pathlib import Path

import pytest

from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.entry_points import TRAIN
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import ProcessFacts
from tests.settings.builders import LEAST, about, notices, other_value, resolved
from tests.settings.test_device_notices import ON_A_GPU
from tests.settings.test_loop_settings import CASES as OF_THE_LOOP
from tests.settings.test_model_settings import IDLE as OF_THE_MODEL

ONE = ProcessFacts(1)
TWO = ProcessFacts(2, 2)
FOUR = ProcessFacts(4, 4)
INSTANCES = "--num-distributed-optimizer-instances 2"
TORCHRUN = ProcessFacts(2, 2, 2, "torchrun", True)
SLURM = ProcessFacts(2, 2, 2, "Slurm", False)
FILES = "--data-path a --vocab-size 100 --train-iters 10"
OWN_FILES = "--train-data-path a --vocab-size 100 --train-iters 10"
INTERLEAVED = f"{LEAST} --pp_size 2 --virtual-pipeline-model-parallel-size 2 --num-microbatches 4"
GROUPED = "--microbatch-group-size-per-virtual-pipeline-stage 3"
EXPERTS = f"{LEAST} --num-experts 4"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
SYNTHETIC = "--dataset-size 80 --vocab-size 100 --train-iters 10"


@pytest.mark.parametrize("name", [name for name, item in all_settings().items() if item.notice])
def test_every_notice_is_printed(name: str) -> None:
    item = all_settings()[name]
    value = other_value(item)
    words = item.written(value)
    assert notices(words) == [f"{words}: {item.notice}"]


# Setting, words with which it has no effect, words with which it has one, facts of the first, facts of the
# second
CASES: list[tuple[str, str, str, ProcessFacts, ProcessFacts]] = [
    ("sequence_parallel", f"{LEAST} --sequence-parallel", f"{LEAST} --no-sequence-parallel", ONE, ONE),
    (
        "sequence_parallel",
        f"{LEAST} --sequence-parallel",
        f"{LEAST} --sequence-parallel --tp_size 2",
        ONE,
        TWO,
    ),
    *(
        (name, f"{LEAST} {words}", f"{LEAST} {words} --pp_size 2", ONE, TWO)
        for name, words in (
            ("pipeline_schedule", "--pipeline-schedule gpipe"),
            ("decoder_first_pipeline_num_layers", "--decoder-first-pipeline-num-layers 1"),
            ("decoder_last_pipeline_num_layers", "--decoder-last-pipeline-num-layers 1"),
            ("account_for_embedding_in_pipeline_split", "--account-for-embedding-in-pipeline-split"),
            ("account_for_loss_in_pipeline_split", "--account-for-loss-in-pipeline-split"),
        )
    ),
    (
        "pipeline_model_parallel_layout",
        f"{LEAST} --pipeline-model-parallel-layout EttttL",
        f"{LEAST} --pipeline-model-parallel-layout Et|tttL --pp_size 2",
        ONE,
        TWO,
    ),
    (
        "microbatch_group_size_per_virtual_pipeline_stage",
        f"{LEAST} {GROUPED}",
        f"{INTERLEAVED} {GROUPED}",
        ONE,
        TWO,
    ),
    (
        "microbatch_group_size_per_virtual_pipeline_stage",
        f"{LEAST} {GROUPED} --pp_size 2",
        f"{INTERLEAVED} {GROUPED}",
        TWO,
        TWO,
    ),
    ("zero_stage", f"{LEAST} --zero-stage 1", f"{LEAST} --zero-stage 1", ONE, TWO),
    ("zero_stage", f"{LEAST} --zero-stage 2 --tp_size 2", f"{LEAST} --zero-stage 0", TWO, ONE),
    *(
        (name, f"{LEAST} {words} --zero-stage 3", f"{LEAST} {words} --zero-stage 1", TWO, TWO)
        for name, words in (
            ("overlap_grad_reduce", "--overlap-grad-reduce"),
            ("overlap_param_gather", "--overlap-param-gather"),
            ("ddp_bucket_size", "--ddp-bucket-size 50"),
        )
    ),
    *(
        (
            "num_distributed_optimizer_instances",
            f"{LEAST} {INSTANCES} {words}",
            f"{LEAST} {INSTANCES} --zero-stage 3",
            TWO,
            FOUR,
        )
        for words in ("", "--zero-stage 1", "--zero-stage 2", "--zero-stage 3")
    ),
    (
        "num_distributed_optimizer_instances",
        f"{LEAST} {INSTANCES} --zero-stage 1",
        f"{LEAST} --num-distributed-optimizer-instances 1",
        FOUR,
        FOUR,
    ),
    ("overlap_grad_reduce", f"{LEAST} --overlap-grad-reduce", f"{LEAST} --overlap-grad-reduce", ONE, TWO),
    (
        "overlap_param_gather",
        f"{LEAST} --overlap-param-gather",
        f"{LEAST} --overlap-param-gather --zero-stage 1",
        TWO,
        TWO,
    ),
    (
        "overlap_param_gather",
        f"{LEAST} --overlap-param-gather --zero-stage 1",
        f"{LEAST} --no-overlap-param-gather",
        ONE,
        ONE,
    ),
    ("cp_comm_type", f"{LEAST} --cp-comm-type a2a", LEAST, ONE, ONE),
    (
        "make_vocab_size_divisible_by",
        f"{LEAST} --make-vocab-size-divisible-by 2 --padded-vocab-size 128",
        f"{LEAST} --make-vocab-size-divisible-by 2",
        ONE,
        ONE,
    ),
    (
        "prefetch_factor",
        f"{LEAST} --prefetch-factor 3",
        f"{LEAST} --prefetch-factor 3 --num-workers 1",
        ONE,
        ONE,
    ),
    ("split", f"{LEAST} --split 9,1,0", f"{FILES} --split 9,1,0", ONE, ONE),
    ("corpus_bytes", f"{LEAST} --corpus-bytes 9", "--preset demo --corpus-bytes 9", ONE, ProcessFacts(2, 2)),
    ("dataset_size", f"{LEAST} --dataset-size 9", SYNTHETIC, ONE, ONE),
    *(
        (flag[2:].replace("-", "_"), f"{SYNTHETIC} {flag}", f"{FILES} {flag}", ONE, ONE)
        for flag in ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
    ),
    ("epochs", f"{FILES} --epochs 2", f"{SYNTHETIC} --epochs 2", ONE, ONE),
    ("split", f"{OWN_FILES} --split 9,1,0", f"{FILES} --split 9,1,0", ONE, ONE),
    ("full_validation", f"{SYNTHETIC} --full-validation", f"{FILES} --full-validation", ONE, ONE),
    ("full_validation", f"{FILES} --full-validation --split 1", f"{LEAST} --full-validation", ONE, ONE),
    (
        "full_validation",
        f"{FILES} --full-validation --eval-interval 0",
        f"{OWN_FILES} --full-validation --valid-data-path b",
        ONE,
        ONE,
    ),
    ("eval_iters", f"{FILES} --eval-iters 5 --full-validation", f"{FILES} --eval-iters 5", ONE, ONE),
    (
        "test_data_path",
        f"{OWN_FILES} --test-data-path b --eval-iters 0",
        f"{OWN_FILES} --test-data-path b --eval-interval 0",
        ONE,
        ONE,
    ),
    ("data_cache_path", f"{SYNTHETIC} --data-cache-path a", f"{FILES} --data-cache-path a", ONE, ONE),
    (
        "dataloader_type",
        f"{SYNTHETIC} --dataloader-type cyclic",
        f"{FILES} --dataloader-type cyclic",
        ONE,
        ONE,
    ),
    (
        "mid_level_dataset_surplus",
        f"{FILES} --mid-level-dataset-surplus 0.1",
        f"{FILES} --mid-level-dataset-surplus 0.1 --data-path 1 a 2 b",
        ONE,
        ONE,
    ),
    (
        "eval_interval",
        f"{OWN_FILES} --eval-interval 5",
        f"{OWN_FILES} --eval-interval 5 --valid-data-path b",
        ONE,
        ONE,
    ),
    ("eval_interval", f"{FILES} --split 1,0,0 --eval-interval 5", f"{FILES} --eval-interval 5", ONE, ONE),
    (
        "eval_interval",
        f"{FILES} --eval-iters 0 --eval-interval 5",
        f"{SYNTHETIC} --eval-interval 5",
        ONE,
        ONE,
    ),
    (
        "eval_interval",
        f"{FILES} --split 9,0 --eval-interval 5",
        f"{FILES} --split 9,1 --eval-interval 5",
        ONE,
        ONE,
    ),
    ("eval_iters", f"{OWN_FILES} --eval-iters 5", f"{OWN_FILES} --eval-iters 0", ONE, ONE),
    ("eval_iters", f"{LEAST} --eval-interval 0 --eval-iters 5", f"{LEAST} --eval-iters 5", ONE, ONE),
    ("eval_iters", f"{FILES} --eval-iters 5 --eval-interval 0", f"{FILES} --eval-iters 5", ONE, ONE),
    ("eval_iters", f"{FILES} --eval-iters 5 --split 1", f"{SYNTHETIC} --eval-iters 5", ONE, ONE),
    (
        "sample_prompt",
        f"{FILES} --sample-prompt a",
        f"{FILES} --sample-prompt a --tokenizer-type ByteTokenizer",
        ONE,
        ONE,
    ),
    (
        "sample_prompt",
        f"{LEAST} --sample-prompt a",
        "--preset demo --sample-prompt a",
        ONE,
        ProcessFacts(2, 2),
    ),
    (
        "sample_tokens",
        f"{LEAST} --sample-tokens 5",
        "--preset demo --sample-tokens 5",
        ONE,
        ProcessFacts(2, 2),
    ),
    (
        "tokenizer_type",
        f"{LEAST} --tokenizer-type ByteTokenizer",
        f"{FILES} --tokenizer-type ByteTokenizer",
        ONE,
        ONE,
    ),
    (
        "tokenizer_model",
        "--preset demo --tokenizer-model a",
        f"{FILES} --tokenizer-model a",
        ProcessFacts(2, 2),
        ONE,
    ),
    (
        "vocab_file",
        f"{FILES} --tokenizer-model a --vocab-file v",
        f"{FILES} --vocab-file v --merge-file m",
        ONE,
        ONE,
    ),
    ("merge_file", f"{LEAST} --merge-file m", f"{FILES} --vocab-file v --merge-file m", ONE, ONE),
    ("min_lr", f"{LEAST} --lr-decay-style constant --min-lr 1e-05", f"{LEAST} --min-lr 1e-05", ONE, ONE),
    (
        "lr_decay_samples",
        f"{LEAST} --lr-decay-style constant --lr-decay-samples 9",
        f"{LEAST} --lr-decay-samples 9",
        ONE,
        ONE,
    ),
    *(
        (
            name,
            f"{LEAST} --{name.replace('_', '-')} {value}",
            f"{LEAST} --lr-decay-style WSD --{name.replace('_', '-')} {value} {needed}",
            ONE,
            ONE,
        )
        for name, value, needed in (
            ("lr_wsd_decay_iters", "3", ""),
            ("lr_wsd_decay_samples", "3", ""),
            ("lr_wsd_decay_style", "cosine", "--lr-wsd-decay-iters 3"),
        )
    ),
    (
        "lr_warmup_init",
        f"{LEAST} --lr-warmup-init 1e-06",
        f"{LEAST} --lr-warmup-init 1e-06 --lr-warmup-samples 3",
        ONE,
        ONE,
    ),
    (
        "weight_decay",
        f"{LEAST} --weight-decay 0.1 --start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style linear",
        f"{LEAST} --weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style linear",
        ONE,
        ONE,
    ),
    (
        "weight_decay_incr_style",
        f"{LEAST} --weight-decay-incr-style linear",
        f"{LEAST} --weight-decay-incr-style linear --end-weight-decay 0.2",
        ONE,
        ONE,
    ),
    (
        "rampup_batch_size",
        f"{LEAST} --global-batch-size 4 --rampup-batch-size 4 4 9",
        f"{LEAST} --global-batch-size 8 --rampup-batch-size 4 4 9",
        ONE,
        ONE,
    ),
    (
        "lr_decay_iters",
        f"{LEAST} --lr-decay-style constant --lr-decay-iters 9",
        f"{LEAST} --lr-decay-style constant --lr-decay-iters 9 --lr-warmup-fraction 0.2",
        ONE,
        ONE,
    ),
    (
        "ddp_bucket_size",
        f"{LEAST} --ddp-bucket-size 9",
        f"{LEAST} --ddp-bucket-size 9",
        ONE,
        ProcessFacts(2, 2),
    ),
    (
        "distributed_timeout_minutes",
        f"{LEAST} --distributed-timeout-minutes 9.0",
        f"{LEAST} --distributed-timeout-minutes 9.0",
        ONE,
        ProcessFacts(2, 2),
    ),
    (
        "distributed_timeout_seconds_after_init",
        f"{LEAST} --distributed-timeout-seconds-after-init 9.0",
        f"{LEAST} --distributed-timeout-seconds-after-init 9.0",
        ONE,
        ProcessFacts(2, 2),
    ),
    (
        "heartbeat_timeout",
        f"{LEAST} --heartbeat-timeout 9.0",
        f"{LEAST} --heartbeat-timeout 9.0",
        ONE,
        ProcessFacts(2, 2),
    ),
    ("max_restarts", f"{LEAST} --max-restarts 9", f"{LEAST} --max-restarts 9", TORCHRUN, ProcessFacts(2, 2)),
    ("master_port", f"{LEAST} --master-port 9", f"{LEAST} --master-port 9", ONE, ProcessFacts(2, 2)),
    ("master_port", f"{LEAST} --master-port 9", f"{LEAST} --master-port 9", TORCHRUN, ProcessFacts(2, 2)),
    ("init_method", f"{LEAST} --init-method tcp://a:1", f"{LEAST} --init-method tcp://a:1", TORCHRUN, SLURM),
    ("init_method", f"{LEAST} --init-method tcp://a:1", f"{LEAST} --init-method tcp://a:1", ONE, SLURM),
    (
        "init_method",
        f"{LEAST} --init-method tcp://a:1",
        f"{LEAST} --init-method tcp://a:1",
        ProcessFacts(2, 2),
        SLURM,
    ),
    *(
        (name, f"{LEAST} {words}", f"{LEAST} --recompute-granularity full {words}", ONE, ONE)
        for name, words in (
            ("recompute_method", "--recompute-method uniform"),
            ("recompute_num_layers", "--recompute-num-layers 1"),
        )
    ),
    *(
        (
            "recompute_modules",
            f"{LEAST} {idle} --recompute-modules mlp",
            f"{LEAST} --recompute-granularity selective --recompute-modules mlp",
            ONE,
            ONE,
        )
        for idle in ("", "--recompute-granularity full")
    ),
    (
        "recompute_modules",
        f"{LEAST} --recompute-granularity selective --recompute-modules moe_act",
        f"{LEAST} --num-experts 4 --recompute-granularity selective --recompute-modules moe_act",
        ONE,
        ONE,
    ),
    *(
        (name, f"{LEAST} {flag} {more}", f"{LEAST} {flag} {acts} --bf16 --fp8 e4m3 --num-layers 6", ONE, ONE)
        for name, flag, more, acts in (
            ("fp8_recipe", "--fp8-recipe tensorwise", "", ""),
            ("fp8_output_layer", "--fp8-output-layer", "", ""),
            ("first_last_layers_bf16", "--first-last-layers-bf16", "", ""),
            (
                "num_layers_at_start_in_bf16",
                "--num-layers-at-start-in-bf16 2",
                "",
                "--first-last-layers-bf16",
            ),
            (
                "num_layers_at_start_in_bf16",
                "--num-layers-at-start-in-bf16 2",
                "--bf16 --fp8 e4m3",
                "--first-last-layers-bf16",
            ),
            ("num_layers_at_end_in_bf16", "--num-layers-at-end-in-bf16 2", "", "--first-last-layers-bf16"),
        )
    ),
    (
        "memory_monitor_interval",
        f"{LEAST} --memory-monitor-interval 1.0",
        f"{LEAST} --memory-monitor-interval 1.0 --monitor-memory-continuously",
        ONE,
        ONE,
    ),
    (
        "tensorboard_log_interval",
        f"{LEAST} --tensorboard-log-interval 5",
        f"{LEAST} --tensorboard-log-interval 5 --tensorboard-dir tb",
        ONE,
        ONE,
    ),
    (
        "log_timers_to_tensorboard",
        f"{LEAST} --log-timers-to-tensorboard",
        f"{LEAST} --log-timers-to-tensorboard --tensorboard-dir tb",
        ONE,
        ONE,
    ),
    (
        "log_memory_to_tensorboard",
        f"{LEAST} --log-memory-to-tensorboard",
        f"{LEAST} --log-memory-to-tensorboard --wandb-project p",
        ONE,
        ONE,
    ),
    (
        "log_world_size_to_tensorboard",
        f"{LEAST} --log-world-size-to-tensorboard",
        f"{LEAST} --log-world-size-to-tensorboard --wandb-project p",
        ONE,
        ONE,
    ),
    (
        "log_validation_ppl_to_tensorboard",
        f"{LEAST} --log-validation-ppl-to-tensorboard",
        f"{LEAST} --log-validation-ppl-to-tensorboard --tensorboard-dir tb",
        ONE,
        ONE,
    ),
    (
        "wandb_exp_name",
        f"{LEAST} --wandb-exp-name a",
        f"{LEAST} --wandb-exp-name a --wandb-project p",
        ONE,
        ONE,
    ),
    ("wandb_entity", f"{LEAST} --wandb-entity a", f"{LEAST} --wandb-entity a --wandb-project p", ONE, ONE),
    (
        "wandb_save_dir",
        f"{LEAST} --wandb-save-dir a",
        f"{LEAST} --wandb-save-dir a --wandb-project p",
        ONE,
        ONE,
    ),
    ("job_id", f"{LEAST} --job-id 7", f"{LEAST} --job-id 7 --log-progress", ONE, ONE),
    *(
        (name, f"{LEAST} {idle} {words}", f"{LEAST} --fp16 {words}", ONE, ONE)
        for idle in ("--bf16", "--fp16 --loss-scale 8")
        for name, words in (
            ("initial_loss_scale", "--initial-loss-scale 16.0"),
            ("min_loss_scale", "--min-loss-scale 2.0"),
            ("loss_scale_window", "--loss-scale-window 9"),
            ("loss_scale_growth_factor", "--loss-scale-growth-factor 3.0"),
            ("loss_scale_backoff_factor", "--loss-scale-backoff-factor 0.25"),
            ("hysteresis", "--hysteresis 1"),
        )
    ),
    ("loss_scale", f"{LEAST} --fp16 --loss-scale 0.0", f"{LEAST} --loss-scale 4.0", ONE, ONE),
    ("sgd_momentum", f"{LEAST} --sgd-momentum 0.8", f"{LEAST} --sgd-momentum 0.8 --optimizer sgd", ONE, ONE),
    *(
        (name, f"{LEAST} --optimizer sgd {words}", f"{LEAST} {words}", ONE, ONE)
        for name, words in (
            ("adam_beta1", "--adam-beta1 0.8"),
            ("adam_beta2", "--adam-beta2 0.8"),
            ("adam_eps", "--adam-eps 0.1"),
        )
    ),
    ("moe_router_topk", f"{LEAST} --moe-router-topk 2", LEAST, ONE, ONE),
    ("moe_token_dispatcher_type", f"{LEAST} --moe-token-dispatcher-type alltoall", LEAST, ONE, ONE),
    ("moe_router_load_balancing_type", f"{LEAST} --moe-router-load-balancing-type aux_loss", LEAST, ONE, ONE),
    ("moe_aux_loss_coeff", f"{LEAST} --moe-aux-loss-coeff 0.0", LEAST, ONE, ONE),
    *(
        (name, f"{LEAST} {words}", f"{LEAST} --num-experts 4 {words} {help}", ONE, ONE)
        for name, words, help in (
            ("expert_tensor_parallel_size", "--expert-tensor-parallel-size 1", ""),
            ("moe_router_bias_update_rate", "--moe-router-bias-update-rate 0.5", BIAS),
            ("moe_router_pre_softmax", "--moe-router-pre-softmax", ""),
            ("moe_aux_loss_coeff", "--moe-aux-loss-coeff 0.5", ""),
        )
    ),
    *(
        (name, f"{EXPERTS} {words} {idle}", f"{EXPERTS} {words} {acting}", ONE, ONE)
        for name, words, idle, acting in (
            ("moe_router_bias_update_rate", "--moe-router-bias-update-rate 0.5", "", BIAS),
            ("moe_router_pre_softmax", "--moe-router-pre-softmax", "--moe-router-score-function sigmoid", ""),
            (
                "moe_router_load_balancing_type",
                "--moe-router-load-balancing-type seq_aux_loss aux_loss",
                "",
                "--moe-aux-loss-coeff 0 0.1",
            ),
            (
                "moe_aux_loss_coeff",
                "--moe-aux-loss-coeff 0.5",
                "--moe-router-load-balancing-type none",
                "--moe-router-load-balancing-type global_aux_loss",
            ),
        )
    ),
    ("save", "--no-save-checkpoints --save x", "--save x", ONE, ONE),
    ("save_interval", "--no-save-checkpoints --save-interval 2", "--save-interval 2", ONE, ONE),
    ("keep_checkpoints", "--no-save-checkpoints --keep-checkpoints 2", "--keep-checkpoints 2", ONE, ONE),
    ("ckpt_format", "--ckpt-format torch", "--ckpt-format torch_dist", ONE, ONE),
    ("async_save", "--no-save-checkpoints --async-save", "--async-save", ONE, ONE),
    (
        "save_retain_interval",
        "--keep-checkpoints none --save-interval 2 --save-retain-interval 4",
        "--save-interval 2 --save-retain-interval 4",
        ONE,
        ONE,
    ),
]


@pytest.mark.parametrize(
    ("name", "idle", "acting", "idle_facts", "acting_facts"), CASES, ids=[c[0] for c in CASES]
)
def test_idle(
    name: str, idle: str, acting: str, idle_facts: ProcessFacts, acting_facts: ProcessFacts
) -> None:
    (line,) = about(name, idle, idle_facts)
    flag, reason = line.split(": ", 1)
    assert flag in idle and len(reason.split()) >= 4
    assert about(name, acting, acting_facts) == []


def test_every_need_and_decision_has_a_case() -> None:
    """Cases about conversations are in train/test_sft.py."""
    conversations = {"sft_packing", "sft_tokenizer_prompt_format", "chat_template", "sft_date"}
    elsewhere = {"check_weight_hash_across_dp_replicas_interval", *conversations, *ON_A_GPU}
    elsewhere |= {n for n, item in all_settings().items() if item.section == "moe"}
    cases = {case[0] for case in (*CASES, *OF_THE_LOOP, *OF_THE_MODEL)}
    with_needs = {n for n, item in all_settings().items() if item.needs}
    decided = decide(resolved().config, DeviceFacts()).no_effect
    assert (with_needs | set(decided)) - elsewhere == cases - elsewhere


def test_wording_of_notices() -> None:
    assert notices("--no-rope-fusion --cp_comm_type=a2a") == [
        "--cp_comm_type a2a: sequences are not split (--context-parallel-size 1), so nothing is exchanged",
        "--no-rope-fusion: there is no separate rotary kernel, so this has no effect",
    ]
    assert notices("--init-method tcp://a:1", TORCHRUN) == [
        "--init-method tcp://a:1: torchrun provides the rendezvous (MASTER_ADDR), which is used instead"
    ]
    assert notices("--epochs 3", least=FILES) == [
        "--epochs 3: the data is not read here; --train-iters 10 sets the length"
    ]
    assert notices("--epochs 3 --corpus python", least="--vocab-size 500") == [
        "--epochs 3: the number of steps is known once the run has tokenized its data"
    ]
    assert notices("--epochs 3 --data-path 2 a 1 b", least="--vocab-size 100 --train-iters 10") == [
        "--epochs 3: weighted data is sampled by weight, so it has no epochs; --train-iters 10 sets the length"
    ]


def test_attention_dropout_depends_on_the_layout_and_hidden_dropout_does_not() -> None:
    for words in ("--attention-dropout 0.1 --hidden-dropout 0.1", "--preset gpt2"):
        assert notices(words) == [
            "--attention-dropout 0.1: the dropout mask depends on the layout, so other parallel sizes give other losses (the mask of hidden dropout does not depend on it)"
        ]
    assert notices("--hidden-dropout 0.1") == []


def test_full_recompute_without_a_method_says_which_one_it_takes() -> None:
    assert notices("--recompute-granularity full") == [
        "--recompute-granularity full: no --recompute-method is given, so uniform is used: every layer is recomputed "
        "by itself"
    ]
    assert notices("--recompute-granularity full --recompute-num-layers 2") == [
        "--recompute-granularity full: no --recompute-method is given, so uniform is used: every 2 layers are "
        "recomputed together"
    ]
    assert notices("--recompute-granularity full --recompute-method uniform") == []


def test_a_file_that_lists_defaults_is_not_scolded(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("rotary_base: 10000.0\ncp_comm_type: p2p\nrope_fusion: true\nprefetch_factor: 5\n")
    found = resolve(gather(["--config", str(path), *LEAST.split()], TRAIN), ONE)
    assert list(found.notices) == [
        "--prefetch-factor 5: there are no data loading processes (--num-workers 0), so nothing is prefetched"
    ]


def test_a_default_typed_as_a_flag_is_answered() -> None:
    assert len(notices("--cp-comm-type p2p")) == 1


def test_presets_and_entry_points_are_not_scolded() -> None:
    assert notices("--preset demo", ProcessFacts(2, 2), least="") == []


@pytest.mark.parametrize(("total", "waiting"), [(2, "67%"), (4, "50%"), (6, None)])
def test_pipeline_with_too_few_micro_batches_is_reported(total: int, waiting: str | None) -> None:
    words = f"{LEAST} --pp_size 3 --num-layers 3 --global-batch-size {total} --micro-batch-size 2"
    told = [n for n in notices(words, ProcessFacts(3, 3)) if "pipeline ranks waiting" in n]
    assert len(told) == (waiting is not None) and all(str(waiting) in n for n in told)
