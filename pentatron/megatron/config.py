"""Megatron's `TransformerConfig`, and conversions to and from Pentatron's configuration."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pentatron.errors import UserError
from pentatron.megatron.state import current_run, is_running
from pentatron.settings import core_config as settings_core
from pentatron.settings.core_config import CoreTransformerConfig
from pentatron.settings.model import NO_EXPERTS, MoEConfig
from pentatron.settings.model import TransformerConfig as PentatronConfig
from pentatron.settings.run_config import RunConfig


@dataclass
class ModelParallelConfig:
    """Layout and precision. They are set by the flags of a run; values given here must agree with those."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32


# Fields of the run rather than of the model.
_LAYOUT = {f.name for f in dataclasses.fields(ModelParallelConfig)} | {"fp8"}


@dataclass
class TransformerConfig(ModelParallelConfig):
    """The architecture, with Megatron's names and defaults.

    Vocabulary and positions are arguments of GPTModel.
    """

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
    # The configuration of the run, for settings that Megatron's class has no field for; None if written by
    # hand.
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
        """Converts a run's configuration; `layout` are the fields of ModelParallelConfig."""
        values = {**vars(core.moe), **vars(core), **layout, "num_moe_experts": core.moe.num_experts}
        names = {f.name for f in dataclasses.fields(cls)} & values.keys()
        shared = {name: _unpacked(values[name]) for name in names}
        return cls(**shared, activation_func=F.silu if core.gated_linear_unit else F.gelu, of_run=core)


def core_of(config: TransformerConfig | PentatronConfig) -> CoreTransformerConfig:
    """Converts to the configuration that models are built from; checks the activation and the layout."""
    if isinstance(config, PentatronConfig):
        return CoreTransformerConfig.of(config)
    _check_activation(config)
    _check_layout(config)
    base = config.of_run or CoreTransformerConfig()
    moe = base.moe if config.of_run is not None else NO_EXPERTS
    moe = dataclasses.replace(moe, **{**_shared(config, MoEConfig), "num_experts": config.num_moe_experts})
    return CoreTransformerConfig.of(dataclasses.replace(base, **_shared(config, PentatronConfig), moe=moe))


def _shared(config: TransformerConfig, section: type) -> dict[str, Any]:
    """Values of the fields that `section` has too, in the types of `section`."""
    names = {f.name for f in dataclasses.fields(section)}
    values = {name: value for name, value in vars(config).items() if name in names}
    for name in values.keys() & {"moe_router_load_balancing_type", "moe_aux_loss_coeff"}:
        value = values[name]
        values[name] = (value,) if isinstance(value, str | float | int) else tuple(value)
    if "moe_layer_freq" in values:
        values["moe_layer_freq"] = str(config.moe_layer_freq).replace(" ", "")
    if "window_size" in values:
        values["window_size"] = tuple(config.window_size or ())
    return values


def _unpacked(value: Any) -> Any:
    """Tuples in Megatron's form: None if empty, the element itself if there is one."""
    if not isinstance(value, tuple):
        return value
    return None if not value else value[0] if len(value) == 1 else value


def _check_activation(config: TransformerConfig) -> None:
    function, gated = config.activation_func, config.gated_linear_unit
    if gated and function is F.gelu:
        warnings.warn(
            "gated_linear_unit is SwiGLU here; set activation_func=F.silu to avoid this warning", stacklevel=4
        )
    elif function is not (F.silu if gated else F.gelu):
        raise UserError(
            f"activation_func={getattr(function, '__name__', function)} is not available: an MLP here has F.gelu or, with "
            "gated_linear_unit, F.silu"
        )


def _check_layout(config: TransformerConfig) -> None:
    """Raises if a field of the layout differs from the run's value and from its default."""
    if not is_running():
        return
    run = current_run().args
    for item in dataclasses.fields(config):
        value, of_run = getattr(config, item.name), getattr(run, item.name, None)
        if item.name in _LAYOUT and value not in (of_run, item.default):
            raise UserError(
                f"the model's configuration has {item.name}={value}, the run has {of_run}; set the layout and the precision with "
                "the flags"
            )


def core_transformer_config_from_args(
    args: SimpleNamespace | RunConfig, config_class: type[TransformerConfig] | None = None
) -> TransformerConfig:
    """Builds the model's configuration from `get_args()` or from a resolved configuration."""
    values = args.flat() if isinstance(args, RunConfig) else vars(args)
    layout = {name: values[name] for name in ModelParallelConfig.__dataclass_fields__ if name in values}
    core = settings_core.core_transformer_config_from_args(args)
    return (config_class or TransformerConfig).from_core(core, layout)


def core_transformer_config_from_yaml(
    args: SimpleNamespace, transfomer_key: str = "language_model"
) -> TransformerConfig:
    """Builds the model's configuration; `args` contains the values of the file.

    (The misspelled name is Megatron's.)
    """
    if transfomer_key != "language_model":
        raise UserError(f"a file of settings describes one model, language_model, not {transfomer_key}")
    return core_transformer_config_from_args(args)
