"""Triton kernels for many tensors at once: AdamW in one pass over memory, sum of squares, and sums in fp32.

AdamW reads and writes every element once: its gradient in any dtype, times a factor that is on the device;
both moments; the fp32 value; and the value in the model's dtype. A table of addresses describes which tensors
belong together, so one launch updates all tensors whose gradients have the same dtype. The device skips the
update if a flag is 0.

Requires Triton, so it is imported only where there are CUDA tensors. The reference of AdamW is torch's fused
version.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# One launch over many tensors: a table of addresses, and for each program its block of a tensor.


TYPES: dict[torch.dtype | None, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    None: None,
}


# The dtypes of gradients and of rounded weights; None without them.
_Dtypes = tuple[torch.dtype | None, torch.dtype | None]


class Programs(NamedTuple):
    """For every program its row of the table, and for every row its first program."""

    row_of: Tensor
    first_of: Tensor


def programs_of(sizes: Sequence[int], block: int, device: torch.device) -> Programs:
    counts = torch.tensor([triton.cdiv(size, block) for size in sizes])
    rows = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    return Programs(rows.to(device), (counts.cumsum(0) - counts).to(device, torch.int32))


class Addresses:
    """Device table of tensor addresses.

    The allocator mostly repeats them in every step; then the table is reused.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: list[int] = []
        self._table: Tensor | None = None

    def __call__(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Returns the addresses, 0 for None, without a host synchronization."""
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        if self._table is None or addresses != self._known:
            table = torch.tensor(addresses)
            # Only copies from pinned memory are asynchronous.
            on_gpu = self._device.type == "cuda"
            self._known = addresses
            self._table = table.pin_memory().to(self._device, non_blocking=True) if on_gpu else table
        return self._table


@triton.jit
def pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Converts an address to a pointer; ALIGNED (16 bytes) lets the compiler vectorize accesses."""
    found = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


_FIXED_COLUMNS = tl.constexpr(6)


@dataclass(frozen=True)
class Target:
    """Tensors that are updated together: contiguous, on one device; `rounded` has the model's dtype."""

    values: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    rounded: Tensor | None
    decays: bool


@dataclass(frozen=True)
class AdamWParameters:
    """Hyperparameters of one update. `decay` is for targets with weight decay; `update` counts from 1."""

    learning_rate: float
    decay: float
    beta1: float
    beta2: float
    epsilon: float
    update: int


@dataclass(frozen=True)
class _Launch:
    """The targets (by index) of one launch, and all that is constant while the gradients keep their sizes."""

    targets: Sequence[int]
    gradient: torch.dtype | None
    rounded: torch.dtype | None
    fixed: Tensor
    programs: Programs
    addresses: Addresses


class FusedAdamWKernel:
    """Updates targets at fixed addresses, with gradients at other addresses in every step."""

    def __init__(self, targets: Sequence[Target], block: int = 8192, warps: int = 16) -> None:
        self.targets, self.block, self.warps = targets, block, warps
        self._known: tuple[object, ...] = ()
        self._launches: list[_Launch] = []

    def __call__(self, gradients: Sequence[Tensor | None], control: Tensor, adam: AdamWParameters) -> None:
        """`control` is on the device in fp32: the factor of the gradients, and 0 if the update is to be
        skipped.

        A gradient may have fewer elements than its target (padding); None counts as zeros.
        """
        kinds = tuple(None if g is None else (g.dtype, g.numel()) for g in gradients)
        if kinds != self._known:
            self._known, self._launches = kinds, self._plan(gradients)
        for launch in self._launches:
            self._launch(launch, gradients, control, adam)

    def _plan(self, gradients: Sequence[Tensor | None]) -> list[_Launch]:
        groups: dict[_Dtypes, list[int]] = {}
        for number, (target, gradient) in enumerate(zip(self.targets, gradients, strict=True)):
            groups.setdefault((_dtype_of(gradient), _dtype_of(target.rounded)), []).append(number)
        return [self._plan_launch(targets, gradients, dtypes) for dtypes, targets in groups.items()]

    def _plan_launch(
        self, targets: Sequence[int], gradients: Sequence[Tensor | None], dtypes: _Dtypes
    ) -> _Launch:
        """`targets` have gradients of one dtype and weights of one dtype."""
        rows, sizes = [], []
        for number in targets:
            target, gradient = self.targets[number], gradients[number]
            sizes.append(target.values.numel() if gradient is None else gradient.numel())
            tensors = (target.values, target.exp_avg, target.exp_avg_sq)
            addresses = [t.data_ptr() for t in tensors]
            addresses.append(0 if target.rounded is None else target.rounded.data_ptr())
            assert all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors)
            # Weight decay is a flag in the table, which keeps rows short.
            rows.append([*addresses, sizes[-1], int(target.decays)])
        device = self.targets[targets[0]].values.device
        fixed, programs = torch.tensor(rows).to(device), programs_of(sizes, self.block, device)
        return _Launch(targets, *dtypes, fixed, programs, Addresses(device))

    def _launch(
        self, launch: _Launch, gradients: Sequence[Tensor | None], control: Tensor, adam: AdamWParameters
    ) -> None:
        launch_gradients = [gradients[number] for number in launch.targets]
        assert all(g is None or g.is_contiguous() for g in launch_gradients), "gradients must be contiguous"
        rate, beta1, beta2 = adam.learning_rate, adam.beta1, adam.beta2
        correction1, correction2 = 1 - beta1**adam.update, 1 - beta2**adam.update
        factors = (rate / correction1, rate * adam.decay, beta1, 1 - beta1, beta2, 1 - beta2)
        tables = (*launch.programs, launch.fixed, launch.addresses(launch_gradients), control)
        constants = (TYPES[launch.gradient], TYPES[launch.rounded], self.block)
        _update[(len(launch.programs.row_of),)](
            *tables, *factors, correction2**-0.5, adam.epsilon, *constants, num_warps=self.warps
        )


def _dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


@triton.jit
def _update(
    row_of,
    first_of,
    fixed,
    gradients,
    control,
    step_size,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    correction,
    epsilon,
    GRADIENT: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(control + 1) != 0:
        program = tl.program_id(0)
        row = tl.load(row_of + program)
        begin = (program - tl.load(first_of + row)).to(tl.int64) * BLOCK
        entry = fixed + row * _FIXED_COLUMNS
        gradient = tl.load(gradients + row)
        values, average = tl.load(entry), tl.load(entry + 1)
        square, rounded = tl.load(entry + 2), tl.load(entry + 3)
        elements = tl.load(entry + 4)
        decay = decay * tl.load(entry + 5).to(tl.float32)
        factor = tl.load(control)
        aligned = ((gradient | values | average | square | rounded) & 15) == 0
        places = (gradient, values, average, square, rounded)
        numbers = (factor, step_size, decay, beta1, rest1, beta2, rest2, correction, epsilon)
        if aligned & (begin + BLOCK <= elements):
            _elements(places, numbers, begin, elements, GRADIENT, ROUNDED, BLOCK, True)
        else:
            _elements(places, numbers, begin, elements, GRADIENT, ROUNDED, BLOCK, False)


@triton.jit
def _elements(
    places,
    numbers,
    begin,
    elements,
    GRADIENT: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Updates one block; a complete and aligned one is read and written in vectors."""
    gradient, values, average, square, rounded = places
    factor, step_size, decay, beta1, rest1, beta2, rest2, correction, epsilon = numbers
    offsets = begin + tl.arange(0, BLOCK)
    inside = offsets < elements
    if WHOLE:
        inside = None
    value_at = pointer(values, tl.float32, WHOLE) + offsets
    average_at = pointer(average, tl.float32, WHOLE) + offsets
    square_at = pointer(square, tl.float32, WHOLE) + offsets
    value = tl.load(value_at, mask=inside)
    first = tl.load(average_at, mask=inside)
    second = tl.load(square_at, mask=inside)
    first = beta1 * first
    second = beta2 * second
    if GRADIENT is not None:
        found = tl.load(pointer(gradient, GRADIENT, WHOLE) + offsets, mask=inside).to(tl.float32) * factor
        first += rest1 * found
        second += rest2 * found * found
    value -= decay * value
    # Approximate square root and division: one unit in the last place is negligible here, and they are half
    # of the work.
    value -= step_size * first / (tl.sqrt(second) * correction + epsilon)
    tl.store(average_at, first, mask=inside)
    tl.store(square_at, second, mask=inside)
    tl.store(value_at, value, mask=inside)
    if ROUNDED is not None:
        tl.store(pointer(rounded, ROUNDED, WHOLE) + offsets, value.to(ROUNDED), mask=inside)


# Sum of squares over many tensors, each read once in its own dtype, and the sum of two tensors in fp32. The
# references are torch's norm in fp32 and a sum of casts.


class SumOfSquares:
    """Sums squares over many tensors; caches what depends on their sizes, which seldom change."""

    def __init__(self, block: int = 4096, warps: int = 8) -> None:
        self.block, self.warps = block, warps
        self._known: tuple[int, ...] = ()
        self._plan: tuple[Programs, Tensor, Addresses] | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the sum in fp64, for contiguous tensors of one dtype on one device."""
        device, sizes = tensors[0].device, tuple(t.numel() for t in tensors)
        if sizes != self._known or self._plan is None:
            on_device = torch.tensor(sizes, dtype=torch.int64).to(device)
            self._known = sizes
            self._plan = programs_of(sizes, self.block, device), on_device, Addresses(device)
        programs, sizes_on_device, addresses = self._plan
        sums = torch.empty(len(programs.row_of), dtype=torch.float32, device=device)
        tables = (*programs, sizes_on_device, addresses(tensors), sums)
        kind = TYPES[tensors[0].dtype]
        _sum_of_squares[(len(sums),)](*tables, DTYPE=kind, BLOCK=self.block, num_warps=self.warps)
        return sums.sum(dtype=torch.float64)


def sum_in_fp32(first: Tensor, second: Tensor) -> Tensor:
    """Returns the sum of two contiguous tensors of one dtype in fp32, in one pass."""
    total = torch.empty_like(first, dtype=torch.float32)
    elements, block = total.numel(), 2048
    _exact_sum[(triton.cdiv(elements, block),)](first, second, total, elements, BLOCK=block, num_warps=4)
    return total


@triton.jit
def _sum_of_squares(row_of, first_of, sizes, addresses, sums, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = tl.load(row_of + program)
    begin = (program - tl.load(first_of + row)).to(tl.int64) * BLOCK
    address = tl.load(addresses + row)
    elements = tl.load(sizes + row)
    offsets = begin + tl.arange(0, BLOCK)
    if ((address & 15) == 0) & (begin + BLOCK <= elements):
        found = tl.load(pointer(address, DTYPE, True) + offsets).to(tl.float32)
        tl.store(sums + program, tl.sum(found * found))
    else:
        some = tl.load(pointer(address, DTYPE, False) + offsets, mask=offsets < elements, other=0.0)
        some = some.to(tl.float32)
        tl.store(sums + program, tl.sum(some * some))


@triton.jit
def _exact_sum(first, second, total, elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    left = tl.load(first + offsets, mask=inside).to(tl.float32)
    right = tl.load(second + offsets, mask=inside).to(tl.float32)
    tl.store(total + offsets, left + right, mask=inside)
