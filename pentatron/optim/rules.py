"""Which rule updates the weights, and what it is called in a checkpoint."""

from collections.abc import Iterable, Sequence

from pentatron.config.training import OptimConfig
from pentatron.optim.adam import Adam
from pentatron.optim.sgd import Sgd
from pentatron.optim.update import Part, Update

_RULES: dict[str, type[Adam] | type[Sgd]] = {"adam": Adam, "sgd": Sgd}
# The tensors by which a checkpoint tells whose state it holds.
_KNOWN_BY = {"exp_avg/": "adam", "momentum_buffer/": "sgd"}


def build_update(parts: Sequence[Part], config: OptimConfig) -> Update:
    return _RULES[config.optimizer](parts, config)


def rule_of(tensors: Iterable[str]) -> str | None:
    """Whose state is among the tensors of a checkpoint; none where nothing is remembered."""
    return next(
        (rule for name in tensors for begin, rule in _KNOWN_BY.items() if name.startswith(begin)), None
    )
