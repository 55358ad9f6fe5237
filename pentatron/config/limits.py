"""Limits that a declaration sets on the value of its setting."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limit:
    """`holds` judges one number; `words` complete the sentence `--flag value must be …`."""

    holds: Callable[[float], bool]
    words: str

    def allows(self, value: Any) -> bool:
        """Whether a value, or each number of a list, is within the limit; an unset value is."""
        numbers = () if value is None else value if isinstance(value, tuple) else (value,)
        return all(self.holds(number) for number in numbers)


ABOVE_ZERO = Limit(lambda x: x > 0, "more than 0")
ZERO_OR_MORE = Limit(lambda x: x >= 0, "0 or more")
BELOW_ONE = Limit(lambda x: 0 <= x < 1, "at least 0 and below 1")
ONE_OR_MORE = Limit(lambda x: x >= 1, "1 or more")
TOKENS_OR_ALL = Limit(lambda x: x >= -1, "-1 or more")
ABOVE_ONE = Limit(lambda x: x > 1, "more than 1")
BETWEEN = Limit(lambda x: 0 < x < 1, "more than 0 and below 1")
SHARE = Limit(lambda x: 0 < x <= 1, "above 0 and at most 1")
# NumPy's generators take no larger ones.
SEED = Limit(lambda x: 0 <= x < 2**32, "from 0 to 4294967295")
PORT = Limit(lambda x: 1 <= x <= 65535, "a port from 1 to 65535")
