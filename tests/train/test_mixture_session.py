"""Tests a run with experts: resume, other numbers of ranks, generated text, metrics and notices."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pentatron.models.router_load as loads_module
from pentatron.checkpoint.load import load_tensor
from pentatron.checkpoint.store import Checkpoint, CheckpointStore
from pentatron.errors import UserError
from pentatron.generate.continue_text import open_continuation
from pentatron.parallel.world import create_groups, single_process
from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.resolve import notices_of_device
from pentatron.train.resume import require_same_model
from pentatron.train.session import run_training
from tests.harness import distributed
from tests.support import LLAMA, resolved

CPU = torch.device("cpu")
RUN = f"{LLAMA} --train-iters 6 --lr-decay-iters 6 --save-interval 2 --keep-checkpoints 9 --eval-interval 0 --log-interval 2"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 --micro-batch-size 4"
# A fast-moving router bias and a loss with the load of the previous step: both are kept across steps.
REMEMBERING = (
    f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-router-load-balancing-type global_aux_loss aux_loss --moe-aux-loss-coeff 0.5 0.1"
)
FORGETTING = f"{EXPERTS} --moe-aux-loss-coeff 0.1"


def train(folder: Path, words: str, world_size: int = 1) -> None:
    found = resolved(f"{RUN} --run-dir {folder} {words}", world_size)
    rank = dist.get_rank() if world_size > 1 else 0
    world = create_groups(found.config.grid, rank, rank, CPU) if world_size > 1 else single_process()
    run_training(found, world, True)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder)]


def newest(folder: Path) -> Checkpoint:
    found, _ = CheckpointStore(folder / "checkpoints", keep=None).newest_valid(verify=True, set_aside=True)
    assert found is not None
    return found


def checksums(folder: Path) -> dict[str, str]:
    return {name: record.sha256 for name, record in newest(folder).manifest.files.items()}


def routers(folder: Path) -> dict[str, list[float]]:
    found = newest(folder)
    names = [name for name in found.manifest.tensors if name.startswith("routers/")]
    return {name: load_tensor(found.folder, found.manifest, name).tolist() for name in names}


@pytest.mark.parametrize("words", [REMEMBERING, FORGETTING, f"{REMEMBERING} --bf16 --recompute-activations"])
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(tmp_path: Path, words: str) -> None:
    train(tmp_path / "whole", words)
    for steps in (1, 3, 6):
        train(tmp_path / "cut", f"{words} --train-iters {steps}")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert checksums(tmp_path / "cut") == checksums(tmp_path / "whole")


def test_router_state_is_in_the_checkpoint(tmp_path: Path) -> None:
    train(tmp_path / "a", REMEMBERING)
    found = routers(tmp_path / "a")
    assert set(found) == {
        f"routers/layers.{layer}.mlp.router.{name}" for layer in range(2) for name in ("bias", "previous")
    }
    for name, values in found.items():
        if name.endswith("previous"):
            assert sum(values) == pytest.approx(1) and len(set(values)) > 1
        else:
            assert all(value == pytest.approx(0.05 * round(value / 0.05), abs=1e-6) for value in values)
            assert any(values)


def test_a_run_that_forgets_them_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "whole", REMEMBERING)
    train(tmp_path / "cut", f"{REMEMBERING} --train-iters 3")
    original = loads_module.RouterLoads.fragments

    def not_loaded(self: Any, owned_only: bool) -> Any:
        return original(self, owned_only) if owned_only else iter(())

    monkeypatch.setattr(loads_module.RouterLoads, "fragments", not_loaded)
    train(tmp_path / "cut", REMEMBERING)
    ours, whole = losses(tmp_path / "cut"), losses(tmp_path / "whole")
    assert ours[:3] == whole[:3] and ours[3:] != whole[3:]


def test_another_balancing_may_go_on(tmp_path: Path) -> None:
    train(tmp_path / "a", f"{FORGETTING} --train-iters 3")
    train(tmp_path / "a", f"{FORGETTING} --moe-router-load-balancing-type global_aux_loss")
    assert len(losses(tmp_path / "a")) == 6
    log = (tmp_path / "a" / "train.log").read_text()
    assert "--moe-router-load-balancing-type global_aux_loss (was " in log


def test_other_experts_are_another_model(tmp_path: Path) -> None:
    train(tmp_path / "a", f"{FORGETTING} --train-iters 2")
    for words in ("--num-experts 8", "--moe-router-topk 1 --moe-router-pre-softmax", "--moe-layer-freq 2"):
        with pytest.raises(UserError, match=words.split()[0].removeprefix("--").replace("-", "_")):
            train(tmp_path / "a", f"{FORGETTING} {words}")


@distributed(world=2, timeout=120.0)
@pytest.mark.parametrize(
    "spread", ["--ep 2", "--ep 2 --zero-stage 2", "--tp 2 --expert-tensor-parallel-size 2"]
)
def test_other_numbers_of_ranks_continue_it(tmp_path: Path, spread: str) -> None:
    """Trains two steps each on two ranks, on one and on two."""
    if dist.get_rank() == 0:
        train(tmp_path / "whole", REMEMBERING)
    dist.barrier()
    train(tmp_path / "cut", f"{REMEMBERING} {spread} --train-iters 2", 2)
    dist.barrier()
    before = routers(tmp_path / "cut")
    if dist.get_rank() == 0:
        train(tmp_path / "cut", f"{REMEMBERING} --train-iters 4")
    dist.barrier()
    train(tmp_path / "cut", f"{REMEMBERING} {spread}", 2)
    dist.barrier()
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    after, whole = routers(tmp_path / "cut"), routers(tmp_path / "whole")
    assert after.keys() == whole.keys() and before.keys() == whole.keys() and before != after
    for name, values in whole.items():
        assert after[name] == pytest.approx(values, abs=1e-6), name


@distributed(world=2, timeout=120.0)
def test_two_expert_ranks_resume_bit_for_bit(tmp_path: Path) -> None:
    train(tmp_path / "whole", f"{REMEMBERING} --ep 2", 2)
    train(tmp_path / "cut", f"{REMEMBERING} --ep 2 --train-iters 3", 2)
    train(tmp_path / "cut", f"{REMEMBERING} --ep 2", 2)
    dist.barrier()
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert checksums(tmp_path / "cut") == checksums(tmp_path / "whole")
    held = newest(tmp_path / "whole").manifest
    pieces = held.tensors["weights/layers.0.mlp.experts.linear_fc1.weight"].pieces
    assert len({piece.file for piece in pieces}) == 2, "each rank saved the experts it has"


# --- generated text ---


@distributed(world=2, timeout=120.0)
def test_text_is_made_by_the_experts_the_run_would_choose(tmp_path: Path) -> None:
    bytes_of_text = "--tokenizer-type ByteTokenizer --vocab-size 257"
    train(tmp_path / "a", f"{REMEMBERING} --ep 2 {bytes_of_text}", 2)
    dist.barrier()
    if dist.get_rank() == 0:
        found = newest(tmp_path / "a")
        text = "".join(open_continuation(tmp_path / "a", "import ", 5))
        assert text == "".join(open_continuation(tmp_path / "a", "import ", 5))
        assert any(load_tensor(found.folder, found.manifest, "routers/layers.0.mlp.router.bias"))


# --- metrics, log and notices ---


def test_metrics_and_log(tmp_path: Path) -> None:
    train(
        tmp_path / "a", f"{REMEMBERING} --moe-z-loss-coeff 0.001 --moe-per-layer-logging --moe-layer-freq 2"
    )
    rows = metrics(tmp_path / "a")
    tokens = 8 * 16
    for row in rows:
        counts = row["tokens_per_expert"]
        assert list(counts) == ["0"] and sum(counts["0"]) == 2 * tokens, "two experts for each token"
        assert row["expert_imbalance"] == pytest.approx(max(counts["0"]) / (2 * tokens / 4), abs=1e-4)
        assert row["idle_experts"] == counts["0"].count(0)
        assert row["global_load_balancing_loss"] > 0 and row["load_balancing_loss"] > 0 and row["z_loss"] > 0
    assert rows[0]["global_load_balancing_loss"] == pytest.approx(1), (
        "before the first step all are equally busy"
    )
    line = next(
        line for line in (tmp_path / "a" / "train.log").read_text().splitlines() if " iteration " in line
    )
    names = [field.split(":")[0].strip() for field in line.split(" | ")]
    at = names.index("lm loss")
    assert names[at + 1 : at + 5] == [
        "global_load_balancing_loss",
        "load_balancing_loss",
        "z_loss",
        "loss scale",
    ]
    assert (
        f"busiest expert: {rows[0]['expert_imbalance']:.2f} x mean | idle experts: {rows[0]['idle_experts']} |"
        in line
    )


def test_loads_by_layer_are_written_only_if_asked_for(tmp_path: Path) -> None:
    train(tmp_path / "a", FORGETTING)
    for row in metrics(tmp_path / "a"):
        assert "tokens_per_expert" not in row and row["expert_imbalance"] >= 1
        assert {"load_balancing_loss", "idle_experts"} <= row.keys()


def test_a_run_without_experts_says_nothing_of_them(tmp_path: Path) -> None:
    train(tmp_path / "a", "")
    names = set(itertools.chain.from_iterable(metrics(tmp_path / "a")))
    assert not {name for name in names if "expert" in name or "balancing" in name}
    assert "busiest expert" not in (tmp_path / "a" / "train.log").read_text()


def test_a_checkpoint_older_than_some_settings_is_the_same_model() -> None:
    rope = "--position-embedding-type rope"
    dense, mixed = resolved(rope).config, resolved(f"{rope} --num-experts 4").config
    saved = {**dense.nested()["model"], "num_experts": None, "moe_router_topk": 2}
    del saved["rope_scaling_low_freq_factor"], saved["yarn_truncate"]
    require_same_model(Path("somewhere"), saved, dense)
    stretched = resolved(f"{rope} --use-rope-scaling --rope-scaling-low-freq-factor 2").config
    with pytest.raises(UserError, match="rope_scaling_type was None, is llama3"):
        require_same_model(Path("somewhere"), saved, stretched)
    with pytest.raises(UserError, match="num_experts was None, is 4"):
        require_same_model(Path("somewhere"), saved, mixed)


@pytest.mark.parametrize(
    ("words", "device", "told"),
    [
        ("", "cpu", ""),
        ("--moe-grouped-gemm", "cpu", "separate matmuls here"),
        ("--no-moe-grouped-gemm", "cpu", "separate matmuls anyway"),
        ("--moe-grouped-gemm --bf16", "cuda", ""),
        ("--no-moe-grouped-gemm --bf16", "cuda", ""),
        ("--moe-grouped-gemm", "cuda", "needs bf16 on a GPU"),
        ("--moe-grouped-gemm --bf16 --moe-ffn-hidden-size 20", "cuda", "multiples of 8, not 32 and 20"),
    ],
)
def test_unavailable_grouped_matmul_is_reported(words: str, device: str, told: str) -> None:
    chosen = resolved(f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 24 {words}")
    later = notices_of_device(chosen, decide(chosen.config, DeviceFacts(device)))
    found = [line for line in (*chosen.notices, *later) if "grouped-gemm" in line]
    assert len(found) == bool(told) and all(told in line for line in found)
