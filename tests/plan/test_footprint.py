"""Compares Megatron-LM's memory estimate with its formulas for single cases."""

import pytest

from pentatron.plan.fit import megatron_estimate, megatron_estimate_line
from pentatron.settings.entry_points import LAYOUT
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import ProcessFacts

MB = 2**20


def of(words: str, world: int) -> RunConfig:
    return resolve(
        gather(words.split(), LAYOUT), ProcessFacts(world, world), refuse_unimplemented=False
    ).config


def test_gpt3_with_sequence_parallelism_and_selective_recompute() -> None:
    words = "--preset gpt3-175b --seq-length 2048 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --fp16"
    config = of(
        f"{words} --sequence-parallel --recompute-activations --micro-batch-size 1 --global-batch-size 64", 64
    )
    s, h, vocabulary = 2048, 12288, 51200
    layer = 2 * h * (4 * h + 2) + 2 * h * h * 2
    held = ((96 * layer + 2 * h) / 8 + h * vocabulary) / 8 * 18
    activation = (96 * s * h * (18 + 4 * 4) + 8 * s * 8 + s * h * 8) / 8
    assert megatron_estimate(config).weight_and_optimizer == pytest.approx(held)
    assert megatron_estimate(config).activation == pytest.approx(activation)
    assert megatron_estimate_line(config) == (
        f"Theoretical memory footprints: weight and optimizer={held / MB:.2f} MB, "
        f"activation={activation / MB:.2f} MB, total={(held + activation) / MB:.2f} MB"
    )


def test_the_distributed_optimizer_and_virtual_stages() -> None:
    words = "--preset gpt3-175b --seq-length 2048 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel"
    words += " --recompute-activations --micro-batch-size 1 --global-batch-size 64"
    plain, divided = of(words, 256), of(f"{words} --use-distributed-optimizer", 256)
    assert megatron_estimate(divided).weight_and_optimizer == pytest.approx(
        megatron_estimate(plain).weight_and_optimizer * (6 + 12 / 4) / 18
    )
    virtual = of(f"{words} --virtual-pipeline-model-parallel-size 3", 256)
    assert megatron_estimate(virtual).activation == pytest.approx(
        megatron_estimate(plain).activation * (1 + 7 / 24)
    )


def test_without_sequence_parallelism() -> None:
    config = of(
        "--preset llama3-8b --seq-length 4096 --micro-batch-size 2 --global-batch-size 8 --tensor-model-parallel-size 4",
        4,
    )
    assert config.model.padded_vocab_size
    s, b, h, vocabulary = 4096, 2, 4096, config.model.padded_vocab_size
    layers = 32 * s * b * h * (10 + 24 / 4) + 8 * s * b + s * b * h
    assert megatron_estimate(config).activation == pytest.approx(
        1.05 * (layers + 2 * (s * b * vocabulary / 4 + s * b * h))
    )
    hidden, groups = 4096, 8 / 32
    layer = 2 * hidden * (14336 * 1.5 + 1) + 2 * hidden * hidden * (1 + groups)
    held = (32 * layer + hidden + 2 * hidden * vocabulary) / 4 * 18
    assert megatron_estimate(config).weight_and_optimizer == pytest.approx(held)
