"""Model provider of the training scripts: calls the given model builder."""

from collections.abc import Callable
from typing import Any

from gpt_builders import gpt_builder
from pentatron.megatron.training import get_args
from pentatron.settings.core_config import arguments
from pentatron.settings.run_config import RunConfig


def model_provider(
    model_builder: Callable[..., Any] | bool = gpt_builder,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Builds the model of the current run, or a pipeline stage of it.

    If `config` is a resolved configuration, it is built from that, without any run.
    """
    if isinstance(model_builder, bool):
        # The older form has no builder as its first argument: model_provider(pre_process, post_process).
        return model_provider(gpt_builder, model_builder, pre_process, vp_stage, config, pg_collection)
    args: Any = arguments(config) if isinstance(config, RunConfig) else get_args()
    return model_builder(
        args,
        pre_process,
        post_process,
        vp_stage=vp_stage,
        config=None if isinstance(config, RunConfig) else config,
        pg_collection=pg_collection,
    )
