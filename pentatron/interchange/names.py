"""What the tensors of our models are called in Megatron-LM's checkpoints: a table for both directions; `links.py` reads it.

`{layer}` is the place of the layer's number, `{kind}` is `weight` or `bias`. Queries, keys and values by group, gate before up, and all
experts in one tensor are as we have them, so what differs are names, and the axis of layers in front.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A tensor of ours, and its names there: the first that a file has is read.

    `halves`: some files have its two halves apart, under the name with `_w` and with `_v`. `experts`: some have each expert
    apart. `also`: whether layers with experts are written under every name, as two kinds of layers ask for it.
    """

    ours: str
    theirs: tuple[str, ...]
    halves: bool = False
    experts: bool = False
    also: bool = False


LAYER = "decoder.layers.{layer}."
_EXPERTS = "mlp.experts.experts."

OUTSIDE_LAYERS = (
    Row("embedding.word.weight", ("embedding.word_embeddings.weight",)),
    Row("embedding.position.weight", ("embedding.position_embeddings.weight",)),
    Row("final_norm.{kind}", ("decoder.final_layernorm.{kind}",)),
    Row("head.weight", ("output_layer.weight",)),
)
# Their names follow `decoder.layers.` and, unless all layers lie in one tensor, the layer's number.
IN_LAYERS = (
    Row("input_norm.{kind}", ("self_attention.linear_qkv.layer_norm_{kind}", "input_layernorm.{kind}")),
    Row("attention.linear_qkv.{kind}", ("self_attention.linear_qkv.{kind}",)),
    Row("attention.q_norm.{kind}", ("self_attention.q_layernorm.{kind}",)),
    Row("attention.k_norm.{kind}", ("self_attention.k_layernorm.{kind}",)),
    Row("attention.linear_proj.{kind}", ("self_attention.linear_proj.{kind}",)),
    Row("mlp_norm.{kind}", ("mlp.linear_fc1.layer_norm_{kind}", "pre_mlp_layernorm.{kind}"), also=True),
    Row("mlp.linear_fc1.{kind}", ("mlp.linear_fc1.{kind}",), halves=True),
    Row("mlp.linear_fc2.{kind}", ("mlp.linear_fc2.{kind}",)),
    Row("mlp.router.weight", ("mlp.router.weight",)),
    Row("mlp.router.bias", ("mlp.router.expert_bias",)),
    Row("mlp.experts.linear_fc1.weight", (f"{_EXPERTS}linear_fc1.weight",), halves=True, experts=True),
    Row("mlp.experts.linear_fc2.weight", (f"{_EXPERTS}linear_fc2.weight",), experts=True),
    Row("mlp.shared.mlp.linear_fc1.{kind}", ("mlp.shared_experts.linear_fc1.{kind}",), halves=True),
    Row("mlp.shared.mlp.linear_fc2.{kind}", ("mlp.shared_experts.linear_fc2.{kind}",)),
    Row("mlp.shared.gate.weight", ("mlp.shared_experts.gate_weight",)),
)
# What their layers keep besides tensors: nothing, unless matrices are in fp8, but a loader asks for it. With the number of
# axes in front of it: the layers, and the experts.
EXTRA_STATE = "_extra_state"
EXTRA_IN_LAYERS = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "input_layernorm",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
)
EXTRA_OF_EXPERTS = (f"{_EXPERTS}linear_fc1", f"{_EXPERTS}linear_fc2")
EXTRA_OUTSIDE = ("decoder.final_layernorm",)
