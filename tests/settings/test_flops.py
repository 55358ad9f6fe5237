import pytest

from pentatron.settings.entry_points import PRETRAIN_GPT
from pentatron.settings.model_sizes import step_flops
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import ProcessFacts


def shape(preset: str, words: str = "") -> RunConfig:
    usual = "--hidden-dropout 0 --attention-dropout 0 --dataset-size 8 --train-iters 1"
    draft = gather(f"--preset {preset} {usual} {words}".split(), PRETRAIN_GPT)
    return resolve(draft, ProcessFacts(1)).config


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


def attention(words: str, sequence: int) -> float:
    """Returns the FLOPs of attention in units of one layer with full attention."""
    with_it, width = shape("llama3-8b", f"--num-layers 4 {words}").model, 32 * 128
    everything = shape("llama3-8b", "--num-layers 4").model
    left_out = step_flops(everything, 2, sequence) - step_flops(with_it, 2, sequence)
    return 4 - left_out / (6 * 2 * sequence * sequence * width)


def test_window_limits_the_flops_of_attention() -> None:
    """Counts only token pairs inside the window: W · (2 S - W) of S² pairs for W of S tokens."""
    for before in (0, 7, 100):
        seen = [min(before + 1, place + 1) for place in range(256)]
        assert attention(f"--window-size {before},0", 256) == pytest.approx(
            4 * sum(seen) / sum(range(257)), rel=0.01
        )
    assert attention("--window-size 255,0", 256) == 4
    assert attention("--window-size 10000,0", 256) == 4
    assert attention("--window-size=-1,0", 256) == 4


def test_layers_without_a_window_count_whole() -> None:
    one = attention("--window-size 63,0", 256) / 4
    assert attention("--window-size 63,0 --window-attn-skip-freq 2", 256) == 2 + 2 * one
    assert attention("--window-size 63,0 --window-attn-skip-freq [1,1,0,1]", 256) == 1 + 3 * one
