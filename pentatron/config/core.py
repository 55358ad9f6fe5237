"""What a layer is made from: the architecture with its experts, in one object, as Megatron's configurations are."""

import dataclasses
from dataclasses import dataclass
from typing import Self

from pentatron.config.model import NO_EXPERTS, MoEConfig, TransformerConfig


@dataclass(frozen=True)
class CoreTransformerConfig(TransformerConfig):
    moe: MoEConfig = NO_EXPERTS

    @classmethod
    def of(cls, config: TransformerConfig, moe: MoEConfig = NO_EXPERTS) -> Self:
        """The same architecture with these experts; one that has its experts with it keeps them."""
        if isinstance(config, cls):
            return config if moe == NO_EXPERTS else dataclasses.replace(config, moe=moe)
        return cls(**vars(config), moe=moe)

    @property
    def num_moe_experts(self) -> int | None:
        return self.moe.num_experts

    @property
    def moe_router_topk(self) -> int:
        return self.moe.moe_router_topk

    @property
    def moe_grouped_gemm(self) -> bool:
        return self.moe.moe_grouped_gemm
