"""Gradient norm, clipping and update rules (AdamW, SGD), for fp32 values in buckets or parameter shards."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from pentatron.ops.dispatch import triton_works, uses_triton
from pentatron.settings.training import OptimConfig

_EPSILON = 1e-6
# On a CPU, vector_norm adds squares in fp32 one after the other: with millions of them the relative error
# reaches 1e-3. Large tensors are therefore summed by rows of this many elements.
_ROW = 4096
_ROWS_PER_CHUNK = 64


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the squared L2 norm over all gradients in fp64, as squares of scaled gradients may be large."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    # The norms of bf16 gradients are computed in fp32, too, which is not torch's default.
    norms_of = _exact_norms if device.type == "cpu" else _norms
    norms = [norm for tensors in _by_dtype(gradients).values() for norm in norms_of(tensors)]
    return torch.linalg.vector_norm(torch.stack(norms)).double().square()


def _by_dtype(gradients: Sequence[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    return by_dtype


def _norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch._foreach_norm(list(tensors), 2, dtype=torch.float32)


def _exact_norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the norms of tensors, summed by rows for large ones."""
    small = [tensor for tensor in tensors if tensor.numel() <= _ROW]
    large = [_norm_by_rows(tensor.reshape(-1)) for tensor in tensors if tensor.numel() > _ROW]
    return [*(_norms(small) if small else ()), *large]


def _norm_by_rows(flat: Tensor) -> Tensor:
    whole = flat.numel() // _ROW * _ROW
    # Tensors in lower precision are converted to fp32: a few rows at a time, which stay in the cache.
    rows_at_once = _ROWS_PER_CHUNK if flat.dtype != torch.float32 else max(1, whole // _ROW)
    chunks = flat[:whole].view(-1, _ROW).split(rows_at_once)
    rows = torch.cat([torch.linalg.vector_norm(chunk, dim=1, dtype=torch.float32) for chunk in chunks])
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    return torch.linalg.vector_norm(torch.cat((rows, rest[None])), dtype=torch.float64).float()


def build_norm(device: torch.device, by_one_kernel: bool) -> Callable[[Sequence[Tensor]], Tensor]:
    """Returns `squared_norm` for a device; with `by_one_kernel` as a single Triton kernel on a GPU."""
    if not (by_one_kernel and device.type == "cuda" and triton_works()):
        return lambda gradients: squared_norm(gradients, device)
    from pentatron.ops.triton_update import SumOfSquares

    kernels: dict[torch.dtype, SumOfSquares] = {}

    def norm_by_kernel(gradients: Sequence[Tensor]) -> Tensor:
        by_dtype = _by_dtype([gradient.contiguous() for gradient in gradients])
        norms = [kernels.setdefault(dtype, SumOfSquares())(tensors) for dtype, tensors in by_dtype.items()]
        return torch.stack(norms).sum() if norms else squared_norm((), device)

    return norm_by_kernel


def clip_factor(norm: float, limit: float, scale: float = 1.0) -> float:
    """Returns the factor that clips to the norm `limit` and removes `scale`; `norm` is without it."""
    factor = limit / (norm + _EPSILON)
    return (factor if 0 < factor < 1 else 1.0) / scale


def clip_factor_on_device(squared: Tensor, limit: float, scale: float) -> Tensor:
    """Same as `clip_factor`, on the device in fp64; `squared` is the squared norm of the scaled gradients."""
    if limit == 0:
        return torch.full_like(squared, 1 / scale)
    if scale == 1:
        # Bit-identical, with fewer kernel launches.
        return (limit / (squared.sqrt() + _EPSILON)).clamp(max=1)
    return (limit / (squared.sqrt() / scale + _EPSILON)).clamp(max=1) / scale


# The gradients of each part of an update, without trailing padding; None counts as zeros.
Gradients: TypeAlias = Sequence[Tensor | None]

# The most elements whose gradients are converted to fp32 at a time.
_CHUNK_ELEMENTS = 1 << 25


@dataclass(frozen=True, eq=False)
class UpdatePart:
    """fp32 values that an update rule treats as one parameter.

    Updated in place; gradients may be on another device. `weights` are the values in the model's dtype on the
    same device, if they are separate.
    """

    values: Tensor
    decays: bool
    weights: Tensor | None = None


class UpdateRule(ABC):
    """An update rule: clips by the global norm and updates all parts with fused kernels.

    `kept` are the names of its state tensors, one element for each element of a part.
    """

    # Whether one kernel makes an update: it also rounds the values into the `weights` of the parts, and the
    # device can skip it by itself, so that `start` is supported.
    is_fused = False

    def __init__(self, parts: Sequence[UpdatePart], config: OptimConfig, kept: Sequence[str]) -> None:
        self.config = config
        self._parts = parts
        self._kept = kept
        # Called before each update; blocks until a background save has copied the old values.
        self.before: Callable[[], None] = lambda: None
        # Allocated now rather than at the first step, so that saving and loading always see the same tensors.
        self._moments = {id(p): {m: torch.zeros_like(p.values) for m in kept} for p in parts}

    @torch.no_grad()
    def step(
        self, gradients: Gradients, learning_rate: float, norm: float, scale: float, decay: float
    ) -> None:
        """Updates the values with gradients that are multiplied by `scale`; `norm` is the norm without it."""
        self.before()
        factor = clip_factor(norm, self.config.clip_grad, scale)
        # Filled by the device itself: a copy from the host would synchronize for every chunk.
        device = self._parts[0].values.device if self._parts else None
        divisor = None if factor == 1 else torch.full((), 1 / factor, dtype=torch.float32, device=device)
        options = {"lr": learning_rate, "grad_scale": divisor, "fused": True, "maximize": False}
        for decays in (True, False):
            pairs = [(p, g) for p, g in zip(self._parts, gradients, strict=True) if p.decays is decays]
            for chunk in _chunks(pairs):
                parts = [part for part, _ in chunk]
                exact = [torch.zeros_like(p.values) if g is None else g.to(torch.float32) for p, g in chunk]
                kept = [[self.state(part)[name] for part in parts] for name in ("weights", *self._kept)]
                values, *moments = [list(map(without_padding, tensors, exact)) for tensors in kept]
                on_device = [gradient.to(part.values.device) for part, gradient in zip(parts, exact)]
                weight_decay = decay if decays else 0.0
                self._update(parts, values, on_device, *moments, weight_decay=weight_decay, **options)

    def start(
        self, gradients: Gradients, learning_rate: float, loss_and_norm: Tensor, scale: float, decay: float
    ) -> None:
        """Starts an update that the device skips if loss or squared norm, in `loss_and_norm` (fp64), are NaN
        or inf.

        The norm includes `scale`. An optional third element is a factor that the norm includes and
        the gradients lack. `finish` must report later whether the update was made. Does not synchronize with
        the host.
        """
        raise NotImplementedError

    def finish(self, updated: bool) -> None:
        """Reports whether an update that was started was made or skipped."""
        raise NotImplementedError

    def _update(self, parts: Sequence[UpdatePart], *tensors: list[Tensor], **options: Any) -> None:
        """Updates the values and the state of parts with a fused kernel of torch.

        `tensors` are the values, the gradients and the state tensors of the parts. `options` are arguments of
        the kernel, which first divides the gradients by `grad_scale`, if any.
        """
        raise NotImplementedError

    def state(self, part: UpdatePart) -> dict[str, Tensor]:
        """Returns the tensors of a part that a checkpoint stores, as views for loading."""
        return {"weights": part.values, **self._moments[id(part)]}

    def moments(self) -> list[Tensor]:
        return [moment for part in self._parts for moment in self._moments[id(part)].values()]

    @abstractmethod
    def set_updates(self, updates: int) -> None:
        """Sets how many updates the values and state, loaded from a checkpoint, have seen."""


def without_padding(values: Tensor, gradient: Tensor) -> Tensor:
    """Returns the elements that a gradient belongs to, without trailing padding."""
    return values if values.shape == gradient.shape else values[: gradient.numel()]


def _chunks(
    pairs: Sequence[tuple[UpdatePart, Tensor | None]],
) -> Iterator[Sequence[tuple[UpdatePart, Tensor | None]]]:
    """Splits the parts into chunks, so that fp32 copies of their gradients need little memory."""
    first = elements = 0
    for number, (part, _) in enumerate(pairs):
        if elements and elements + part.values.numel() > _CHUNK_ELEMENTS:
            yield pairs[first:number]
            first, elements = number, 0
        elements += part.values.numel()
    if pairs:
        yield pairs[first:]


MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam(UpdateRule):
    """AdamW with torch's fused kernel.

    Uses the functional form: constructing or stepping a `torch.optim.Optimizer` imports torch's compiler, a
    third of the start-up time. On a GPU, `FusedAdamW` does the same in one pass over memory.
    """

    def __init__(self, parts: Sequence[UpdatePart], config: OptimConfig) -> None:
        super().__init__(parts, config, MOMENTS)
        self._steps = {id(p): torch.zeros((), dtype=torch.float32, device=p.values.device) for p in parts}

    def _update(self, parts: Sequence[UpdatePart], *tensors: list[Tensor], **options: Any) -> None:
        values, gradients, averages, squares = tensors
        steps = [self._steps[id(part)] for part in parts]
        betas = {"beta1": self.config.adam_beta1, "beta2": self.config.adam_beta2}
        options |= {"amsgrad": False, "eps": self.config.adam_eps, **betas}
        adamw(values, gradients, averages, squares, [], steps, **options)

    def set_updates(self, updates: int) -> None:
        for step in self._steps.values():
            step.fill_(float(updates))


class FusedAdamW(UpdateRule):
    """AdamW on a GPU in one pass over memory, which the device itself can skip.

    Clipping, the update and the rounding of the weights are one kernel on the gradients as backward left
    them. Loss and norm need not be known on the host before the update is launched: the GPU never waits for
    the host.
    """

    is_fused = True

    def __init__(self, parts: Sequence[UpdatePart], config: OptimConfig) -> None:
        # Requires Triton, which takes a while to import.
        from pentatron.ops.triton_update import AdamWParameters, FusedAdamWKernel, Target

        super().__init__(parts, config, MOMENTS)
        self._updates = 0
        self._device = parts[0].values.device
        targets = [
            Target(part.values, kept["exp_avg"], kept["exp_avg_sq"], part.weights, part.decays)
            for part, kept in zip(parts, self._moments.values())
        ]
        self._kernel, self._adam = FusedAdamWKernel(targets), AdamWParameters

    @torch.no_grad()
    def step(
        self, gradients: Gradients, learning_rate: float, norm: float, scale: float, decay: float
    ) -> None:
        factor = clip_factor(norm, self.config.clip_grad, scale)
        control = torch.tensor([factor, 1.0], dtype=torch.float32).to(self._device)
        self._launch(gradients, learning_rate, control, decay)
        self.finish(updated=True)

    @torch.no_grad()
    def start(
        self, gradients: Gradients, learning_rate: float, loss_and_norm: Tensor, scale: float, decay: float
    ) -> None:
        factor = clip_factor_on_device(loss_and_norm[1], self.config.clip_grad, scale)
        if len(loss_and_norm) > 2:
            factor = factor * loss_and_norm[2]
        control = torch.stack((factor, torch.isfinite(loss_and_norm).all().double())).float()
        self._launch(gradients, learning_rate, control, decay)

    def _launch(self, gradients: Gradients, learning_rate: float, control: Tensor, decay: float) -> None:
        self.before()
        betas = self.config.adam_beta1, self.config.adam_beta2
        adam = self._adam(learning_rate, decay, *betas, self.config.adam_eps, self._updates + 1)
        self._kernel(gradients, control, adam)

    def finish(self, updated: bool) -> None:
        self._updates += updated

    def set_updates(self, updates: int) -> None:
        self._updates = updates


class Sgd(UpdateRule):
    """SGD with momentum, with torch's fused kernel.

    As in torch and Megatron, weight decay is added to the gradient and so enters the momentum.
    """

    def __init__(self, parts: Sequence[UpdatePart], config: OptimConfig) -> None:
        super().__init__(parts, config, ("momentum_buffer",) if config.sgd_momentum else ())

    def _update(self, parts: Sequence[UpdatePart], *tensors: list[Tensor], **options: Any) -> None:
        values, gradients, *momentum = tensors
        buffers: list[Tensor | None] = [*momentum[0]] if momentum else [None] * len(parts)
        options |= {"momentum": self.config.sgd_momentum, "dampening": 0.0, "nesterov": False}
        sgd(values, gradients, buffers, **options)

    def set_updates(self, updates: int) -> None:
        """Does nothing: SGD does not count its updates."""


_RULES: dict[str, type[Adam] | type[Sgd]] = {"adam": Adam, "sgd": Sgd}
# The prefix of a state tensor in a checkpoint, and the rule it belongs to.
_RULE_BY_PREFIX = {"exp_avg/": "adam", "momentum_buffer/": "sgd"}


def build_update(parts: Sequence[UpdatePart], config: OptimConfig, fused: bool) -> UpdateRule:
    """Returns the configured update rule. `fused`: as a single kernel, if all tensors are on a GPU."""
    rule = FusedAdamW if fused and _can_fuse(parts) else _RULES[config.optimizer]
    return rule(parts, config)


def _can_fuse(parts: Sequence[UpdatePart]) -> bool:
    """Whether all values are on a GPU; offloaded ones are updated in host memory."""
    return bool(parts) and all(uses_triton(part.values) and part.values.is_contiguous() for part in parts)


def rule_of_checkpoint(tensors: Iterable[str]) -> str | None:
    """Returns the update rule whose state a checkpoint's tensors include, or None."""
    rules = _RULE_BY_PREFIX.items()
    return next((rule for name in tensors for prefix, rule in rules if name.startswith(prefix)), None)
