"""Layouts of the parity net for mixtures of experts."""

from tests.parity.cases import (
    BOTH_OVERLAPS,
    DROPOUT,
    DUALPIPEV,
    FIVE,
    FOUR,
    GPIPE,
    HYBRID,
    OVERLAP,
    SMALL,
    SP,
    VIRTUAL,
    ZBV,
    ZERO3,
    ZERO_BUBBLE,
    Layout,
    every_second_scaled,
)
from tests.parity.cases import _cp as context
from tests.parity.cases import _full as full
from tests.parity.cases import _pp as pipeline
from tests.parity.cases import _selective as selective
from tests.parity.cases import _tp as tensor
from tests.parity.cases import _zero as zero

# Experts are not split over ranks, even if dense layers are.
WHOLE = "--expert-tensor-parallel-size 1"
GATHER = "--moe-token-dispatcher-type allgather"
# Computed over a micro-batch, so the run on one process must use the same micro-batches.
BY_MICRO_BATCH = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.05"
CAPACITY = "--moe-expert-capacity-factor 1.1"


def experts(size: int, more: str = "") -> str:
    return f"--expert-model-parallel-size {size} {more}"


_SCHEDULES = (
    ("1f1b", ""),
    ("gpipe", GPIPE),
    ("virtual2", VIRTUAL),
    ("zero-bubble", ZERO_BUBBLE),
    ("zbv", ZBV),
    ("dualpipev", DUALPIPEV),
)

_PLAIN = (
    Layout("accumulation", 1, "", micro_batch=1),
    Layout("dp2", 2, "", micro_batch=4),
    Layout("ep2", 2, experts(2), micro_batch=4),
    Layout("ep2 gather", 2, experts(2, GATHER)),
    Layout("ep2 zero1 overlap dropout", 2, f"{experts(2)} {zero(1, BOTH_OVERLAPS)}", both=DROPOUT),
    Layout("ep2 gather zero2", 2, f"{experts(2, GATHER)} {zero(2)}"),
    Layout("ep4 gather dropout", 4, experts(4, GATHER), both=DROPOUT),
    Layout("dp4 ep2 zero1", 4, f"{experts(2)} {zero(1)}"),
    Layout("dp4 ep2 zero2 overlap", 4, f"{experts(2)} {zero(2, OVERLAP)}", micro_batch=1),
    Layout("dp4 ep2 gather zero1", 4, f"{experts(2, GATHER)} {zero(1)}"),
    Layout("tp2", 2, tensor(2), micro_batch=4),
    Layout("tp2 ep2 whole", 2, f"{tensor(2)} {experts(2, WHOLE)}", micro_batch=4),
    Layout("tp2 ep2 whole gather", 2, f"{tensor(2)} {experts(2, WHOLE)} {GATHER}", micro_batch=4),
    Layout("tp2 dp2 ep2", 4, f"{tensor(2)} {experts(2)}"),
    Layout("tp2 dp2 ep2 gather", 4, f"{tensor(2)} {experts(2, GATHER)}", micro_batch=4),
    Layout("tp2 dp2 ep4 whole zero1", 4, f"{tensor(2)} {experts(4, WHOLE)} {zero(1)}"),
    Layout("tp4 ep2", 4, f"{tensor(4)} {experts(2, '--expert-tensor-parallel-size 2')}", micro_batch=8),
    Layout("tp2 dp2 zero1 dropout", 4, f"{tensor(2)} {zero(1)}", both=DROPOUT),
    Layout("tp2 dp2 zero2", 4, f"{tensor(2)} {zero(2)}"),
    # Experts split over more ranks than dense layers: etp 2 without tensor parallelism.
    Layout("dp2 etp2", 2, "--expert-tensor-parallel-size 2"),
    Layout(
        "dp4 ep2 etp2 gather overlap",
        4,
        f"{experts(2, GATHER)} --expert-tensor-parallel-size 2 {SMALL} {OVERLAP}",
    ),
    *(
        Layout(f"cp2 {kind} ep2{word}", 2, f"{context(2, kind)} {experts(2, more)}", micro_batch=4)
        for kind in ("p2p", "all_gather", "a2a")
        for word, more in (("", ""), (" gather", GATHER))
    ),
    *(
        Layout(f"tp2 cp2 {kind} etp2", 4, f"{tensor(2)} {context(2, kind)}", micro_batch=4)
        for kind in ("p2p", "all_gather", "a2a")
    ),
    Layout("cp2 dp2 ep4 zero2", 4, f"{context(2)} {experts(4)} {zero(2)}"),
    *(
        Layout(
            f"pp2 {name} ep2{word}",
            4,
            f"{pipeline(2, schedule)} {experts(2, more)}",
            micro_batch=1,
        )
        for name, schedule in _SCHEDULES
        for word, more in (("", ""), (" gather", GATHER))
    ),
    *(
        Layout(f"tp2 pp2 {name} etp2", 4, f"{tensor(2)} {pipeline(2, schedule)}")
        for name, schedule in _SCHEDULES
    ),
    Layout("pp2 uneven ep2", 4, f"{pipeline(2)} {experts(2)}", both=FIVE),
    Layout("tp2 pp2 uneven etp2 gather", 4, f"{tensor(2)} {pipeline(2)} {GATHER}", both=FIVE),
    Layout("pp2 uneven ep2 gather", 4, f"{pipeline(2)} {experts(2, GATHER)}", both=FIVE),
    Layout("ep2 full", 2, f"{experts(2)} {full('uniform', 1)}", both=DROPOUT),
    Layout("ep2 gather full", 2, f"{experts(2, GATHER)} {full('block', 1)}"),
    Layout("ep2 moe", 2, f"{experts(2)} {selective('moe', 'layernorm')}"),
    Layout(
        "ep2 gather moe_act", 2, f"{experts(2, GATHER)} {selective('moe_act', 'shared_experts', 'core_attn')}"
    ),
    Layout("tp2 moe_act etp2", 2, f"{tensor(2)} {selective('moe_act', 'mlp')}", micro_batch=4),
    Layout("tp2 pp2 full etp2", 4, f"{tensor(2)} {pipeline(2)} {full('uniform', 1)}"),
    Layout("pp2 zero-bubble ep2 full", 4, f"{pipeline(2, ZERO_BUBBLE)} {experts(2)} {full('uniform', 1)}"),
    Layout("pp2 zbv ep2 moe_act", 4, f"{pipeline(2, ZBV)} {experts(2)} {selective('moe_act', 'mlp')}"),
    Layout("pp2 dualpipev moe", 2, f"{pipeline(2, DUALPIPEV)} {selective('moe', 'layernorm')}"),
    Layout("tp2 pp2 dp2 ep2 zero1", 8, f"{tensor(2)} {pipeline(2)} {experts(2)} {zero(1)}"),
    Layout(
        "tp2 sp cp2 dp2 ep4 gather zero2", 8, f"{tensor(2)} {SP} {context(2)} {experts(4, GATHER)} {zero(2)}"
    ),
    Layout("dp8 ep4 zero2", 8, f"{experts(4)} {zero(2)}", micro_batch=1),
    # ZeRO 3; with as many expert ranks as replicas, experts are not sharded.
    Layout("ep2 zero3", 2, f"{experts(2)} {ZERO3}", both=DROPOUT),
    Layout("dp4 ep2 zero3", 4, f"{experts(2)} {ZERO3}"),
    Layout("dp4 ep2 gather zero3 hybrid", 4, f"{experts(2, GATHER)} {HYBRID}", micro_batch=1),
    Layout("tp2 dp2 zero3 etp2", 4, f"{tensor(2)} {ZERO3}"),
    Layout("tp2 ep1 whole zero3", 2, f"{tensor(2)} {WHOLE} {ZERO3}", micro_batch=4),
    Layout("ep2 zero3 moe", 2, f"{experts(2)} {ZERO3} {selective('moe', 'layernorm')}"),
    Layout("ep2 zero3 full", 2, f"{experts(2)} {ZERO3} {full('uniform', 2)}", both=FOUR),
    Layout("pp2 ep2 zero3", 4, f"{pipeline(2)} {experts(2)} {ZERO3}"),
    # Auxiliary losses and capacities that are defined per micro-batch.
    Layout("dp2 by micro-batch", 2, "", both=BY_MICRO_BATCH, same_cut=True),
    Layout(
        "tp2 cp2 dp2 ep2 by micro-batch",
        8,
        f"{tensor(2)} {context(2)} {experts(2)}",
        both=BY_MICRO_BATCH,
        same_cut=True,
    ),
    Layout("pp2 ep2 by micro-batch", 4, f"{pipeline(2)} {experts(2)}", both=BY_MICRO_BATCH, same_cut=True),
    Layout(
        "tp2 capacity position",
        2,
        tensor(2),
        both=f"{CAPACITY} --moe-token-drop-policy position",
        same_cut=True,
    ),
    Layout("ep2 capacity", 2, experts(2), both=CAPACITY, same_cut=True),
    Layout(
        "tp2 cp2 ep2 capacity gather",
        4,
        f"{tensor(2)} {context(2)} {experts(2, GATHER)}",
        both=CAPACITY,
        same_cut=True,
    ),
)
MIXTURE_LAYOUTS = every_second_scaled(_PLAIN)
