"""Lists the checks that `make cuda` runs and writes into docs/cuda.md, and what it cannot check."""

import difflib
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pentatron.compare.trial import STEPS
from pentatron.compare.verify import single_process_config, small_twin
from pentatron.settings.entry_points import LAYOUT
from pentatron.settings.presets import presets
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.run_config import RunConfig, all_settings
from pentatron.settings.settings import ProcessFacts
from tests.cuda import families, spread, trials, whole_runs
from tests.cuda.trials import Found, Rows
from tests.hf.families import CASES as OF_TRANSFORMERS
from tests.parity.bf16 import FP16
from tests.parity.cases import BATCH, FAMILIES, MIXTURES, SHAPE

# Optimizations on a GPU, and the flags that switch them off.
_SWITCHES = {
    "compile": "--compile off",
    "cuda_graphs": "--cuda-graphs off",
    "fused_update": "--no-fused-update",
    "fused_cross_entropy": "--no-cross-entropy-loss-fusion",
    "moe_grouped_gemm": "--no-moe-grouped-gemm",
    "bias_swiglu_fusion": "--no-bias-swiglu-fusion",
}
# Eager layers without optimizations: the reference of all faster variants.
EAGER = " ".join(flag for setting, flag in _SWITCHES.items() if setting in all_settings())
# The defaults on a GPU, and the defaults without compiling, which would be repeated for every layout.
FAST = ""
UNCOMPILED = "--compile off" if "compile" in all_settings() else ""

KINDS = FAMILIES | MIXTURES
TINY = {
    family: f"{SHAPE} --num-layers 2 --micro-batch-size {BATCH // 2} {words}"
    for family, words in KINDS.items()
}
# Wide enough for the kernels of real models: heads of 64 and of 128, a vocabulary size that is no round
# number.
_WIDE = (
    f"--num-layers 2 --hidden-size 256 --num-attention-heads 8 --ffn-hidden-size 384 --seq-length 192 --vocab-size 1003 "
    f"--make-vocab-size-divisible-by 64 --micro-batch-size 2 --init-method-std 0.05 --adam-eps 1e-6 --clip-grad 0.5 "
    f"--weight-decay 0.1 --lr 1e-3 --train-iters {STEPS} --global-batch-size 4"
)
_HEADS = {"qwen3": 128, "qwen3-moe": 128}
WIDE = {
    family: f"{_WIDE} {words} --kv-channels {_HEADS.get(family, 64)}".replace(
        "--moe-ffn-hidden-size 24", "--moe-ffn-hidden-size 128"
    )
    for family, words in KINDS.items()
}
RECOMPUTED = {
    "llama, full recompute": f"{WIDE['llama']} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "qwen3, selective recompute": f"{WIDE['qwen3']} --recompute-granularity selective --recompute-modules core_attn mlp layernorm",
}

# On a CPU, fp8 matmuls multiply rounded values in fp32.
FP8 = "--bf16 --fp8 hybrid"

# Every n-th layout is run: of four processes over NCCL, of two and of four over gloo. All of them would take
# minutes more.
OF_FOUR, OF_TWO_GLOO, OF_FOUR_GLOO = 4, 4, 12

EXACT, PRESETS = "fp32 on the GPU against the CPU", "Every preset's structure in small form, fp32"
FASTER, HALVES = "What is on by default against plain layers", "bf16, fp16 and fp8"
ORACLE, LAYOUTS = "Beside transformers, both on the GPU", "Processes that share the GPU, over gloo"
OBJECTIVES = "Loss functions of users, over NCCL"
OVER_NCCL = "Processes that share the GPU, over NCCL"
CONTROLS, WHOLE = "Planted mistakes in layouts", "Whole runs"
TABLES = {
    EXACT: "The same model, batches and steps. Wide: 256 wide, heads of 64 and 128, 192 tokens.",
    PRESETS: "Presets with the same structure share a row.",
    FASTER: "Both on the GPU. fp32: tensor by tensor. bf16: how many times as far from fp32 as plain layers in bf16.",
    HALVES: "Plain layers: how many times as far from fp32 as the CPU in the same precision.",
    ORACLE: "Models made and saved by `transformers`, loaded from their folder and trained 20 steps beside the original, fp32.",
    LAYOUTS: "Two or four processes over gloo, fp32, against one process on the GPU. Pipelines, rings and all-to-all pass through host memory.",
    OVER_NCCL: "Two or four processes over NCCL, fp32, against one process on the GPU. NCCL takes them for hosts of their own (`NCCL_HOSTID`) and connects "
    "them by sockets: its order of calls and its waiting are those of several GPUs, its speed is not.",
    OBJECTIVES: "Gradients of one step of two processes over NCCL against a plain torch loop over the same micro-batches, both on the GPU; allowed: 1e-5.",
    CONTROLS: "The mistake must be seen.",
    WHOLE: "Resumed: equal bit for bit, so any difference counts as infinite; with `--deterministic-mode` but where a line says otherwise, compiled anew for the resumed run. "
    "Without the flag two undisturbed runs may differ, which is told. Started by `pentatron train`: losses within 1e-5. Texts: the words of the CPU, probabilities within 1e-4.",
}
NOT_RUN = (
    "NCCL between GPUs, and with it several GPUs or machines: there was one GPU, which all processes shared.",
    f"Layouts of eight processes, and all but one in {OF_FOUR} of those of four without experts in a pipeline: `make parity` has them on a "
    "CPU, `scripts/parity.py --device cuda --backend nccl` on a GPU.",
    "GPUs other than the one named above; AMD and Intel GPUs.",
    "bf16 of the layouts, tensor by tensor: `make parity` holds it on a CPU, `bench/precision.py` compares loss curves on a GPU.",
)


@dataclass(frozen=True)
class Check:
    """A check of one table.

    `measure` takes the device and returns rows of the table; `ranks` is the number of processes it starts.
    """

    table: str
    name: str
    measure: Callable[[str], Rows]
    ranks: int = 1


def _exact() -> list[Check]:
    found = []
    for size, words_of in (("tiny", TINY), ("wide", WIDE)):
        for family, words in words_of.items():
            name = f"{family}, {size}"
            found.append(
                Check(EXACT, name, functools.partial(_on_the_cpu_exactly, name, words)),
            )
    return found


def _on_the_cpu_exactly(name: str, words: str, device: str) -> Rows:
    return trials.exactly(name, words, EAGER, device, "cpu", EAGER)


def _halves() -> list[Check]:
    found = []
    for half, flags in (("bf16", "--bf16"), ("fp16", FP16)):
        for family, words in TINY.items():
            name = f"{family}, {half}"
            found.append(Check(HALVES, name, functools.partial(_on_the_cpu_roughly, name, words, flags)))
    by_rows = f"{FP8} --fp8-recipe rowwise"
    for family, name, flags in (
        ("llama", "fp8", FP8),
        ("qwen3", "fp8", FP8),
        ("llama", "fp8 by rows", by_rows),
    ):
        measure = functools.partial(_on_the_cpu_roughly, f"{family}, {name}", TINY[family], flags)
        found.append(Check(HALVES, f"{family}, {name}", measure))
    return found


def _on_the_cpu_roughly(name: str, words: str, flags: str, device: str) -> Rows:
    return trials.roughly(name, words, flags, EAGER, device, "cpu", EAGER)


def _faster() -> list[Check]:
    cases = WIDE | RECOMPUTED
    exact = [
        Check(FASTER, f"{name}, fp32", functools.partial(_faster_exactly, f"{name}, fp32", words))
        for name, words in cases.items()
    ]
    rough = [
        Check(FASTER, f"{name}, bf16", functools.partial(_faster_roughly, f"{name}, bf16", words, "--bf16"))
        for name, words in cases.items()
    ]
    name = "llama, full recompute"
    in_fp8 = Check(
        FASTER, f"{name}, fp8", functools.partial(_faster_roughly, f"{name}, fp8", cases[name], FP8)
    )
    return [*exact, *rough, in_fp8]


def _faster_exactly(name: str, words: str, device: str) -> Rows:
    return trials.exactly(name, words, FAST, device, device, f"{EAGER} --attention-backend math")


def _faster_roughly(name: str, words: str, flags: str, device: str) -> Rows:
    # The reference uses flash attention. Plain attention rounds scores to bf16, which would allow large gaps.
    kernel = "--attention-backend flash" if device == "cuda" else ""
    return trials.roughly(name, words, flags, FAST, device, device, EAGER, kernel)


def _twins() -> dict[str, list[str]]:
    """Returns {structure of a preset's small twin, as text: presets with it}."""
    found: dict[str, list[str]] = {}
    for preset in presets():
        twin = _twin(preset)
        found.setdefault(repr((twin.model, twin.moe)), []).append(preset)
    return found


def _twin(preset: str) -> RunConfig:
    words = f"--preset {preset} --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 {EAGER}"
    words += " --micro-batch-size 2 --global-batch-size 8"
    return single_process_config(
        small_twin(resolve(gather(words.split(), LAYOUT), ProcessFacts(1), refuse_unimplemented=False).config)
    )


def _every_preset(device: str) -> Rows:
    """Checks all presets in one process, because only one then groups them by structure."""
    rows: Rows = {}
    for alike in _twins().values():
        more = f" and {len(alike) - 1} like it" if len(alike) > 1 else ""
        rows[f"{alike[0]}{more}"] = trials.same_structure(_twin(alike[0]), device)
    return rows


def _oracle() -> list[Check]:
    plain = [
        Check(ORACLE, case.name, functools.partial(families.beside_transformers, case.name, EAGER))
        for case in OF_TRANSFORMERS
    ]
    faster = [
        Check(ORACLE, f"{name}, as by default", functools.partial(_oracle_by_default, name))
        for name in ("gpt2", "llama2", "qwen2 tied", "qwen3", "qwen3-moe")
    ]
    return plain + faster


def _oracle_by_default(name: str, device: str) -> Rows:
    found = families.beside_transformers(name, FAST, device)
    return {f"{name}, as by default": row for name, row in found.items()}


def _layouts() -> list[Check]:
    found = []
    for ranks, every, count in ((2, OF_TWO_GLOO, 2), (4, OF_FOUR_GLOO, 2)):
        for number, cases in enumerate(spread.in_batches(spread.of_size(ranks)[::every], count), 1):
            measure = functools.partial(spread.layouts, cases, UNCOMPILED)
            found.append(Check(LAYOUTS, f"{ranks} processes, part {number}", measure, ranks))
    for number, cases in enumerate(spread.in_batches(spread.EACH_AXIS, 3), 1):
        found.append(
            Check(
                LAYOUTS,
                f"2 processes, on by default, part {number}",
                functools.partial(_by_default, cases),
                2,
            )
        )
    return found


def _over_nccl() -> list[Check]:
    experts = spread.experts_in_pipelines(4)
    others = [case for case in spread.of_size(4)[::OF_FOUR] if case not in experts]
    return [
        Check(
            OVER_NCCL,
            f"{name}, part {number}",
            functools.partial(spread.over_nccl, cases, UNCOMPILED),
            named_ranks,
        )
        for name, every, count, named_ranks in (
            ("2 processes", spread.of_size(2), 6, 2),
            ("4 processes", others, 3, 4),
            ("experts in pipelines", experts, 4, 4),
        )
        for number, cases in enumerate(spread.in_batches(every, count), 1)
    ]


def _objectives() -> list[Check]:
    return [
        Check(OBJECTIVES, f"loss functions, {layout}", functools.partial(spread.objectives, layout), 2)
        for layout in ("tp2 sp", "pp2", "dp2 zero2", "cp2")
    ]


def _by_default(cases: spread.Cases, device: str) -> Rows:
    return {f"{name}, as by default": row for name, row in spread.layouts(cases, FAST, device).items()}


def _whole() -> list[Check]:
    resumed = [
        Check(WHOLE, f"resumed: {name}", functools.partial(_resumed, name), ranks)
        for name, (ranks, _) in whole_runs.RESUMED.items()
    ]
    launched = [
        Check(WHOLE, f"launched: {name}", functools.partial(_launched, name), 2)
        for name in whole_runs.LAUNCHED
    ]
    spoken = [Check(WHOLE, f"texts: {name}", functools.partial(_spoken, name)) for name in whole_runs.SPOKEN]
    return [Check(WHOLE, "own tests", _own_tests), *launched, *resumed, *spoken]


def _resumed(name: str, device: str) -> Rows:
    return _titled("resumed", whole_runs.resumed(name, device))


def _launched(name: str, device: str) -> Rows:
    # Only one layout is compiled: three runs of each would compile for a minute.
    more = FAST if name == next(iter(whole_runs.LAUNCHED)) else UNCOMPILED
    return _titled("started by the launcher", whole_runs.launched(name, more, device))


def _spoken(name: str, device: str) -> Rows:
    return _titled("texts", whole_runs.spoken(name, device))


def _own_tests(device: str) -> Rows:
    return whole_runs.own_tests()


def _titled(title: str, rows: Rows) -> Rows:
    return {f"{title}: {name}": row for name, row in rows.items()}


def checks() -> list[Check]:
    planted = [
        Check(CONTROLS, bug, functools.partial(spread.planted_bug, bug, UNCOMPILED), 2)
        for bug in spread.smallest_bugs(6)
    ]
    # The longest checks come first.
    return [
        *_whole(),
        *reversed(_over_nccl()),
        *_objectives(),
        *reversed(_layouts()),
        *_faster(),
        *_exact(),
        Check(PRESETS, "every preset", _every_preset),
        *_halves(),
        *_oracle(),
        *planted,
    ]


def measured(check: Check, device: str) -> Rows:
    """Runs a check; an error becomes an infinite gap with the message as its note."""
    try:
        return check.measure(device)
    except ModuleNotFoundError as error:
        return {check.name: Found(0.0, left_out=f"{error.name} is not installed")}
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        lines = [line for line in lines if "raised" in line][:1] or lines
        return {check.name: Found(float("inf"), note=f"{type(error).__name__}: {lines[-1][:300]}")}


def nothing_called(only: str, table: str) -> str:
    """Lists the names that exist, with the nearest ones in the last line, where they are seen."""
    of_tables = [check for check in checks() if table.lower() in check.table.lower()]
    if not of_tables:
        return _listed(f"--table {table!r}", "table", table, TABLES)
    within = f" of --table {table!r}" if table else ""
    return _listed(f"--only {only!r}", f"check{within}", only, sorted({check.name for check in of_tables}))


def _listed(given: str, kind: str, typed: str, names: Collection[str]) -> str:
    """Lists names, and in the last line those that are nearest to what was typed.

    A part of a name selects it, so the guess compares parts with as many words as were typed.
    """
    count, parts = len(typed.split()), dict[str, str]()
    for name in names:
        words = name.split()
        for first in range(len(words) - count + 1):
            part = " ".join(words[first : first + count]).strip(",:")
            parts[part.lower()] = part
    near = [parts[part] for part in difflib.get_close_matches(typed.lower(), parts, n=3)]
    guess = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
    return "\n".join(
        [*(f"  {name}" for name in names), f"{given}: no {kind} is called so{guess}; all are above"]
    )
