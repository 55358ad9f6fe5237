"""Values of the layout that follow from others: sizes that fit the processes, virtual stages, the schedule."""

from pentatron.config.draft import Draft
from pentatron.config.run import table
from pentatron.config.settings import unset
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


def derive_layout(draft: Draft) -> None:
    _fit_inherited_sizes(draft)
    _data_parallel(draft)
    _virtual_stages(draft)
    if (draft.virtual_pipeline_model_parallel_size or 1) > 1 and not draft.given("pipeline_schedule"):
        draft.derive("there are virtual stages", pipeline_schedule="interleaved")


def _fit_inherited_sizes(draft: Draft) -> None:
    """Lowers the sizes of a preset to what the processes and the typed settings allow; typed sizes stay as they are."""
    inherited = [name for name in _SIZES if getattr(draft, name) > 1 and not draft.given(name)]
    if not inherited:
        return
    own_layout = next((name for name in _OWN_LAYOUT if draft.given(name)), None)
    if own_layout is not None:
        flag = table()[own_layout].flag
        for name in inherited:
            draft.derive(
                f"{flag} is given, so the preset's {getattr(draft, name)} does not count", **{name: 1}
            )
        return
    tensor_sizes, pipeline_sizes = (
        divisors(getattr(draft, name)) if name in inherited else [getattr(draft, name)] for name in _SIZES
    )
    fitting = [(t * p, t, p) for t in tensor_sizes for p in pipeline_sizes if _fits(draft, t, p)]
    # Where nothing fits a rule says why; it should then speak of what was typed.
    _, tensor, pipeline = max(fitting, default=(0, tensor_sizes[0], pipeline_sizes[0]))
    for name, size in zip(_SIZES, (tensor, pipeline)):
        if getattr(draft, name) != size:
            draft.derive(f"{_reason(draft)}; the preset has {getattr(draft, name)}", **{name: size})


def _reason(draft: Draft) -> str:
    if draft.facts.world_size % (
        getattr(draft, _SIZES[0]) * getattr(draft, _SIZES[1]) * draft.context_parallel_size
    ):
        return f"fits {draft.facts.world_size} process{'es' if draft.facts.world_size > 1 else ''}"
    return "fits the settings given"


def _fits(draft: Draft, tensor: int, pipeline: int) -> bool:
    """Whether these sizes go with the number of processes and with the model."""
    copies, rest = divmod(draft.facts.world_size, tensor * pipeline * draft.context_parallel_size)
    if rest or draft.data_parallel_size not in (None, copies):
        return False
    virtual = draft.virtual_pipeline_model_parallel_size or 1
    if draft.num_layers < pipeline * virtual or (virtual > 1 and pipeline == 1):
        return False
    groups = draft.num_query_groups
    widths = (draft.num_attention_heads, draft.ffn_hidden_size, draft.padded_vocab_size)
    whole = all(width is None or width % tensor == 0 for width in widths)
    return whole and (groups is None or groups % tensor == 0 or tensor % groups == 0)


def _data_parallel(draft: Draft) -> None:
    if not unset(draft.data_parallel_size):
        return
    model = getattr(draft, _SIZES[0]) * getattr(draft, _SIZES[1]) * draft.context_parallel_size
    draft.derive(
        f"{draft.facts.world_size} processes / (tp × pp × cp = {model})",
        data_parallel_size=max(1, draft.facts.world_size // model),
    )


def _virtual_stages(draft: Draft) -> None:
    """Their number, where it was said another way; whether it fits is for the rules to say."""
    if draft.virtual_pipeline_model_parallel_size is not None:
        return
    ranks, layers = draft.pipeline_model_parallel_size, draft.num_layers
    each, written = draft.num_layers_per_virtual_pipeline_stage, draft.pipeline_model_parallel_layout
    if each is not None:
        draft.derive(
            f"{layers} layers / ({ranks} ranks × {each} layers)",
            virtual_pipeline_model_parallel_size=max(1, layers // (ranks * each)),
        )
    elif written is not None:
        stages = _number_of_stages(written)
        if stages > ranks and stages % ranks == 0:
            draft.derive(
                f"{stages} stages written out / {ranks} ranks",
                virtual_pipeline_model_parallel_size=stages // ranks,
            )
    elif draft.pipeline_schedule in FOLDED and ranks > 1:
        kind = draft.pipeline_schedule
        draft.derive(f"{kind} has two stages on each rank", virtual_pipeline_model_parallel_size=2)


def _number_of_stages(written: str) -> int:
    try:
        return len(written_stages(written))
    except ValueError:
        return 0
