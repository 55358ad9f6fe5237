"""Notices for the user: settings that were given but have no effect in this run, and consequences worth a line."""

from pentatron.config.decided import Decisions
from pentatron.config.needs.need import first_unmet
from pentatron.config.parameters import has_mlp_bias
from pentatron.config.run import table
from pentatron.config.settings import Settings


def notices_for(s: Settings, decisions: Decisions) -> list[str]:
    """Every notice for these settings. `decisions`: as far as the settings alone decide them."""
    found = []
    for name, item in table().items():
        if not _asked_for(s, name):
            continue
        reason = item.notice if getattr(s, name) != item.default else ""
        if reason := reason or decisions.idle.get(name, "") or first_unmet(item.needs, s):
            found.append(f"{item.written(getattr(s, name), s.source(name))}: {reason}")
    if s.attention_dropout > 0:
        found.append(
            f"--attention-dropout {s.attention_dropout}: which attention weights are dropped depends on the "
            f"layout, so other parallel sizes give other losses (hidden dropout does not depend on it)"
        )
    found += [*_every_layer_recomputed(s), *_idle_pipeline(s), *_no_bias_in_experts(s)]
    found += _without_checkpoints(s)
    return [*found, *decisions.remarks]


def notices_of_decisions(s: Settings, decisions: Decisions) -> list[str]:
    """One line for each setting that was given and that these decisions leave without effect."""
    idle = {name: reason for name, reason in decisions.idle.items() if reason and _asked_for(s, name)}
    lines = [f"{table()[n].written(getattr(s, n), s.source(n))}: {idle[n]}" for n in table() if n in idle]
    return [*lines, *decisions.remarks]


def _without_checkpoints(s: Settings) -> list[str]:
    if s.save_checkpoints or s.given("save_checkpoints") or s.skip_train:
        return []
    return ["no checkpoint is written, as --save is not given"]


def _no_bias_in_experts(s: Settings) -> list[str]:
    if s.num_experts is None or not has_mlp_bias(s):
        return []
    if not s.add_bias_linear:
        return [
            "experts have no bias here; --add-mlp-bias acts on MLPs without experts and on shared experts"
        ]
    return [
        "experts have no bias here; the other linear layers have one (--disable-bias-linear takes it away there too)"
    ]


def _every_layer_recomputed(s: Settings) -> list[str]:
    """Megatron refuses full recompute without a method; here there is a usual one, and it is named."""
    if s.recompute_granularity != "full" or s.given("recompute_method"):
        return []
    written = table()["recompute_granularity"].written("full", s.source("recompute_granularity"))
    each = s.recompute_num_layers
    return [
        f"{written}: no --recompute-method is given, so uniform is used: every {each} layers are recomputed together"
        if each > 1
        else f"{written}: no --recompute-method is given, so uniform is used: every layer is recomputed by itself"
    ]


def _idle_pipeline(s: Settings) -> list[str]:
    """A pipeline with few micro-batches waits most of the time, which is rarely what anyone wants."""
    ranks, virtual = s.pipeline_model_parallel_size, s.virtual_pipeline_model_parallel_size or 1
    total, micro, copies = (
        getattr(s, n) for n in ("global_batch_size", "micro_batch_size", "data_parallel_size")
    )
    if ranks == 1 or not total or not micro or total % (micro * copies) or total >= ranks * micro * copies:
        return []
    count = total // (micro * copies)
    # The usual estimate: every rank waits while the others fill and drain the pipeline.
    waiting = (ranks - 1) / (ranks - 1 + count * virtual)
    batches = "1 micro-batch a step leaves" if count == 1 else f"{count} micro-batches a step leave"
    return [
        f"{batches} {ranks} pipeline ranks waiting {waiting:.0%} of the time; a smaller --micro-batch-size or a larger "
        f"--global-batch-size gives more micro-batches"
    ]


def _asked_for(s: Settings, name: str) -> bool:
    """A file may list every setting there is; only a flag, or a value of its own, is a wish."""
    by_flag = s.source(name).startswith("flag")
    return by_flag or (s.given(name) and getattr(s, name) != table()[name].default)
