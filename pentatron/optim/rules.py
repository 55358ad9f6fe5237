"""Which rule updates the weights, and what it is called in a checkpoint."""

from collections.abc import Iterable, Sequence

from pentatron.config.training import OptimConfig
from pentatron.kernels.choice import by_kernel
from pentatron.optim.adam import Adam
from pentatron.optim.sgd import Sgd
from pentatron.optim.update import Part, Update

_RULES: dict[str, type[Adam] | type[Sgd]] = {"adam": Adam, "sgd": Sgd}
# The tensors by which a checkpoint tells whose state it holds.
_KNOWN_BY = {"exp_avg/": "adam", "momentum_buffer/": "sgd"}


def build_update(parts: Sequence[Part], config: OptimConfig, one_pass: bool) -> Update:
    """`one_pass`: by the kernel that does all of Adam at once, where it runs."""
    if one_pass and _suits_one_pass(parts):
        # Triton is there where torch can compute on a GPU, and takes a while to import.
        from pentatron.optim.one_pass import OnePassAdam

        return OnePassAdam(parts, config)
    return _RULES[config.optimizer](parts, config)


def _suits_one_pass(parts: Sequence[Part]) -> bool:
    """Where everything is on a GPU: what is in host memory is updated there."""
    return bool(parts) and all(by_kernel(part.values) and part.values.is_contiguous() for part in parts)


def rule_of(tensors: Iterable[str]) -> str | None:
    """Whose state is among the tensors of a checkpoint; none where nothing is remembered."""
    return next(
        (rule for name in tensors for begin, rule in _KNOWN_BY.items() if name.startswith(begin)), None
    )
