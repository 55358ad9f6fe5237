"""Datasets of user programs: Megatron's dataset builder and configuration, and the data of a run from a
dataset provider.

The provider is called once, before the start step is known. The builder therefore returns `PlannedDataset`s:
their samples are ordered at the first access, or when the session knows how the run's previous segments were
ordered. Datasets of other classes are used unchanged.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pentatron.data.gpt_dataset import GPTDataset
from pentatron.data.identity import DataIdentity
from pentatron.data.loader import EpochShuffle, FiniteDataset
from pentatron.data.open_data import OpenedData, OrderSizes, SplitDatasets, open_data, required_samples
from pentatron.data.sample_index import SPLIT_NAMES, IndexCache, Sample
from pentatron.errors import UserError
from pentatron.megatron import state
from pentatron.monitor.display import Display
from pentatron.parallel.world import World
from pentatron.settings import data_paths
from pentatron.settings.run_config import RunConfig

# Settings of a builder that are settings of the run, with the same names.
_COPIED = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "mid_level_dataset_surplus")
_SAMPLE_DTYPES = {"tokens": "int64", "labels": "int64", "loss_mask": "float32", "position_ids": "int64"}
# Path prefixes, and their weights if given.
Blend = tuple[list[str], list[float] | None]
DatasetProvider = Callable[[Sequence[int]], Any]


class MockGPTDataset(GPTDataset):
    """Selects the synthetic data of `--mock-data` in the builder."""


@dataclass
class GPTDatasetConfig:
    """The data settings that a builder may change; all others come from the flags."""

    random_seed: int
    sequence_length: int
    blend: Blend | None = None
    blend_per_split: list[Blend | None] | None = None
    split: str | None = None
    path_to_cache: str | None = None
    tokenizer: Any = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = False
    mmap_bin_files: bool = True
    num_dataset_builder_threads: int = 1
    mid_level_dataset_surplus: float = 0.005


def get_blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """Parses `P1 P2 ...` or `W1 P1 W2 P2 ...` into prefixes and weights."""
    if not blend:
        return None
    parsed = data_paths.Blend.parse(blend)
    return list(parsed.prefixes), None if parsed.weights is None else list(parsed.weights)


def core_gpt_dataset_config_from_args(args: SimpleNamespace) -> GPTDatasetConfig:
    """Builds the dataset configuration from `get_args()`."""
    per_split = [get_blend_from_list(getattr(args, f"{name}_data_path")) for name in SPLIT_NAMES]
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        blend_per_split=per_split if args.train_data_path else None,
        split=args.split,
        path_to_cache=args.data_cache_path,
        **{name: getattr(args, name) for name in _COPIED},
    )


@dataclass(eq=False)
class BlendedMegatronDatasetBuilder:
    """Builds the train, validation and test datasets; `cls` is GPTDataset or MockGPTDataset, `sizes` are
    numbers of samples.

    Every rank reads the samples it computes, so datasets are built on all ranks and `is_built_on_rank` is
    ignored.
    """

    cls: type[Any]
    sizes: Sequence[int | None]
    is_built_on_rank: Callable[[], bool]
    config: GPTDatasetConfig

    def build(self) -> "list[PlannedDataset | None]":
        if (plan := state.current_run().data) is None:
            raise UserError(
                "BlendedMegatronDatasetBuilder.build() knows its data only inside the dataset provider given to pretrain() or "
                "build_train_valid_test_data_iterators(); call it there"
            )
        if self.cls not in (GPTDataset, MockGPTDataset):
            raise UserError(
                f"the dataset builder builds GPTDataset and MockGPTDataset, not {self.cls.__name__}; build a dataset of your own class "
                "yourself and return it from the provider"
            )
        wanted = required_samples(plan.config)
        for name, size, needed in zip(SPLIT_NAMES, self.sizes, wanted, strict=True):
            if size is not None and size != needed:
                raise UserError(
                    f"the dataset builder was asked for {size} {name} samples, the run needs {needed}; pass the sizes that the "
                    "provider is called with"
                )
        opened = plan.open(_merged(plan.config, self.config, self.cls is MockGPTDataset))
        planned = Planned(opened, OrderSizes([wanted.train], [wanted.valid]))
        plan.planned.append(planned)
        return [PlannedDataset(planned, split) if count else None for split, count in enumerate(wanted)]


@dataclass(eq=False)
class PlannedDataset:
    """One split that the builder returned."""

    plan: "Planned"
    split: int

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    @property
    def samples(self) -> Any:
        return self.plan.parts[self.split]


@dataclass
class Planned:
    """Opened data whose samples are ordered at the first access to `parts`, if the run has not set them."""

    opened: OpenedData
    sizes: OrderSizes

    @cached_property
    def parts(self) -> SplitDatasets:
        return self.opened.order(self.sizes, IndexCache())


@dataclass
class DataPlan:
    """The datasets that a provider builds, from data that `open` opens."""

    config: RunConfig
    open: Callable[[RunConfig], OpenedData]
    planned: list[Planned] = field(default_factory=list)


@dataclass(eq=False)
class UserSamples:
    """A user's dataset of dictionaries with tokens, labels, loss_mask and position_ids."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        sample = self.dataset[index]
        if not isinstance(sample, dict) or not {"tokens", "labels"} <= sample.keys():
            raise UserError(
                f"sample {index} of {type(self.dataset).__name__} has no tokens and labels; return a dictionary with tokens, labels "
                "and, if they are not all ones and 0, 1, 2 …, loss_mask and position_ids"
            )
        length = len(sample["tokens"])
        filled = {"loss_mask": np.ones(length), "position_ids": np.arange(length)}
        filled |= {name: values for name, values in sample.items() if values is not None}
        return {name: _array(filled[name], dtype) for name, dtype in _SAMPLE_DTYPES.items()}


def provided_data(
    provider: DatasetProvider, config: RunConfig, world: World, folder: Path, display: Display
) -> OpenedData:
    """Opens the data of a run whose datasets a provider returns."""
    run = state.current_run()
    plan = run.data = DataPlan(config, lambda merged: open_data(merged, world, folder, display))
    try:
        returned = provider(list(required_samples(config)))
    finally:
        run.data = None
    if not isinstance(returned, tuple | list) or len(returned) != 3 or returned[0] is None:
        raise UserError(
            "the dataset provider must return (train, valid, test): a dataset to train on, and None for the others if there is none"
        )
    datasets = SplitDatasets(*returned)
    built = datasets.train.plan.opened if isinstance(datasets.train, PlannedDataset) else None
    source = plan.planned[0].opened if plan.planned else None
    if built is not None:
        names, fingerprint = built.names, built.identity.fingerprint
    else:
        names = (type(datasets.train).__name__,)
        length = len(datasets.train) if isinstance(datasets.train, FiniteDataset) else "without end"
        # The length of a dataset around the builder's depends on the length of the run, which may change.
        fingerprint = f"{names[0]} {length if source is None else source.identity.fingerprint}"

    def order(numbers: OrderSizes, cache: IndexCache) -> SplitDatasets:
        for planned in plan.planned:
            planned.parts = planned.opened.order(numbers, cache)
        train, valid, test = map(_samples, datasets)
        if built is None and config.data.dataloader_type == "cyclic":
            train = EpochShuffle(train, config.run.seed)
        return SplitDatasets(train, valid, test)

    if source is None:
        return OpenedData(order, None, names, DataIdentity(fingerprint), depends_on_length=False)
    identity = dataclasses.replace(source.identity, fingerprint=fingerprint)
    return dataclasses.replace(source, order=order, names=names, identity=identity)


def _samples(dataset: Any) -> Any:
    if dataset is None:
        return None
    return dataset.samples if isinstance(dataset, PlannedDataset) else UserSamples(dataset)


def _array(values: Any, dtype: str) -> npt.NDArray[Any]:
    return np.asarray(values.cpu().numpy() if isinstance(values, torch.Tensor) else values, dtype=dtype)


def _merged(config: RunConfig, dataset_config: GPTDatasetConfig, mock: bool) -> RunConfig:
    """Returns the run's configuration with the values of the builder's."""
    for name, flag, of_run, advice in (
        ("sequence_length", "--seq-length", config.model.seq_length, "pass the latter"),
        ("path_to_cache", "--data-cache-path", config.data.data_cache_path, "set the folder with the flag"),
    ):
        if (value := getattr(dataset_config, name)) != of_run:
            raise UserError(f"the dataset's config has {name}={value}, the run has {flag} {of_run}; {advice}")
    if dataset_config.create_attention_mask:
        raise UserError(
            "create_attention_mask=True: masks are not part of the data here (attention is causal, and --reset-attention-mask keeps "
            "documents apart); leave it False"
        )
    changes: dict[str, Any] = {name: getattr(dataset_config, name) for name in _COPIED}
    if mock:
        changes |= {"data_path": (), "train_data_path": (), "corpus": None}
    elif dataset_config.blend is not None:
        split = dataset_config.split or config.data.split
        changes |= {"data_path": _words(dataset_config.blend), "split": split}
    elif dataset_config.blend_per_split is not None:
        paths = [() if blend is None else _words(blend) for blend in dataset_config.blend_per_split]
        changes |= {f"{name}_data_path": path for name, path in zip(SPLIT_NAMES, paths, strict=True)}
    data = dataclasses.replace(config.data, mock_data=mock, **changes)
    run = dataclasses.replace(config.run, seed=dataset_config.random_seed)
    return dataclasses.replace(config, data=data, run=run)


def _words(blend: Blend) -> tuple[str, ...]:
    """The inverse of `get_blend_from_list`."""
    prefixes, weights = blend
    pairs = zip(prefixes) if weights is None else zip(map(str, weights), prefixes, strict=True)
    return tuple(itertools.chain.from_iterable(pairs))
