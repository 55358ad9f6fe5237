"""Divisibility, put into the words an error message needs."""


def divisors(number: int) -> list[int]:
    """All positive divisors, smallest first."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def either(choices: list[int], limit: int = 12) -> str:
    """`[1, 2, 3]` becomes `1, 2 or 3`; a long list keeps its ends."""
    if len(choices) > limit:
        shown = [*map(str, choices[: limit - 2]), "...", str(choices[-1])]
    else:
        shown = [str(c) for c in choices]
    if len(shown) == 1:
        return shown[0]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"
