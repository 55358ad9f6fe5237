"""Megatron's configuration of a model: the same names and defaults, of which ours is made."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pentatron.errors import UserError
from pentatron.megatron.core.model_parallel_config import ModelParallelConfig
from pentatron.megatron.state import current, is_running
from pentatron.settings.core import CoreTransformerConfig
from pentatron.settings.model import NO_EXPERTS, MoEConfig
from pentatron.settings.model import TransformerConfig as OwnConfig

# Of the run rather than of the model: to be read, and to agree with.
_LAYOUT = {f.name for f in dataclasses.fields(ModelParallelConfig)} | {"fp8"}


@dataclass
class TransformerConfig(ModelParallelConfig):
    """What a model needs beyond this (vocabulary, positions) is given to GPTModel."""

    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    gated_linear_unit: bool = False
    activation_func: Callable[..., Tensor] = F.gelu
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    rotary_interleaved: bool = False
    window_size: tuple[int, ...] | None = None
    qk_layernorm: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02
    num_moe_experts: int | None = None
    moe_layer_freq: int | list[int] | str = 1
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_router_load_balancing_type: str | Sequence[str] = "aux_loss"
    moe_aux_loss_coeff: float | Sequence[float] = 0.0
    moe_token_dispatcher_type: str = "allgather"
    moe_grouped_gemm: bool = False
    moe_shared_expert_intermediate_size: int | None = None
    fp8: str | None = None
    # What the run has besides; none for a configuration written by hand.
    of_run: CoreTransformerConfig | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        if self.kv_channels is None and self.num_attention_heads:
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads

    @classmethod
    def from_core(cls, core: CoreTransformerConfig, layout: dict[str, Any]) -> "TransformerConfig":
        """Of a run's configuration, with its layout."""
        own = {**vars(core.moe), **vars(core), **layout, "num_moe_experts": core.moe.num_experts}
        names = {f.name for f in dataclasses.fields(cls)} & own.keys()
        made = {name: _simple(own[name]) for name in names}
        return cls(**made, activation_func=F.silu if core.gated_linear_unit else F.gelu, of_run=core)


def core_of(config: TransformerConfig | OwnConfig) -> CoreTransformerConfig:
    """What models here are built from."""
    if isinstance(config, OwnConfig):
        return CoreTransformerConfig.of(config)
    _check_activation(config)
    _check_layout(config)
    base = config.of_run or CoreTransformerConfig()
    moe = base.moe if config.of_run is not None else NO_EXPERTS
    changed_moe = {**_shared(config, MoEConfig), "num_experts": config.num_moe_experts}
    return CoreTransformerConfig.of(
        dataclasses.replace(base, **_shared(config, OwnConfig), moe=dataclasses.replace(moe, **changed_moe))
    )


def _shared(config: TransformerConfig, section: type) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(section)} & {f.name for f in dataclasses.fields(config)}
    found = {name: getattr(config, name) for name in names}
    for name in found.keys() & {"moe_router_load_balancing_type", "moe_aux_loss_coeff"}:
        value = found[name]
        found[name] = (value,) if isinstance(value, str | float | int) else tuple(value)
    if "moe_layer_freq" in found:
        found |= {"moe_layer_freq": str(config.moe_layer_freq).replace(" ", "")}
    if "window_size" in found:
        found |= {"window_size": tuple(config.window_size or ())}
    return found


def _simple(value: Any) -> Any:
    """Megatron writes one of a list as itself, and none as None."""
    if not isinstance(value, tuple):
        return value
    return None if not value else value[0] if len(value) == 1 else value


def _check_activation(config: TransformerConfig) -> None:
    function, gated = config.activation_func, config.gated_linear_unit
    if gated and function is F.gelu:
        warnings.warn("gated_linear_unit is SwiGLU here; say so with activation_func=F.silu", stacklevel=4)
    elif function is not (F.silu if gated else F.gelu):
        raise UserError(
            f"activation_func={getattr(function, '__name__', function)} is not available: an MLP here has F.gelu or, with "
            "gated_linear_unit, F.silu"
        )


def _check_layout(config: TransformerConfig) -> None:
    """What was changed, or written by hand and not left at its default, must be what the run has."""
    if not is_running():
        return
    run = current().args
    for item in dataclasses.fields(config):
        if item.name not in _LAYOUT:
            continue
        value, own = getattr(config, item.name), getattr(run, item.name)
        if value not in (own, item.default):
            raise UserError(
                f"the model's configuration says {item.name}={value}, the run has {own}; the layout and the precision are those of "
                "the flags"
            )
