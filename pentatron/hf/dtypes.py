"""Which type a converted weight gets: nothing is rounded that nobody asked to round."""

from collections.abc import Iterable

import torch

from pentatron.checkpoint.tensor_file import holds
from pentatron.errors import UserError

BY_NAME = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in BY_NAME.items()} | {torch.float64: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    return _NAMES[dtype]


def common_dtype(stored: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest type that holds the values of all of them."""
    found = set(stored)
    candidates = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return next(kept for kept in candidates if all(holds(kept, one) for one in found))


def require_room(name: str, stored: torch.dtype, wanted: torch.dtype) -> None:
    """Refuses a type that would round values of this tensor."""
    if not holds(wanted, stored):
        raise UserError(
            f"{name} is {dtype_name(stored)}, of which {dtype_name(wanted)} cannot hold every value; leave out --dtype to keep "
            f"the type, or add --allow-narrowing to round the weights"
        )
