"""Tests files with one value changed and signed again: they load within limits or are refused.

A seed chooses among some thousand changes of manifests and configurations. The named cases once took
gigabytes or ended with a traceback.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pentatron.checkpoint.state import TrainState
from pentatron.data import sample_index
from pentatron.data.blending import BlendMember, SampleRecipe, build_blend
from pentatron.data.gpt_dataset import mock_sequences
from pentatron.data.open_data import Datasets
from pentatron.errors import UserError
from pentatron.hf.config_reader import ConfigReader, InvalidKey
from pentatron.settings.layer_patterns import layer_pattern
from pentatron.train.lr_schedule import OptimizerSchedule
from tests.adversary.loading import (
    failures_of_configurations,
    failures_of_manifests,
    load_configuration,
    load_forged,
    make_run,
    manifest_of,
)
from tests.adversary.mutations import Place
from tests.hf.support import save, theirs
from tests.support import resolved


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return save(theirs("qwen2", num_hidden_layers=1), tmp_path_factory.mktemp("model"))


def test_unmodified_files_are_loaded(run: Path, model: Path, tmp_path: Path) -> None:
    """Control."""
    for command in ("resume", "finetune", "generate", "inspect", "export"):
        outcome = load_forged(run, tmp_path, command, manifest_of(run))
        assert outcome.kind == "accepted", f"{command}: {outcome.said}"
    config = json.loads((model / "config.json").read_text())
    for command in ("import", "generate"):
        assert load_configuration(model, tmp_path, command, config).kind == "accepted"


@pytest.mark.parametrize(
    ("command", "limit"), [("resume", 10), ("generate", 8), ("inspect", 8), ("finetune", 2)]
)
def test_forged_manifests_end_with_a_sentence_or_load(
    run: Path, tmp_path: Path, command: str, limit: int
) -> None:
    under: dict[str, list[Place]] = {
        "resume": [("run_state",), ("config", "model")],
        "generate": [("config", "model"), ("config", "moe"), ("config", "data")],
    }
    rng = random.Random(f"{command} 1")
    found = list(failures_of_manifests(run, tmp_path, command, rng, limit, under.get(command, [()])))
    assert not found, found[0]


def test_forged_configurations_end_with_a_sentence_or_load(model: Path, tmp_path: Path) -> None:
    found = list(failures_of_configurations(model, tmp_path, "import", random.Random(1), 10))
    assert not found, found[0]


SIZES = {
    "heads": ("model", {"num_attention_heads": 10**9}, "num_attention_heads 1000000000 × kv_channels 8"),
    "width of a head": ("model", {"kv_channels": 10**10}, "kv_channels 10000000000"),
    "positions": ("model", {"max_position_embeddings": 10**10}, "max_position_embeddings 10000000000 × hidden_size"),
    "padding": ("model", {"padded_vocab_size": 10**10}, "padded_vocab_size 10000000000 for vocab_size 31"),
    "experts": ("moe", {"num_experts": 10**9, "moe_ffn_hidden_size": 16}, "num_experts 1000000000 × moe_ffn"),
    "no layers": ("model", {"num_layers": 0}, "num_layers 0, which must be above 0"),
    "no choice": ("model", {"normalization": "None"}, "normalization 'None', which is not a value of that setting"),
    "no number": ("model", {"rotary_base": float("nan")}, "rotary_base nan, which is not a value of that setting"),
    "nothing": ("model", {"num_layers": None}, "num_layers None, which is not a value of that setting"),
    "beyond all numbers": ("model", {"window_size": [10**30, 0]}, "which is not a value of that setting"),
    "no size of a head": ("model", {"kv_channels": None}, "lacks kv_channels"),
}  # fmt: skip


@pytest.mark.parametrize("attack", SIZES)
def test_sizes_of_a_manifest_are_held_against_its_tensors(run: Path, tmp_path: Path, attack: str) -> None:
    section, values, reason = SIZES[attack]
    manifest = manifest_of(run)
    manifest["config"][section] |= values
    outcome = load_forged(run, tmp_path, "generate", manifest)
    assert outcome.is_good and outcome.kind == "refused" and reason in outcome.said, outcome.said


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"head_dim": 10**9}, "kv_channels 1000000000 × hidden_size 32, but all tensors have"),
        ({"head_dim": 4 * 10**9}, "kv_channels 4000000000"),
        ({"head_dim": 10**30}, "must be a whole number above 0 and below 2^63"),
        ({"intermediate_size": 10**12}, "ffn_hidden_size 1000000000000 × hidden_size 32"),
        ({"rope_theta": 10**400}, "must be a number, 0 or more"),
        ({"hidden_act": "\ud800"}, "half a surrogate pair"),
    ],
)
def test_sizes_of_a_configuration_are_held_against_its_tensors(
    model: Path, tmp_path: Path, values: dict[str, Any], reason: str
) -> None:
    config = json.loads((model / "config.json").read_text())
    outcome = load_configuration(model, tmp_path, "import", {**config, **values})
    assert outcome.is_good and outcome.kind == "refused" and reason in outcome.said, outcome.said


def test_more_samples_than_were_ordered_cannot_have_been_consumed() -> None:
    assert TrainState.from_json({"consumed_samples": 8, "ordered_for": [4, 8]}).consumed_samples == 8
    with pytest.raises(
        UserError, match="consumed_samples 1000000000 of samples that were ordered for 8, which is invalid"
    ):
        TrainState.from_json({"consumed_samples": 10**9, "ordered_for": [8]})
    for state in (
        {"step": 10**16},
        {"flops": float("nan")},
        {"largest_loss": 10**400},
        {"step": 1, "updates": "x"},
    ):
        with pytest.raises(UserError, match="which is invalid"):
            TrainState.from_json(state)


def test_an_order_beyond_the_memory_of_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = mock_sequences(31, sequences=10)
    recipe = SampleRecipe(8, 1, 31)
    members = [BlendMember(source, range(10), None), BlendMember(source, range(5), None)]
    builds: list[Callable[[], object]] = [
        lambda: build_blend(members[:1], None, [10**15], recipe),
        lambda: build_blend(members, [1.0, 2.0], [10**15], recipe),
        lambda: build_blend(members, None, [100, 10**15], recipe),
    ]
    for build in builds:
        with pytest.raises(UserError, match=r"samples needs \d+ GiB of memory, and this machine has"):
            build()
    monkeypatch.setattr(sample_index, "machine_memory", lambda: 10**4)
    lengths = np.full(10, 100, np.int32)
    assert len(sample_index.build_sample_index(lengths, range(10), 100, 9, 1)) >= 100
    with pytest.raises(UserError, match="the order of 1111 samples needs"):
        sample_index.build_sample_index(lengths, range(10), 1000, 9, 1)


def test_samples_of_one_dataset_are_counted_without_listing_them() -> None:
    datasets = Datasets(None, None, None, None, ("a",), "")  # type: ignore[arg-type]
    assert datasets.drawn(3, 10**15) == {"a": 10**15 - 3}


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("learning_rate", {"style": ""}),
        ("learning_rate", {"style": {}}),
        ("learning_rate", {"peak": "x"}),
        ("learning_rate", {"decay_samples": float("nan")}),
        ("learning_rate", {"decay_samples": 0}),
        ("learning_rate", {"warmup_samples": -1}),
        ("weight_decay", {"start": None}),
        ("weight_decay", {"style": "linear", "samples": 0}),
    ],
)
def test_a_schedule_of_a_checkpoint_can_be_computed_with(part: str, values: dict[str, Any]) -> None:
    saved = OptimizerSchedule.of(resolved().config).to_json()
    assert OptimizerSchedule.from_json(saved).to_json() == saved
    saved[part] |= values
    with pytest.raises(UserError, match="schedule cannot be read"):
        OptimizerSchedule.from_json(saved)


@pytest.mark.parametrize(
    "written", ["[" * 9000, "-" * 9000 + "1", "+".join(["[0]*9000"] * 4000), "\u00b2", "[0]*9" * 10**5]
)
def test_a_pattern_of_layers_is_bounded(written: str) -> None:
    with pytest.raises(ValueError, match=r"neither a number nor a list|names more than 10000 layers") as told:
        layer_pattern("--moe-layer-freq", written, 4, "[1,0]")
    assert len(str(told.value)) < 500


@pytest.mark.parametrize(
    ("kind", "value"),
    [(int, 2**63), (int, 0), (float, 10**400), (float, float("inf")), (float, float("nan"))],
    ids=["beyond 63 bits", "zero", "beyond a float", "infinity", "NaN"],
)
def test_numbers_that_no_library_counts_are_a_sentence(kind: type, value: float) -> None:
    with pytest.raises(InvalidKey, match="must be"):
        ConfigReader({"a": value}).get("a", kind)
