"""Numbers as people read them."""

import pytest

from pentatron.cli.plan_report import _seconds
from pentatron.config.counted import in_digits
from pentatron.plan.devices import in_words
from pentatron.train.results import _count


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "0"),
        (0.001234, "0.00123"),
        (1.2345, "1.23"),
        (71.34, "71.3"),
        (999.4, "999"),
        (999.6, "1000"),
        (1234.5, "1234"),
        (-4321.4, "-4321"),
    ],
)
def test_three_digits_and_no_exponent(number: float, said: str) -> None:
    assert in_digits(number) == said


def test_what_rounds_up_to_a_thousand_of_a_unit() -> None:
    assert in_digits(9999.7, 4) == "10000"
    assert in_words(999.7 * 2**20) == "1000 MiB" and in_words(1023.4 * 2**20) == "1023 MiB"
    assert _count(999_700) == "1000 k" and _count(1_500_000) == "1.5 M"
    assert _seconds(1234.5) == "1234 s" and _seconds(0.9999) == "1000 ms"
