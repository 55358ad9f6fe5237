"""Measures one mixture-of-experts layer, forward and backward, against dense matmuls of equal size.

    python bench/experts.py [--experts 128] [--topk 8] [--hidden 2048] [--inner 768] [--tokens 16384]
        [--kernels]

Compares experts computed one by one, grouped with token counts on the host, and grouped with token counts on
the device. Prints for each way its time, how often it waits for the GPU, the memory it keeps for backward,
and the gap of its results to those of experts computed one by one. `--kernels` lists the kernels of the way
on the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.steps import milliseconds, synchronisations
from pentatron.nn.init import draw_weights
from pentatron.nn.moe import MoE
from pentatron.nn.options import Axes, LayerOptions
from pentatron.nn.recompute import NO_RECOMPUTE, Recompute, RecomputeSwitch
from pentatron.parallel.sharding import sharded_parameters
from pentatron.settings.core_config import CoreTransformerConfig
from pentatron.settings.model import MoEConfig, TransformerConfig

LENGTH = 4096


@dataclass(frozen=True)
class Way:
    name: str
    grouped: bool
    on_device: bool
    recompute: Recompute = NO_RECOMPUTE


WAYS = (
    Way("one by one", False, False),
    Way("grouped, counted by the host", True, False),
    Way("on the device", True, True),
    Way("on the device, moe_act", True, True, Recompute(frozenset({"moe_act"}))),
)


def built(words: argparse.Namespace, way: Way) -> MoE:
    shape = TransformerConfig(
        num_layers=4,
        hidden_size=words.hidden,
        ffn_hidden_size=words.inner,
        num_attention_heads=16,
        gated_linear_unit=True,
        add_bias_linear=False,
    )
    moe = MoEConfig(
        num_experts=words.experts,
        moe_ffn_hidden_size=words.inner,
        moe_router_topk=words.topk,
        moe_aux_loss_coeff=(1e-3,),
        moe_grouped_gemm=way.grouped,
    )
    axes = Axes(options=LayerOptions(RecomputeSwitch(way.recompute)))
    with torch.device("cuda"):
        layer = MoE(CoreTransformerConfig.of(shape, moe), axes=axes)
    draw_weights(sharded_parameters(layer), seed=1, std=0.02)
    for parameter in layer.parameters():
        parameter.data = parameter.data.bfloat16()
    return layer.train()


def dense(words: argparse.Namespace) -> float:
    """Returns the milliseconds of the six products of one expert that processes all rows."""
    rows, hidden, inner = words.tokens * words.topk, words.hidden, words.inner
    x, z, between, first, second = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((rows, hidden), (rows, 2 * inner), (rows, inner), (2 * inner, hidden), (hidden, inner))
    )

    def products() -> None:
        for left, right in (
            (x, first.t()),
            (z, first),
            (z.t(), x),
            (between, second.t()),
            (x, second),
            (x.t(), between),
        ):
            torch.mm(left, right)

    return milliseconds(products)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("experts", 128), ("topk", 8), ("hidden", 2048), ("inner", 768), ("tokens", 16384)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kernels", action="store_true")
    words = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/experts.py needs a GPU: on a CPU the ways are one and the same")
        return 0
    x = torch.randn(words.tokens // LENGTH, LENGTH, words.hidden, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn_like(x)
    chosen_by_itself = built(words, WAYS[1]).experts.can_run_on_device(x.flatten(0, 1))

    def run(layer: MoE) -> list[Tensor]:
        given = x.detach().requires_grad_()
        made = layer(given)
        made.backward(gradient)
        assert given.grad is not None
        found = [made.detach(), given.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
        for parameter in layer.parameters():
            parameter.grad = None
        return found

    operations = 18 * words.tokens * words.topk * words.hidden * words.inner
    floor = dense(words)
    print(
        f"{words.experts} experts, {words.topk} a token, {words.hidden} × {words.inner}, {words.tokens} tokens, bf16, "
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; the layer chooses "
        f"{'the device' if chosen_by_itself else 'the host'}"
    )
    print(f"{'dense products':<30} {floor:7.2f} ms, {operations / floor / 1e9:4.0f} TFLOP/s")
    reference: list[Tensor] = []
    for way in WAYS:
        layer = built(words, way)
        layer.experts.can_run_on_device = lambda x_TD, chosen=way.on_device: chosen
        found = run(layer)
        reference = reference or found
        apart = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, reference))
        del found
        before = torch.cuda.memory_allocated()
        kept = layer(x.detach().requires_grad_())
        held = torch.cuda.memory_allocated() - before
        del kept
        again = partial(run, layer)
        waits, taken = synchronisations(again), milliseconds(again)
        print(
            f"{way.name:<30} {taken:7.2f} ms, {operations / taken / 1e9:4.0f} TFLOP/s, {taken / floor:.2f} of the dense time; waits "
            f"{len(waits)} times{_first(waits)}; keeps {held / 2**20:,.0f} MiB; apart {apart:.1e}",
            flush=True,
        )
        if words.kernels and way.name == "on the device":
            _kernels(again)
    return 0


def _first(places: list[str]) -> str:
    return f" ({places[0]} first)" if places else ""


def _kernels(run: Callable[[], object]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    # Events without time on the device are calls of the host.
    timed = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    rows = sorted(timed, key=lambda event: -event.self_device_time_total)
    for event in rows[:25]:
        print(f"    {event.self_device_time_total / 1000:7.3f} ms, {event.count} times: {event.key[:100]}")
    total = sum(event.self_device_time_total for event in rows) / 1000
    print(f"    {total:7.3f} ms in {sum(event.count for event in rows)} kernels")


if __name__ == "__main__":
    sys.exit(main())
