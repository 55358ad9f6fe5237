"""The entry to model building: calls the builder it is given."""

from collections.abc import Callable
from typing import Any

from gpt_builders import gpt_builder
from pentatron.config.core import arguments
from pentatron.config.errors import UserError
from pentatron.config.run import RunConfig


def model_provider(
    model_builder: Callable[..., Any] | bool = gpt_builder,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: RunConfig | None = None,
    pg_collection: Any = None,
) -> Any:
    """Builds the model of a resolved configuration; the builder gets its settings as `args`."""
    if isinstance(model_builder, bool):
        # The older form has no builder in front: model_provider(pre_process, post_process).
        return model_provider(gpt_builder, model_builder, pre_process, vp_stage, config, pg_collection)
    if config is None:
        raise UserError("model_provider needs config=...; arguments kept in a global are not available yet")
    return model_builder(
        arguments(config), pre_process, post_process, vp_stage=vp_stage, pg_collection=pg_collection
    )
