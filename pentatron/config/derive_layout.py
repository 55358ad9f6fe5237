"""Values of the layout that follow from others: sizes that fit the processes, virtual stages, the schedule."""

from pentatron.config.draft import Draft, Facts
from pentatron.config.run import table
from pentatron.layout.divisors import divisors
from pentatron.layout.schedules import FOLDED
from pentatron.layout.stages import written_stages

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
# Whoever types one of these has a layout in mind; a preset's own sizes would only get in its way.
_OWN_LAYOUT = (
    *_SIZES,
    "zero_stage",
    "num_distributed_optimizer_instances",
    "overlap_grad_reduce",
    "overlap_param_gather",
)


def derive_layout(draft: Draft, facts: Facts) -> None:
    _fit_inherited_sizes(draft, facts)
    _data_parallel(draft, facts)
    _virtual_stages(draft)
    if (draft["virtual_pipeline_model_parallel_size"] or 1) > 1 and not draft.given("pipeline_schedule"):
        draft.derive("pipeline_schedule", "interleaved", "there are virtual stages")


def _fit_inherited_sizes(draft: Draft, facts: Facts) -> None:
    """Lowers the sizes of a preset to what the processes and the typed settings allow; typed sizes stay as they are."""
    inherited = [name for name in _SIZES if draft[name] > 1 and not draft.given(name)]
    if not inherited:
        return
    own_layout = next((name for name in _OWN_LAYOUT if draft.given(name)), None)
    if own_layout is not None:
        flag = table()[own_layout].flag
        for name in inherited:
            draft.derive(name, 1, f"{flag} is given, so the preset's {draft[name]} does not count")
        return
    tensor_sizes, pipeline_sizes = (
        divisors(draft[name]) if name in inherited else [draft[name]] for name in _SIZES
    )
    fitting = [(t * p, t, p) for t in tensor_sizes for p in pipeline_sizes if _fits(draft, facts, t, p)]
    # Where nothing fits a rule says why; it should then speak of what was typed.
    _, tensor, pipeline = max(fitting, default=(0, tensor_sizes[0], pipeline_sizes[0]))
    for name, size in zip(_SIZES, (tensor, pipeline)):
        if draft[name] != size:
            draft.derive(name, size, f"{_reason(draft, facts)}; the preset has {draft[name]}")


def _reason(draft: Draft, facts: Facts) -> str:
    if facts.world_size % (draft[_SIZES[0]] * draft[_SIZES[1]] * draft["context_parallel_size"]):
        return f"fits {facts.world_size} process{'es' if facts.world_size > 1 else ''}"
    return "fits the settings given"


def _fits(draft: Draft, facts: Facts, tensor: int, pipeline: int) -> bool:
    """Whether these sizes go with the number of processes and with the model."""
    copies, rest = divmod(facts.world_size, tensor * pipeline * draft["context_parallel_size"])
    if rest or draft["data_parallel_size"] not in (None, copies):
        return False
    virtual = draft["virtual_pipeline_model_parallel_size"] or 1
    if draft["num_layers"] < pipeline * virtual or (virtual > 1 and pipeline == 1):
        return False
    groups = draft["num_query_groups"]
    widths = (draft["num_attention_heads"], draft["ffn_hidden_size"], draft["padded_vocab_size"])
    whole = all(width is None or width % tensor == 0 for width in widths)
    return whole and (groups is None or groups % tensor == 0 or tensor % groups == 0)


def _data_parallel(draft: Draft, facts: Facts) -> None:
    if draft["data_parallel_size"] is not None:
        return
    model = draft[_SIZES[0]] * draft[_SIZES[1]] * draft["context_parallel_size"]
    draft.derive(
        "data_parallel_size",
        max(1, facts.world_size // model),
        f"{facts.world_size} processes / (tp × pp × cp = {model})",
    )


def _virtual_stages(draft: Draft) -> None:
    """Their number, where it was said another way; whether it fits is for the rules to say."""
    if draft["virtual_pipeline_model_parallel_size"] is not None:
        return
    ranks, layers = draft["pipeline_model_parallel_size"], draft["num_layers"]
    each, written = draft["num_layers_per_virtual_pipeline_stage"], draft["pipeline_model_parallel_layout"]
    if each is not None:
        draft.derive(
            "virtual_pipeline_model_parallel_size",
            max(1, layers // (ranks * each)),
            f"{layers} layers / ({ranks} ranks × {each} layers)",
        )
    elif written is not None:
        stages = _number_of_stages(written)
        if stages > ranks and stages % ranks == 0:
            draft.derive(
                "virtual_pipeline_model_parallel_size",
                stages // ranks,
                f"{stages} stages written out / {ranks} ranks",
            )
    elif draft["pipeline_schedule"] in FOLDED and ranks > 1:
        kind = draft["pipeline_schedule"]
        draft.derive("virtual_pipeline_model_parallel_size", 2, f"{kind} has two stages on each rank")


def _number_of_stages(written: str) -> int:
    try:
        return len(written_stages(written))
    except ValueError:
        return 0
