"""AdamW over flat buffers: fp32 master weights and gradients, one fused kernel per weight-decay group."""

import math

import torch
from torch import Tensor, nn

from pentatron.config.training import OptimConfig
from pentatron.optim.clip import clip_, gradient_norm
from pentatron.parallel.buckets import FlatBuffers, named_unique_parameters, split_by
from pentatron.parallel.collectives import Group

MOMENTS = ("exp_avg", "exp_avg_sq")


def _decays(name: str, parameter: nn.Parameter) -> bool:
    """Matrices decay; norms and biases, which have one dimension, do not."""
    return parameter.dim() > 1


class Optimizer:
    """Owns the model's parameters from the moment it is made."""

    def __init__(
        self, model: nn.Module, config: OptimConfig, dtype: torch.dtype, bucket_elements: int
    ) -> None:
        self.config = config
        self.bucket_elements = bucket_elements
        kinds = split_by(named_unique_parameters(model), _decays)
        decays = (config.weight_decay, 0.0)
        self.buffers = [FlatBuffers(parameters, dtype) for parameters in kinds if parameters]
        self._flat = [nn.Parameter(b.master, requires_grad=False) for b in self.buffers]
        groups = [
            {"params": [flat], "weight_decay": decay}
            for flat, decay in zip(self._flat, [d for d, kind in zip(decays, kinds) if kind])
        ]
        self._adam = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        for flat in self._flat:
            # Made now rather than at the first step, so that saving and loading see one layout at all times.
            self._adam.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                **{moment: torch.zeros_like(flat) for moment in MOMENTS},
            }

    def zero_gradients(self) -> None:
        for buffer in self.buffers:
            buffer.gradients.zero_()

    def reduce_gradients(self, group: Group) -> None:
        for buffer in self.buffers:
            buffer.reduce_gradients(group, self.bucket_elements)

    def step(self, learning_rate: float) -> float:
        """Clips, updates the weights, and returns the gradient norm before clipping.

        A norm that is not finite leaves everything as it was: the caller decides what to do about it.
        """
        gradients = [b.gradients for b in self.buffers]
        norm = gradient_norm(gradients)
        value = float(norm)
        if not math.isfinite(value):
            return value
        clip_(gradients, norm, self.config.clip_grad)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        for flat, gradient in zip(self._flat, gradients):
            flat.grad = gradient
        self._adam.step()
        for buffer, flat in zip(self.buffers, self._flat):
            flat.grad = None
            buffer.publish_master()
        return value

    def state(self) -> dict[str, Tensor]:
        """Every tensor a checkpoint must hold, by logical name; views, not copies."""
        found: dict[str, Tensor] = {}
        for buffer, flat in zip(self.buffers, self._flat):
            found |= {f"weights/{name}": t for name, t in buffer.views(buffer.master).items()}
            for moment in MOMENTS:
                found |= {
                    f"{moment}/{name}": t for name, t in buffer.views(self._adam.state[flat][moment]).items()
                }
        return found

    def loaded(self, updates: int) -> None:
        """To be called after `state()`'s tensors were overwritten: `updates` steps had been taken by then."""
        for buffer, flat in zip(self.buffers, self._flat):
            self._adam.state[flat]["step"].fill_(float(updates))
            buffer.publish_master()
