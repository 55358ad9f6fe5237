import torch
from torch import nn

from pentatron.parallel.buckets import FlatBuffers, named_unique_parameters, split_by
from pentatron.parallel.collectives import Group


def test_weights_and_gradients_are_views_of_the_flat_buffers() -> None:
    torch.manual_seed(0)
    layer, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(layer.state_dict())
    flat = FlatBuffers(list(named_unique_parameters(layer)), torch.float32)
    x = torch.randn(4, 3)
    for _ in range(2):
        layer(x).square().sum().backward()
        twin(x).square().sum().backward()
    for name, parameter in twin.named_parameters():
        assert torch.equal(flat.views(flat.gradients)[name], parameter.grad)
    assert all(p.grad is None for p in layer.parameters())
    flat.master.zero_()
    assert layer(x).abs().sum() == 0


def test_bf16_keeps_fp32_master_weights_and_gradients() -> None:
    layer = nn.Linear(8, 8)
    exact = layer.weight.detach().clone()
    flat = FlatBuffers(list(named_unique_parameters(layer)), torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(flat.views(flat.master)["weight"], exact)
    # Additions below bf16's resolution must survive in the sum.
    for _ in range(64):
        layer.weight.grad = None
        (layer.weight.sum() * 0.001 + layer.bias.sum() * 0).backward()
    expected = 64 * float(torch.tensor(0.001, dtype=torch.bfloat16))
    assert torch.allclose(flat.views(flat.gradients)["weight"], torch.full((8, 8), expected), rtol=1e-5)
    flat.master.add_(1.0)
    flat.publish_master()
    assert torch.equal(layer.weight, (exact + 1.0).bfloat16())


def test_reduction_covers_every_element_in_buckets() -> None:
    layer = nn.Linear(5, 7)
    flat = FlatBuffers(list(named_unique_parameters(layer)), torch.float32)
    flat.gradients.copy_(torch.arange(42.0))
    flat.reduce_gradients(Group(0, 1), bucket_elements=10)
    assert torch.equal(flat.gradients, torch.arange(42.0))


def test_tied_parameters_appear_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    assert [name for name, _ in named_unique_parameters(model)] == ["a.weight"]


def test_split_by_keeps_order() -> None:
    layer = nn.Linear(2, 2)
    yes, no = split_by(named_unique_parameters(layer), lambda name, p: p.dim() > 1)
    assert [n for n, _ in yes] == ["weight"] and [n for n, _ in no] == ["bias"]
