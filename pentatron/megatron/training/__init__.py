"""Megatron's reference trainer: its names over our session, loop and checkpoints."""

from pentatron.megatron.training.global_vars import (
    get_args,
    get_one_logger,
    get_tensorboard_writer,
    get_timers,
    get_tokenizer,
    get_wandb_writer,
)
from pentatron.megatron.training.initialize import initialize_megatron
from pentatron.megatron.training.training import pretrain
from pentatron.megatron.training.utils import is_last_rank, print_rank_0, print_rank_last

__all__ = [
    "get_args",
    "get_one_logger",
    "get_tensorboard_writer",
    "get_timers",
    "get_tokenizer",
    "get_wandb_writer",
    "initialize_megatron",
    "is_last_rank",
    "pretrain",
    "print_rank_0",
    "print_rank_last",
]
