"""Tests the order of samples over a run: blends, ranks, interruptions, longer runs, cached files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pentatron.data.sample_index as cache_module
import pentatron.train.evaluation as evaluation_module
from pentatron.checkpoint.state import TrainState
from pentatron.checkpoint.store import CheckpointStore
from pentatron.data.blending import BlendedDataset
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.data.loader import build_loader
from pentatron.data.open_data import Datasets, build_datasets, open_data
from pentatron.errors import UserError
from pentatron.layout.ranks import Grid
from pentatron.monitor.display import SilentDisplay
from pentatron.parallel.world import create_groups, single_process
from pentatron.train.session import run_training
from tests.harness import distributed
from tests.support import LLAMA, resolved

RUN = f"{LLAMA} --train-iters 6 --save-interval 2 --eval-interval 3 --eval-iters 1 --keep-checkpoints 9"


def write_corpora(folder: Path) -> str:
    """Writes two corpora with disjoint tokens; returns the flags of their blend.

    Six steps need three epochs of the second corpus.
    """
    draw = np.random.default_rng(0)
    for name, count, low in (("a", 60, 0), ("b", 9, 30)):
        with IndexedDatasetWriter(folder / name, "uint16") as writer:
            for _ in range(count):
                writer.add_document(low + draw.integers(0, 30, size=draw.integers(5, 30)))
    return f"--data-path 2 {folder / 'a'} 1 {folder / 'b'} --split 8,2"


def run(folder: Path, words: str, world: Any = None, size: int = 1) -> None:
    run_training(resolved(f"{RUN} --run-dir {folder} {words}", size), world or single_process(), True)


def newest(folder: Path) -> tuple[TrainState, dict[str, str]]:
    found, _ = CheckpointStore(folder / "checkpoints", keep=None).newest_valid(verify=True, set_aside=True)
    assert found is not None
    files = {name: record.sha256 for name, record in found.manifest.files.items()}
    return TrainState.from_json(found.manifest.run_state), files


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def laid_out(tmp_path: Path, words: str, state: TrainState | None = None) -> Datasets:
    config = resolved(f"{RUN} --run-dir {tmp_path} {words}").config
    world = single_process(torch.device("cpu"))
    opened = open_data(config, world, tmp_path, SilentDisplay())
    return build_datasets(
        opened, config, world, state if state is not None else TrainState(), tmp_path, SilentDisplay()
    )


def tokens(datasets: Datasets, count: int) -> list[list[int]]:
    return [datasets.train[i]["tokens"].tolist() for i in range(count)]


def test_a_resumed_run_reads_on_where_it_stopped(tmp_path: Path) -> None:
    """Identical checkpoint files imply identical samples; their state has the count of each corpus."""
    words = write_corpora(tmp_path)
    run(tmp_path / "whole", words)
    state, files = newest(tmp_path / "whole")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert f"samples so far: 32 from {a}, 16 from {b}\n" in (tmp_path / "whole" / "train.log").read_text()
    assert state.drawn == {a: 32, b: 16} and state.ordered_for == [48]
    run(tmp_path / "parts", words)
    # As if it had been killed after step 2, in the middle of the first epoch.
    for step in ("step-00000004", "step-00000006"):
        folder = tmp_path / "parts" / "checkpoints" / step
        folder.rename(tmp_path / step)
    run(tmp_path / "parts", words)
    assert newest(tmp_path / "parts") == (state, files)


def test_longer_run_keeps_its_sample_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_corpora(tmp_path)
    run(tmp_path / "a1", f"{words} --train-iters 4 --lr-decay-iters 9")
    before = losses(tmp_path / "a1")
    capsys.readouterr()
    run(tmp_path / "a1", f"{words} --train-iters 8 --lr-decay-iters 9")
    said = capsys.readouterr().out
    assert "samples were ordered for a run of 32; they keep that order" in said
    assert "the sample order from here on" not in said
    state, _ = newest(tmp_path / "a1")
    assert state.ordered_for == [32, 64] and sum(state.drawn.values()) == 64
    assert losses(tmp_path / "a1")[:4] == before
    grown = laid_out(tmp_path, f"{words} --train-iters 8", TrainState(ordered_for=[32]))
    assert tokens(grown, 32) == tokens(laid_out(tmp_path, f"{words} --train-iters 4"), 32)
    assert tokens(grown, 32) != tokens(laid_out(tmp_path, f"{words} --train-iters 8"), 32)
    # A shorter run or another batch size does not change the order either.
    for other in ("--train-iters 2", "--train-iters 8 --global-batch-size 4"):
        assert tokens(laid_out(tmp_path, f"{words} {other}", TrainState(ordered_for=[32, 64])), 64) == tokens(
            grown, 64
        )


def test_a_changed_blend_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_corpora(tmp_path)
    run(tmp_path / "r", f"{words} --train-iters 2")
    a, b = tmp_path / "a", tmp_path / "b"
    for other, why in (
        (words.replace("2 /", "3 /"), "the files are the same, their weights or their order are not"),
        (f"--data-path {a}", f"{b} is no longer read"),
        ("--mock-data", "its fingerprint was 'blend .*', is 'mock 61'"),
    ):
        with pytest.raises(UserError, match=rf"the data is not what .* --allow-changed-data.* \({why}\)$"):
            run(tmp_path / "r", other)
    # After one --allow-changed-data the flag is not needed again; the count of the dropped corpus is kept.
    capsys.readouterr()
    run(tmp_path / "r", f"--data-path {a} --allow-changed-data --train-iters 4")
    said = capsys.readouterr().out
    assert f"the data has changed ({b} is no longer read); --allow-changed-data: from sample 16 on" in said
    assert newest(tmp_path / "r")[0].drawn == {str(a): 11 + 16, str(b): 5}
    run(tmp_path / "r", f"--data-path {a} --allow-changed-data --train-iters 6")
    assert "--allow-changed-data: the data has not changed, so this has no effect" in capsys.readouterr().out
    run(tmp_path / "r", f"--data-path {a} --train-iters 7")
    assert newest(tmp_path / "r")[0].drawn == {str(a): 11 + 40, str(b): 5}
    run(tmp_path / "new", f"--data-path {a} --train-iters 1 --allow-changed-data")
    assert "--allow-changed-data: no data was read before" in capsys.readouterr().out


def write_constant(prefix: Path, token: int) -> None:
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for _ in range(40):
            writer.add_document([token] * 20)


def test_other_tokens_under_the_same_index_are_noticed(tmp_path: Path) -> None:
    """Index and sizes stay the same: only the sidecar's checksums differ, and the tokens are not read."""
    prefix, words = tmp_path / "c", f"--data-path {tmp_path / 'c'} --split 1"
    write_constant(prefix, 5)
    index = Path(f"{prefix}.idx").read_bytes()
    run(tmp_path / "r", f"{words} --train-iters 2")
    write_constant(prefix, 6)
    assert Path(f"{prefix}.idx").read_bytes() == index
    with pytest.raises(
        UserError, match=r"c\.bin holds other tokens: the checksum of its checksums was \w+, is"
    ):
        run(tmp_path / "r", f"{words} --train-iters 3")
    # Without a sidecar the change goes unnoticed; the known checksum is kept and compared when a sidecar is
    # back.
    sidecar = Path(f"{prefix}.meta")
    kept = sidecar.read_bytes()
    sidecar.unlink()
    run(tmp_path / "r", f"{words} --train-iters 3")
    sidecar.write_bytes(kept)
    with pytest.raises(UserError, match="holds other tokens"):
        run(tmp_path / "r", f"{words} --train-iters 4")
    write_constant(prefix, 5)
    moved = tmp_path / "moved"
    for ending in ("bin", "idx", "meta"):
        Path(f"{prefix}.{ending}").rename(f"{moved}.{ending}")
    run(tmp_path / "r", f"--data-path {moved} --split 1 --train-iters 4")


@distributed(world=2)
def test_ranks_with_different_copies_are_refused(tmp_path: Path) -> None:
    """Imitates two machines without a shared file system."""
    rank = dist.get_rank()
    world, own = create_groups(Grid(data=2), rank, rank, torch.device("cpu")), tmp_path / f"machine{rank}"
    own.mkdir()
    write_constant(own / "c", 5)
    run(tmp_path / "r", f"--data-path {own / 'c'} --split 1 --train-iters 1", world, 2)
    write_constant(own / "c", 5 + rank)
    with pytest.raises(UserError, match=r"rank 1 reads other data than rank 0 \(.*holds other tokens"):
        run(tmp_path / "other", f"--data-path {own / 'c'} --split 1 --train-iters 1", world, 2)


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("weighted", [True, False])
def test_ranks_share_the_samples_of_one_process(tmp_path: Path, kind: str, weighted: bool) -> None:
    words = write_corpora(tmp_path)
    if not weighted:
        words = words.replace(" 2 /", " /").replace(" 1 /", " /")
    datasets = laid_out(tmp_path, f"{words} --dataloader-type {kind} --train-iters 30")
    # Starts in the middle of an epoch and crosses its end.
    start = 40

    def steps(ranks: int) -> list[list[list[int]]]:
        loaders = [
            iter(build_loader(datasets.train, start, 8 // ranks, rank, ranks)) for rank in range(ranks)
        ]
        return [[row for loader in loaders for row in next(loader).tokens.tolist()] for _ in range(12)]

    assert steps(1) == steps(2) == steps(4)
    longer = laid_out(
        tmp_path, f"{words} --dataloader-type {kind} --train-iters 60", TrainState(ordered_for=[240])
    )
    assert tokens(longer, 240) == tokens(datasets, 240)
    assert sum(datasets.drawn(start, 200).values()) == 160


def test_full_validation_reads_every_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Includes samples that do not fill a batch; the loss covers all labels."""
    words = (
        f"{write_corpora(tmp_path)} --full-validation --train-iters 2 --eval-interval 2 --micro-batch-size 2"
    )
    seen: list[list[int]] = []
    labels = []
    original = evaluation_module.evaluate

    def watched(model: Any, batches: Any, at_once: int) -> Any:
        read = list(batches)
        for batch in read:
            counts = batch.loss_mask.sum(1) > 0
            seen.extend(batch.tokens[counts].tolist())
            labels.append(int(batch.valid_tokens))
        return original(model, read, at_once)

    monkeypatch.setattr(evaluation_module, "evaluate", watched)
    run(tmp_path / "r", words)
    valid = laid_out(tmp_path, words).valid
    assert isinstance(valid, BlendedDataset) and len(valid) % 8
    assert seen == [valid[i]["tokens"].tolist() for i in range(len(valid))]
    assert sum(labels) == 16 * len(valid) and len(labels) == -(-len(valid) // 8) * 4


def test_files_of_each_split(tmp_path: Path) -> None:
    write_corpora(tmp_path)
    a, b = tmp_path / "a", tmp_path / "b"
    datasets = laid_out(tmp_path, f"--train-data-path {a} --valid-data-path 7 {b}")
    assert datasets.names == (str(a),) and datasets.valid is not None
    # The first corpus has the tokens below 30, the second those above.
    assert max(max(row) for row in tokens(datasets, 48)) < 30
    assert min(datasets.valid[i]["tokens"].min() for i in range(8)) >= 30
    assert laid_out(tmp_path, f"--train-data-path {a}").valid is None


@distributed(world=2)
def test_one_rank_of_a_machine_builds_for_all(tmp_path: Path) -> None:
    """Both ranks read the samples of one process; only the first rank of a machine writes the cache."""
    rank = dist.get_rank()
    world = create_groups(Grid(data=2), rank, rank, torch.device("cpu"))
    if rank == 0:
        write_corpora(tmp_path)
        run(tmp_path / "one", _words(tmp_path))
    dist.barrier()
    written: list[Path] = []
    original = cache_module.write_arrays
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            cache_module, "write_arrays", lambda path, a: (written.append(path), original(path, a))
        )
        run(tmp_path / "two", f"{_words(tmp_path)} --data-cache-path {tmp_path / 'cache'}", world, 2)
    # Two corpora for training, two for validation, and the order of each blend.
    assert len(written) == (6 if rank == 0 else 0)
    assert len(list((tmp_path / "cache").iterdir())) == 6
    if rank == 0:
        assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def _words(folder: Path) -> str:
    return f"--data-path 2 {folder / 'a'} 1 {folder / 'b'} --split 8,2"
