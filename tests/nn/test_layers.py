import torch

from pentatron.nn.init import named_generator, normal_
from pentatron.nn.norm import build_norm
from pentatron.nn.rope import RotaryEmbedding


def test_rotated_products_depend_on_the_distance_alone() -> None:
    rope = RotaryEmbedding(head_width=16, base=100.0, percent=1.0, interleaved=False)
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def product(at_q: int, at_k: int) -> float:
        turned = [rope.rotate(x, *rope(torch.tensor([[at]]))) for x, at in ((q, at_q), (k, at_k))]
        return float((turned[0] * turned[1]).sum())

    assert abs(product(3, 1) - product(40, 38)) < 1e-4
    assert abs(product(3, 1) - product(3, 2)) > 1e-2


def test_norms_compute_in_fp32_and_answer_in_the_dtype_of_the_stream() -> None:
    x = torch.randn(4, 64) * 300
    for kind in ("RMSNorm", "LayerNorm"):
        norm = build_norm(kind, 64, 1e-6)
        norm.init_weights(0, "", 0.0)  # type: ignore[operator]
        exact = norm(x)
        rounded = norm.to(torch.bfloat16)(x.bfloat16())
        assert rounded.dtype == torch.bfloat16
        assert (rounded.float() - exact).abs().max() < 0.05


def test_drawing_does_not_touch_the_global_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = torch.empty(50), torch.empty(50), torch.empty(50)
    normal_(first, 1, "a", 0.1)
    normal_(second, 1, "a", 0.1)
    normal_(other, 1, "b", 0.1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert named_generator(1, "12").initial_seed() != named_generator(11, "2").initial_seed()
