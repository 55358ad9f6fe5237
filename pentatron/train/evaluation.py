"""The loss on data that is not trained on."""

import itertools

from pentatron.config.run import RunConfig
from pentatron.data.epochs import FiniteDataset, Padded
from pentatron.parallel.world import World
from pentatron.train.batches import micro_batches
from pentatron.train.datasets import Datasets
from pentatron.train.parallel_model import ParallelModel
from pentatron.train.step import validation_loss


class Evaluation:
    def __init__(self, config: RunConfig, world: World, model: ParallelModel, datasets: Datasets) -> None:
        self.config, self.world, self.model, self.datasets = config, world, model, datasets

    def loss(self) -> float | None:
        """The loss on the validation set, if there is one."""
        valid, steps, size = (
            self.datasets.valid,
            self.config.train.eval_iters,
            self.config.train.global_batch_size,
        )
        assert size is not None
        if valid is None:
            return None
        if self.config.train.full_validation and isinstance(valid, FiniteDataset):
            steps = -(-len(valid) // size)
            valid = Padded(valid, steps * size)
        batches = micro_batches(self.config, self.world, valid, consumed_samples=0)
        wanted = itertools.islice(batches, steps * self.config.accumulation)
        return validation_loss(self.model, wanted, self.config.accumulation)
