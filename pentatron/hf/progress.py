"""How far a conversion is, and how fast."""

import time
from dataclasses import dataclass

from torch import Tensor

from pentatron.checkpoint.tensor_file import Read
from pentatron.monitor.display import Display
from pentatron.parallel.pieces import Shape
from pentatron.text import decimal_rate, decimal_size


@dataclass(frozen=True)
class Summary:
    """What was written."""

    parameters: int
    tensors: int
    bytes: int
    seconds: float

    def sentence(self) -> str:
        return (
            f"{self.parameters:,} parameters in {self.tensors} tensors, {decimal_size(self.bytes)}, in {self.seconds:.1f} s "
            f"({decimal_rate(self.bytes, self.seconds)})"
        )


class Progress:
    """Counts the bytes that pass through a reader, and shows them."""

    def __init__(self, display: Display, what: str, total: int) -> None:
        self.display, self.what, self.total = display, what, total
        self.done, self._start = 0, time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def counting(self, read: Read) -> Read:
        def counted(name: str, start: Shape, size: Shape) -> Tensor:
            values = read(name, start, size)
            self.add(values.nbytes)
            return values

        return counted

    def add(self, count: int) -> None:
        self.done += count
        self.display.work(self.what, self.done, self.total, decimal_rate(self.done, self.seconds))
