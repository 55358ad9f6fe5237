"""Linear layers and embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentatron.nn.init import normal_


class Linear(nn.Module):
    """`y = x Wᵀ + b`, left uninitialised: the model fills its weights by name."""

    def __init__(self, inputs: int, outputs: int, bias: bool, init_scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.init_scale = init_scale

    def init_weights(self, seed: int, name: str, std: float) -> None:
        normal_(self.weight, seed, f"{name}.weight", std * self.init_scale)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Table(nn.Module):
    """Rows looked up by number. Rows beyond `meaningful` are padding: zero, never drawn, never looked up."""

    def __init__(self, rows: int, width: int, meaningful: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.meaningful = rows if meaningful is None else meaningful

    def init_weights(self, seed: int, name: str, std: float) -> None:
        # Padding depends on the layout, so it must not take part in the drawing.
        normal_(self.weight[: self.meaningful], seed, f"{name}.weight", std)
        nn.init.zeros_(self.weight[self.meaningful :])

    def forward(self, numbers: Tensor) -> Tensor:
        return F.embedding(numbers, self.weight)
