"""What of a run can be recorded as CUDA graphs: the launches of a micro-batch must be the same in every step, whatever its tokens are."""

from collections.abc import Mapping
from typing import Any

from pentatron.config.draft import Facts
from pentatron.config.stages import grid_of

Values = Mapping[str, Any]
# Megatron's names for whose graphs they are; here there is one kind.
WANTED = {"on": "on", "local": "on", "transformer_engine": "on", "off": "off", "none": "off", "auto": "auto"}


def not_recordable(v: Values) -> str:
    """Why no step of such a run can be recorded; nothing if it can."""
    if grid_of(v).world_size > 1:
        return "several processes talk to each other during a step"
    if v["num_experts"] is not None:
        return "how many tokens an expert gets is known in the step alone"
    if v["reset_attention_mask"] or v["sft_packing"]:
        return "documents begin elsewhere in every batch"
    if v["spec"]:
        return "layers of your own (--spec) may decide while they run"
    if v["attention_dropout"] > 0 and v["recompute_granularity"] is not None:
        return "what is recomputed with --attention-dropout asks for the state of a generator"
    if v["timing_log_level"] > 1:
        return "--timing-log-level 2 takes the time of forward and backward apart"
    return ""


def _recorded_if_asked_for(v: Values, facts: Facts) -> str | None:
    if WANTED.get(v["cuda_graphs"]) != "on":
        return None
    reason = "the run is on a CPU" if v["device"] == "cpu" else not_recordable(v)
    return (
        f"--cuda-graphs on is not possible: {reason}; leave it out, or use --cuda-graphs auto"
        if reason
        else None
    )


GRAPH_RULES = (_recorded_if_asked_for,)
