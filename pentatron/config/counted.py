"""Numbers with their words."""


def counted(number: int, what: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def in_digits(number: float, digits: int = 3) -> str:
    """`1.23`, `999`, `1000`: so many digits, and never an exponent for what is large."""
    text = f"{number:.{digits}g}"
    return f"{number:.0f}" if "e+" in text else text
