"""Tests links: formats of the same weights, slices of any layout, dtypes, detection of wrong links."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pentatron.checkpoint import links
from pentatron.checkpoint.links import their_shapes
from pentatron.errors import UserError
from pentatron.hf.folder import SINGLE, open_folder
from pentatron.hf.tensor_names import load_weights, tensor_links
from pentatron.models.causal_lm import logical_shapes
from pentatron.parallel.sharding import Fragment, region
from tests.hf.support import EXPERTS, batch, gap, ours, ours_from, save, targets_of, theirs


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    save_file(change(load_file(folder / SINGLE)), folder / SINGLE)
    return folder


def as_before_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns GPT-2 as on the hub: the base model, with its mask buffers."""
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return {
        **bare,
        "h.0.attn.bias": torch.ones(1, 1, 64, 64).tril(),
        "h.1.attn.masked_bias": torch.tensor(-1e4),
    }


def with_rotary_buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}


def with_a_copy_of_the_embedding(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def with_experts_in_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"

        def take(part: str, experts: str = experts) -> Tensor:
            return torch.stack([tensors.pop(f"{experts}.{e}.{part}_proj.weight") for e in range(4)])

        tensors[f"{experts}.gate_up_proj"] = torch.cat([take("gate"), take("up")], dim=1)
        tensors[f"{experts}.down_proj"] = take("down")
    return tensors


@pytest.mark.parametrize(
    "model_type, config, change",
    [
        ("gpt2", {}, as_before_prefixes),
        ("llama", {}, with_rotary_buffers),
        ("qwen2", {"tie_word_embeddings": True}, with_a_copy_of_the_embedding),
        ("qwen3_moe", EXPERTS, with_experts_in_one),
    ],
)
def test_other_forms_of_the_same_weights(
    model_type: str, config: dict, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = save(theirs(model_type, **config), tmp_path)
    usual = ours_from(folder)[0].state_dict()
    for name, tensor in ours_from(rewritten(folder, change))[0].state_dict().items():
        assert torch.equal(tensor, usual[name]), name


def swap(one: str, other: str) -> dict[str, object]:
    return {**links.ROW_SELECTIONS, one: links.ROW_SELECTIONS[other], other: links.ROW_SELECTIONS[one]}


@pytest.mark.parametrize("one, other", [("first half", "second half"), ("keys", "values")])
def test_swapped_parts_are_seen(
    one: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shapes are right; only the values show that the link is wrong."""
    their = theirs("llama")
    tokens, positions, _ = batch()
    with open_folder(save(their, tmp_path)) as folder, torch.no_grad():
        wanted = their(tokens).logits
        assert gap(ours(folder)[0](tokens, positions)[..., : wanted.shape[-1]], wanted) < 1e-5
        monkeypatch.setattr(links, "ROW_SELECTIONS", swap(one, other))
        assert gap(ours(folder)[0](tokens, positions)[..., : wanted.shape[-1]], wanted) > 1e-2


@pytest.mark.parametrize(
    "model_type, config", [("gpt2", {}), ("qwen2_moe", {**EXPERTS, "decoder_sparse_step": 2})]
)
def test_any_rectangle_of_any_tensor(model_type: str, config: dict, tmp_path: Path) -> None:
    """Reads any slice that a layout may need."""
    choose = random.Random(7)
    with open_folder(save(theirs(model_type, **config), tmp_path, max_shard_size="10KB")) as folder:
        whole, model, moe = ours(folder)
        wanted = []
        for name, shape in logical_shapes(model, moe).items():
            for _ in range(3):
                start = tuple(choose.randrange(n) for n in shape)
                size = tuple(choose.randint(1, n - i) for n, i in zip(shape, start))
                wanted.append(Fragment(name, shape, start, torch.full(size, torch.nan)))
        load_weights(folder, model, moe, wanted)
    for target in wanted:
        expected = region(whole.get_parameter(target.tensor), target.start, tuple(target.values.shape))
        assert torch.equal(target.values, expected), target.tensor


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mixtral", "qwen2_moe"])
def test_every_element_of_both_sides_is_linked_once(model_type: str, tmp_path: Path) -> None:
    config = {"num_local_experts": 4} if model_type == "mixtral" else EXPERTS if "moe" in model_type else {}
    their = theirs(model_type, **config)
    with open_folder(save(their, tmp_path)) as folder:
        _, model, moe = ours(folder)
        found = tensor_links(model_type, model, moe)
        assert found == tensor_links(model_type, model, moe, folder.tensors), (
            "what is written is what they write"
        )
        counts = {name: torch.zeros(shape) for name, shape in logical_shapes(model, moe).items()}
        theirs_counted = {name: torch.zeros(stored.shape) for name, stored in folder.tensors.items()}
        assert their_shapes(found) == {name: stored.shape for name, stored in folder.tensors.items()}
    for link in found:
        region(counts[link.ours], link.at, link.size).add_(1)
        region(theirs_counted[link.theirs], link.start, link.their_size).add_(1)
    assert all(bool((count == 1).all()) for count in (*counts.values(), *theirs_counted.values()))


def test_a_tensor_that_the_family_does_not_have_is_named(tmp_path: Path) -> None:
    with open_folder(save(theirs("llama", num_hidden_layers=1), tmp_path)) as folder:
        _, model, moe = ours(folder)
        with pytest.raises(UserError, match=r"has layers\.0\.adapter\.weight, which no llama model has"):
            load_weights(folder, model, moe, [Fragment("layers.0.adapter.weight", (2,), (0,), torch.ones(2))])


def test_types_that_hold_the_values_are_converted_and_others_refused(tmp_path: Path) -> None:
    halves = theirs("qwen2", num_hidden_layers=1).to(torch.bfloat16)
    with open_folder(save(halves, tmp_path)) as folder:
        whole, model, moe = ours(folder)
        word = halves.get_input_embeddings().weight
        assert torch.equal(whole.embedding.word.weight[: len(word)], word.float())
        narrow = [replace(target, values=target.values.to(torch.float16)) for target in targets_of(whole)]
        kept = [target.values.clone() for target in narrow]
        with pytest.raises(UserError, match="as bfloat16, and float16 cannot hold all of its values"):
            load_weights(folder, model, moe, narrow)
        assert all(torch.equal(target.values, before) for target, before in zip(narrow, kept))
        load_weights(folder, model, moe, narrow, allow_narrowing=True)
        assert torch.equal(narrow[0].values, word.to(torch.float16))
