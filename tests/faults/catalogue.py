"""Every case, in the order of the matrix."""

from tests.faults import (
    damaged_checkpoint,
    damaged_data,
    frozen,
    killed,
    numbers,
    other,
    other_layout,
    preemption,
    storage,
)
from tests.faults.cases import GROUPS, Case

ALL = (killed, preemption, frozen, storage, damaged_checkpoint, damaged_data, numbers, other_layout, other)


def cases() -> list[Case]:
    found = [case for module in ALL for case in module.SERIES.cases]
    return sorted(found, key=lambda case: GROUPS.index(case.group))
