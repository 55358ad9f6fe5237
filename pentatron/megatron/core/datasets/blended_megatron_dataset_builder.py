"""The train, validation and test samples of a run."""

from collections.abc import Callable, Sequence
from typing import Any

from pentatron.errors import UserError
from pentatron.megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from pentatron.megatron.datasets import PlannedDataset
from pentatron.megatron.state import current


class BlendedMegatronDatasetBuilder:
    """`cls` is GPTDataset or MockGPTDataset; `sizes` are the samples of train, valid and test.

    Every rank reads what it computes, so datasets are built on all of them, whatever `is_built_on_rank` says.
    """

    def __init__(
        self,
        cls: type[Any],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: GPTDatasetConfig,
    ) -> None:
        self.cls, self.sizes, self.config = cls, list(sizes), config

    def build(self) -> list[PlannedDataset | None]:
        plan = current().data
        if plan is None:
            raise UserError(
                "BlendedMegatronDatasetBuilder.build() knows its data only inside the dataset provider given to pretrain() or "
                "build_train_valid_test_data_iterators(); call it there"
            )
        return plan.build(self.cls, self.sizes, self.config)
