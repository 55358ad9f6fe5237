"""One line for every setting that was given but cannot change anything in this run."""

from pentatron.config.draft import Draft
from pentatron.config.run import table


def notices_for(draft: Draft) -> list[str]:
    found = []
    for name, item in table().items():
        if not draft.given(name):
            continue
        reason = item.notice if draft[name] != item.default else ""
        reason = reason or _idle(draft, name)
        if reason:
            shown = draft[name]
            found.append(f"{item.flag if isinstance(shown, bool) else f'{item.flag} {shown}'}: {reason}")
    return found


def _idle(draft: Draft, name: str) -> str:
    """Why a setting that can act has nothing to act on here, or nothing."""
    if name == "sequence_parallel" and draft[name] and draft["tensor_model_parallel_size"] == 1:
        return (
            "there is no tensor axis to split over (--tensor-model-parallel-size 1), so this changes nothing"
        )
    if name == "pipeline_schedule" and draft["pipeline_model_parallel_size"] == 1:
        return "there is one pipeline stage, so no schedule is needed"
    if name == "cp_comm_type" and draft["context_parallel_size"] == 1:
        return "sequences are not split (--context-parallel-size 1), so nothing is exchanged"
    if (
        name in ("rotary_base", "rotary_percent", "rotary_interleaved")
        and draft["position_embedding_type"] != "rope"
    ):
        return f"positions are {draft['position_embedding_type']}, not rope, so this changes nothing"
    if name == "prefetch_factor" and draft["num_workers"] == 0:
        return "there are no reader processes (--num-workers 0), so nothing is read ahead"
    if name == "split" and not draft["data_path"] and not draft["corpus"]:
        return "synthetic data is not split, so this changes nothing"
    if name == "corpus_bytes" and not draft["corpus"]:
        return "there is no --corpus, so this changes nothing"
    return ""
