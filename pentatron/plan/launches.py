"""Whether a host launches kernels as fast as a GPU computes them: where it does not, micro-batches are worth being recorded as CUDA graphs."""

import dataclasses

from pentatron.config.graph_rules import WANTED, not_recordable
from pentatron.config.run import RunConfig
from pentatron.models.flops import step_flops

# A host launches the kernels of a layer, forward and backward, in about this time; what a GPU computes for longer is not held up by it.
_LAUNCHING_SECONDS = 2.5e-3
# In fp8 it has half as many again to launch, more of them through Python, and the GPU is done sooner than in 16 bits, by which a layer's time is estimated here.
_LAUNCHING_SECONDS_IN_FP8 = 13e-3
# Of what a GPU computes at best, and what one is taken for that is not known.
_USUAL_SHARE, _USUAL_PEAK = 0.5, 300.0


def launches_hold_up(config: RunConfig, peak: float | None) -> bool:
    """`peak` of the GPU in TFLOP/s, in the precision of the run; in fp8 that of 16 bits."""
    launching = _LAUNCHING_SECONDS_IN_FP8 if config.precision.fp8_format else _LAUNCHING_SECONDS
    return layer_seconds(config, peak) <= launching


def layer_seconds(config: RunConfig, peak: float | None) -> float:
    """About how long a GPU computes one layer of a micro-batch, forward and backward."""
    assert config.train.micro_batch_size is not None
    flops = step_flops(config.model, config.train.micro_batch_size, config.model.seq_length, config.moe)
    return flops / config.model.num_layers / ((peak or _USUAL_PEAK) * 1e12 * _USUAL_SHARE)


def recorded(config: RunConfig) -> RunConfig:
    """The same run with its micro-batches recorded for certain."""
    return dataclasses.replace(config, kernels=dataclasses.replace(config.kernels, cuda_graphs="on"))


def would_record(config: RunConfig, peak: float | None) -> bool:
    """Whether `--cuda-graphs auto` records such a run on a GPU that has room for it."""
    wanted = WANTED[config.kernels.cuda_graphs] == "auto"
    return wanted and not not_recordable(config.settings) and launches_hold_up(config, peak)
