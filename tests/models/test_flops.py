import pytest

from pentatron.config.draft import Facts
from pentatron.config.entry import PRETRAIN_GPT
from pentatron.config.resolve import gather, resolve
from pentatron.config.run import RunConfig
from pentatron.models.flops import step_flops


def shape(preset: str, words: str = "") -> RunConfig:
    usual = "--hidden-dropout 0 --attention-dropout 0 --dataset-size 8 --train-iters 1"
    draft = gather(f"--preset {preset} {usual} {words}".split(), PRETRAIN_GPT)
    return resolve(draft, Facts(1)).config


@pytest.mark.parametrize(
    ("preset", "words", "batch", "sequence", "expected"),
    [
        ("gpt3-175b", "--padded-vocab-size 51200", 1536, 2048, 3.340598e18),
        ("qwen2.5-7b", "", 64, 4096, 1.176711e16),
        ("qwen3-8b", "", 64, 4096, 1.285357e16),
        ("llama3-8b", "", 128, 8192, 5.397063e16),
        ("qwen3-30b-a3b", "", 256, 4096, 2.412383e16),
    ],
)
def test_published_check_values(preset: str, words: str, batch: int, sequence: int, expected: float) -> None:
    config = shape(preset, words)
    assert f"{step_flops(config.model, batch, sequence, config.moe):.6e}" == f"{expected:.6e}"
