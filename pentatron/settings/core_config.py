"""The model configuration in one object, as in Megatron Core, and its construction from parsed arguments."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Self

from pentatron.errors import UserError
from pentatron.settings.model import NO_EXPERTS, MoEConfig, TransformerConfig
from pentatron.settings.run_config import RunConfig, section_of


@dataclass(frozen=True)
class CoreTransformerConfig(TransformerConfig):
    """Megatron Core's model configuration, with experts, seed and attention kernel in one object."""

    moe: MoEConfig = NO_EXPERTS
    seed: int = 1234
    attention_backend: str = "auto"

    @classmethod
    def of(cls, config: TransformerConfig, moe: MoEConfig = NO_EXPERTS) -> Self:
        """Returns `config` with `moe`.

        If `config` is of this class already, `moe` replaces its experts only if given.
        """
        core = config if isinstance(config, cls) else cls(**vars(config))
        heads, hidden = core.num_attention_heads, core.hidden_size
        if heads is None:
            raise UserError("the configuration has no num_attention_heads; set the number of attention heads")
        if core.kv_channels is None and hidden % heads:
            raise UserError(f"hidden_size {hidden} is not divisible by {heads} heads; give kv_channels")
        # A configuration written by hand may omit these sizes. That of a run has all of them.
        return dataclasses.replace(
            core,
            kv_channels=core.kv_channels or hidden // heads,
            num_query_groups=core.num_query_groups or heads,
            ffn_hidden_size=core.ffn_hidden_size or 4 * hidden,
            moe=core.moe if moe == NO_EXPERTS else moe,
        )

    @property
    def num_moe_experts(self) -> int | None:
        return self.moe.num_experts

    @property
    def moe_router_topk(self) -> int:
        return self.moe.moe_router_topk

    @property
    def moe_grouped_gemm(self) -> bool:
        return bool(self.moe.moe_grouped_gemm)


def arguments(config: RunConfig) -> SimpleNamespace:
    """Returns all settings as attributes of one object, like Megatron's `args`."""
    return SimpleNamespace(**config.flat())


def core_transformer_config_from_args(args: RunConfig | SimpleNamespace) -> CoreTransformerConfig:
    """Builds the model configuration from a resolved configuration or its `arguments`."""
    settings = args.settings if isinstance(args, RunConfig) else args
    model, moe = section_of(TransformerConfig, settings), section_of(MoEConfig, settings)
    seed, backend = settings.seed, settings.attention_backend
    return CoreTransformerConfig(**vars(model), moe=moe, seed=seed, attention_backend=backend)
