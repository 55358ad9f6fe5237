"""Warm-up and cosine decay for any of torch's optimizers, by the name and with the arguments that scripts know."""

from typing import TYPE_CHECKING

from pentatron.optim.schedule import LearningRate

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR


def get_cosine_schedule_with_warmup(
    optimizer: "Optimizer", num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> "LambdaLR":
    """From 0 to the optimizer's own rate in `num_warmup_steps`, and along half a cosine to 0 at `num_training_steps`, where it stays."""
    # Torch's schedulers bring its compiler along, which who does not use them need not wait for.
    from torch.optim.lr_scheduler import LambdaLR

    share = LearningRate(
        "cosine", peak=1.0, floor=0.0, warmup_samples=num_warmup_steps, decay_samples=num_training_steps
    )
    return LambdaLR(optimizer, share, last_epoch)
