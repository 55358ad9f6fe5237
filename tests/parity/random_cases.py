"""Random models in random layouts; a seed and a number always give the same case.

Most values are drawn so that they fit together. Now and then one is drawn without regard to the others, as a
user might choose it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pentatron.compare.trial import STEPS
from pentatron.layout.schedules import FOLDED
from pentatron.nn.router import loss_weights
from pentatron.settings.command_line import FlagTable, is_flag
from pentatron.settings.declaration import Setting
from pentatron.settings.entry_points import PRETRAIN_GPT
from pentatron.settings.run_config import RunConfig
from pentatron.text import divisors
from tests.parity.random_choice import Dice, available
from tests.parity.random_experts import draw_experts
from tests.support import resolved

# As in the parity table; std 0.1 and the large epsilon come with every small configuration.
COMMON = f"--lr 3e-3 --train-iters {STEPS}"
MOST_LAYERS = 9
LONGEST = 32
# Settings without effect in the run on one process: parallelism, and what is kept in memory.
_SPREAD_SECTIONS = ("parallel", "memory")
_SPREAD_SETTINGS = (
    *("micro_batch_size", "loss_scale", "moe_token_dispatcher_type", "moe_grouped_gemm"),
    *("fused_cross_entropy", "cross_entropy_chunk"),
)
# Weights of the numbers of ranks: two and four find most mistakes and are quick.
_RANKS = {1: 2, 2: 12, 3: 1, 4: 12, 5: 0.5, 6: 1, 7: 0.5, 8: 3}


@dataclass(frozen=True)
class Case:
    """A number of processes, and the flags of the run on them, each with its values."""

    ranks: int
    traits: tuple[str, ...]

    @property
    def words(self) -> str:
        return " ".join(self.traits)

    @property
    def command(self) -> str:
        return f"{COMMON} {self.words}"

    def config(self) -> RunConfig:
        """Resolves the flags; raises `UserError` if the case is refused."""
        return resolved(self.command, self.ranks).config

    def reference(self) -> str:
        """Returns the flags of the same model on one process."""
        config = self.config()
        micro_batch = (
            config.train.micro_batch_size if _by_micro_batch(config) else config.train.global_batch_size
        )
        kept = " ".join(trait for trait in self.traits if not _is_spread(trait))
        batch = f"--global-batch-size {config.train.global_batch_size} --micro-batch-size {micro_batch}"
        return f"{COMMON} {kept} {batch}"


def read_case(ranks: int, text: str) -> Case:
    """Parses the flags that a failing case prints."""
    traits: list[str] = []
    for word in text.split():
        if is_flag(word) or not traits:
            traits.append(word)
        else:
            traits[-1] += f" {word}"
    return Case(ranks, tuple(traits))


def setting_of(trait: str) -> Setting | None:
    found = FlagTable(PRETRAIN_GPT).find(trait.split()[0])
    return None if found is None else found[0]


def _is_spread(trait: str) -> bool:
    setting = setting_of(trait)
    return setting is not None and (
        setting.section in _SPREAD_SECTIONS
        or setting.name in _SPREAD_SETTINGS
        or setting.name == "global_batch_size"
    )


def _by_micro_batch(config: RunConfig) -> bool:
    """Whether results depend on the micro-batches, so that one process must use the same ones."""
    if config.moe.num_experts is None:
        return False
    return "aux_loss" in loss_weights(config.moe) or config.moe.moe_expert_capacity_factor is not None


@dataclass(frozen=True)
class Axes:
    tensor: int
    pipeline: int
    context: int
    data: int

    @property
    def stage(self) -> int:
        return self.tensor * self.context * self.data


def draw(seed: int, number: int) -> Case:
    dice = Dice(f"{seed}:{number}")
    ranks = dice.weighted(_RANKS)
    axes = _axes(dice, ranks)
    exchange = dice.of(*available("cp_comm_type"))
    experts = dice.often(0.4)
    kind, virtual = _schedule(dice, axes.pipeline)
    layers = _layers(dice, axes.pipeline * virtual)
    sequence_parallel = axes.tensor > 1 and (dice.often(0.5) or (experts and not dice.careless()))
    norm, query_key_norms = dice.of(*available("normalization")), dice.often(0.25)
    # A norm over two channels leaves only a sign or an angle, which is steep where both are small: rounding
    # alone then changes a run.
    few_channels = not query_key_norms
    traits = [
        *_shape(dice, axes, layers, exchange, sequence_parallel),
        *_positions(dice, few_channels),
        *_windows(dice, layers),
        *_norms(norm, query_key_norms),
        *_family(dice, kind in FOLDED and axes.pipeline > 1),
        *(draw_experts(dice, axes.stage, axes.tensor, layers) if experts else ()),
        *_sizes(axes, exchange, sequence_parallel),
        *_pipeline(dice, axes.pipeline, kind, virtual, layers),
        *_sharing(dice),
        *_recompute(dice, experts, layers // (axes.pipeline * virtual)),
        *_batch(dice, axes, kind),
        f"--seed {dice.number(0, 10**6)}",
        *(dice.some(_DOCUMENTS, 3) if dice.often(0.25) else ()),
        *_updates(dice),
        *_loss(dice),
    ]
    return Case(ranks, tuple(traits))


def _axes(dice: Dice, ranks: int) -> Axes:
    sizes = {"tensor": 1, "pipeline": 1, "context": 1, "data": 1}
    while ranks > 1:
        factor = divisors(ranks)[1]
        sizes[dice.of(*sizes)] *= factor
        ranks //= factor
    return Axes(**sizes)


def _schedule(dice: Dice, ranks: int) -> tuple[str, int]:
    """Draws a pipeline schedule and the number of stages of each rank."""
    if ranks == 1:
        return "1f1b", 1
    several = [n for n in (2, 3) if n * ranks <= MOST_LAYERS]
    kinds = [k for k in available("pipeline_schedule") if several or k not in (*FOLDED, "interleaved")]
    kind = dice.of(*kinds)
    if kind in FOLDED:
        return kind, 2
    if kind == "interleaved" or (kind == "zero-bubble" and several and dice.often(0.4)):
        return kind, dice.of(*several)
    return kind, 1


def _layers(dice: Dice, stages: int) -> int:
    """Draws a number of layers, more often a small one."""
    if dice.careless():
        return dice.number(1, MOST_LAYERS)
    return min(dice.number(stages, MOST_LAYERS) for _ in range(2))


def _shape(dice: Dice, axes: Axes, layers: int, exchange: str, sequence_parallel: bool) -> Iterable[str]:
    tensor = 1 if dice.careless() else axes.tensor
    heads = tensor * dice.of(1, 2, 3, 4)
    if exchange == "a2a" and axes.context > 1:
        heads = tensor * axes.context * dice.of(1, 2)
    yield f"--num-layers {layers}"
    yield f"--hidden-size {dice.of(8, 12, 20, 24, 32, 33, 40)}"
    yield f"--num-attention-heads {heads}"
    if dice.often(0.5):
        yield f"--group-query-attention --num-query-groups {_groups(dice, heads, tensor)}"
    yield f"--ffn-hidden-size {tensor * dice.number(2, 48 // tensor)}"
    multiple = 2 * axes.context if axes.context > 1 else 1
    if sequence_parallel:
        multiple = math.lcm(multiple, axes.context * axes.tensor)
    length = multiple * dice.number(1, LONGEST // multiple)
    # With fewer than two tokens, masks cannot differ.
    yield f"--seq-length {max(2, length + dice.careless())}"
    yield f"--vocab-size {dice.number(11, 97)}"
    yield f"--make-vocab-size-divisible-by {dice.of(1, 2, 3, 5, 16, 64)}"


def _positions(dice: Dice, few_channels: bool) -> Iterable[str]:
    kind = dice.of(*available("position_embedding_type"))
    yield f"--position-embedding-type {kind}"
    rotary = kind in ("rope", "yarn")
    widths = (4, 6, 8, 16) if rotary else (5, 8, 11, 16)
    yield f"--kv-channels {dice.of(*widths, *([2] if few_channels else []))}"
    if not rotary:
        return
    scaling = "yarn" if kind == "yarn" else dice.of("linear", "llama3") if dice.often(0.3) else None
    if scaling is not None:
        yield f"--rope-scaling-type {scaling} --rope-scaling-factor {dice.of(2, 8)}"
    if scaling in ("llama3", "yarn"):
        yield f"--rope-scaling-original-max-position-embeddings {dice.of(16, 64)}"
    if dice.often(0.4):
        yield "--rotary-interleaved"
    if dice.often(0.3):
        # Half of a head of two channels is a single one, which cannot be rotated; such a case is refused.
        yield f"--rotary-percent {dice.of(0.5, 0.25)}"


def _groups(dice: Dice, heads: int, tensor: int) -> int:
    fitting = [n for n in divisors(heads) if n % tensor == 0 or tensor % n == 0]
    return dice.of(*(divisors(heads) if dice.careless() else fitting))


def _norms(kind: str, query_key_norms: bool) -> Iterable[str]:
    yield f"--normalization {kind}"
    if query_key_norms:
        yield "--qk-layernorm"


def _windows(dice: Dice, layers: int) -> Iterable[str]:
    if dice.often(0.3):
        yield f"--window-size {dice.number(0, 12)},0"
        if dice.often(0.5):
            listed = ",".join(str(dice.of(0, 1)) for _ in range(layers))
            yield f"--window-attn-skip-freq {dice.of('2', '3', f'[{listed}]')}"


_DOCUMENTS = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
_SINGLE_BIASES = ("--add-qkv-bias", "--add-proj-bias", "--add-mlp-bias")


def _family(dice: Dice, must_be_untied: bool) -> Iterable[str]:
    if dice.often(0.5):
        yield "--swiglu"
    if dice.often(0.5):
        yield "--disable-bias-linear"
        yield from (flag for flag in _SINGLE_BIASES if dice.often(0.3))
    if dice.often(0.5) or (must_be_untied and not dice.careless()):
        yield "--untie-embeddings-and-output-weights"
    if dice.often(0.3):
        yield f"--hidden-dropout {dice.of(0.1, 0.3)}"


def _sizes(axes: Axes, exchange: str, sequence_parallel: bool) -> Iterable[str]:
    if axes.tensor > 1:
        yield f"--tensor-model-parallel-size {axes.tensor}"
        yield "--sequence-parallel" if sequence_parallel else "--no-sequence-parallel"
    if axes.context > 1:
        yield f"--context-parallel-size {axes.context}"
        yield f"--cp-comm-type {exchange}"


def _pipeline(dice: Dice, ranks: int, kind: str, virtual: int, layers: int) -> Iterable[str]:
    if ranks == 1:
        return
    stages = ranks * virtual
    yield f"--pipeline-model-parallel-size {ranks}"
    yield f"--pipeline-schedule {kind}"
    if virtual > 1 and kind not in FOLDED:
        if layers % stages == 0 and dice.often(0.3):
            yield f"--num-layers-per-virtual-pipeline-stage {layers // stages}"
            return
        yield f"--virtual-pipeline-model-parallel-size {virtual}"
        if dice.often(0.3):
            yield f"--microbatch-group-size-per-virtual-pipeline-stage {dice.number(ranks, ranks + 2)}"
    way = dice.of("by cost", "by cost", "ends", "counted", "written out")
    if way == "ends":
        # The remaining layers must fill the other stages.
        most = max(1, (layers - stages) // virtual + 1)
        flag = dice.of("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
        yield f"{flag} {virtual * dice.number(1, most)}"
    elif way == "counted":
        yield from dice.some(
            ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"], 2
        )
    elif way == "written out":
        yield f"--pipeline-model-parallel-layout {_written(dice, layers, stages)}"


def _written(dice: Dice, layers: int, stages: int) -> str:
    """Draws a pipeline layout with a layer in each inner stage; the ends may have none."""
    counts = [0] + [1] * (stages - 2) + [0]
    for _ in range(layers - sum(counts)):
        counts[dice.number(0, stages - 1)] += 1
    return "E" + "|".join("t" * count for count in counts) + "L"


def _sharing(dice: Dice) -> Iterable[str]:
    stage = dice.of(*available("zero_stage"))
    if stage:
        yield f"--zero-stage {stage}"
    if dice.often(0.3):
        yield "--overlap-grad-reduce"
    if dice.often(0.3):
        yield "--overlap-param-gather"
    if dice.often(0.8):
        # Far smaller than the model, so that there are several buckets.
        yield f"--ddp-bucket-size {dice.of(300, 1000, 3000, 10_000)}"


def _recompute(dice: Dice, experts: bool, smallest_stage: int) -> Iterable[str]:
    if dice.often(0.5):
        return
    kind = dice.of(*available("recompute_granularity"))
    yield f"--recompute-granularity {kind}"
    if kind == "full":
        yield f"--recompute-method {dice.of(*available('recompute_method'))}"
        yield f"--recompute-num-layers {dice.number(1, smallest_stage + dice.careless())}"
    else:
        of_experts = ("moe", "moe_act", "shared_experts")
        modules = [m for m in available("recompute_modules") if experts or m not in of_experts]
        yield f"--recompute-modules {' '.join(dice.some(modules, 3))}"


def _loss(dice: Dice) -> Iterable[str]:
    if dice.often(0.4):
        yield "--cross-entropy-loss-fusion"
        yield f"--cross-entropy-chunk {dice.number(1, 40)}"


def _batch(dice: Dice, axes: Axes, kind: str) -> Iterable[str]:
    micro_batch = dice.of(1, 1, 2, 2, 3)
    least = 2 * axes.pipeline if kind == "dualpipev" and not dice.careless() else 1
    count = dice.number(least, max(least + 1, 6))
    yield f"--micro-batch-size {micro_batch}"
    yield f"--global-batch-size {micro_batch * axes.data * count + dice.careless()}"


def _updates(dice: Dice) -> Iterable[str]:
    if dice.often(0.3):
        yield f"--loss-scale {dice.of(2, 4096, 65536)}"
    if dice.often(0.2):
        yield f"--optimizer sgd --sgd-momentum {dice.of(0, 0.9)}"
