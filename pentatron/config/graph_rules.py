"""What of a run can be recorded as CUDA graphs: the launches of a micro-batch must be the same in every step, whatever its tokens are."""

from pentatron.config.settings import Settings
from pentatron.config.stages import grid_of

# Megatron's names for whose graphs they are; here there is one kind.
WANTED = {"on": "on", "local": "on", "transformer_engine": "on", "off": "off", "none": "off", "auto": "auto"}


def not_recordable(s: Settings) -> str:
    """Why no step of such a run can be recorded; nothing if it can."""
    if grid_of(s).world_size > 1:
        return "several processes talk to each other during a step"
    if s.num_experts is not None:
        return "how many tokens an expert gets is known in the step alone"
    if s.reset_attention_mask or s.sft_packing:
        return "documents begin elsewhere in every batch"
    if s.spec:
        return "layers of your own (--spec) may decide while they run"
    if s.attention_dropout > 0 and s.recompute_granularity is not None:
        return "what is recomputed with --attention-dropout asks for the state of a generator"
    if s.timing_log_level > 1:
        return "--timing-log-level 2 takes the time of forward and backward apart"
    return ""


def _recorded_if_asked_for(s: Settings) -> str | None:
    if WANTED.get(s.cuda_graphs) != "on":
        return None
    reason = "the run is on a CPU" if s.device == "cpu" else not_recordable(s)
    return (
        f"--cuda-graphs on is not possible: {reason}; leave it out, or use --cuda-graphs auto"
        if reason
        else None
    )


GRAPH_RULES = (_recorded_if_asked_for,)
