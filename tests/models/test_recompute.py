"""Tests recompute: equal bits, no more forwards than needed, and less memory saved for backward."""

import traceback
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import pentatron.nn.recompute as recompute_module
from pentatron.models.causal_lm import CausalLM, build_model
from pentatron.nn.dropout import DropoutKeys, dropout_keys
from pentatron.nn.options import ModelOptions
from pentatron.nn.recompute import LAYERS, NO_RECOMPUTE, RecomputeSwitch, recompute_of
from pentatron.settings.model import TransformerConfig
from pentatron.settings.parallel import MemoryConfig
from tests.support import LLAMA, model_config

BATCH, LENGTH, HIDDEN = 2, 16, 32
CPU = torch.device("cpu")
MODULES = ("core_attn", "mlp", "layernorm")
KINDS = {
    "uniform 1": MemoryConfig("full", "uniform", 1),
    "uniform 2": MemoryConfig("full", "uniform", 2),
    "uniform 3": MemoryConfig("full", "uniform", 3),
    "block 1": MemoryConfig("full", "block", 1),
    "block 3": MemoryConfig("full", "block", 3),
    **{module: MemoryConfig("selective", recompute_modules=(module,)) for module in MODULES},
    "all modules": MemoryConfig("selective", recompute_modules=MODULES),
}
FAMILIES = {"gpt": "", "llama": LLAMA, "qwen3": f"{LLAMA} --qk-layernorm"}
DROPOUTS = {"": "", "hidden": "--hidden-dropout 0.2", "attention": "--attention-dropout 0.2"}


def build(
    words: str = "", kind: str | None = None, layers: int = 4, backend: str = "auto"
) -> tuple[CausalLM, TransformerConfig]:
    config = model_config(f"{words} --num-layers {layers}")
    recompute = recompute_of(KINDS[kind]) if kind else NO_RECOMPUTE
    model = build_model(config, 1, CPU, options=ModelOptions(backend, recompute))
    return model, config


def batch(config: TransformerConfig) -> tuple[Tensor, Tensor, Tensor, None, DropoutKeys | None]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(61, (BATCH, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    keys = dropout_keys(1, 0, 0, BATCH, positions[0], CPU) if config.hidden_dropout else None
    return tokens, positions, tokens.roll(-1, 1), None, keys


def loss_and_gradients(model: CausalLM, config: TransformerConfig) -> dict[str, Tensor]:
    """Returns losses and gradients of two micro-batches, and the state of the generator.

    Both forwards precede the first backward, so that random numbers drawn in backward would be out of order.
    """
    torch.manual_seed(11)
    losses = [model(*batch(config)).sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        **found,
        "loss": torch.stack(losses).detach(),
        "generator": torch.get_rng_state(),
    }


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize(("kind", "is_between"), [(None, False), ("core_attn", False), ("uniform 1", True)])
def test_layers_are_called_directly_unless_they_are_recomputed(kind: str | None, is_between: bool) -> None:
    model, config = build(kind=kind)
    files: set[str] = set()

    def note(*inputs: object) -> None:
        files.update(frame.filename.rpartition("/")[2] for frame in traceback.extract_stack())

    model.layers["1"].register_forward_pre_hook(note)
    model(*batch(config))
    assert "causal_lm.py" in files and ("recompute.py" in files) == is_between


@pytest.mark.parametrize(
    ("kind", "family", "dropout"),
    [
        (kind, list(FAMILIES)[(i + j) % len(FAMILIES)], dropout)
        for i, kind in enumerate(KINDS)
        for j, dropout in enumerate(DROPOUTS)
    ],
)
def test_every_bit_is_that_of_a_run_without(kind: str, family: str, dropout: str) -> None:
    words = f"{FAMILIES[family]} {DROPOUTS[dropout]}"
    assert differing(loss_and_gradients(*build(words, kind)), loss_and_gradients(*build(words))) == []


@pytest.mark.parametrize("kind", ["uniform 1", "core_attn"])
def test_attention_dropout_that_is_drawn_anew_would_be_seen(kind: str) -> None:
    words = f"{LLAMA} {DROPOUTS['attention']}"
    model, config = build(words, kind)
    model.recompute.draws = False
    found = differing(loss_and_gradients(model, config), loss_and_gradients(*build(words)))
    assert "loss" not in found and "layers.0.attention.linear_qkv.weight" in found


def test_the_generators_state_is_kept_only_where_attention_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def recording(function: Any, *inputs: Any, use_reentrant: bool, preserve_rng_state: bool) -> Any:
        asked.append(preserve_rng_state)
        return function(*inputs)

    monkeypatch.setattr(recompute_module, "checkpoint", recording)
    for words, kind, expected in (
        ("--hidden-dropout 0.2", "uniform 1", {False}),
        ("--attention-dropout 0.2", "uniform 1", {True}),
        ("--attention-dropout 0.2", "core_attn", {True}),
        ("--attention-dropout 0.2", "mlp", {False}),
    ):
        asked.clear()
        model, config = build(words, kind)
        model(*batch(config))
        assert set(asked) == expected, (words, kind)


# --- number of forwards ---


def runs(model: CausalLM, config: TransformerConfig, train: bool = True) -> Counter[str]:
    """Counts the forwards of each layer, and of each norm, core attention and MLP of layer 0."""
    seen: Counter[str] = Counter()
    watched: dict[str, Any] = {f"layer {n}": layer for n, layer in model.layers.items()}
    first: Any = model.layers["0"]
    watched |= {"mlp": first.mlp, "layernorm": first.input_norm, "head": model.final_norm}
    for name, module in watched.items():
        module.register_forward_pre_hook(lambda module, inputs, name=name: seen.update([name]))
    attend = first.attention._attend

    def counted(*inputs: Tensor) -> Tensor:
        seen.update(["core_attn"])
        return attend(*inputs)

    first.attention._attend = counted
    if train:
        model(*batch(config)).sum().backward()
    else:
        with torch.no_grad():
            model(*batch(config))
    return seen


@pytest.mark.parametrize(
    ("kind", "twice"),
    [
        (None, set()),
        ("uniform 1", {0, 1, 2, 3, 4}),
        ("uniform 2", {0, 1, 2, 3, 4}),
        ("uniform 3", {0, 1, 2, 3, 4}),
        ("block 1", {0}),
        ("block 3", {0, 1, 2}),
        ("all modules", set()),
    ],
)
def test_covered_layers_run_twice_and_others_once(kind: str | None, twice: set[int]) -> None:
    seen = runs(*build(LLAMA, kind, layers=5))
    assert {n: seen[f"layer {n}"] for n in range(5)} == {n: 2 if n in twice else 1 for n in range(5)}
    assert seen["head"] == 1
    assert seen["core_attn"] == (2 if 0 in twice or kind == "all modules" else 1)


@pytest.mark.parametrize("kind", MODULES)
def test_a_chosen_module_runs_twice_and_others_once(kind: str) -> None:
    seen = runs(*build(LLAMA, kind))
    assert {module: seen[module] for module in MODULES} == {m: 2 if m == kind else 1 for m in MODULES}


def test_an_evaluation_runs_everything_once() -> None:
    assert set(runs(*build(LLAMA, "uniform 1"), train=False).values()) == {1}


@pytest.mark.parametrize("layers", range(1, 6))
@pytest.mark.parametrize("kind", ["uniform 1", "uniform 2", "uniform 3", "block 1", "block 3", "mlp"])
def test_chunks_hold_every_layer_once_and_in_order(kind: str, layers: int) -> None:
    memory = KINDS[kind]
    chunks = list(RecomputeSwitch(recompute_of(memory)).chunks(list(range(layers))))
    assert [n for _, chunk in chunks for n in chunk] == list(range(layers))
    covered = [list(chunk) for part, chunk in chunks if part == LAYERS]
    match memory.recompute_method, memory.recompute_num_layers:
        case "uniform", int(size):
            assert len(covered) == -(-layers // size) and all(len(c) == size for c in covered[:-1])
        case "block", int(count):
            assert covered == [[n] for n in range(min(count, layers))]
        case _:
            assert covered == []


# --- memory saved for backward ---


def kept_bytes(model: CausalLM, config: TransformerConfig) -> int:
    """Returns the bytes that autograd saves besides weights, each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}
    alive = []

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = model(*batch(config)).sum()
    del loss
    return sum(storages.values())


# More layers than block recompute covers below, and a multiple of the chunks of 2 and 3.
BASE = 6


def kept_by_layers(count: int, kind: str | None, words: str = LLAMA, backend: str = "auto") -> int:
    """Returns the bytes saved by `count` layers: the difference of a deeper and a shallower model."""
    depths = (count + BASE, BASE)
    deep, shallow = (kept_bytes(*build(words, kind, layers, backend)) for layers in depths)
    return deep - shallow


STREAM = BATCH * LENGTH * HIDDEN * 4


@pytest.mark.parametrize("words", [LLAMA, "", f"{LLAMA} --hidden-dropout 0.2 --attention-dropout 0.2"])
def test_full_recompute_keeps_the_input_of_every_chunk(words: str) -> None:
    assert kept_by_layers(6, "uniform 1", words) == 6 * STREAM
    assert kept_by_layers(6, "uniform 3", words) == 2 * STREAM


def test_block_recompute_keeps_the_other_layers_whole() -> None:
    alone = kept_by_layers(6, None)
    assert kept_by_layers(6, "block 3") == alone
    saved = kept_bytes(*build(LLAMA, layers=BASE)) - kept_bytes(*build(LLAMA, "block 3", BASE))
    assert saved == kept_by_layers(3, None) - 3 * STREAM


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_the_more_is_recomputed_the_less_is_kept(backend: str) -> None:
    kept = {kind: kept_by_layers(2, kind, backend=backend) for kind in (*KINDS, None)}
    assert kept["uniform 2"] < kept["uniform 1"] < kept["all modules"]
    for module in MODULES:
        assert kept["all modules"] < kept[module] < kept[None]


def test_the_attention_matrix_is_not_kept() -> None:
    """Recompute of core_attn saves exactly the attention matrix.

    Queries, keys and values are views of a projection that is kept in any case.
    """
    heads = model_config(LLAMA).num_attention_heads or 0
    without = kept_by_layers(1, None, backend="math")
    saved = without - kept_by_layers(1, "core_attn", backend="math")
    assert saved == 4 * BATCH * heads * LENGTH * LENGTH


# --- the switch on the model ---


def test_gradient_checkpointing_is_switched_on_and_off() -> None:
    model, config = build(LLAMA)
    without = kept_bytes(model, config)
    model.gradient_checkpointing_enable()
    assert kept_bytes(model, config) < without
    expected = loss_and_gradients(*build(LLAMA))
    assert differing(loss_and_gradients(model, config), expected) == []
    model.gradient_checkpointing_disable()
    assert kept_bytes(model, config) == without


def test_the_second_run_uses_the_kernels_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*inputs: Any, **named: Any) -> Tensor:
        used.append(torch.backends.cuda.flash_sdp_enabled())
        return attend(*inputs, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    for kind in ("uniform 1", "core_attn"):
        used.clear()
        model, config = build(LLAMA, kind, backend="math")
        model(*batch(config)).sum().backward()
        assert used == [False] * 8
    assert torch.backends.cuda.flash_sdp_enabled(), "elsewhere the kernel is free"
