"""Cases of the parity net: families of models, and layouts to run them in."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pentatron.compare.trial import STEPS
from tests.support import LLAMA, REVEALING

BATCH = 8
SEQUENCE = 16
VOCABULARY = 61

# Four layers unless a layout sets another number, eight heads, two key/value heads: with four tensor ranks,
# two ranks share a key/value head.
SHAPE = (
    f"--num-layers 4 --hidden-size 32 --num-attention-heads 8 --kv-channels 8 --ffn-hidden-size 48 "
    f"--seq-length {SEQUENCE} --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 16 {REVEALING} "
    f"--lr 3e-3 --train-iters {STEPS} --global-batch-size {BATCH}"
)
GROUPED = "--group-query-attention --num-query-groups 2"
_UNTIED = "--untie-embeddings-and-output-weights"

FAMILIES = {
    "gpt": "--hidden-dropout 0.1",
    "llama": f"{LLAMA} {GROUPED} --untie-embeddings-and-output-weights",
    "qwen2.5": f"{LLAMA} {GROUPED} --add-qkv-bias",
    "qwen3": f"{LLAMA} {GROUPED} --qk-layernorm --untie-embeddings-and-output-weights",
}

_SPARSE = f"{LLAMA} {GROUPED} --moe-ffn-hidden-size 24"
MIXTURES = {
    "mixtral": (
        f"{_SPARSE} {_UNTIED} --num-experts 4 --moe-router-topk 2 "
        f"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.05"
    ),
    "qwen2-moe": (
        f"{_SPARSE} --add-qkv-bias --num-experts 8 --moe-router-topk 3 --moe-router-pre-softmax --moe-layer-freq 2 "
        f"--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --moe-z-loss-coeff 0.01 "
        f"--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.05"
    ),
    "qwen3-moe": (
        f"{_SPARSE} {_UNTIED} --qk-layernorm --num-experts 8 --moe-router-topk 2 --moe-router-dtype fp32 "
        f"--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.05 0.02"
    ),
    "sigmoid": (
        f"{_SPARSE} --num-experts 8 --moe-router-topk 4 --moe-router-score-function sigmoid "
        f"--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --moe-router-num-groups 4 "
        f"--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 24 "
        f"--moe-router-load-balancing-type none"
    ),
}


@dataclass(frozen=True)
class Layout:
    """One layout of the net.

    `words`: flags of the run on several ranks. `both`: flags that the run on one process gets too.
    `same_cut`: the result depends on the micro-batches, so the run on one process uses the same ones;
    otherwise it takes the whole batch at once. `scaled`: on several ranks the loss is scaled before backward,
    as in fp16. `fused`: on several ranks the cross entropy is fused and computed in chunks.
    """

    name: str
    ranks: int
    words: str
    micro_batch: int = 2
    both: str = ""
    same_cut: bool = False
    scaled: bool = False
    fused: bool = False

    def command(self, family: str) -> str:
        more = f"{SCALED if self.scaled else ''} {FUSED if self.fused else ''}"
        return f"{self.reference(family)} {self.words} {more} --micro-batch-size {self.micro_batch}"

    def reference(self, family: str) -> str:
        return f"{SHAPE} --num-layers {self.depth} {(FAMILIES | MIXTURES)[family]} {self.both}"

    @property
    def depth(self) -> int:
        """Number of layers unless `both` sets it: one for each stage, and at least two.

        Every layer adds collectives. Stages of several layers, and of different numbers, are covered by FIVE.
        """
        doubled = VIRTUAL in self.words or ZBV in self.words or DUALPIPEV in self.words
        return max(2, self.pipeline_ranks * (2 if doubled else 1))

    @property
    def pipeline_ranks(self) -> int:
        flags = self.words.split()
        return int(flags[flags.index(PIPELINE) + 1]) if PIPELINE in flags else 1

    def alone(self, family: str) -> str:
        """Returns the flags of the run on one process."""
        return f"{self.reference(family)} --micro-batch-size {self.micro_batch if self.same_cut else BATCH}"


def _tp(size: int) -> str:
    return f"--tensor-model-parallel-size {size}"


PIPELINE = "--pipeline-model-parallel-size"


def _pp(size: int, more: str = "") -> str:
    return f"{PIPELINE} {size} {more}"


def every_second_scaled(layouts: Iterable[Layout]) -> tuple[Layout, ...]:
    """Scales the loss in every second layout, and fuses the cross entropy in two of every four.

    Neither may change a result in any layout, so they need no layouts of their own.
    """
    return tuple(
        replace(layout, scaled=number % 2 == 1, fused=number // 2 % 2 == 0)
        for number, layout in enumerate(layouts)
    )


SCALED = "--loss-scale 4096"
# The chunk divides no micro-batch, and is smaller than any of more than one sequence.
FUSED = "--cross-entropy-loss-fusion --cross-entropy-chunk 20"
SP = "--sequence-parallel"
GPIPE = "--pipeline-schedule gpipe"
VIRTUAL = "--virtual-pipeline-model-parallel-size 2"
OVERLAP = "--overlap-grad-reduce"
# Buckets far smaller than the model, so that there are several of them.
SMALL = "--ddp-bucket-size 3000"
FOUR, FIVE = "--num-layers 4", "--num-layers 5"
DROPOUT = "--hidden-dropout 0.2"
EIGHT, NINE = "--num-layers 8", "--num-layers 9"
ZERO_BUBBLE = "--pipeline-schedule zero-bubble"
ZBV, DUALPIPEV = "--pipeline-schedule zbv", "--pipeline-schedule dualpipev"
BOTH_OVERLAPS = f"{OVERLAP} --overlap-param-gather"


def _cp(size: int, exchange: str = "p2p") -> str:
    return f"--context-parallel-size {size} --cp-comm-type {exchange}"


CORE, MLP, NORMS = "core_attn", "mlp", "layernorm"


def _zero(stage: int, more: str = "") -> str:
    return f"--zero-stage {stage} {SMALL} {more}"


ZERO3 = "--zero-stage 3"
HYBRID = f"{ZERO3} --num-distributed-optimizer-instances 2"


def _full(method: str, layers: int) -> str:
    return f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {layers}"


def _selective(*modules: str) -> str:
    return f"--recompute-granularity selective --recompute-modules {' '.join(modules)}"


_PLAIN = (
    Layout("accumulation", 1, "", micro_batch=1),
    Layout("dp2", 2, "", micro_batch=4),
    Layout("dp2 overlap", 2, f"{SMALL} {OVERLAP}"),
    Layout("dp2 zero1", 2, _zero(1)),
    Layout("dp2 zero1 overlap", 2, _zero(1, f"{OVERLAP} --overlap-param-gather")),
    Layout("dp2 zero2", 2, _zero(2)),
    Layout("tp2", 2, _tp(2), micro_batch=8),
    Layout("tp2 sp", 2, f"{_tp(2)} {SP}", micro_batch=4),
    Layout("tp2 sp dropout", 2, f"{_tp(2)} {SP}", micro_batch=4, both=DROPOUT),
    Layout("pp2", 2, _pp(2)),
    Layout("pp2 gpipe", 2, _pp(2, GPIPE)),
    Layout("pp2 virtual2", 2, _pp(2, VIRTUAL)),
    Layout("pp2 uneven dropout", 2, _pp(2), both=f"{FIVE} {DROPOUT}"),
    Layout("tp4", 4, _tp(4), micro_batch=8),
    Layout("tp4 sp", 4, f"{_tp(4)} {SP}", micro_batch=8),
    Layout("pp4", 4, _pp(4), micro_batch=1),
    Layout("pp4 gpipe", 4, _pp(4, GPIPE)),
    Layout("pp4 written out", 4, _pp(4, "--pipeline-model-parallel-layout Et|t|tt|L")),
    Layout("tp2 dp2", 4, _tp(2)),
    Layout("tp2 sp dp2 zero1", 4, f"{_tp(2)} {SP} {_zero(1)}"),
    Layout("tp2 dp2 zero2 overlap", 4, f"{_tp(2)} {_zero(2, OVERLAP)}"),
    Layout("tp2 pp2", 4, f"{_tp(2)} {_pp(2)}"),
    Layout("tp2 sp pp2 virtual2", 4, f"{_tp(2)} {SP} {_pp(2, VIRTUAL)}"),
    Layout("tp2 sp pp2 gpipe dropout", 4, f"{_tp(2)} {SP} {_pp(2, GPIPE)}", both=DROPOUT),
    Layout("pp2 dp2", 4, _pp(2), micro_batch=1),
    Layout("pp2 dp2 zero1", 4, f"{_pp(2)} {_zero(1)}"),
    Layout("pp2 dp2 zero2", 4, f"{_pp(2)} {_zero(2)}"),
    Layout("pp2 virtual2 dp2", 4, _pp(2, VIRTUAL)),
    Layout("pp2 virtual2 dp2 zero1", 4, f"{_pp(2, VIRTUAL)} {_zero(1)}"),
    Layout("pp2 gpipe dp2 zero2", 4, f"{_pp(2, GPIPE)} {_zero(2)}"),
    Layout("pp2 virtual2 uneven dp2 zero2 overlap", 4, f"{_pp(2, VIRTUAL)} {_zero(2, OVERLAP)}", both=FIVE),
    Layout("dp8 zero1", 8, _zero(1), micro_batch=1),
    Layout("dp4 zero2 dropout", 4, _zero(2), both=DROPOUT),
    Layout("tp2 pp2 uneven dp2 overlap", 8, f"{_tp(2)} {_pp(2)} {SMALL} {OVERLAP}", both=FIVE),
    Layout("tp2 sp pp2 gpipe uneven dp2 zero1", 8, f"{_tp(2)} {SP} {_pp(2, GPIPE)} {_zero(1)}", both=FIVE),
    Layout("tp2 sp pp2 dp2 zero1", 8, f"{_tp(2)} {SP} {_pp(2)} {_zero(1)}"),
    Layout("tp2 sp pp2 virtual2 dp2 zero2", 8, f"{_tp(2)} {SP} {_pp(2, VIRTUAL)} {_zero(2)}"),
    Layout("tp2 sp pp2 gpipe dp2", 8, f"{_tp(2)} {SP} {_pp(2, GPIPE)}"),
    Layout("tp4 sp dp2 zero2", 8, f"{_tp(4)} {SP} {_zero(2)}"),
    Layout("tp4 pp2", 8, f"{_tp(4)} {_pp(2)}", micro_batch=4),
    # Context parallelism.
    Layout("cp2", 2, _cp(2), micro_batch=8),
    Layout("cp2 all_gather", 2, _cp(2, "all_gather"), micro_batch=4),
    Layout("cp2 a2a", 2, _cp(2, "a2a"), micro_batch=4),
    Layout("cp2 zero1", 2, f"{_cp(2)} {_zero(1)}", micro_batch=4),
    Layout("cp2 all_gather zero2 overlap", 2, f"{_cp(2, 'allgather')} {_zero(2, OVERLAP)}", micro_batch=4),
    Layout("cp4", 4, _cp(4), micro_batch=4),
    Layout("cp4 all_gather", 4, _cp(4, "all_gather"), micro_batch=8),
    Layout("cp4 a2a dropout", 4, _cp(4, "a2a"), micro_batch=4, both=DROPOUT),
    Layout("tp2 cp2", 4, f"{_tp(2)} {_cp(2)}", micro_batch=4),
    Layout("tp2 cp2 a2a", 4, f"{_tp(2)} {_cp(2, 'a2a')}", micro_batch=4),
    Layout("tp2 sp cp2 dropout", 4, f"{_tp(2)} {SP} {_cp(2)}", micro_batch=4, both=DROPOUT),
    Layout("cp2 pp2", 4, f"{_cp(2)} {_pp(2)}"),
    Layout("cp2 pp2 gpipe", 4, f"{_cp(2)} {_pp(2, GPIPE)}"),
    Layout("cp2 pp2 virtual2 uneven zero2", 4, f"{_cp(2)} {_pp(2, VIRTUAL)} {_zero(2)}", both=FIVE),
    Layout("cp2 all_gather pp2", 4, f"{_cp(2, 'all_gather')} {_pp(2)}"),
    Layout("cp2 all_gather pp2 gpipe", 4, f"{_cp(2, 'all_gather')} {_pp(2, GPIPE)}"),
    Layout(
        "cp2 all_gather pp2 virtual2 uneven",
        4,
        f"{_cp(2, 'all_gather')} {_pp(2, VIRTUAL)}",
        both=FIVE,
    ),
    Layout("cp2 a2a pp2 gpipe", 4, f"{_cp(2, 'a2a')} {_pp(2, GPIPE)}"),
    Layout("cp2 dp2", 4, _cp(2)),
    Layout("cp2 dp2 zero1 overlap", 4, f"{_cp(2)} {_zero(1, OVERLAP)}"),
    Layout("cp2 all_gather dp2 zero2", 4, f"{_cp(2, 'all_gather')} {_zero(2)}"),
    Layout("tp2 sp cp2 pp2", 8, f"{_tp(2)} {SP} {_cp(2)} {_pp(2)}"),
    Layout("tp2 sp cp2 all_gather dp2 zero1", 8, f"{_tp(2)} {SP} {_cp(2, 'all_gather')} {_zero(1)}"),
    Layout(
        "tp2 sp cp2 a2a pp2 virtual2 uneven zero1",
        8,
        f"{_tp(2)} {SP} {_cp(2, 'a2a')} {_pp(2, VIRTUAL)} {_zero(1)}",
        both=FIVE,
    ),
    Layout("cp2 a2a pp2 dp2 zero2", 8, f"{_cp(2, 'a2a')} {_pp(2)} {_zero(2)}"),
    # Split backward.
    Layout("pp2 zero-bubble", 2, _pp(2, ZERO_BUBBLE)),
    Layout("pp2 zbv", 2, _pp(2, ZBV)),
    Layout("pp2 dualpipev", 2, _pp(2, DUALPIPEV)),
    Layout("pp4 zero-bubble uneven dropout", 4, _pp(4, ZERO_BUBBLE), micro_batch=1, both=f"{FIVE} {DROPOUT}"),
    Layout("pp4 zbv uneven dropout", 4, _pp(4, ZBV), micro_batch=1, both=f"{NINE} {DROPOUT}"),
    Layout("pp4 dualpipev", 4, _pp(4, DUALPIPEV), micro_batch=1, both=EIGHT),
    Layout("tp2 sp pp2 zero-bubble virtual2", 4, f"{_tp(2)} {SP} {_pp(2, f'{ZERO_BUBBLE} {VIRTUAL}')}"),
    Layout("tp2 sp pp2 zbv", 4, f"{_tp(2)} {SP} {_pp(2, ZBV)}"),
    Layout("tp2 sp pp2 dualpipev dropout", 4, f"{_tp(2)} {SP} {_pp(2, DUALPIPEV)}", both=DROPOUT),
    Layout("pp2 zero-bubble dp2", 4, _pp(2, ZERO_BUBBLE), micro_batch=1),
    Layout(
        "pp2 zero-bubble dp2 zero1 overlap",
        4,
        f"{_pp(2, ZERO_BUBBLE)} {_zero(1, BOTH_OVERLAPS)}",
        micro_batch=1,
    ),
    Layout("pp2 zero-bubble dp2 zero2", 4, f"{_pp(2, ZERO_BUBBLE)} {_zero(2)}", micro_batch=1),
    Layout("pp2 zbv dp2 overlap", 4, f"{_pp(2, ZBV)} {SMALL} {OVERLAP}", micro_batch=1),
    Layout("pp2 zbv dp2 zero1", 4, f"{_pp(2, ZBV)} {_zero(1)}", micro_batch=1),
    Layout("pp2 zbv dp2 zero2 overlap", 4, f"{_pp(2, ZBV)} {_zero(2, BOTH_OVERLAPS)}", micro_batch=1),
    Layout("pp2 dualpipev uneven dp2", 4, _pp(2, DUALPIPEV), micro_batch=1, both=FIVE),
    Layout("pp2 dualpipev dp2 zero1", 4, f"{_pp(2, DUALPIPEV)} {_zero(1)}", micro_batch=1),
    Layout("pp2 dualpipev dp2 zero2", 4, f"{_pp(2, DUALPIPEV)} {_zero(2)}", micro_batch=1),
    # ZeRO 3.
    Layout("dp2 zero3", 2, ZERO3),
    Layout("cp2 zero3", 2, f"{_cp(2)} {ZERO3}", micro_batch=4),
    Layout("tp2 sp dp2 zero3", 4, f"{_tp(2)} {SP} {ZERO3}"),
    Layout("pp2 dp2 zero3", 4, f"{_pp(2)} {ZERO3}"),
    Layout("pp2 virtual2 dp2 zero3", 4, f"{_pp(2, VIRTUAL)} {ZERO3}"),
    Layout("cp2 all_gather dp2 zero3", 4, f"{_cp(2, 'all_gather')} {ZERO3}"),
    Layout("dp4 zero3 hybrid", 4, HYBRID),
    Layout("cp2 a2a pp2 gpipe uneven zero3", 4, f"{_cp(2, 'a2a')} {_pp(2, GPIPE)} {ZERO3}", both=FIVE),
    Layout("dp2 zero3 full", 2, f"{ZERO3} {_full('uniform', 1)}"),
    Layout("dp2 zero3 full2 dropout", 2, f"{ZERO3} {_full('uniform', 2)}", both=f"{FOUR} {DROPOUT}"),
    Layout("dp2 zero3 core_attn mlp", 2, f"{ZERO3} {_selective(CORE, MLP)}"),
    # Activation recompute.
    Layout("tp2 sp full", 2, f"{_tp(2)} {SP} {_full('uniform', 1)}", micro_batch=4, both=DROPOUT),
    Layout("pp2 gpipe uneven full2", 2, f"{_pp(2, GPIPE)} {_full('uniform', 2)}", both=FIVE),
    Layout("dp2 zero2 overlap block1", 2, f"{_zero(2, OVERLAP)} {_full('block', 1)}"),
    Layout("tp2 dp2 overlap full", 4, f"{_tp(2)} {SMALL} {OVERLAP} {_full('uniform', 1)}"),
    Layout("tp2 sp pp2 virtual2 full", 4, f"{_tp(2)} {SP} {_pp(2, VIRTUAL)} {_full('uniform', 1)}"),
    Layout(
        "pp2 dp2 zero1 block1 dropout",
        4,
        f"{_pp(2)} {_zero(1)} {_full('block', 1)}",
        both=f"{FOUR} {DROPOUT}",
    ),
    Layout(
        "tp2 sp core_attn mlp layernorm", 2, f"{_tp(2)} {SP} {_selective(CORE, MLP, NORMS)}", micro_batch=4
    ),
    Layout("dp2 zero2 layernorm", 2, f"{_zero(2)} {_selective(NORMS)}"),
    Layout("tp2 pp2 gpipe mlp", 4, f"{_tp(2)} {_pp(2, GPIPE)} {_selective(MLP)}"),
    Layout("pp2 uneven dp2 zero1 core_attn", 4, f"{_pp(2)} {_zero(1)} {_selective(CORE)}", both=FIVE),
    Layout("pp2 virtual2 dp2 mlp layernorm", 4, f"{_pp(2, VIRTUAL)} {_selective(MLP, NORMS)}"),
    # Recompute with split backward.
    Layout("pp2 zero-bubble full", 2, f"{_pp(2, ZERO_BUBBLE)} {_full('uniform', 1)}", both=DROPOUT),
    Layout("tp2 sp pp2 zero-bubble mlp", 4, f"{_tp(2)} {SP} {_pp(2, ZERO_BUBBLE)} {_selective(MLP)}"),
    Layout("pp2 zbv dp2 zero2 full", 4, f"{_pp(2, ZBV)} {_zero(2)} {_full('uniform', 1)}", micro_batch=1),
    Layout("pp2 zbv core_attn mlp layernorm", 2, f"{_pp(2, ZBV)} {_selective(CORE, MLP, NORMS)}"),
    Layout("tp2 pp2 dualpipev block1", 4, f"{_tp(2)} {_pp(2, DUALPIPEV)} {_full('block', 1)}"),
    Layout("pp2 dualpipev core_attn layernorm", 2, f"{_pp(2, DUALPIPEV)} {_selective(CORE, NORMS)}"),
    # Context parallelism with split backward, and with recompute.
    *(
        Layout(f"cp2 {kind} pp2 {name}", 4, f"{_cp(2, kind)} {_pp(2, schedule)}")
        for kind in ("p2p", "all_gather", "a2a")
        for name, schedule in (("zero-bubble", ZERO_BUBBLE), ("zbv", ZBV), ("dualpipev", DUALPIPEV))
    ),
    *(
        Layout(f"cp2 {kind} {name}", 2, f"{_cp(2, kind)} {recompute}", micro_batch=4)
        for kind in ("p2p", "all_gather", "a2a")
        for name, recompute in (
            (
                "full recompute",
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            ),
            ("selective recompute", "--recompute-granularity selective --recompute-modules core_attn mlp"),
        )
    ),
)
LAYOUTS = every_second_scaled(_PLAIN)
