"""What a micro-batch leaves on a rank between its forward and its backward, in bytes, part by part.

The formulas follow what the layers of `pentatron.nn` save for autograd, with an attention kernel that keeps no scores (flash);
`make plan-check` holds them against the memory of a real step. Compiled layers keep less: a compiler computes again what is cheap, so that
norms leave their input and a number for each row, and a gate's activation is made anew. Below, T are the tokens a rank's attention sees, S those of
which it has the stream (T / tensor ranks with sequence parallelism), e the bytes of a number.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pentatron.layout.stages import StagePart
from pentatron.plan.shape import Shape
from pentatron.settings.parameters import has_shared_gate

_FP32, _INDEX = 4, 8
# Elements that the loss in plain torch has in fp32 at a time.
_BLOCK = 2**25
_UNFUSED = ("math", "unfused", "local")
# Tokens of which a fused loss without a backward has the logits at a time.
_EVALUATED = 4096


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one stage: in layers and around them, and of the last logits."""

    layers: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return self.layers + self.logits


def kept(shape: Shape, part: StagePart) -> Activations:
    """From the end of a forward to the backward."""
    runs = shape.config.recomputed(part)
    again = {layer for run in runs for layer in run}
    stream = shape.width * shape.in_stream * shape.hidden
    total = len(runs) * stream
    total += _sum_of(shape, [number for number in part.layers if number not in again])
    total += _around(shape, part)
    if not part.embedding and not again and not _norm_keeps_input(shape):
        # What came from the stage before; elsewhere the first norm or run keeps it anyway.
        total += stream
    return Activations(total, logits(shape) if part.head else 0)


def _sum_of(shape: Shape, layers: Sequence[int]) -> int:
    kinds = Counter((number in shape.sparse_layers, number in shape.fp8_layers) for number in layers)
    return sum(count * layer(shape, sparse, fp8=fp8) for (sparse, fp8), count in kinds.items())


def first_layer(shape: Shape, part: StagePart) -> int:
    """What is left when the backward of a stage has come to its first layer."""
    return _sum_of(shape, part.layers[:1])


def rerun(shape: Shape, part: StagePart) -> int:
    """What comes back for a while when layers, or a module of one, run again in backward: the largest of these."""
    runs = shape.config.recomputed(part)
    if runs:
        return max(_sum_of(shape, run) for run in runs)
    if not _modules(shape):
        return 0
    kinds = {number in shape.sparse_layers for number in part.layers}
    return max((layer(shape, kind, frozenset()) - layer(shape, kind) for kind in kinds), default=0)


def deferred(shape: Shape, part: StagePart) -> int:
    """Between the halves of a backward: the input and the gradient of the output of every product with a weight."""
    s, tokens = shape, shape.tokens
    attention = 2 * s.hidden + 2 * s.queries + 2 * s.keys
    total = 0
    for number in part.layers:
        elements = tokens * attention
        if number in s.sparse_layers:
            elements += s.rows * (2 * s.hidden + (s.halves + 1) * s.expert_inner)
            if s.shared_inner:
                elements += tokens * (2 * s.hidden + (s.halves + 1) * s.shared_inner)
        else:
            elements += tokens * (2 * s.hidden + (s.halves + 1) * s.inner)
        total += s.width * elements
    return total + (s.width * tokens * (s.hidden + s.words) if part.head else 0)


def logits(shape: Shape) -> int:
    """Fused: logits in the model's precision, of as many tokens as a chunk has. Otherwise log-probabilities in fp32, of the words
    without padding where one rank has all of them."""
    model = shape.config.model
    if shape.decisions.loss.on:
        return shape.width * chunk(shape) * shape.words
    words = shape.words if shape.grid.tensor > 1 else model.vocab_size
    return _FP32 * shape.tokens * words


def logits_evaluated(shape: Shape) -> int:
    """Without a backward. What is not fused has logits in the model's precision and in fp32, and log-probabilities; a fused loss without
    a kernel of its own two blocks in fp32."""
    if shape.decisions.loss.on:
        elements = min(chunk(shape), _EVALUATED) * shape.words
        return shape.width * elements + (
            0 if shape.decisions.loss.kernel else 2 * _FP32 * min(_BLOCK, elements)
        )
    cast = _FP32 if shape.width != _FP32 else 0
    return (shape.width + cast + _FP32) * shape.tokens * shape.words


def in_layer(shape: Shape) -> int:
    """The most that a layer without experts has at once in forward: no more than all that it could keep."""
    return layer(shape, sparse=False, modules=frozenset())


def chunk(shape: Shape) -> int:
    """Tokens of which a fused loss has the logits at a time; products that are deferred take all at once."""
    if shape.config.defers_weight_gradients:
        return shape.tokens
    return min(shape.tokens, shape.decisions.loss.chunk)


def loss_in_backward(shape: Shape) -> int:
    """Beside the log-probabilities, while the loss is differentiated: their gradient and that of the logits, in fp32; where ranks
    share the words, also the latter in the model's precision. A fused loss writes the gradient over the logits, without a kernel of its
    own by way of two blocks in fp32."""
    model = shape.config.model
    if shape.decisions.loss.on:
        return 0 if shape.decisions.loss.kernel else 2 * _FP32 * min(_BLOCK, chunk(shape) * shape.words)
    if shape.grid.tensor == 1:
        return 2 * _FP32 * shape.tokens * model.vocab_size
    cast = shape.width if shape.width != _FP32 else 0
    return (2 * _FP32 + cast) * shape.tokens * shape.words


def layer(shape: Shape, sparse: bool, modules: frozenset[str] | None = None, fp8: bool = False) -> int:
    """Of a layer, with experts or without, that is not recomputed as a whole; `modules` of it are. `fp8`: its matrices keep their
    inputs rounded."""
    modules = _modules(shape) if modules is None else modules
    keys = 2 * _INDEX * shape.in_stream if shape.config.model.hidden_dropout else 0
    norms = 2 * _norm(shape, "layernorm" in modules)
    after = _experts(shape, modules) if sparse else _mlp(shape, "mlp" in modules, fp8)
    return norms + _attention(shape, "core_attn" in modules, fp8) + after + keys


def _modules(shape: Shape) -> frozenset[str]:
    memory = shape.config.memory
    return frozenset(memory.recompute_modules if memory.recompute_granularity == "selective" else ())


def _norm_keeps_input(shape: Shape) -> bool:
    rms = shape.config.model.normalization == "RMSNorm"
    return not rms or not _norm_widens(shape) or "layernorm" in _modules(shape)


def _norm_widens(shape: Shape) -> bool:
    """An RMSNorm in fewer bits than fp32 keeps a copy of its input in fp32 instead, unless it is compiled or on a CPU."""
    return bool(shape.on_gpu) and shape.width != _FP32 and not shape.decisions.compilation.on


def _norm(shape: Shape, again: bool) -> int:
    """The input, and of an RMSNorm what it becomes before it meets the weights. The output is kept by who uses it."""
    rows, width = shape.in_stream, shape.hidden
    if again:
        return shape.width * rows * width
    return rows * _norm_row(shape, width)


def _norm_row(shape: Shape, width: int) -> int:
    if shape.config.model.normalization == "LayerNorm":
        return shape.width * width + 2 * _FP32
    if shape.decisions.compilation.on:
        return shape.width * width + _FP32
    return ((_FP32 if _norm_widens(shape) else shape.width) + shape.width) * width + _FP32


def _attention(shape: Shape, again: bool, fp8: bool) -> int:
    """Input, fused projection, rotated queries and keys, output, a number for each head and token."""
    s, model = shape, shape.config.model
    e, tokens = s.width, s.tokens
    projected = s.queries + 2 * s.keys
    given, found = (1 if fp8 else e) * tokens * s.hidden, (1 if fp8 else e) * tokens * s.queries
    if again:
        # A compiler makes what the heads found anew as well.
        return given + e * tokens * projected + (0 if s.decisions.compilation.on else found)
    rotated = model.position_embedding_type == "rope"
    # Queries of several groups cannot stay a view of the projection.
    copied = s.heads > s.groups > 1
    core = _FP32 * tokens * s.heads
    if s.grid.context > 1 and s.config.parallel.cp_comm_type == "a2a":
        # Exchanged in one piece, so that the projection itself is not needed.
        core += e * tokens * (s.queries + 2 * max(s.keys, s.head * s.grid.context // s.heads)) + found
    else:
        core += e * tokens * projected
        # Computed head by head, it is laid out anew, token by token, for what follows. A GPU's kernels compute it so.
        anew = s.grid.context > 1 or (rotated and not s.on_gpu) or fp8
        core += e * tokens * s.queries if anew else 0
        if rotated or model.qk_layernorm:
            core += e * tokens * (s.queries + s.keys)
        elif copied:
            core += e * tokens * s.queries
    if model.qk_layernorm:
        core += _norms_of_heads(s, copied)
    return given + core + found + _scores(s)


def _norms_of_heads(shape: Shape, copied: bool) -> int:
    s, tokens = shape, shape.tokens
    rows = tokens * (s.heads + s.groups)
    layer_norm = s.config.model.normalization == "LayerNorm"
    if layer_norm or s.decisions.compilation.on:
        return (s.width * tokens * s.queries if copied else 0) + (1 + layer_norm) * _FP32 * rows
    widened = _FP32 * tokens * (s.queries + s.keys)
    if not _norm_widens(s):
        # Kept as it is: a view of the projection, unless it had to be copied.
        widened = s.width * tokens * s.queries if copied else 0
    return widened + s.width * tokens * (s.queries + s.keys) + _FP32 * rows


def _scores(shape: Shape) -> int:
    """What kernels keep that do not compute scores anew: probabilities, and with dropout what it left of them."""
    config = shape.config
    # On a GPU no other kernel takes groups of queries in fp32.
    plain = shape.on_gpu and shape.width == _FP32 and shape.heads > shape.groups
    plain = plain and config.kernels.attention_backend == "auto" and shape.grid.context == 1
    kept = plain or config.kernels.attention_backend in _UNFUSED or config.model.attention_dropout
    if not kept:
        return 0
    per_head = shape.tokens * config.model.seq_length // shape.grid.context
    copies = 2 if config.model.attention_dropout else 1
    return copies * shape.width * shape.heads * per_head


def _mlp(shape: Shape, again: bool, fp8: bool) -> int:
    if again:
        return shape.width * shape.in_stream * shape.hidden
    if fp8:
        # The input of each matrix in one byte; of a gate that is a part of the first matrix, what that one made.
        wide = (2 if shape.decisions.gate.on else between(shape) - 1) * shape.width
        return shape.tokens * (shape.hidden + (wide + 1) * shape.inner)
    return shape.width * shape.tokens * (shape.hidden + between(shape) * shape.inner)


def between(shape: Shape, sparse: bool = False) -> int:
    """Of the inner width: both halves, and unless they are made anew the activated one and the product; or what goes into GELU and
    what comes out."""
    if not shape.config.model.gated_linear_unit:
        return 2
    if shape.decisions.gate.in_second and not sparse:
        return 2
    return 3 if shape.decisions.compilation.on and not sparse else 4


def _experts(shape: Shape, modules: frozenset[str]) -> int:
    s, moe, e = shape, shape.config.moe, shape.width
    stream = e * s.in_stream * s.hidden
    if "moe" in modules:
        return stream
    total = _router(s)
    if s.decisions.experts.on_device:
        total += _together(s, "moe_act" in modules)
        return total + (_shared_expert(s, "shared_experts" in modules) if s.shared_inner else 0)
    inner = s.halves if "moe_act" in modules else between(s, sparse=True)
    total += e * s.rows * (s.hidden + inner * s.expert_inner) + _INDEX * s.rows
    pairs = s.in_stream * moe.moe_router_topk
    if moe.moe_token_dispatcher_type == "allgather":
        pairs *= s.grid.expert * s.grid.expert_tensor
    total += pairs * (e * (s.hidden + 1) + _INDEX)
    if not s.shared_inner:
        return total
    return total + _shared_expert(s, "shared_experts" in modules)


def _together(shape: Shape, again: bool) -> int:
    """Experts multiplied as one: the rows they get, what the first matrices make of them, weights, and the order both ways."""
    rows, e = shape.rows, shape.width
    given = 0 if again else e * rows * shape.hidden
    return given + e * rows * (shape.halves * shape.expert_inner + 1) + 2 * _INDEX * rows


def _router(shape: Shape) -> int:
    """Its input, in its own precision; probabilities and choices; scores of all experts, where a loss looks at them."""
    s, moe = shape, shape.config.moe
    wide = {"fp32": _FP32, "fp64": 2 * _FP32}.get(moe.moe_router_dtype or "", s.width)
    total = wide * s.in_stream * s.hidden
    balanced = any(moe.moe_aux_loss_coeff) and moe.moe_router_load_balancing_type != ("none",)
    whole = moe.moe_router_pre_softmax + moe.moe_router_score_function.count("sigmoid")
    whole += balanced + bool(moe.moe_z_loss_coeff)
    return total + s.in_stream * (_FP32 * moe.experts * whole + (_FP32 + _INDEX) * moe.moe_router_topk)


def _shared_expert(shape: Shape, again: bool) -> int:
    s, e = shape, shape.width
    stream = e * s.in_stream * s.hidden
    # Without sequence parallelism, and in the same precision, the router has kept this already.
    same = s.config.moe.moe_router_dtype in (None, "fp32" if e == _FP32 else "")
    if again:
        return 0 if same else stream
    given = e * s.tokens * s.hidden if s.sequence_parallel else (0 if same else stream)
    gated = stream if has_shared_gate(s.config.moe) else 0
    kept = 2 if s.decisions.gate.in_second else between(s, sparse=True)
    return given + gated + e * s.tokens * kept * s.shared_inner


def _around(shape: Shape, part: StagePart) -> int:
    """Angles of rotation, tokens to look up, the last norm and the input of the head."""
    s, model = shape, shape.config.model
    split = s.grid.tensor > 1
    total = 0
    if model.position_embedding_type == "rope" and part.layers:
        total += _FP32 * s.tokens * int(s.head * model.rotary_percent)
    if part.embedding:
        total += s.tokens * (_INDEX + split)
        total += _INDEX * s.in_stream if model.hidden_dropout else 0
        total += _INDEX * s.tokens if model.position_embedding_type == "learned_absolute" else 0
    if part.head:
        total += s.in_stream * _norm_row(s, s.hidden) + s.width * s.tokens * s.hidden
        total += s.tokens * (_INDEX + _FP32 + (split and not s.decisions.loss.on))
    return total
