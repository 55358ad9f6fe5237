"""A run that goes on with another number of processes keeps its batch: the same samples a step, divided among more ranks or fewer."""

from collections.abc import Mapping
from typing import Any

from pentatron.config.draft import Draft
from pentatron.config.resolve import foreseen
from pentatron.config.settings import KEPT, Facts, Settings, unset
from pentatron.layout.divisors import divisors
from pentatron.text import plural

# Ways to say how much a rank does, from which the batch of a step follows.
_BY_RANK = ("rank_batch_size", "micro_batch_size", "gradient_accumulation_steps", "num_microbatches")


def keep_global_batch(draft: Draft, facts: Facts, saved: Mapping[str, Any], origin: str) -> None:
    """Takes the batch size of the run itself where this command says the same as it did, on another number of ranks.

    Who says something else, such as another size for a rank or one for the whole step, wants that.
    """
    before = Settings.defaults(**saved)
    total, ranks = before.global_batch_size, before.data_parallel_size
    if unset(total) or not unset(draft.global_batch_size) or draft.step_batch_size_schedule:
        return
    now = foreseen(draft, facts)
    says_the_same = all(
        getattr(draft, name) == getattr(before, name)
        for name in _BY_RANK
        if draft.given(name) or name == "rank_batch_size"
    )
    data = now.data_parallel_size
    if not says_the_same or now.global_batch_size in (None, total):
        return
    if not draft.given("micro_batch_size"):
        micro = max(d for d in divisors(total // data or 1) if d <= before.micro_batch_size)
        draft.derive(f"{KEPT} {origin}", micro_batch_size=micro)
    draft.derive(f"{KEPT} {origin}", global_batch_size=total)
    had = f"{ranks} {plural(ranks or 0, 'data-parallel rank')}"
    draft.notices.append(
        f"the run keeps its {total} samples a step, which it had on {had}; on {data}, what is said of a rank would make "
        f"{now.global_batch_size} (--global-batch-size changes it)"
    )
