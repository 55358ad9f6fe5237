import pytest
import torch
from torch.nn.attention import SDPBackend

from pentatron.nn.init import draw_weights, named_generator, normal_region
from pentatron.nn.mlp import _GatedByHalves
from pentatron.nn.norm import NORMS
from pentatron.nn.options import AttentionKernels, allowed_kernels
from pentatron.nn.rope import RotaryEmbedding, rope_frequencies
from pentatron.ops.activation import mlp_activation
from pentatron.parallel.sharding import sharded_parameters

CPU = torch.device("cpu")


def test_rotated_products_depend_on_the_distance_alone() -> None:
    rope = RotaryEmbedding(rope_frequencies(16, base=100.0), interleaved=False)
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
        norm = NORMS[kind](64, 1e-6)
        draw_weights(sharded_parameters(norm), seed=0, std=0.0)
        exact = norm(x)
        rounded = norm.to(torch.bfloat16)(x.bfloat16())
        assert rounded.dtype == torch.bfloat16
        assert (rounded.float() - exact).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_by_halves_is_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    inner = torch.randn(2, 5, 24, dtype=dtype)
    ways = [inner.clone().requires_grad_() for _ in range(2)]
    made = [mlp_activation(ways[0], has_gate=True), _GatedByHalves.apply(ways[1])]
    for values in made:
        (values * torch.arange(12)).sum().backward()
    assert torch.equal(*made) and ways[0].grad is not None and ways[1].grad is not None
    assert torch.equal(ways[0].grad, ways[1].grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_in_few_passes_is_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    norm = NORMS["RMSNorm"](48, 1e-6)
    norm.weight.data = torch.randn(48).to(dtype)
    x, gradient = (torch.randn(2, 5, 3, 48).to(dtype).transpose(1, 2) for _ in range(2))
    x.requires_grad_()
    wide = x.float()
    derived = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype) * norm.weight
    found, expected = ((y, *torch.autograd.grad(y, (x, norm.weight), gradient)) for y in (norm(x), derived))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with torch.no_grad():
        without_backward = norm(x)
    assert torch.equal(without_backward, expected[0])


def test_drawing_does_not_touch_the_global_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = torch.empty(50), torch.empty(50), torch.empty(50)
    for name, out in (("a", first), ("a", second), ("b", other)):
        normal_region(1, name, (50,), (0,), (50,), out)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert named_generator(1, "12").initial_seed() != named_generator(11, "2").initial_seed()


def test_any_rectangle_of_a_tensor_is_drawn_alike() -> None:
    """Draws rectangles whose rows and columns cross the blocks of the generators."""
    shape = (300, 170)
    everything = torch.empty(shape)
    normal_region(3, "w", shape, (0, 0), shape, everything)
    for start, size in (((0, 0), (1, 1)), ((95, 0), (4, 170)), ((0, 160), (300, 10)), ((299, 169), (1, 1))):
        part = torch.empty(size)
        normal_region(3, "w", shape, start, size, part)
        assert torch.equal(part, everything[start[0] : start[0] + size[0], start[1] : start[1] + size[1]])
    assert abs(everything.std() - 1) < 0.02 and abs(everything.mean()) < 0.02
    halves = everything.flatten()[:16384], everything.flatten()[16384:32768]
    assert not torch.equal(*halves), "every block has a generator of its own"


def test_weights_are_drawn_on_the_cpu_under_any_default_device() -> None:
    expected, found = torch.empty(3, 4), torch.empty(3, 4)
    normal_region(1, "a", (3, 4), (0, 0), (3, 4), expected)
    with torch.device("meta"):
        normal_region(1, "a", (3, 4), (0, 0), (3, 4), found)
    assert torch.equal(found, expected)


def test_which_attention_kernels_are_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for generation, first in ((8, None), (9, SDPBackend.CUDNN_ATTENTION), (10, SDPBackend.CUDNN_ATTENTION)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, g=generation: (g, 0))
        chosen = allowed_kernels("auto", gpu)
        assert (chosen and chosen[0]) == first
        assert SDPBackend.CUDNN_ATTENTION not in (allowed_kernels("auto", gpu, dropout=0.1) or [])
    assert allowed_kernels("flash", gpu) == [SDPBackend.FLASH_ATTENTION]
    # For other devices the GPU is not queried: the query would create a CUDA context.
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    assert allowed_kernels("auto", CPU) is None and allowed_kernels("auto", torch.device("meta")) is None


def test_attention_kernels_apply_inside_their_context() -> None:
    flags = torch.backends.cuda
    kernels, other = AttentionKernels([SDPBackend.MATH]), AttentionKernels([SDPBackend.FLASH_ATTENTION])
    assert flags.flash_sdp_enabled()
    with kernels.context():
        assert flags.math_sdp_enabled() and not flags.flash_sdp_enabled()
        with pytest.raises(ValueError, match="inside"), kernels.context():
            raise ValueError("inside")
        assert not flags.flash_sdp_enabled(), "what is inside does not end what is around it"
        with other.context():
            assert flags.flash_sdp_enabled() and not flags.math_sdp_enabled()
        assert not flags.flash_sdp_enabled()
    assert flags.flash_sdp_enabled()
    with AttentionKernels().context():
        assert flags.flash_sdp_enabled() and flags.math_sdp_enabled()
