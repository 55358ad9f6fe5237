"""Pretrains GPT with Megatron-LM's flags, and is the example of its API.

Any of the functions below can be replaced by your own.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpt_builders import gpt_builder
from model_provider import model_provider
from pentatron.megatron import as_megatron
from pentatron.megatron.core import mpu
from pentatron.megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from pentatron.megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from pentatron.megatron.core.enums import ModelType
from pentatron.megatron.core.models.gpt import GPTModel
from pentatron.megatron.training import get_args, get_timers, pretrain, print_rank_0
from pentatron.megatron.training.arguments import core_gpt_dataset_config_from_args
from pentatron.megatron.training.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank

if __name__ == "__main__":
    # A builder written for Megatron-LM (`from megatron.core ...`) can be imported below this line as it is.
    as_megatron()


def get_batch(data_iterator: Iterator[dict[str, Tensor]]) -> tuple[Tensor | None, ...]:
    """Returns the next micro-batch: tokens, labels, loss_mask, attention_mask, position_ids.

    Inner pipeline stages get None for each.
    """
    if not mpu.is_pipeline_first_stage() and not mpu.is_pipeline_last_stage():
        return None, None, None, None, None
    batch = get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator))
    return tuple(batch.values())


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the summed loss of this rank's tokens, their number, and a report for the log.

    The report has both summed over the data-parallel ranks.
    """
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum()
    report = torch.stack((loss.detach(), num_tokens))
    torch.distributed.all_reduce(report, group=mpu.get_data_parallel_group())
    return loss, num_tokens.to(torch.int), {"lm loss": report}


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]], model: GPTModel
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Returns the model's output for a micro-batch, and the function that makes a loss of it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator)
    timers("batch-generator").stop()
    output_tensor = model(tokens, position_ids, attention_mask, labels=labels)
    return output_tensor, partial(loss_func, loss_mask)


def is_dataset_built_on_rank() -> bool:
    """Returns True: every rank builds its datasets."""
    return True


def train_valid_test_datasets_provider(train_val_test_num_samples: Sequence[int]) -> tuple[Any, Any, Any]:
    args = get_args()
    config = core_gpt_dataset_config_from_args(args)
    dataset_type = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    train_ds, valid_ds, test_ds = BlendedMegatronDatasetBuilder(
        dataset_type, train_val_test_num_samples, is_dataset_built_on_rank, config
    ).build()
    return train_ds, valid_ds, test_ds


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        partial(model_provider, gpt_builder),
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
