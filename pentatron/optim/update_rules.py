"""What an update does, whichever its rule: to tensors that this rank keeps, wherever they come from: buckets, or shards of
parameters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from pentatron.ops.dispatch import by_kernel, triton_works
from pentatron.settings.training import OptimConfig

# Gradient norm and clipping.


_EPSILON = 1e-6
# A CPU adds up the squares of a tensor one after the other: of millions of them a thousandth is lost in fp32. So many are added up at a time.
_ROW = 4096
_ROWS_AT_ONCE = 64


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squared L2 norm over all gradients, in fp64: squares of scaled gradients may be large. Zero where there are none."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient)
    # Of gradients in bf16 too the norms are fp32, which is not what torch does unless it is asked.
    exact = _exact_norms if device.type == "cpu" else _norms
    norms = [norm for some in by_type.values() for norm in exact(some)]
    return torch.linalg.vector_norm(torch.stack(norms)).double().square()


def _norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch._foreach_norm(list(tensors), 2, dtype=torch.float32)


def _exact_norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same, of large tensors row by row."""
    small = [tensor for tensor in tensors if tensor.numel() <= _ROW]
    large = [_norm_by_rows(tensor.reshape(-1)) for tensor in tensors if tensor.numel() > _ROW]
    return [*(_norms(small) if small else ()), *large]


def _norm_by_rows(flat: Tensor) -> Tensor:
    whole = flat.numel() // _ROW * _ROW
    # What is rounded is turned into fp32 for it: some rows at a time, which stay in a cache.
    some = (
        flat[:whole]
        .view(-1, _ROW)
        .split(_ROWS_AT_ONCE if flat.dtype != torch.float32 else max(1, whole // _ROW))
    )
    rows = torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in some])
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    return torch.linalg.vector_norm(torch.cat((rows, rest[None])), dtype=torch.float64).float()


def build_norm(device: torch.device, by_one_kernel: bool) -> Callable[[Sequence[Tensor]], Tensor]:
    """`squared_norm` for a device; with `by_one_kernel` a GPU reads all gradients in one launch instead of hundreds."""
    if not (by_one_kernel and device.type == "cuda" and triton_works()):
        return lambda gradients: squared_norm(gradients, device)
    from pentatron.ops.triton_update import Squares

    kernels: dict[torch.dtype, Squares] = {}

    def in_one_launch(gradients: Sequence[Tensor]) -> Tensor:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_type.setdefault(gradient.dtype, []).append(gradient.contiguous())
        found = [kernels.setdefault(dtype, Squares())(some) for dtype, some in by_type.items()]
        return torch.stack(found).sum() if found else squared_norm((), device)

    return in_one_launch


def clipping(norm: float, limit: float, scale: float = 1.0) -> float:
    """What gradients with that norm, mended, are to be multiplied by."""
    factor = limit / (norm + _EPSILON)
    return (factor if 0 < factor < 1 else 1.0) / scale


def clipping_on_device(squared: Tensor, limit: float, scale: float) -> Tensor:
    """The same, in the same precision, of a squared norm that is still scaled and that nobody waits for."""
    if limit == 0:
        return torch.full_like(squared, 1 / scale)
    if scale == 1:
        # The same bits, with fewer launches.
        return (limit / (squared.sqrt() + _EPSILON)).clamp(max=1)
    return (limit / (squared.sqrt() / scale + _EPSILON)).clamp(max=1) / scale


# Of each part, as many as have come from its first element on; None where none has come, which counts as zeros.
Gradients: TypeAlias = Sequence[Tensor | None]

# Elements whose gradients are in fp32 at a time where they come in less.
_ELEMENTS_AT_ONCE = 1 << 25


@dataclass(frozen=True, eq=False)
class Part:
    """What a rule sees as one parameter: fp32 values, updated in place where they are. Gradients may be on another device.

    `weights`: the values in the precision of the model, on the same device, where there are such.
    """

    values: Tensor
    decays: bool
    weights: Tensor | None = None


class Update(ABC):
    """Clipping by a norm that all ranks know, and one fused update. `kept` names what a rule remembers of each element."""

    # Whether an update also rounds the values into the weights of the parts.
    rounds = False
    # Whether the device itself can leave an update out: `start` is there then.
    decides = False

    def __init__(self, parts: Sequence[Part], config: OptimConfig, kept: Sequence[str]) -> None:
        self.config = config
        self._parts = parts
        # Called before anything changes: who reads the values beside the computation is waited for.
        self.before: Callable[[], None] = lambda: None
        # Made now rather than at the first step, so that saving and loading see one layout at all times.
        self._moments = {id(p): {m: torch.zeros_like(p.values) for m in kept} for p in parts}

    @torch.no_grad()
    def step(
        self,
        gradients: Gradients,
        learning_rate: float,
        norm: float,
        scale: float,
        weight_decay: float | None = None,
    ) -> None:
        """Gradients are `scale` times what they should be; `norm` is that of what they should be. `weight_decay`: of this step,
        where it changes during a run."""
        self.before()
        factor = clipping(norm, self.config.clip_grad, scale)
        # Written by the device itself: a copy from the host would be waited for, portion by portion.
        device = self._parts[0].values.device if self._parts else None
        divisor = None if factor == 1 else torch.full((), 1 / factor, dtype=torch.float32, device=device)
        for decays in (True, False):
            decay = self._decay(weight_decay) if decays else 0.0
            chosen = [(p, g) for p, g in zip(self._parts, gradients, strict=True) if p.decays is decays]
            for some in _portions(chosen):
                parts = [part for part, _ in some]
                exact = [_exact(part, gradient) for part, gradient in some]
                self._update(parts, exact, learning_rate, decay, divisor)

    def start(
        self,
        gradients: Gradients,
        learning_rate: float,
        found: Tensor,
        scale: float,
        weight_decay: float | None = None,
    ) -> None:
        """An update that is made if loss and squared norm, `found` on the device in fp64, are numbers; nobody waits for them.
        The norm is that of the gradients, `scale` included; a third number is a factor of the gradients that the norm has and they
        lack. `settle` must tell later whether it was made."""
        raise NotImplementedError

    def settle(self, made: bool) -> None:
        """What became of an update that was started."""
        raise NotImplementedError

    def _decay(self, of_step: float | None) -> float:
        return self.config.weight_decay if of_step is None else of_step

    @abstractmethod
    def _update(
        self,
        parts: Sequence[Part],
        gradients: Sequence[Tensor],
        learning_rate: float,
        weight_decay: float,
        divisor: Tensor | None,
    ) -> None:
        """Changes the values of the parts, as far as they have gradients, and what is remembered of them. Gradients are divided
        first, where something is to divide them by, in the same pass."""

    def _of(self, moment: str, parts: Sequence[Part], gradients: Sequence[Tensor]) -> list[Tensor]:
        return [beside(self._moments[id(part)][moment], g) for part, g in zip(parts, gradients)]

    def state(self, part: Part) -> dict[str, Tensor]:
        """What a checkpoint keeps of a part, to be read or overwritten."""
        return {"weights": part.values, **self._moments[id(part)]}

    def moments(self) -> list[Tensor]:
        return [moment for part in self._parts for moment in self._moments[id(part)].values()]

    @abstractmethod
    def set_updates(self, updates: int) -> None:
        """How many updates the values and moments, overwritten from elsewhere, have seen."""


def beside(values: Tensor, gradient: Tensor) -> Tensor:
    """The elements that a gradient belongs to; what follows it is alignment."""
    return values if values.shape == gradient.shape else values[: gradient.numel()]


def _exact(part: Part, gradient: Tensor | None) -> Tensor:
    """A gradient in fp32, where it lies."""
    return torch.zeros_like(part.values) if gradient is None else gradient.to(torch.float32)


def _portions(
    found: Sequence[tuple[Part, Tensor | None]],
) -> Iterator[Sequence[tuple[Part, Tensor | None]]]:
    """Few at a time, so that copies in fp32 are small beside the gradients."""
    first = elements = 0
    for number, (part, _) in enumerate(found):
        if elements and elements + part.values.numel() > _ELEMENTS_AT_ONCE:
            yield found[first:number]
            first, elements = number, 0
        elements += part.values.numel()
    if found:
        yield found[first:]


# AdamW.
#
# It is torch's fused update without the class around it: making or stepping any `torch.optim.Optimizer`
# imports torch's compiler, a third of what a process needs to start. On a GPU `one_pass.py` does the same in
# one pass over memory.


MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam(Update):
    def __init__(self, parts: Sequence[Part], config: OptimConfig) -> None:
        super().__init__(parts, config, MOMENTS)
        self._steps = {id(p): torch.zeros((), dtype=torch.float32, device=p.values.device) for p in parts}

    def _update(
        self,
        parts: Sequence[Part],
        gradients: Sequence[Tensor],
        learning_rate: float,
        weight_decay: float,
        divisor: Tensor | None,
    ) -> None:
        adamw(
            [beside(part.values, gradient) for part, gradient in zip(parts, gradients)],
            [gradient.to(part.values.device) for part, gradient in zip(parts, gradients)],
            self._of("exp_avg", parts, gradients),
            self._of("exp_avg_sq", parts, gradients),
            [],
            [self._steps[id(part)] for part in parts],
            fused=True,
            grad_scale=divisor,
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self.config.adam_eps,
            maximize=False,
        )

    def set_updates(self, updates: int) -> None:
        for step in self._steps.values():
            step.fill_(float(updates))


# Stochastic gradient descent with momentum, torch's as AdamW is in `adam.py`.
#
# As in torch and Megatron, weight decay is a part of the gradient here, and is remembered with it.


_MOMENTUM = "momentum_buffer"


class Sgd(Update):
    def __init__(self, parts: Sequence[Part], config: OptimConfig) -> None:
        super().__init__(parts, config, (_MOMENTUM,) if config.sgd_momentum else ())

    def _update(
        self,
        parts: Sequence[Part],
        gradients: Sequence[Tensor],
        learning_rate: float,
        weight_decay: float,
        divisor: Tensor | None,
    ) -> None:
        momentum = self.config.sgd_momentum
        remembered: list[Tensor | None] = [None] * len(parts)
        sgd(
            [beside(part.values, gradient) for part, gradient in zip(parts, gradients)],
            [gradient.to(part.values.device) for part, gradient in zip(parts, gradients)],
            [*self._of(_MOMENTUM, parts, gradients)] if momentum else remembered,
            fused=True,
            grad_scale=divisor,
            weight_decay=weight_decay,
            momentum=momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def set_updates(self, updates: int) -> None:
        """Every update is like the first."""


# Which rule updates the weights, and what it is called in a checkpoint.


_RULES: dict[str, type[Adam] | type[Sgd]] = {"adam": Adam, "sgd": Sgd}
# The tensors by which a checkpoint tells whose state it holds.
_KNOWN_BY = {"exp_avg/": "adam", "momentum_buffer/": "sgd"}


def build_update(parts: Sequence[Part], config: OptimConfig, one_pass: bool) -> Update:
    """`one_pass`: by the kernel that does all of Adam at once, where it runs."""
    if one_pass and _suits_one_pass(parts):
        # Triton is there where torch can compute on a GPU, and takes a while to import.
        from pentatron.optim.fused_adamw import OnePassAdam

        return OnePassAdam(parts, config)
    return _RULES[config.optimizer](parts, config)


def _suits_one_pass(parts: Sequence[Part]) -> bool:
    """Where everything is on a GPU: what is in host memory is updated there."""
    return bool(parts) and all(by_kernel(part.values) and part.values.is_contiguous() for part in parts)


def rule_of(tensors: Iterable[str]) -> str | None:
    """Whose state is among the tensors of a checkpoint; none where nothing is remembered."""
    return next(
        (rule for name in tensors for begin, rule in _KNOWN_BY.items() if name.startswith(begin)), None
    )
