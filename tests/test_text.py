"""Formatting of numbers, sizes, times and counts."""

import pytest

from pentatron.text import (
    binary_size,
    decimal_size,
    format_abbreviated,
    format_count,
    format_significant,
    in_gib,
    in_mib,
    parameter_count,
    plural,
    seconds_text,
)


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
    assert format_significant(number) == said


def test_a_number_that_rounds_up_to_a_thousand_of_its_unit() -> None:
    assert format_significant(9999.7, 4) == "10000"
    assert binary_size(999.7 * 2**20) == "1000 MiB" and binary_size(1023.4 * 2**20) == "1023 MiB"
    assert (
        format_abbreviated(999_700) == "1000 k"
        and format_abbreviated(1_500_000) == "1.5 M"
        and format_abbreviated(999) == "999"
    )
    assert seconds_text(1234.5) == "1234 s" and seconds_text(0.9999) == "1000 ms" and seconds_text(0) == "0 s"
    assert parameter_count(8_030_261_248) == "8.03 B" and parameter_count(494_032_768) == "494 M"


@pytest.mark.parametrize(
    ("count", "binary", "decimal"),
    [
        (0, "0 B", "0.0 kB"),
        (31_249, "30.5 KiB", "31.2 kB"),
        (700_000, "684 KiB", "0.7 MB"),
        (1_234_567, "1.18 MiB", "1.2 MB"),
        (12_345_678_901, "11.5 GiB", "12.35 GB"),
        (10**18, "909495 TiB", "1,000,000,000.00 GB"),
    ],
)
def test_bytes_in_both_systems_of_units(count: int, binary: str, decimal: str) -> None:
    assert (binary_size(count), decimal_size(count)) == (binary, decimal)


def test_bytes_under_a_fixed_unit() -> None:
    assert in_mib(3 * 2**30) == "3,072" and in_mib(3 * 2**30, "8.1f") == "  3072.0"
    assert in_gib(3 * 2**30, ".2f") == "3.00"


def test_nouns_agree_with_their_number() -> None:
    assert [plural(number, "rank") for number in (0, 1, 2)] == ["ranks", "rank", "ranks"]
    assert (
        plural(4, "process") == "processes"
        and plural(4, "micro-batch") == "micro-batches"
        and plural(4, "epoch") == "epochs"
    )
    assert format_count(1, "file") == "1 file" and format_count(1024, "step") == "1,024 steps"
