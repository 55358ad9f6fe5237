"""Bytes of activations that a micro-batch keeps on a rank from forward to backward.

The formulas follow what the layers of `pentatron.nn` save for autograd, with an attention kernel that does
not store scores (flash attention); `make plan-check` compares them with the measured memory of a real step.
Compiled layers save less, because the compiler recomputes cheap operations: a norm saves its input and one
statistic a row, and the output of a gate's activation function is recomputed.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pentatron.layout.stages import StagePart
from pentatron.plan.shape import FP32, Shape
from pentatron.settings.parameters import has_shared_gate

_INDEX = 8
# Elements that the loss in plain torch converts to fp32 at a time.
_LOSS_BLOCK = 2**25
_UNFUSED_BACKENDS = ("math", "unfused", "local")
# Most tokens in a chunk of the fused loss in evaluation.
_EVALUATED = 4096


class Activations(NamedTuple):
    """Bytes that one micro-batch keeps on one stage: `layers` in and around the layers, `logits` for the
    loss."""

    layers: int
    logits: int


def saved_activations(shape: Shape, part: StagePart) -> Activations:
    """Returns the activations that a stage keeps from the end of a forward to its backward."""
    runs = shape.config.recomputed(part)
    recomputed = {layer for run in runs for layer in run}
    total = len(runs) * shape.hidden_states + _outside_layers(shape, part)
    total += layers_activations(shape, [number for number in part.layers if number not in recomputed])
    norm_saves_copy = shape.config.model.normalization == "RMSNorm" and _norm_saves_fp32(shape)
    norm_saves_copy = norm_saves_copy and "layernorm" not in shape.recomputed_modules
    if norm_saves_copy and not part.embedding and not recomputed:
        # The input received from the previous stage; otherwise the first norm or recomputed run saves it
        # anyway.
        total += shape.hidden_states
    return Activations(total, loss_activations(shape) if part.head else 0)


def layers_activations(shape: Shape, numbers: Sequence[int]) -> int:
    """Returns the activations of layers that are not recomputed as a whole."""
    kinds = Counter((number in shape.sparse_layers, number in shape.fp8_layers) for number in numbers)
    return sum(count * layer_activations(shape, sparse, fp8=fp8) for (sparse, fp8), count in kinds.items())


def recompute_peak(shape: Shape, part: StagePart) -> int:
    """Returns the largest amount of activations that recomputing layers, or a module of a layer, restores in
    backward."""
    if runs := shape.config.recomputed(part):
        return max(layers_activations(shape, run) for run in runs)
    if not shape.recomputed_modules:
        return 0
    kinds = {number in shape.sparse_layers for number in part.layers}
    gaps = (layer_activations(shape, kind, frozenset()) - layer_activations(shape, kind) for kind in kinds)
    return max(gaps, default=0)


def deferred_weight_gradient_inputs(shape: Shape, part: StagePart) -> int:
    """Returns the bytes kept between the input-gradient and weight-gradient halves of a split backward: the
    input and the output gradient of every linear layer."""
    s = shape

    def mlp(rows: int, inner: int) -> int:
        return rows * (2 * s.hidden + (s.halves + 1) * inner)

    attention = s.tokens * (2 * s.hidden + 2 * s.queries + 2 * s.keys)
    sparse = mlp(s.rows, s.expert_inner) + (mlp(s.tokens, s.shared_inner) if s.shared_inner else 0)
    dense = mlp(s.tokens, s.inner)
    elements = sum(attention + (sparse if number in s.sparse_layers else dense) for number in part.layers)
    return s.width * (elements + (s.tokens * (s.hidden + s.words) if part.head else 0))


def loss_activations(shape: Shape) -> int:
    """Returns the bytes the loss keeps for backward. A fused loss keeps the logits of one chunk in the
    model's precision; otherwise log-probabilities are kept in fp32, without vocabulary padding if one rank
    holds the whole vocabulary."""
    if shape.decisions.loss.on:
        return shape.width * loss_chunk(shape) * shape.words
    words = shape.words if shape.grid.tensor > 1 else shape.config.model.vocab_size
    return FP32 * shape.tokens * words


def evaluation_loss_bytes(shape: Shape) -> int:
    """Returns the bytes of the loss in evaluation. An unfused loss has logits in the model's precision and in
    fp32, and log-probabilities; a fused loss without its own kernel has two fp32 blocks."""
    if shape.decisions.loss.on:
        elements = min(loss_chunk(shape), _EVALUATED) * shape.words
        return shape.width * elements + _loss_blocks(shape, elements)
    cast = FP32 if shape.width != FP32 else 0
    return (shape.width + cast + FP32) * shape.tokens * shape.words


def _loss_blocks(shape: Shape, elements: int) -> int:
    """Returns the bytes of the two fp32 blocks of a fused loss without its own kernel."""
    return 0 if shape.decisions.loss.kernel else 2 * FP32 * min(_LOSS_BLOCK, elements)


def loss_chunk(shape: Shape) -> int:
    """Returns the number of tokens in a chunk of the fused loss; deferred weight gradients require a single
    chunk."""
    if shape.config.defers_weight_gradients:
        return shape.tokens
    return min(shape.tokens, shape.decisions.loss.chunk)


def loss_backward_bytes(shape: Shape) -> int:
    """Returns the extra bytes while the loss is differentiated, beside the log-probabilities: their gradient
    and that of the logits in fp32, and with a vocabulary-parallel loss also the latter in the model's
    precision. A fused loss overwrites the logits with their gradient; without its own kernel it needs two
    fp32 blocks for that."""
    if shape.decisions.loss.on:
        return _loss_blocks(shape, loss_chunk(shape) * shape.words)
    if shape.grid.tensor == 1:
        return 2 * FP32 * shape.tokens * shape.config.model.vocab_size
    cast = shape.width if shape.width != FP32 else 0
    return (2 * FP32 + cast) * shape.tokens * shape.words


def layer_activations(
    shape: Shape, sparse: bool, modules: frozenset[str] | None = None, fp8: bool = False
) -> int:
    """Returns the activations of one layer, dense or with experts, that is not recomputed as a whole.

    `modules` are those that selective recompute covers. With `fp8`, linear layers save their quantized
    inputs.
    """
    modules = shape.recomputed_modules if modules is None else modules
    dropout_indices = 2 * _INDEX * shape.local_tokens if shape.config.model.hidden_dropout else 0
    # The output of a norm is saved by the linear layer that reads it.
    norm = shape.width * shape.hidden if "layernorm" in modules else _norm_row(shape)
    feed_forward = _experts(shape, modules) if sparse else _mlp(shape, "mlp" in modules, fp8)
    attention = _attention(shape, "core_attn" in modules, fp8)
    return 2 * shape.local_tokens * norm + attention + feed_forward + dropout_indices


def _norm_saves_fp32(shape: Shape) -> bool:
    """Whether an RMSNorm in lower precision saves an fp32 copy of its input: on a GPU, and not compiled."""
    return bool(shape.on_gpu) and shape.width != FP32 and not shape.decisions.compilation.on


def _norm_row(shape: Shape) -> int:
    if shape.config.model.normalization == "LayerNorm":
        return shape.width * shape.hidden + 2 * FP32
    if shape.decisions.compilation.on:
        return shape.width * shape.hidden + FP32
    return ((FP32 if _norm_saves_fp32(shape) else shape.width) + shape.width) * shape.hidden + FP32


def _attention(shape: Shape, recomputed: bool, fp8: bool) -> int:
    """Returns the bytes of an attention block: its input, the fused QKV projection, rotated queries and keys,
    the output, and the log-sum-exp of each head and token."""
    s, model = shape, shape.config.model
    e, tokens = s.width, s.tokens
    projected, input_width = s.queries + 2 * s.keys, 1 if fp8 else e
    inputs, output = input_width * tokens * s.hidden, input_width * tokens * s.queries
    if recomputed:
        # A compiler recomputes the attention output as well.
        return inputs + e * tokens * projected + (0 if s.decisions.compilation.on else output)
    rotated = model.position_embedding_type == "rope"
    # Queries of several key/value groups are not a view of the projection, so that they are copied.
    copied = s.heads > s.groups > 1
    saved = FP32 * tokens * s.heads
    if s.grid.context > 1 and s.config.parallel.cp_comm_type == "a2a":
        # The all-to-all exchanges one contiguous tensor, so that the projection itself is not saved.
        saved += e * tokens * (s.queries + 2 * max(s.keys, s.head * s.grid.context // s.heads)) + output
    else:
        saved += e * tokens * projected
        # The head-major output is copied to token-major layout, except where a GPU kernel writes that
        # directly.
        relaid = s.grid.context > 1 or (rotated and not s.on_gpu) or fp8
        saved += e * tokens * s.queries if relaid else 0
        if rotated or model.qk_layernorm:
            saved += e * tokens * (s.queries + s.keys)
        elif copied:
            saved += e * tokens * s.queries
    if model.qk_layernorm:
        saved += _qk_norms(s, copied)
    return inputs + saved + output + _scores(s)


def _qk_norms(shape: Shape, copied: bool) -> int:
    s, tokens = shape, shape.tokens
    rows = tokens * (s.heads + s.groups)
    layer_norm = s.config.model.normalization == "LayerNorm"
    # Saved without a conversion: a view of the projection, unless it had to be copied.
    inputs = s.width * tokens * s.queries if copied else 0
    if layer_norm or s.decisions.compilation.on:
        return inputs + (1 + layer_norm) * FP32 * rows
    inputs = FP32 * tokens * (s.queries + s.keys) if _norm_saves_fp32(s) else inputs
    return inputs + s.width * tokens * (s.queries + s.keys) + FP32 * rows


def _scores(shape: Shape) -> int:
    """Returns the bytes of attention probabilities, for kernels that store them, and of their dropout."""
    model, backend = shape.config.model, shape.config.kernels.attention_backend
    # On a GPU no fused kernel supports grouped queries in fp32.
    fallback = shape.on_gpu and shape.width == FP32 and shape.heads > shape.groups
    fallback = fallback and backend == "auto" and shape.grid.context == 1
    if not (fallback or backend in _UNFUSED_BACKENDS or model.attention_dropout):
        return 0
    copies = 2 if model.attention_dropout else 1
    per_head = shape.tokens * model.seq_length // shape.grid.context
    return copies * shape.width * shape.heads * per_head


def _mlp(shape: Shape, recomputed: bool, fp8: bool) -> int:
    if recomputed:
        return shape.hidden_states
    if fp8:
        # Inputs of the matrices in one byte; the outputs of the first one in full precision for the gate's
        # backward.
        kept_widths = (2 if shape.decisions.gate.on else saved_ffn_tensors(shape) - 1) * shape.width
        return shape.tokens * (shape.hidden + (kept_widths + 1) * shape.inner)
    return shape.width * shape.tokens * (shape.hidden + saved_ffn_tensors(shape) * shape.inner)


def saved_ffn_tensors(shape: Shape, sparse: bool = False) -> int:
    """Returns how many tensors of the FFN width are saved per token: both halves of the gate and, unless
    recomputed, the activated half and the product; or the input and output of GELU."""
    if not shape.config.model.gated_linear_unit or (shape.decisions.gate.in_second and not sparse):
        return 2
    return 3 if shape.decisions.compilation.on and not sparse else 4


def _experts(shape: Shape, modules: frozenset[str]) -> int:
    s, moe, e = shape, shape.config.moe, shape.width
    if "moe" in modules:
        return s.hidden_states
    total = _router(s) + (_shared_expert(s, "shared_experts" in modules) if s.shared_inner else 0)
    if s.decisions.experts.on_device:
        # Grouped matmuls: the dispatched rows, the outputs of the first matrices, weights, and the
        # permutation both ways.
        inputs = 0 if "moe_act" in modules else e * s.rows * s.hidden
        return total + inputs + e * s.rows * (s.halves * s.expert_inner + 1) + 2 * _INDEX * s.rows
    inner = s.halves if "moe_act" in modules else saved_ffn_tensors(s, sparse=True)
    total += e * s.rows * (s.hidden + inner * s.expert_inner) + _INDEX * s.rows
    pairs = s.local_tokens * moe.moe_router_topk
    if moe.moe_token_dispatcher_type == "allgather":
        pairs *= s.grid.expert * s.grid.expert_tensor
    return total + pairs * (e * (s.hidden + 1) + _INDEX)


def _router(shape: Shape) -> int:
    """Returns the bytes of the router: its input in the router's precision, probabilities and indices, and
    the scores of all experts if an auxiliary loss reads them."""
    s, moe = shape, shape.config.moe
    router_bytes = {"fp32": FP32, "fp64": 2 * FP32}.get(moe.moe_router_dtype or "", s.width)
    balanced = any(moe.moe_aux_loss_coeff) and moe.moe_router_load_balancing_type != ("none",)
    full_scores = moe.moe_router_pre_softmax + moe.moe_router_score_function.count("sigmoid")
    full_scores += balanced + bool(moe.moe_z_loss_coeff)
    row = FP32 * moe.experts * full_scores + (FP32 + _INDEX) * moe.moe_router_topk
    return s.local_tokens * (router_bytes * s.hidden + row)


def _shared_expert(shape: Shape, recomputed: bool) -> int:
    s, e = shape, shape.width
    # The router has saved this input already, if its precision is the same.
    router_saves_input = s.config.moe.moe_router_dtype in (None, "fp32" if e == FP32 else "")
    inputs = 0 if router_saves_input else s.hidden_states
    if recomputed:
        return inputs
    if s.sequence_parallel:
        inputs = e * s.tokens * s.hidden
    gate = s.hidden_states if has_shared_gate(s.config.moe) else 0
    saved = 2 if s.decisions.gate.in_second else saved_ffn_tensors(s, sparse=True)
    return inputs + gate + e * s.tokens * saved * s.shared_inner


def _outside_layers(shape: Shape, part: StagePart) -> int:
    """Returns the bytes outside the layers: rotary angles, token ids, the final norm and the input of the
    output layer."""
    s, model = shape, shape.config.model
    vocabulary_parallel = s.grid.tensor > 1
    rotates = model.position_embedding_type == "rope" and bool(part.layers)
    total = FP32 * s.tokens * int(s.head * model.rotary_percent) if rotates else 0
    if part.embedding:
        total += s.tokens * (_INDEX + vocabulary_parallel)
        total += _INDEX * s.local_tokens if model.hidden_dropout else 0
        total += _INDEX * s.tokens if model.position_embedding_type == "learned_absolute" else 0
    if part.head:
        total += s.local_tokens * _norm_row(s) + s.width * s.tokens * s.hidden
        total += s.tokens * (_INDEX + FP32 + (vocabulary_parallel and not s.decisions.loss.on))
    return total
