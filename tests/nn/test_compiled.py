"""Tests compiled layers: one graph without breaks for each kind of layer, equal to eager layers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from pentatron.layout.documents import DocumentStarts
from pentatron.models.causal_lm import CausalLM, build_model
from pentatron.models.layer_specs import spec_of
from pentatron.nn import mlp
from pentatron.nn.attention import SelfAttention
from pentatron.nn.compiled import CompileOptions, compilation_report
from pentatron.nn.dropout import dropout_keys
from pentatron.nn.options import Fp8Options, ModelOptions
from pentatron.nn.recompute import recompute_of
from pentatron.nn.transformer_layer import TransformerLayer
from pentatron.ops.fp8_linear import FORMATS, WeightScales
from pentatron.settings.run_config import RunConfig
from tests.support import LLAMA, resolved

CPU = torch.device("cpu")
BATCH, LENGTH = 2, 16
GROUPED = f"{LLAMA} --group-query-attention --num-query-groups 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24"
DOCUMENTS: tuple[DocumentStarts, ...] = (((0, 3, 9), (0, 7)), ((0,), (0, 2, 5, 9)), ((0, 8), (0,)))


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """Clears the compiler's caches between tests."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Counting:
    """Compiler backend that counts its graphs."""

    def __init__(self, name: str = "aot_eager") -> None:
        self.compile: Any = lookup_backend(name)
        self.graphs = 0

    def __call__(self, graph: Any, examples: Any) -> Any:
        self.graphs += 1
        return self.compile(graph, examples)


def build(
    words: str, layers: int = 3, compile: CompileOptions | None = None, fuses_gates: bool = False
) -> tuple[CausalLM, RunConfig]:
    config = resolved(f"{words} --num-layers {layers}").config
    options = ModelOptions(
        attention_backend=config.kernels.attention_backend,
        recompute=recompute_of(config.memory),
        fuses_gates=fuses_gates,
        compile=compile,
    )
    return build_model(config.model, 1, CPU, config.moe, options), config


def left_out(model: CausalLM) -> tuple[str, ...]:
    return compilation_report(model.layers.values()).graph_breaks


def computed(
    model: CausalLM, config: RunConfig, documents: DocumentStarts | None = None
) -> tuple[dict[str, Tensor], int]:
    """Returns loss and gradients, and the bytes saved for backward besides the parameters."""
    torch.manual_seed(3)
    model.zero_grad()
    tokens = torch.randint(61, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    keys = dropout_keys(1, 0, 0, BATCH, positions[0], CPU) if config.model.hidden_dropout else None
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, positions, tokens.roll(-1, 1), None, keys, documents=documents).sum()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}, sum(kept.values())


# Graphs of a model whose layers are all of one kind: one for the layers, one for the last norm.
ONE = 2


@pytest.mark.parametrize(
    ("words", "graphs"),
    [
        pytest.param("--hidden-dropout 0.2", ONE, marks=pytest.mark.sweep),
        (f"{GROUPED} --qk-layernorm --hidden-dropout 0.2", ONE),
        pytest.param(
            f"{GROUPED} --add-qkv-bias --rotary-interleaved --rotary-percent 0.5",
            ONE,
            marks=pytest.mark.sweep,
        ),
        # Every second layer has a window: two kinds of layers.
        (f"{GROUPED} --window-size 4,0 --window-attn-skip-freq 2", ONE + 1),
        pytest.param(f"{GROUPED} --attention-dropout 0.2", ONE, marks=pytest.mark.sweep),
        (f"{GROUPED} --attention-backend math", ONE),
    ],
)
def test_all_layers_of_a_kind_share_one_graph_without_breaks(words: str, graphs: int) -> None:
    eager, _ = computed(*build(words))
    counting = Counting()
    model, config = build(words, compile=CompileOptions(counting))
    assert left_out(model) == ()
    for _ in range(2):
        found, _ = computed(model, config)
        torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)
    assert counting.graphs == graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    "words", ["--hidden-dropout 0.2", f"{GROUPED} --recompute-granularity full --recompute-num-layers 3"]
)
def test_layers_together_are_one_graph(words: str) -> None:
    """Seven layers are compiled in pairs: the pairs share one graph, and the last layer has its own."""
    eager, _ = computed(*build(words, layers=7))
    counting = Counting()
    model, config = build(words, 7, CompileOptions(counting, layers_per_graph=2))
    for _ in range(2):
        found, _ = computed(model, config)
        torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)
    assert counting.graphs == ONE + 1 and not counters["graph_break"]


def test_hooks_around_a_layer_are_called_though_it_is_compiled_with_others() -> None:
    model, config = build(GROUPED, 4, CompileOptions(Counting("eager"), layers_per_graph=2))
    called: list[int] = []
    layer = model.layers["1"]
    computed(model, config)
    hook = layer.register_forward_pre_hook(lambda module, inputs: called.append(1))
    computed(model, config)
    assert called == [1]
    hook.remove()
    with torch.compiler.set_stance("force_eager"):
        inside = layer.attention.register_forward_hook(lambda module, inputs, made: called.append(2))  # type: ignore[union-attr]
        computed(model, config)
    inside.remove()
    assert called == [1, 2]


def test_a_number_of_its_own_would_be_compiled_for_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a dropout site that is passed as an int is compiled for every layer."""
    monkeypatch.setattr(TransformerLayer, "_site", lambda self, which: self.first_site + which)
    counting = Counting("eager")
    model, config = build("--hidden-dropout 0.2", compile=CompileOptions(counting))
    computed(model, config)
    assert counting.graphs > ONE


@pytest.mark.parametrize(
    "words",
    [
        "--recompute-granularity full",
        pytest.param(
            "--recompute-granularity selective --recompute-modules core_attn", marks=pytest.mark.sweep
        ),
        "--recompute-granularity selective --recompute-modules mlp layernorm --hidden-dropout 0.2",
    ],
)
def test_recompute_saves_memory_in_compiled_layers(words: str) -> None:
    counting = Counting("aot_eager_decomp_partition")
    compile, dropout = CompileOptions(counting), " --hidden-dropout 0.2" if "dropout" in words else ""
    expected, everything = computed(*build(f"{GROUPED}{dropout}", compile=compile))
    model, config = build(f"{GROUPED} {words}", compile=compile)
    found, kept = computed(model, config)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert kept < 0.95 * everything
    assert not counters["graph_break"]


def test_documents_that_begin_elsewhere_need_no_other_graphs() -> None:
    eager, config = build(GROUPED)
    counting = Counting()
    model, _ = build(GROUPED, compile=CompileOptions(counting, documents=True))
    assert len(left_out(model)) == 1
    seen = []
    for documents in (*DOCUMENTS, None):
        torch.testing.assert_close(
            computed(model, config, documents)[0], computed(eager, config, documents)[0], rtol=1e-4, atol=1e-5
        )
        seen.append(counting.graphs)
    assert seen[0] == seen[1] == seen[2], "the same graphs for other documents"


class OwnAttention(SelfAttention):
    """A user's attention that reads documents."""

    def forward(self, *inputs: Any, documents: DocumentStarts | None = None) -> Tensor:
        assert documents is None or isinstance(documents, tuple)
        return super().forward(*inputs, documents=documents)


def test_custom_attention_reads_documents_uncompiled() -> None:
    eager, config = build(GROUPED)
    expected, _ = computed(eager, config, DOCUMENTS[0])
    spec = spec_of(config.model, config.moe, 0)
    attention = replace(spec.submodules.self_attention, module=OwnAttention)
    own = replace(spec, submodules=replace(spec.submodules, self_attention=attention))
    compile = CompileOptions(Counting("eager"), documents=True)
    model = build_model(config.model, 1, CPU, options=ModelOptions(compile=compile), spec=own)
    assert left_out(model) == ("OwnAttention, which reads documents",)
    torch.testing.assert_close(computed(model, config, DOCUMENTS[0])[0], expected, rtol=1e-4, atol=1e-5)


def test_experts_stay_as_they_are() -> None:
    words = f"{GROUPED} {EXPERTS} --moe-layer-freq 2"
    eager, _ = computed(*build(words))
    model, config = build(words, compile=CompileOptions(Counting()))
    assert left_out(model) == ("experts, whose sizes depend on the routing",)
    torch.testing.assert_close(computed(model, config)[0], eager, rtol=1e-4, atol=1e-5)


def test_a_gate_in_the_second_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused gate, here in plain operations, is compiled into one graph and saves no activation."""
    kept = []
    for gates in (False, True):
        monkeypatch.setattr(mlp, "uses_triton", lambda inner, gates=gates: gates)
        torch._dynamo.reset()
        eager, _ = computed(*build(GROUPED))
        counting = Counting("aot_eager_decomp_partition")
        model, config = build(GROUPED, compile=CompileOptions(counting), fuses_gates=True)
        found, bytes_kept = computed(model, config)
        torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)
        assert counting.graphs == ONE and not counters["graph_break"]
        kept.append(bytes_kept)
    width = resolved(GROUPED).config.model.ffn_hidden_size
    assert width is not None
    assert kept[0] - kept[1] == 3 * BATCH * LENGTH * width * 4, "three layers"


@pytest.mark.parametrize("kept", [False, True])
def test_layers_in_fp8_share_one_graph(kept: bool) -> None:
    """Stored scales of weights are inputs of the graph, not constants."""
    scales, counting = WeightScales(CPU), Counting()
    fp8 = Fp8Options(FORMATS["hybrid"], range(3), scales=scales if kept else None)
    config = resolved(f"{GROUPED} --num-layers 3 --ffn-hidden-size 64").config

    def built(compile: CompileOptions | None) -> CausalLM:
        return build_model(config.model, 1, CPU, options=ModelOptions(fp8=fp8, compile=compile))

    eager, model = built(None), built(CompileOptions(counting))
    for _ in range(2):
        scales.refresh()
        found, expected = computed(model, config)[0], computed(eager, config)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        scales.forget()
        with torch.no_grad():
            for parameter in (*model.parameters(), *eager.parameters()):
                parameter.mul_(1.01)
    assert counting.graphs == ONE and not counters["graph_break"]
