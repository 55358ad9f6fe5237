"""Cross entropy of logits whose vocabulary is spread over the tensor axis."""

from torch import Tensor

from pentatron.errors import UserError
from pentatron.megatron.state import current
from pentatron.nn.loss import cross_entropy_of
from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """The loss of every token from this rank's part of the logits; the same on every tensor rank."""
    if label_smoothing:
        raise UserError(
            f"vocab_parallel_cross_entropy: label_smoothing={label_smoothing} is not available; leave it out"
        )
    run = current()
    axis, vocabulary = run.groups.axes.tensor, run.config.model.vocab_size
    assert vocabulary is not None
    first = axis.rank * vocab_parallel_logits.shape[-1]
    how = cross_entropy_of(decide(run.config, DeviceFacts(vocab_parallel_logits.device.type)).loss)
    return how.of_logits(vocab_parallel_logits, target, vocabulary, first, axis.group)
