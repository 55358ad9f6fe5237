"""Tests every cross-field rule: words that break it, the whole sentence, and words that keep it."""

import pytest

from pentatron.settings.entry_points import STANDARD
from pentatron.settings.model_rules import MOE_RULES, POSITION_RULES
from pentatron.settings.rules import RULES, out_of_limits, problems_of, unsupported_features
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import ProcessFacts
from pentatron.settings.training_rules import LOOP_RULES, SFT_RULES
from tests.settings.builders import not_built, problems, resolved

ONE = ProcessFacts(1)


def relations(words: str, facts: ProcessFacts = ONE, least: str | None = None) -> list[str]:
    """Returns the problems, without those that say only that a feature is not implemented yet."""
    found = problems(words, facts) if least is None else problems(words, facts, least=least)
    return [p for p in found if p not in not_built(found)]


TORCHRUN_4 = ProcessFacts(4, 4, 4, "torchrun", True)

# name of the rule, words that break it, the sentence, words that keep it, facts of both
FULL = "--num-layers 4 --recompute-granularity full --recompute-method"
INTERLEAVED = "--num-layers 4 --pp_size 2 --virtual-pipeline-model-parallel-size 2 --micro-batch-size 1"
CASES: list[tuple[str, str, str, str, ProcessFacts]] = [
    ("graphs", "--cuda-graphs on",
     "--cuda-graphs on is not possible: several processes communicate during a step; leave it out, or use --cuda-graphs auto",
     "--cuda-graphs auto", ProcessFacts(4, 4)),
    ("graphs", "--cuda-graph-impl local --reset-attention-mask",
     "--cuda-graphs on is not possible: document boundaries differ in every batch; leave it out, or use --cuda-graphs auto",
     "--cuda-graph-impl local", ONE),
    ("zero3_split_backward", "--zero-stage 3 --pp_size 2 --pipeline-schedule zero-bubble",
     "--pipeline-schedule zero-bubble defers weight gradients until after --zero-stage 3 has reduced the gradients of a layer and freed its weights; use 1f1b, gpipe or interleaved, or --zero-stage 2",
     "--zero-stage 2 --pp_size 2 --pipeline-schedule zero-bubble", ProcessFacts(4, 4)),
    ("zero3_offload", "--zero-stage 3 --optimizer-cpu-offload",
     "--optimizer-cpu-offload offloads what --zero-stage 0 to 2 keep beside the weights; the shards of --zero-stage 3 are the "
     "weights themselves; use --zero-stage 2, or leave --optimizer-cpu-offload out",
     "--zero-stage 2 --optimizer-cpu-offload", ProcessFacts(4, 4)),
    ("hybrid_sharding", "--zero-stage 3 --num-distributed-optimizer-instances 3",
     "--num-distributed-optimizer-instances 3 does not divide 4 (data) × 1 (context) = 4 ranks that hold the same "
     "weights; use 1, 2 or 4",
     "--zero-stage 3 --num-distributed-optimizer-instances 2", ProcessFacts(4, 4)),
    ("hybrid_sharding", "--zero-stage 3 --num-distributed-optimizer-instances 4 --num-experts 4 --ep 2",
     "--num-distributed-optimizer-instances 4 does not divide the 2 ranks that hold the same experts; use 1 or 2",
     "--zero-stage 3 --num-distributed-optimizer-instances 2 --num-experts 4 --ep 2", ProcessFacts(4, 4)),
    ("world", "--tp_size 2",
     "1 process is too few: one copy of the model needs 2 (tensor) × 1 (pipeline) × 1 (context) = 2; "
     "start 2 processes or a multiple, or lower the parallel sizes",
     "--tp_size 1", ONE),
    ("world", "--tp_size 2 --pp_size 2",
     "6 processes cannot be divided into copies of the model of 2 (tensor) × 2 (pipeline) × 1 (context) = 4 processes "
     "each; use 4 or 8 processes, or other parallel sizes",
     "--tp_size 2", ProcessFacts(6, 6)),
    ("expected_world", "--world-size 8",
     "--world-size 8 does not match the 4 started process(es); start 8 (torchrun --nproc_per_node=... or "
     "--nproc-per-node) or leave --world-size out",
     "--world-size 4", ProcessFacts(4, 4)),
    ("data_parallel", "--data-parallel-size 3",
     "--data-parallel-size 3 × 1 (tp × pp × cp) = 3, but there are 4 processes; use 4 or leave it out",
     "--data-parallel-size 4", ProcessFacts(4, 4)),
    ("data_parallel", "--data-parallel-size 4 --tp_size 2",
     "--data-parallel-size 4 × 2 (tp × pp × cp) = 8, but there are 4 processes; use 2 or leave it out",
     "--data-parallel-size 2 --tp_size 2", ProcessFacts(4, 4)),
    ("processes_here", "--nproc-per-node 2",
     "--nproc-per-node 2 does not match the 4 process(es) that torchrun started on this machine; "
     "leave --nproc-per-node out",
     "--nproc-per-node 4", TORCHRUN_4),
    ("recompute_method", "--recompute-granularity selective --recompute-method uniform --recompute-num-layers 1",
     "--recompute-method uniform is for whole layers, but --recompute-granularity selective recomputes modules; "
     "leave it out or use full",
     f"{FULL} uniform --recompute-num-layers 1", ONE),
    ("recompute_method", "--recompute-activations --recompute-num-layers 1",
     "--recompute-num-layers 1 is for whole layers, but --recompute-granularity selective recomputes modules; "
     "leave it out or use full",
     "--recompute-activations --recompute-modules mlp", ONE),
    ("recomputed_block", f"{FULL} block",
     "--recompute-method block needs the number of first layers of a stage to recompute; give --recompute-num-layers",
     f"{FULL} block --recompute-num-layers 1", ONE),
    ("recomputed_layers", f"{FULL} uniform --recompute-num-layers 5",
     "--recompute-num-layers 5 is more than the 4 layers that the model has; use 1 to 4",
     f"{FULL} uniform --recompute-num-layers 4", ONE),
    ("recomputed_layers", f"{FULL} block --recompute-num-layers 3 --pp_size 2",
     "--recompute-num-layers 3 is more than the 2 layers that a stage has at most; use 1 to 2",
     f"{FULL} block --recompute-num-layers 2 --pp_size 2", ProcessFacts(2, 2)),
    ("rendezvous", "--init-method localhost:12345",
     "--init-method localhost:12345 must look like tcp://HOST:PORT, for example tcp://localhost:12345",
     "--init-method tcp://localhost:12345", ONE),
    ("heads_per_rank", "--hidden-size 120 --ffn-hidden-size 120 --num-attention-heads 12 --tp_size 5",
     "--num-attention-heads 12 is not divisible by --tensor-model-parallel-size 5; use 1, 2, 3, 4, 6 or 12",
     "--hidden-size 150 --num-attention-heads 15 --tp_size 5", ProcessFacts(5, 5)),
    ("groups", "--hidden-size 64 --num-attention-heads 8 --num-query-groups 3",
     "--num-attention-heads 8 is not divisible by --num-query-groups 3; use 1, 2, 4 or 8 groups",
     "--hidden-size 64 --num-attention-heads 8 --num-query-groups 4", ONE),
    ("groups_per_rank", "--hidden-size 72 --num-attention-heads 12 --num-query-groups 3 --tp_size 2",
     "--num-query-groups 3 is neither a multiple nor a divisor of --tensor-model-parallel-size 2; "
     "use a tensor parallel size of 1 or 3",
     "--hidden-size 72 --num-attention-heads 12 --num-query-groups 6 --tp_size 2", ProcessFacts(2, 2)),
    ("groups_per_rank", "--hidden-size 72 --num-attention-heads 12 --num-query-groups 3 --tp_size 4",
     "--num-query-groups 3 is neither a multiple nor a divisor of --tensor-model-parallel-size 4; "
     "use a tensor parallel size of 1 or 3",
     "--hidden-size 72 --num-attention-heads 12 --num-query-groups 2 --tp_size 4", ProcessFacts(4, 4)),
    ("grouping", "--hidden-size 64 --num-attention-heads 8 --num-query-groups 4 --no-group-query-attention",
     "--no-group-query-attention and --num-query-groups 4 contradict each other; leave one of them out",
     "--hidden-size 64 --num-attention-heads 8 --num-query-groups 8 --no-group-query-attention", ONE),
    ("mlp_per_rank", "--ffn-hidden-size 101 --tp_size 2",
     "--ffn-hidden-size 101 is not divisible by --tensor-model-parallel-size 2; use --ffn-hidden-size 104",
     "--ffn-hidden-size 102 --tp_size 2", ProcessFacts(2, 2)),
    ("mlp_per_rank", "--hidden-size 72 --num-attention-heads 12 --ffn-hidden-size 11008 --tp_size 3",
     "--ffn-hidden-size 11008 is not divisible by --tensor-model-parallel-size 3; use --ffn-hidden-size 11136",
     "--hidden-size 72 --num-attention-heads 12 --ffn-hidden-size 11136 --tp_size 3", ProcessFacts(3, 3)),
    ("layers_per_stage", "--num-layers 2 --pp_size 4",
     "--num-layers 2 cannot fill the 4 stages of --pipeline-model-parallel-size 4; use 4 layers or more, or at most 2 "
     "stages",
     "--num-layers 4 --pp_size 4", ProcessFacts(4, 4)),
    ("layers_per_stage", "--num-layers 6 --pp_size 4 --virtual-pipeline-model-parallel-size 2",
     "--num-layers 6 cannot fill 4 (pipeline) × 2 (virtual) = 8 stages; use 8 layers or more, or fewer stages",
     "--num-layers 8 --pp_size 4 --virtual-pipeline-model-parallel-size 2", ProcessFacts(4, 4)),
    ("virtual_stages", "--virtual-pipeline-model-parallel-size 2",
     "virtual stages (2 on each rank) need a pipeline, but --pipeline-model-parallel-size is 1; "
     "use 2 or more pipeline ranks, or leave the virtual stages out",
     "--virtual-pipeline-model-parallel-size 1", ONE),
    ("layers_per_virtual_stage", "--num-layers 10 --pp_size 2 --num-layers-per-virtual-pipeline-stage 2",
     "--num-layers 10 is not divisible by 2 (pipeline) × 2 (--num-layers-per-virtual-pipeline-stage) = 4; "
     "use 8 or 12 layers, or another number for each stage",
     "--num-layers 12 --pp_size 2 --num-layers-per-virtual-pipeline-stage 2", ProcessFacts(2, 2)),
    ("layers_per_virtual_stage",
     "--num-layers 8 --pp_size 2 --num-layers-per-virtual-pipeline-stage 2 --virtual-pipeline-model-parallel-size 4",
     "2 (pipeline) × 4 (virtual) × 2 (--num-layers-per-virtual-pipeline-stage) = 16, but --num-layers is 8; "
     "leave one of the two flags for virtual stages out",
     "--num-layers 8 --pp_size 2 --num-layers-per-virtual-pipeline-stage 2 --virtual-pipeline-model-parallel-size 2",
     ProcessFacts(2, 2)),
    ("division", "--num-layers 8 --pp_size 4 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4",
     "--decoder-first-pipeline-num-layers 3 and --decoder-last-pipeline-num-layers 4 leave 8 − 7 = 1 layers for the "
     "2 other stages, which need one each; the sum of all must be --num-layers 8",
     "--num-layers 9 --pp_size 4 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4",
     ProcessFacts(4, 4)),
    ("division", "--num-layers 8 --pp_size 2 --account-for-loss-in-pipeline-split --decoder-last-pipeline-num-layers 3",
     "--decoder-last-pipeline-num-layers and --account-for-loss-in-pipeline-split each set how the layers are divided; "
     "give one of them",
     "--num-layers 8 --pp_size 2 --account-for-loss-in-pipeline-split", ProcessFacts(2, 2)),
    ("division", "--num-layers 30 --pp_size 2 --pipeline-model-parallel-layout Et*14|t*14L",
     "--pipeline-model-parallel-layout Et*14|t*14L has 28 layers in its 2 stages, but --num-layers is 30; add 2 t",
     "--num-layers 30 --pp_size 2 --pipeline-model-parallel-layout Et*16|t*14L", ProcessFacts(2, 2)),
    ("enough_micro_batches",
     "--num-layers 4 --pp_size 2 --pipeline-schedule dualpipev --untie-embeddings-and-output-weights "
     "--micro-batch-size 4 --global-batch-size 8",
     "--pipeline-schedule dualpipev needs 2 × 2 (pipeline ranks) = 4 or more micro-batches, not 2; "
     "use 4 or more, or the schedule zbv",
     "--num-layers 4 --pp_size 2 --pipeline-schedule dualpipev --untie-embeddings-and-output-weights "
     "--micro-batch-size 2 --global-batch-size 8", ProcessFacts(2, 2)),
    ("schedule", "--num-layers 4 --pp_size 2 --pipeline-schedule interleaved",
     "--pipeline-schedule interleaved needs several stages on each rank; "
     "give --virtual-pipeline-model-parallel-size 2 or more, or use 1f1b",
     "--num-layers 4 --pp_size 2 --pipeline-schedule interleaved --virtual-pipeline-model-parallel-size 2", ProcessFacts(2, 2)),
    ("schedule", "--num-layers 4 --pp_size 2 --pipeline-schedule gpipe --virtual-pipeline-model-parallel-size 2",
     "--pipeline-schedule gpipe runs one stage on each rank, not the 2 of --virtual-pipeline-model-parallel-size 2; "
     "use interleaved, or leave one of the two out",
     "--num-layers 4 --pp_size 2 --pipeline-schedule gpipe", ProcessFacts(2, 2)),
    ("micro_batch_groups",
     f"{INTERLEAVED} --global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 9",
     "--microbatch-group-size-per-virtual-pipeline-stage 9: a group of 9 micro-batches does not fit 8 micro-batches; "
     "use a number from 2 (pipeline ranks) to 8 (micro-batches)",
     f"{INTERLEAVED} --global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 3", ProcessFacts(2, 2)),
    ("micro_batch_groups",
     f"{INTERLEAVED} --global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 1",
     "--microbatch-group-size-per-virtual-pipeline-stage 1: a group of 1 micro-batches does not fit 8 micro-batches; "
     "use a number from 2 (pipeline ranks) to 8 (micro-batches)",
     f"{INTERLEAVED} --global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 2", ProcessFacts(2, 2)),
    ("sequence_per_rank", "--seq-length 100 --context-parallel-size 4",
     "--seq-length 100 is not divisible by 8, as 2 × 4 (context) need; use 96 or 104",
     "--seq-length 104 --context-parallel-size 4", ProcessFacts(4, 4)),
    ("sequence_per_rank", "--seq-length 5 --sequence-parallel --tp_size 2",
     "--seq-length 5 is not divisible by 2, as 2 (tensor, for --sequence-parallel) need; use 4 or 6",
     "--seq-length 6 --sequence-parallel --tp_size 2", ProcessFacts(2, 2)),
    ("sequence_per_rank", "--seq-length 3 --sequence-parallel --tp_size 4",
     "--seq-length 3 is not divisible by 4, as 4 (tensor, for --sequence-parallel) need; use 4",
     "--seq-length 3 --tp_size 4", ProcessFacts(4, 4)),
    ("sequence_per_rank", "--seq-length 100 --sequence-parallel --tp_size 4 --context-parallel-size 2",
     "--seq-length 100 is not divisible by 8, as 2 × 2 (context) and 4 (tensor, for --sequence-parallel) need; "
     "use 96 or 104",
     "--seq-length 96 --sequence-parallel --tp_size 4 --context-parallel-size 2", ProcessFacts(8, 8)),
    ("heads_per_context_rank",
     "--hidden-size 96 --num-attention-heads 6 --seq-length 64 --context-parallel-size 4 --cp-comm-type a2a",
     "--cp-comm-type a2a cannot distribute 6 heads to 4 (context) ranks; use a context parallel size of 1, 2, 3 or 6, "
     "or --cp-comm-type p2p",
     "--hidden-size 96 --num-attention-heads 6 --seq-length 64 --context-parallel-size 4 --cp-comm-type all_gather",
     ProcessFacts(4, 4)),
    ("heads_per_context_rank",
     "--hidden-size 96 --num-attention-heads 24 --num-query-groups 6 --tp_size 2 --seq-length 64 "
     "--context-parallel-size 4 --cp-comm-type a2a",
     "--cp-comm-type a2a cannot distribute 12 heads in 3 groups of each tensor rank to 4 (context) ranks; use a context "
     "parallel size of 1, 3, 6 or 12, or --cp-comm-type p2p",
     "--hidden-size 96 --num-attention-heads 24 --num-query-groups 2 --tp_size 2 --seq-length 64 "
     "--context-parallel-size 4 --cp-comm-type a2a", ProcessFacts(8, 8)),
    ("context_dropout", "--seq-length 64 --context-parallel-size 2 --attention-dropout 0.1",
     "--attention-dropout 0.1 does not work with sequences split over 2 ranks (--context-parallel-size 2); use "
     "--attention-dropout 0, or --context-parallel-size 1",
     "--seq-length 64 --context-parallel-size 2 --hidden-dropout 0.1", ProcessFacts(2, 2)),
    ("context_kernel", "--seq-length 64 --context-parallel-size 2 --attention-backend cudnn",
     "--attention-backend cudnn cannot compute attention in blocks, as --cp-comm-type p2p needs it; use "
     "--attention-backend auto, flash or math, or --cp-comm-type a2a",
     "--seq-length 64 --context-parallel-size 2 --attention-backend cudnn --cp-comm-type a2a", ProcessFacts(2, 2)),
    ("batch", "--global-batch-size 6 --micro-batch-size 2",
     "global batch size (6) is not divisible by micro batch size (2) times data parallel size (2) = 4; "
     "use --micro-batch-size 1 or 3",
     "--global-batch-size 8 --micro-batch-size 2", ProcessFacts(2, 2)),
    ("positions", "--seq-length 512 --max-position-embeddings 256",
     "--seq-length 512 is longer than --max-position-embeddings 256; raise the latter or shorten the sequence",
     "--seq-length 256 --max-position-embeddings 256", ONE),
    ("padded_vocabulary", "--padded-vocab-size 90",
     "--padded-vocab-size 90 is smaller than --vocab-size 100; use 100 or leave it out",
     "--padded-vocab-size 100", ONE),
    ("padded_vocabulary", "--padded-vocab-size 101 --tp_size 2",
     "--padded-vocab-size 101 is not divisible by --tensor-model-parallel-size 2; use 102 or leave it out",
     "--padded-vocab-size 102 --tp_size 2", ProcessFacts(2, 2)),
    ("spec", "--spec alone", "--spec alone has 1 value, but needs two: MODULE FUNCTION", "--spec some words", ONE),
    ("precision", "--fp16 --bf16", "--fp16 and --bf16 exclude each other; choose one", "--bf16", ONE),
    ("smallest_scale", "--fp16 --initial-loss-scale 2 --min-loss-scale 4",
     "--initial-loss-scale 2 is below --min-loss-scale 4; raise the first or lower the second",
     "--fp16 --initial-loss-scale 4 --min-loss-scale 4", ONE),
    ("fp8_without_bf16", "--fp8 e4m3", "--fp8 e4m3 is for matmuls of models in bf16; add --bf16, or leave it out", "--bf16 --fp8 e4m3", ONE),
    ("fp8_on_a_cpu", "--bf16 --fp8 hybrid --device cpu",
     "--fp8 hybrid needs a GPU with fp8 matmuls, and --device cpu has none; leave one of them out", "--bf16 --fp8 hybrid", ONE),
    ("fp8_tokens", "--bf16 --fp8 e4m3 --seq-length 20 --micro-batch-size 1",
     "--fp8 e4m3 needs a multiple of 16 tokens in a micro-batch, and 1 × 20 is 20; use a multiple of 4 for --micro-batch-size, or one of 16 for --seq-length",
     "--bf16 --fp8 e4m3 --seq-length 20 --micro-batch-size 4", ONE),
    ("fp8_tokens", "--bf16 --fp8 e4m3 --seq-length 20 --micro-batch-size 4 --eval-micro-batch-size 2",
     "--fp8 e4m3 needs a multiple of 16 tokens in a micro-batch, and 2 × 20 is 40; use a multiple of 4 for --eval-micro-batch-size, or one of 16 for --seq-length",
     "--bf16 --fp8 e4m3 --seq-length 20 --micro-batch-size 4 --eval-micro-batch-size 4", ONE),
    ("fp8_layers", "--bf16 --fp8 e4m3 --first-last-layers-bf16 --num-layers 2",
     "--first-last-layers-bf16 with 1 first and 1 last layers leaves none of 2 for --fp8; lower --num-layers-at-start-in-bf16 or "
     "--num-layers-at-end-in-bf16, or leave --fp8 out",
     "--bf16 --fp8 e4m3 --first-last-layers-bf16 --num-layers 4", ONE),
    ("data", "--corpus python", "--corpus and --mock-data are different sources of data; choose one", "", ONE),
    ("split", "--split 0,1,1",
     "--split 0,1,1 must be up to three numbers with a training weight above 0, such as 969,30,1", "--split 99,1,0", ONE),
    ("split", "--split most", "--split most must be up to three numbers with a training weight above 0, such as 969,30,1",
     "--split 1", ONE),
    ("split", "--split 9,nan",
     "--split 9,nan must be up to three numbers with a training weight above 0, such as 969,30,1", "--split 9,1", ONE),
    ("split", "--split 9,1e-1",
     "--split 9,1e-1 must be up to three numbers with a training weight above 0, such as 969,30,1", "--split .9,0.1,0.", ONE),
    ("split", "--split 9,-1",
     "--split 9,-1 must be up to three numbers with a training weight above 0, such as 969,30,1", "--split 9,1", ONE),
    ("warmup", "--lr-warmup-iters 10",
     "--lr-warmup-iters 10 must be smaller than the 10 steps of the decay (--lr-decay-iters or --train-iters)",
     "--lr-warmup-iters 9", ONE),
    ("min_lr", "--lr 1e-4 --min-lr 1e-3",
     "--min-lr 0.001 is above --lr 0.0001; lower the first or raise the second", "--lr 1e-4 --min-lr 1e-4", ONE),
    ("min_lr", "--lr 1e-4 --lr-warmup-init 1e-3 --lr-warmup-iters 2",
     "--lr-warmup-init 0.001 is above --lr 0.0001; lower the first or raise the second",
     "--lr 1e-4 --lr-warmup-init 1e-5 --lr-warmup-iters 2", ONE),
    ("warmup", "--lr-warmup-samples 40 --global-batch-size 4",
     "a warm-up of 40 samples must be shorter than the 40 samples of the decay (--lr-decay-samples, --lr-decay-iters or the "
     "length of the run)", "--lr-warmup-samples 39 --global-batch-size 4", ONE),
    ("plan", "--global-batch-size 20 --rampup-batch-size 4 6 100",
     "--rampup-batch-size 4 6 100: expected global batch size interval (20 - 4 = 16) to be divisible by global batch size "
     "increment (6); use --global-batch-size 16 or 22, or another increment",
     "--global-batch-size 20 --rampup-batch-size 4 8 100", ONE),
    ("plan", "--global-batch-size 8 --rampup-batch-size 16 4 100",
     "--rampup-batch-size 16 4 100: the batch size ramp cannot start at 16, above the global batch size 8; lower START or "
     "raise --global-batch-size", "--global-batch-size 16 --rampup-batch-size 16 4 100", ONE),
    ("plan", "--global-batch-size 8 --rampup-batch-size 4 4",
     "--rampup-batch-size 4 4 must be three numbers: START INCREMENT SAMPLES, such as 16 16 5859375",
     "--global-batch-size 8 --rampup-batch-size 4 4 1", ONE),
    ("plan", "--step-batch-size-schedule 1K:8",
     "--step-batch-size-schedule 1K:8: the first threshold must be 0, so that the first steps have a size; begin with 0:SIZE",
     "--step-batch-size-schedule 0:8", ONE),
    ("plan", "--seq-length 100 --step-batch-size-schedule 0:8 2K:16 2050:32",
     "--step-batch-size-schedule 0:8 2K:16 2050:32: thresholds must grow, but 2000 tokens (20 samples) are followed by 2000 "
     "tokens (20 samples); put them in order, further apart than a sequence",
     "--seq-length 100 --step-batch-size-schedule 0:8 2K:16 2100:32", ONE),
    ("plan", "--step-batch-size-schedule 0:8 many:16",
     "--step-batch-size-schedule 0:8 many:16: 'many:16' must look like THRESHOLD:SIZE, whole numbers or with K, M, B or T behind "
     "them (250B:1536)", "--step-batch-size-schedule 0:8 1.5M:16", ONE),
    ("wsd", "--lr-decay-style WSD",
     "--lr-decay-style WSD needs the length of its decay; give --lr-wsd-decay-iters or --lr-wsd-decay-samples",
     "--lr-decay-style WSD --lr-wsd-decay-iters 2", ONE),
    ("wsd", "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-iters 2",
     "--lr-wsd-decay-iters 9 and the warm-up of 2 do not fit into the 10 steps until the end of the decay; use 8 or fewer",
     "--lr-decay-style WSD --lr-wsd-decay-iters 8 --lr-warmup-iters 2", ONE),
    ("wsd", "--lr-decay-style WSD --lr-wsd-decay-samples 9 --lr-warmup-iters 2",
     "--lr-wsd-decay-samples 9 and the warm-up of 2 do not fit into the 10 samples until the end of the decay; use 8 or fewer",
     "--lr-decay-style WSD --lr-wsd-decay-samples 8 --lr-warmup-iters 2", ONE),
    ("weight_decay", "--end-weight-decay 0.2",
     "--end-weight-decay 0.2 needs a changing weight decay; give --weight-decay-incr-style linear or cosine, or "
     "--weight-decay instead", "--end-weight-decay 0.2 --weight-decay-incr-style cosine", ONE),
    ("one_schedule_source", "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
     "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other; give one of them",
     "--use-checkpoint-opt-param-scheduler", ONE),
]  # fmt: skip
# Rules about missing settings: name of the rule, words without the setting, the sentence, words that add it
MISSING: list[tuple[str, str, str, str]] = [
    ("vocabulary", "--mock-data --train-iters 3",
     "the vocabulary size is unknown; give --vocab-size, or --tokenizer-model with a folder that has a tokenizer.json",
     "--vocab-size 5"),
    ("data", "--preset qwen3-8b --train-iters 3",
     "no data is named; give --data-path PREFIX (of PREFIX.bin and PREFIX.idx), --corpus python, --dataset-size N for "
     "synthetic samples, or --mock-data",
     "--dataset-size 4"),
    ("blend", "--vocab-size 5 --train-iters 3 --data-path 0.5 a b c",
     "--data-path mixes prefixes with and without weights ('b' is not a weight); give each prefix one, or "
     "none",
     "--data-path 0.5 a 0.5 b"),
    ("blend", "--vocab-size 5 --train-iters 3 --train-data-path 0.5 a 0 b",
     "--train-data-path: the weight 0 must be more than 0; leave its prefix out instead",
     "--train-data-path 0.5 a 2 b"),
    ("per_split", "--vocab-size 5 --train-iters 3 --mock-data --valid-data-path a",
     "--valid-data-path needs --train-data-path beside it; give both, or --data-path for all splits",
     "--no-mock-data --train-data-path b"),
    ("tokenizer", "--vocab-size 5 --train-iters 3 --data-path a --tokenizer-type HFTokenizer",
     "--tokenizer-type HFTokenizer needs --tokenizer-model, a folder that has a tokenizer.json",
     "--tokenizer-model b"),
    ("run_length", "--mock-data --vocab-size 5", "the length of the run is unknown; give --train-iters",
     "--train-iters 3"),
    ("run_length", "--mock-data --vocab-size 5", "the length of the run is unknown; give --train-iters",
     "--skip-train"),
    ("run_length", "--mock-data --vocab-size 5 --epochs 2",
     "the number of steps of --epochs 2 is unknown: mock data has no epochs; give --train-iters instead",
     "--train-iters 3"),
    ("run_length", "--data-path 0.5 a 0.5 b --vocab-size 5 --epochs 2",
     "the number of steps of --epochs 2 is unknown: weighted data is sampled by weight, so it has no epochs; give "
     "--train-iters instead",
     "--train-iters 3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "bad", "sentence", "good", "facts"), CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES]
)
def test_rule(rule: str, bad: str, sentence: str, good: str, facts: ProcessFacts) -> None:
    assert relations(bad, facts) == [sentence]
    assert relations(good, facts) == []


@pytest.mark.parametrize(
    ("rule", "least", "sentence", "help"), MISSING, ids=[f"{c[0]}: {c[1]}" for c in MISSING]
)
def test_missing_settings_are_reported_with_advice(rule: str, least: str, sentence: str, help: str) -> None:
    assert problems(least=least) == [sentence]
    assert problems(help, least=least) == []


def test_every_rule_has_a_case() -> None:
    """Every rule has a case here or in another file.

    Rules about experts are in test_moe_rules.py, about positions in test_model_settings.py, about chats in
    train/test_sft.py and about the loop in test_loop_settings.py.
    """
    elsewhere = {*MOE_RULES, *POSITION_RULES, *SFT_RULES, *LOOP_RULES}
    named = {case[0] for case in CASES} | {case[0] for case in MISSING}
    assert named == set(RULES) - elsewhere


# Problems that are found while values are derived.
@pytest.mark.parametrize(
    ("words", "world", "sentence"),
    [
        ("--hidden-size 64 --num-attention-heads 6", 1,
         "--hidden-size 64 is not divisible by --num-attention-heads 6; use 1, 2, 4, 8, 16, 32 or 64 heads, or give "
         "--kv-channels"),
        ("--global-batch-size 10", 4,
         "--global-batch-size 10 cannot be divided by 4 data-parallel ranks × 1 micro-batches; use a multiple of 4"),
        ("--global-batch-size 10 --gradient-accumulation-steps 4", 1,
         "--global-batch-size 10 cannot be divided by 1 data-parallel ranks × 4 micro-batches; use a multiple of 4"),
        ("--global-batch-size 10 --micro-batch-size 1 --num-microbatches 4", 2,
         "--global-batch-size 10 ≠ 1 (micro) × 2 (data-parallel) × 4 (micro-batches) = 8; leave one of them out"),
        ("--gradient-accumulation-steps 8 --num-microbatches 4", 1,
         "--gradient-accumulation-steps 8 and --num-microbatches 4 both set the number of micro-batches per step; "
         "give one of them"),
        ("--rank-batch-size 4 --micro-batch-size 2", 1,
         "--batch_size and --micro-batch-size/--global-batch-size set the same size; give one of them"),
        ("--rank-batch-size 6 --num-microbatches 4", 1,
         "--batch_size 6 is not divisible by --num_microbatches 4; use 1, 2, 3 or 6 micro-batches"),
        ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", 1,
         "--lr-warmup-iters 2 and --lr-warmup-fraction 0.1 both set the warm-up; give one of them"),
        ("--train-samples 20", 1,
         "--train-iters 10 and --train-samples 20 both set the length of the run; give one of them"),
        ("--lr-decay-iters 10 --lr-decay-samples 10", 1,
         "--lr-decay-iters 10 and --lr-decay-samples 10 both set the decay; give one of them"),
        ("--global-batch-size 8 --step-batch-size-schedule 0:4", 1,
         "--global-batch-size 8 and --step-batch-size-schedule 0:4 both set the batch size; give one of them"),
        ("--rampup-batch-size 4 4 10 --step-batch-size-schedule 0:4", 1,
         "--rampup-batch-size 4 4 10 and --step-batch-size-schedule 0:4 both set the batch size; give one of them"),
    ],
)  # fmt: skip
def test_problems_of_derivations(words: str, world: int, sentence: str) -> None:
    assert problems(words, ProcessFacts(world, world)) == [sentence]


@pytest.mark.parametrize("width", [10, 16])
def test_heads_of_a_given_width_need_not_fill_the_hidden_size(width: int) -> None:
    """Accepts any `--kv-channels`, even 64 // 6 = 10, the rounded quotient."""
    assert problems(f"--hidden-size 64 --num-attention-heads 6 --kv-channels {width}") == []


def test_batch_size_of_a_guides_program_is_checked() -> None:
    assert problems("--batch_size 8 --num_microbatches 3", ONE, STANDARD, least="") == [
        "--batch_size 8 is not divisible by --num_microbatches 3; use 1, 2, 4 or 8 micro-batches"
    ]


def test_all_problems_are_reported_at_once() -> None:
    words = "--hidden-size 120 --num-attention-heads 12 --tp_size 5 --fp16 --bf16 --min-lr 1 --lr-warmup-iters 10 --seed -1"
    found = problems(words, ProcessFacts(2, 2))
    assert [sentence.split(" ")[0] for sentence in found] == [
        "--seed", "2", "--num-attention-heads", "--fp16", "--lr-warmup-iters", "--min-lr",
    ]  # fmt: skip
    assert (
        "--num-attention-heads 12 is not divisible by --tensor-model-parallel-size 5; use 1, 2, 3, 4, 6 or 12"
        in found
    )


# --- values by themselves ---


@pytest.mark.parametrize("name", [name for name, item in all_settings().items() if item.limit is not None])
def test_limits(name: str) -> None:
    settings = resolved().settings
    limit = all_settings()[name].limit
    assert limit is not None
    bad = {"master_port": 65536, "window_size": -2}.get(name, -1)
    sentence = out_of_limits(settings.changed(**{name: bad}))
    assert sentence == {name: f"{all_settings()[name].flag} {bad} must be {limit.words}"}
    assert out_of_limits(settings) == {}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--adam-beta2 1.0", "--adam-beta2 1.0 must be at least 0 and below 1"),
        ("--rotary-percent 1.5", "--rotary-percent 1.5 must be above 0 and at most 1"),
        ("--master-port 70000", "--master-port 70000 must be a port from 1 to 65535"),
        ("--eval-iters -1", "--eval-iters -1 must be 0 or more"),
        ("--layernorm-epsilon 0", "--layernorm-epsilon 0.0 must be more than 0"),
        ("--lr-warmup-fraction 1", "--lr-warmup-fraction 1.0 must be at least 0 and below 1"),
    ],
)
def test_limits_of_a_command_line(words: str, sentence: str) -> None:
    assert problems(words) == [sentence]


@pytest.mark.parametrize(
    "words",
    [
        "--eval-iters 0",
        "--lr 0 --min-lr 0",
        "--clip-grad 0",
        "--adam-beta1 0",
        "--seed 0",
        "--master-port 65535",
        "--master-port 1",
        "--rotary-percent 1",
    ],
)
def test_values_at_their_limit(words: str) -> None:
    assert problems(words) == []


def test_a_rule_that_looks_at_a_wrong_value_is_not_heard() -> None:
    wrong = resolved().settings.changed(seq_length=-5, max_position_embeddings=-3, num_attention_heads=0)
    assert problems_of(wrong) == [
        "--num-attention-heads 0 must be more than 0",
        "--seq-length -5 must be more than 0",
        "--max-position-embeddings -3 must be more than 0",
    ]


# --- features that come later ---


def test_missing_features_are_refused_with_advice() -> None:
    assert problems("--zero-stage 3") == [], "it is here"
    assert problems("--fp16") == []
    assert problems("--zero-stage 2") == problems("--use-distributed-optimizer") == []
    assert problems("--bf16 --fp8 e4m3 --fp8_recipe=tensorwise") == []
    assert problems("--bf16 --fp8 e4m3 --fp8_recipe=delayed") == [
        "--fp8_recipe delayed needs an fp8 scaling other than by tensor or by row, which this version does not have yet; leave it out"
    ]
    assert problems("--recompute-granularity selective --recompute-modules core_attn mlp layernorm") == []


def test_refusals_of_a_presets_values() -> None:
    settings = resolved().settings.copy()
    settings.assign("preset x", fp8_recipe="delayed", multi_latent_attention=True)
    assert sorted(unsupported_features(settings)) == [
        "--fp8-recipe delayed needs an fp8 scaling other than by tensor or by row, which this version does not have yet; "
        "add --fp8-recipe tensorwise to disable it",
        "--multi-latent-attention needs multi-latent attention, which this version does not have yet; "
        "choose another preset",
    ]
