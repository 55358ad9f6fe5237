"""Small functions around models."""

from collections.abc import Sequence
from typing import Any, overload

from pentatron.errors import UserError


def get_model_config(model: Any) -> Any:
    """The configuration a model was built from."""
    return model.config


@overload
def unwrap_model(model: Sequence[Any]) -> list[Any]: ...
@overload
def unwrap_model(model: Any) -> Any: ...
def unwrap_model(model: Any) -> Any:
    """Models are not wrapped here."""
    return list(model) if isinstance(model, list | tuple) else model


def divide(numerator: int, denominator: int) -> int:
    if numerator % denominator:
        raise UserError(
            f"{numerator} is not divisible by {denominator}; choose numbers that go into each other"
        )
    return numerator // denominator
