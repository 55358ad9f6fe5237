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
from pentatron.plan.sizes import FP32, PlanSizes
from pentatron.settings.model_sizes import has_shared_gate

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


def saved_activations(sizes: PlanSizes, part: StagePart) -> Activations:
    """Returns the activations that a stage keeps from the end of a forward to its backward."""
    runs = sizes.config.recomputed(part)
    recomputed = {layer for run in runs for layer in run}
    total = len(runs) * sizes.hidden_states + _outside_layers(sizes, part)
    total += layers_activations(sizes, [number for number in part.layers if number not in recomputed])
    norm_saves_copy = sizes.config.model.normalization == "RMSNorm" and _norm_saves_fp32(sizes)
    norm_saves_copy = norm_saves_copy and "layernorm" not in sizes.recomputed_modules
    if norm_saves_copy and not part.embedding and not recomputed:
        # The input received from the previous stage; otherwise the first norm or recomputed run saves it
        # anyway.
        total += sizes.hidden_states
    return Activations(total, loss_activations(sizes) if part.head else 0)


def layers_activations(sizes: PlanSizes, numbers: Sequence[int]) -> int:
    """Returns the activations of layers that are not recomputed as a whole."""
    kinds = Counter((number in sizes.sparse_layers, number in sizes.fp8_layers) for number in numbers)
    return sum(count * layer_activations(sizes, sparse, fp8=fp8) for (sparse, fp8), count in kinds.items())


def recompute_peak(sizes: PlanSizes, part: StagePart) -> int:
    """Returns the largest amount of activations that recomputing layers, or a module of a layer, restores in
    backward."""
    if runs := sizes.config.recomputed(part):
        return max(layers_activations(sizes, run) for run in runs)
    if not sizes.recomputed_modules:
        return 0
    kinds = {number in sizes.sparse_layers for number in part.layers}
    gaps = (layer_activations(sizes, kind, frozenset()) - layer_activations(sizes, kind) for kind in kinds)
    return max(gaps, default=0)


def deferred_weight_gradient_inputs(sizes: PlanSizes, part: StagePart) -> int:
    """Returns the bytes kept between the input-gradient and weight-gradient halves of a split backward: the
    input and the output gradient of every linear layer."""
    s = sizes

    def mlp(rows: int, inner: int) -> int:
        return rows * (2 * s.hidden + (s.fc1_matrices + 1) * inner)

    attention = s.tokens * (2 * s.hidden + 2 * s.queries + 2 * s.keys)
    sparse = mlp(s.dispatched_rows, s.expert_inner) + (mlp(s.tokens, s.shared_inner) if s.shared_inner else 0)
    dense = mlp(s.tokens, s.inner)
    elements = sum(attention + (sparse if number in s.sparse_layers else dense) for number in part.layers)
    return s.element_bytes * (elements + (s.tokens * (s.hidden + s.local_vocab_size) if part.head else 0))


def loss_activations(sizes: PlanSizes) -> int:
    """Returns the bytes the loss keeps for backward. A fused loss keeps the logits of one chunk in the
    model's precision; otherwise log-probabilities are kept in fp32, without vocabulary padding if one rank
    holds the whole vocabulary."""
    if sizes.decisions.loss.on:
        return sizes.element_bytes * loss_chunk(sizes) * sizes.local_vocab_size
    vocab_size = sizes.local_vocab_size if sizes.grid.tensor > 1 else sizes.config.model.vocab_size
    return FP32 * sizes.tokens * vocab_size


def evaluation_loss_bytes(sizes: PlanSizes) -> int:
    """Returns the bytes of the loss in evaluation. An unfused loss has logits in the model's precision and in
    fp32, and log-probabilities; a fused loss without its own kernel has two fp32 blocks."""
    if sizes.decisions.loss.on:
        elements = min(loss_chunk(sizes), _EVALUATED) * sizes.local_vocab_size
        return sizes.element_bytes * elements + _loss_blocks(sizes, elements)
    cast = FP32 if sizes.element_bytes != FP32 else 0
    return (sizes.element_bytes + cast + FP32) * sizes.tokens * sizes.local_vocab_size


def _loss_blocks(sizes: PlanSizes, elements: int) -> int:
    """Returns the bytes of the two fp32 blocks of a fused loss without its own kernel."""
    return 0 if sizes.decisions.loss.kernel else 2 * FP32 * min(_LOSS_BLOCK, elements)


def loss_chunk(sizes: PlanSizes) -> int:
    """Returns the number of tokens in a chunk of the fused loss; deferred weight gradients require a single
    chunk."""
    if sizes.config.defers_weight_gradients:
        return sizes.tokens
    return min(sizes.tokens, sizes.decisions.loss.chunk)


def loss_backward_bytes(sizes: PlanSizes) -> int:
    """Returns the extra bytes while the loss is differentiated, beside the log-probabilities: their gradient
    and that of the logits in fp32, and with a vocabulary-parallel loss also the latter in the model's
    precision. A fused loss overwrites the logits with their gradient; without its own kernel it needs two
    fp32 blocks for that."""
    if sizes.decisions.loss.on:
        return _loss_blocks(sizes, loss_chunk(sizes) * sizes.local_vocab_size)
    if sizes.grid.tensor == 1:
        return 2 * FP32 * sizes.tokens * sizes.config.model.vocab_size
    cast = sizes.element_bytes if sizes.element_bytes != FP32 else 0
    return (2 * FP32 + cast) * sizes.tokens * sizes.local_vocab_size


def layer_activations(
    sizes: PlanSizes, sparse: bool, modules: frozenset[str] | None = None, fp8: bool = False
) -> int:
    """Returns the activations of one layer, dense or with experts, that is not recomputed as a whole.

    `modules` are those that selective recompute covers. With `fp8`, linear layers save their quantized
    inputs.
    """
    modules = sizes.recomputed_modules if modules is None else modules
    dropout_indices = 2 * _INDEX * sizes.local_tokens if sizes.config.model.hidden_dropout else 0
    # The output of a norm is saved by the linear layer that reads it.
    norm = sizes.element_bytes * sizes.hidden if "layernorm" in modules else _norm_row(sizes)
    feed_forward = _experts(sizes, modules) if sparse else _mlp(sizes, "mlp" in modules, fp8)
    attention = _attention(sizes, "core_attn" in modules, fp8)
    return 2 * sizes.local_tokens * norm + attention + feed_forward + dropout_indices


def _norm_saves_fp32(sizes: PlanSizes) -> bool:
    """Whether an RMSNorm in lower precision saves an fp32 copy of its input: on a GPU, and not compiled."""
    return bool(sizes.on_gpu) and sizes.element_bytes != FP32 and not sizes.decisions.compilation.on


def _norm_row(sizes: PlanSizes) -> int:
    if sizes.config.model.normalization == "LayerNorm":
        return sizes.element_bytes * sizes.hidden + 2 * FP32
    if sizes.decisions.compilation.on:
        return sizes.element_bytes * sizes.hidden + FP32
    input_bytes = FP32 if _norm_saves_fp32(sizes) else sizes.element_bytes
    return (input_bytes + sizes.element_bytes) * sizes.hidden + FP32


def _attention(sizes: PlanSizes, recomputed: bool, fp8: bool) -> int:
    """Returns the bytes of an attention block: its input, the fused QKV projection, rotated queries and keys,
    the output, and the log-sum-exp of each head and token."""
    s, model = sizes, sizes.config.model
    e, tokens = s.element_bytes, s.tokens
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


def _qk_norms(sizes: PlanSizes, copied: bool) -> int:
    s, tokens = sizes, sizes.tokens
    rows = tokens * (s.heads + s.groups)
    layer_norm = s.config.model.normalization == "LayerNorm"
    # Saved without a conversion: a view of the projection, unless it had to be copied.
    inputs = s.element_bytes * tokens * s.queries if copied else 0
    if layer_norm or s.decisions.compilation.on:
        return inputs + (1 + layer_norm) * FP32 * rows
    inputs = FP32 * tokens * (s.queries + s.keys) if _norm_saves_fp32(s) else inputs
    return inputs + s.element_bytes * tokens * (s.queries + s.keys) + FP32 * rows


def _scores(sizes: PlanSizes) -> int:
    """Returns the bytes of attention probabilities, for kernels that store them, and of their dropout."""
    model, backend = sizes.config.model, sizes.config.kernels.attention_backend
    # On a GPU no fused kernel supports grouped queries in fp32.
    fallback = sizes.on_gpu and sizes.element_bytes == FP32 and sizes.heads > sizes.groups
    fallback = fallback and backend == "auto" and sizes.grid.context == 1
    if not (fallback or backend in _UNFUSED_BACKENDS or model.attention_dropout):
        return 0
    copies = 2 if model.attention_dropout else 1
    per_head = sizes.tokens * model.seq_length // sizes.grid.context
    return copies * sizes.element_bytes * sizes.heads * per_head


def _mlp(sizes: PlanSizes, recomputed: bool, fp8: bool) -> int:
    if recomputed:
        return sizes.hidden_states
    if fp8:
        # Inputs of the matrices in one byte; the outputs of the first one in full precision for the gate's
        # backward.
        kept_widths = (2 if sizes.decisions.gate.on else saved_ffn_tensors(sizes) - 1) * sizes.element_bytes
        return sizes.tokens * (sizes.hidden + (kept_widths + 1) * sizes.inner)
    return sizes.element_bytes * sizes.tokens * (sizes.hidden + saved_ffn_tensors(sizes) * sizes.inner)


def saved_ffn_tensors(sizes: PlanSizes, sparse: bool = False) -> int:
    """Returns how many tensors of the FFN width are saved per token: both halves of the gate and, unless
    recomputed, the activated half and the product; or the input and output of GELU."""
    if not sizes.config.model.gated_linear_unit or (sizes.decisions.gate.in_second and not sparse):
        return 2
    return 3 if sizes.decisions.compilation.on and not sparse else 4


def _experts(sizes: PlanSizes, modules: frozenset[str]) -> int:
    s, moe, e = sizes, sizes.config.moe, sizes.element_bytes
    if "moe" in modules:
        return s.hidden_states
    total = _router(s) + (_shared_expert(s, "shared_experts" in modules) if s.shared_inner else 0)
    if s.decisions.experts.on_device:
        # Grouped matmuls: the dispatched rows, the outputs of the first matrices, weights, and the
        # permutation both ways.
        inputs = 0 if "moe_act" in modules else e * s.dispatched_rows * s.hidden
        return (
            total
            + inputs
            + e * s.dispatched_rows * (s.fc1_matrices * s.expert_inner + 1)
            + 2 * _INDEX * s.dispatched_rows
        )
    inner = s.fc1_matrices if "moe_act" in modules else saved_ffn_tensors(s, sparse=True)
    total += e * s.dispatched_rows * (s.hidden + inner * s.expert_inner) + _INDEX * s.dispatched_rows
    pairs = s.local_tokens * moe.moe_router_topk
    if moe.moe_token_dispatcher_type == "allgather":
        pairs *= s.grid.expert * s.grid.expert_tensor
    return total + pairs * (e * (s.hidden + 1) + _INDEX)


def _router(sizes: PlanSizes) -> int:
    """Returns the bytes of the router: its input in the router's precision, probabilities and indices, and
    the scores of all experts if an auxiliary loss reads them."""
    s, moe = sizes, sizes.config.moe
    router_bytes = {"fp32": FP32, "fp64": 2 * FP32}.get(moe.moe_router_dtype or "", s.element_bytes)
    balanced = any(moe.moe_aux_loss_coeff) and moe.moe_router_load_balancing_type != ("none",)
    full_scores = moe.moe_router_pre_softmax + moe.moe_router_score_function.count("sigmoid")
    full_scores += balanced + bool(moe.moe_z_loss_coeff)
    row = FP32 * moe.experts * full_scores + (FP32 + _INDEX) * moe.moe_router_topk
    return s.local_tokens * (router_bytes * s.hidden + row)


def _shared_expert(sizes: PlanSizes, recomputed: bool) -> int:
    s, e = sizes, sizes.element_bytes
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


def _outside_layers(sizes: PlanSizes, part: StagePart) -> int:
    """Returns the bytes outside the layers: rotary angles, token ids, the final norm and the input of the
    output layer."""
    s, model = sizes, sizes.config.model
    vocabulary_parallel = s.grid.tensor > 1
    rotates = model.position_embedding_type == "rope" and bool(part.layers)
    total = FP32 * s.tokens * int(s.head * model.rotary_percent) if rotates else 0
    if part.embedding:
        total += s.tokens * (_INDEX + vocabulary_parallel)
        total += _INDEX * s.local_tokens if model.hidden_dropout else 0
        total += _INDEX * s.tokens if model.position_embedding_type == "learned_absolute" else 0
    if part.head:
        total += s.local_tokens * _norm_row(s) + s.element_bytes * s.tokens * s.hidden
        total += s.tokens * (_INDEX + FP32 + (vocabulary_parallel and not s.decisions.loss.on))
    return total
