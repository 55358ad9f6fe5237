"""The layout, as a part of Megatron's model configuration."""

from dataclasses import dataclass

import torch


@dataclass
class ModelParallelConfig:
    """A run's layout and precision are those of its flags; here they can be read, and must not say otherwise."""

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
