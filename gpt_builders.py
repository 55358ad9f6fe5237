"""Builders of GPT-like models, for `model_provider`."""

from typing import Any

import torch

from pentatron.config.errors import UserError
from pentatron.config.model import TransformerConfig
from pentatron.config.run import RunConfig
from pentatron.models.causal_lm import CausalLM, build_model


def gpt_builder(
    args: RunConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: Any = None,
) -> CausalLM:
    """A model of the given architecture; `args` is a resolved configuration."""
    if not (pre_process and post_process) or vp_stage is not None:
        raise UserError(
            "gpt_builder makes whole models; leave pre_process and post_process True and vp_stage out "
            "(pentatron divides a model over pipeline stages itself)"
        )
    device = torch.get_default_device()
    return build_model(config or args.model, args.run.seed, device, args.kernels.attention_backend)
