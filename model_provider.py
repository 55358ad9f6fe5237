"""The entry to model building: calls the builder it is given."""

from collections.abc import Callable
from typing import Any

from pentatron.config.errors import UserError
from pentatron.config.run import RunConfig
from pentatron.models.causal_lm import CausalLM


def model_provider(
    model_builder: Callable[..., CausalLM],
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: RunConfig | None = None,
    pg_collection: Any = None,
) -> CausalLM:
    """Builds the model of a resolved configuration."""
    if config is None:
        raise UserError("model_provider needs config=...; arguments kept in a global are not available yet")
    return model_builder(config, pre_process, post_process, vp_stage, pg_collection=pg_collection)
