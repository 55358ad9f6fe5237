"""A user's dataset provider as the data of a run.

The provider is called once, before it is known where the run goes on. What Megatron's builder returns inside it is therefore a
promise: the samples are laid out when they are first asked for, or for the session when it knows the order that the run began
with. Datasets of the user's own are used as they are.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pentatron.data.datasets import Numbers, OpenedData, Parts, Wanted, open_data, wanted_samples
from pentatron.data.gpt_dataset import GPTDataset
from pentatron.data.loader import EpochShuffle, FiniteDataset
from pentatron.data.sampling import SPLIT_NAMES, IndexCache, Sample
from pentatron.errors import UserError
from pentatron.megatron import state
from pentatron.megatron.core.datasets.gpt_dataset import Blend, GPTDatasetConfig, MockGPTDataset
from pentatron.monitor.display import Display
from pentatron.parallel.world import World
from pentatron.settings.run import RunConfig

DatasetProvider = Callable[[Sequence[int]], Any]


class PlannedDataset:
    """One split of what the builder was asked for."""

    def __init__(self, plan: "Planned", place: int) -> None:
        self.plan = plan
        self.place = place

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        found: Sample = self.samples[index]
        return found

    @property
    def samples(self) -> Any:
        return self.plan.parts()[self.place]


class Planned:
    """Opened data, and its samples once an order is known or needed."""

    def __init__(self, opened: OpenedData, wanted: Wanted) -> None:
        self.opened = opened
        self.wanted = wanted
        self._parts: Parts | None = None

    def lay_out(self, numbers: Numbers, cache: IndexCache) -> None:
        self._parts = self.opened.order(numbers, cache)

    def parts(self) -> Parts:
        if self._parts is None:
            self.lay_out(Numbers([self.wanted.train], [self.wanted.valid]), IndexCache())
        assert self._parts is not None
        return self._parts


class DataPlan:
    """What a dataset provider does while it is called."""

    def __init__(self, config: RunConfig, world: World, folder: Path, display: Display) -> None:
        self.config, self.world, self.folder, self.display = config, world, folder, display
        self.made: list[Planned] = []

    def build(
        self, cls: type[Any], sizes: Sequence[int | None], asked: GPTDatasetConfig
    ) -> list[PlannedDataset | None]:
        if cls not in (GPTDataset, MockGPTDataset):
            raise UserError(
                f"the dataset builder makes GPTDataset and MockGPTDataset, not {cls.__name__}; return a dataset of your own class from "
                "the provider instead, built by yourself"
            )
        wanted = wanted_samples(self.config)
        for name, size, own in zip(SPLIT_NAMES, sizes, wanted, strict=True):
            if size is not None and size != own:
                raise UserError(
                    f"the dataset builder was asked for {size} {name} samples, the run needs {own}; hand on the sizes that the "
                    "provider is called with"
                )
        config = _as_asked(self.config, asked, cls is MockGPTDataset)
        planned = Planned(open_data(config, self.world, self.folder, self.display), wanted)
        self.made.append(planned)
        return [PlannedDataset(planned, place) if wanted[place] else None for place in range(len(sizes))]


class UserSamples:
    """A user's dataset: dictionaries with tokens, labels, loss_mask and position_ids, as tensors or arrays."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        sample = self.dataset[index]
        if not isinstance(sample, dict) or not {"tokens", "labels"} <= sample.keys():
            raise UserError(
                f"sample {index} of {type(self.dataset).__name__} has no tokens and labels; return a dictionary with tokens, labels "
                "and, if they are not all ones and 0, 1, 2 …, loss_mask and position_ids"
            )
        tokens = _array(sample["tokens"], np.int64)
        mask, positions = sample.get("loss_mask"), sample.get("position_ids")
        return {
            "tokens": tokens,
            "labels": _array(sample["labels"], np.int64),
            "loss_mask": np.ones(len(tokens), np.float32) if mask is None else _array(mask, np.float32),
            "position_ids": np.arange(len(tokens)) if positions is None else _array(positions, np.int64),
        }

    def origins(self, samples: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        return np.zeros(len(samples), dtype=np.int16)


def provided_data(
    provider: DatasetProvider, config: RunConfig, world: World, folder: Path, display: Display
) -> OpenedData:
    """The data of a run whose datasets a provider returns."""
    plan = DataPlan(config, world, folder, display)
    run = state.current()
    run.data = plan
    try:
        given = _three(provider(list(wanted_samples(config))))
    finally:
        run.data = None
    own = given.train.plan.opened if isinstance(given.train, PlannedDataset) else None
    source = plan.made[0].opened if plan.made else None
    names = (type(given.train).__name__,) if own is None else own.names
    # A dataset around the builder's has as many samples as the run is long, which may change.
    beneath = _length(given.train) if source is None else source.fingerprint
    fingerprint = f"{names[0]} {beneath}" if own is None else own.fingerprint

    def order(numbers: Numbers, cache: IndexCache) -> Parts:
        for planned in plan.made:
            planned.lay_out(numbers, cache)
        train, valid, test = (_samples(dataset) for dataset in given)
        if own is None and config.data.dataloader_type == "cyclic":
            train = EpochShuffle(train, config.run.seed)
        return Parts(train, valid, test)

    if source is None:
        return OpenedData(order, None, names, fingerprint, depends_on_length=False)
    return dataclasses.replace(source, order=order, names=names, fingerprint=fingerprint)


class _Given(NamedTuple):
    train: Any
    valid: Any
    test: Any


def _three(given: Any) -> _Given:
    if not isinstance(given, tuple | list) or len(given) != 3 or given[0] is None:
        raise UserError(
            "the dataset provider must return (train, valid, test): a dataset to train on, and None where there is none of the others"
        )
    return _Given(*given)


def _samples(dataset: Any) -> Any:
    if dataset is None:
        return None
    return dataset.samples if isinstance(dataset, PlannedDataset) else UserSamples(dataset)


def _length(dataset: Any) -> str:
    return str(len(dataset)) if isinstance(dataset, FiniteDataset) else "without end"


def _array(values: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.asarray(values.cpu().numpy() if isinstance(values, torch.Tensor) else values, dtype=dtype)


def _as_asked(config: RunConfig, asked: GPTDatasetConfig, mock: bool) -> RunConfig:
    """The run's configuration with what the builder was told besides."""
    if asked.sequence_length != config.model.seq_length:
        raise UserError(
            f"the dataset's configuration says sequence_length={asked.sequence_length}, the run has --seq-length "
            f"{config.model.seq_length}; give the latter"
        )
    if asked.create_attention_mask:
        raise UserError(
            "create_attention_mask=True: masks are not made of data here (attention is causal, and --reset-attention-mask keeps "
            "documents apart); leave it False"
        )
    if asked.path_to_cache != config.data.data_cache_path:
        raise UserError(
            f"the dataset's configuration says path_to_cache={asked.path_to_cache}, the run has --data-cache-path "
            f"{config.data.data_cache_path}; give the folder as the flag"
        )
    data = dataclasses.replace(
        config.data,
        mock_data=mock,
        reset_position_ids=asked.reset_position_ids,
        reset_attention_mask=asked.reset_attention_mask,
        eod_mask_loss=asked.eod_mask_loss,
        mid_level_dataset_surplus=asked.mid_level_dataset_surplus,
    )
    if mock:
        data = dataclasses.replace(data, data_path=(), train_data_path=(), corpus=None)
    elif asked.blend is not None:
        data = dataclasses.replace(data, data_path=_words(asked.blend), split=asked.split or data.split)
    elif asked.blend_per_split is not None:
        paths = [() if blend is None else _words(blend) for blend in asked.blend_per_split]
        data = dataclasses.replace(
            data, train_data_path=paths[0], valid_data_path=paths[1], test_data_path=paths[2]
        )
    run = dataclasses.replace(config.run, seed=asked.random_seed)
    return dataclasses.replace(config, data=data, run=run)


def _words(blend: Blend) -> tuple[str, ...]:
    prefixes, weights = blend
    if weights is None:
        return tuple(prefixes)
    return tuple(
        word for weight, prefix in zip(weights, prefixes, strict=True) for word in (str(weight), prefix)
    )
