"""Tests loading: any layout reads what another one wrote, bit for bit and in bounded memory."""

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor, nn

import pentatron.checkpoint.tensor_file as tensor_file
from pentatron.checkpoint.load import load_fragments, load_tensor
from pentatron.checkpoint.store import Checkpoint, CheckpointStore
from pentatron.errors import UserError
from pentatron.parallel.collectives import Group
from pentatron.parallel.sharding import (
    ZEROS,
    Fragment,
    Shape,
    Shard,
    ShardedParameter,
    ShardingSpec,
    fragments_of,
    region,
)

ALONE = Group(0, 1)
Layout = list[tuple[Shape, tuple[Shard, ...]]]


def bounds(rng: random.Random, length: int, parts: int) -> list[tuple[int, int]]:
    """Returns random consecutive intervals that make up [0, length)."""
    cuts = sorted({0, length, *(rng.randint(0, length) for _ in range(parts - 1))})
    return list(itertools.pairwise(cuts))


def slab(shape: Shape, dimension: int, first: int, last: int) -> tuple[Shape, Shape]:
    start = tuple(first if d == dimension else 0 for d in range(len(shape)))
    return start, tuple(last - first if d == dimension else n for d, n in enumerate(shape))


def along(rng: random.Random, shape: Shape, dimension: int) -> Layout:
    """Splits a tensor into bands of rows or columns, one for each rank."""
    found = []
    for first, last in bounds(rng, shape[dimension], rng.randint(1, 4)):
        start, size = slab(shape, dimension, first, last)
        found.append((size, (Shard(start, (0,) * len(shape), size),)))
    return found


def in_blocks(rng: random.Random, shape: Shape) -> Layout:
    """Splits rows into bands, of which a rank holds several, as of queries, keys and values."""
    ranks = rng.randint(1, 3)
    bands: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for band in bounds(rng, shape[0], 7):
        rng.choice(bands).append(band)
    found = []
    for of_rank in bands:
        pieces, rows = [], 0
        for first, last in of_rank:
            start, size = slab(shape, 0, first, last)
            pieces.append(Shard(start, (rows, *start[1:]), size))
            rows += last - first
        # Padding below the last band, which is part of no logical tensor.
        found.append(((rows + rng.randint(0, 2), *shape[1:]), tuple(pieces)))
    return found


def grid(rng: random.Random, shape: Shape) -> Layout:
    """Splits rows and columns, as expert and tensor parallelism together do."""
    found = []
    for top, bottom in bounds(rng, shape[0], 3):
        for left, right in bounds(rng, shape[-1], 3):
            size = (bottom - top, *shape[1:-1], right - left)
            start = (top, *(0 for _ in shape[1:-1]), left)
            found.append((size, (Shard(start, (0,) * len(shape), size),)))
    return found


def random_layout(rng: random.Random, shape: Shape) -> Layout:
    makers: list[Callable[[], Layout]] = [
        lambda: along(rng, shape, 0),
        lambda: along(rng, shape, len(shape) - 1),
        lambda: in_blocks(rng, shape),
    ]
    if len(shape) > 1:
        makers.append(lambda: grid(rng, shape))
    return rng.choice(makers)()


def cut(rng: random.Random, layout: Layout, logical: Tensor) -> Iterator[Fragment]:
    """Yields the fragments of all ranks, cut as an optimizer shards them, with values of `logical`."""
    for local_shape, pieces in layout:
        local = torch.full(local_shape, -1, dtype=logical.dtype)
        for piece in pieces:
            region(local, piece.local, piece.size).copy_(region(logical, piece.start, piece.size))
        declared = ShardingSpec(tuple(logical.shape), pieces, ZEROS, "weights/x")
        held = ShardedParameter("x", "weights/x", nn.Parameter(local, requires_grad=False), declared)
        for first, last in bounds(rng, local.numel(), rng.choice((1, 1, 3, 8))):
            shard = local.flatten()[first:last].clone()
            for _, fragment in fragments_of(held, shard, first, last):
                yield fragment


def save(folder: Path, fragments: list[Fragment], **own: Tensor) -> Checkpoint:
    store = CheckpointStore(folder, keep=1)
    store.save(1, fragments, own, {}, {}, ALONE)
    found, complaints = store.newest_valid(verify=True, set_aside=False)
    assert found is not None and not complaints
    return found


def numbered(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Returns a tensor whose elements differ, as far as its dtype can distinguish them."""
    return torch.arange(math.prod(shape)).to(dtype).reshape(shape)


SHAPES: list[Shape] = [(37,), (12, 9), (1, 50), (50, 1), (6, 5, 7), (3, 2, 4, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_layout_is_read_by_any_other(tmp_path: Path, shape: Shape) -> None:
    rng = random.Random(str(shape))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        logical = numbered(shape, dtype)
        for writing in range(3):
            written = list(cut(rng, random_layout(rng, shape), logical))
            found = save(tmp_path / f"{dtype}-{writing}", written, rng=torch.arange(5, dtype=torch.uint8))
            for _ in range(4):
                targets = list(cut(rng, random_layout(rng, shape), torch.full_like(logical, -2)))
                load_fragments(found.folder, found.manifest, targets)
                for target in targets:
                    expected = region(logical, target.start, tuple(target.values.shape))
                    assert torch.equal(target.values, expected)
                assert sum(target.values.numel() for target in targets) == logical.numel()
            assert torch.equal(load_tensor(found.folder, found.manifest, "weights/x"), logical)


def test_control_fragments_with_each_others_place_are_not_equal(tmp_path: Path) -> None:
    logical = numbered((8, 3), torch.float32)
    halves = [Fragment("weights/x", (8, 3), (4 * i, 0), logical[4 * (1 - i) :][:4]) for i in range(2)]
    found = save(tmp_path, halves)
    loaded = load_tensor(found.folder, found.manifest, "weights/x")
    assert torch.equal(loaded[:4], logical[4:]) and not torch.equal(loaded, logical)


def test_one_load_fills_many_tensors_and_leaves_the_rest_alone(tmp_path: Path) -> None:
    a, b = numbered((6, 4), torch.float32), numbered((9,), torch.float64)
    found = save(
        tmp_path,
        [
            Fragment("b", (9,), (5,), b[5:]),
            Fragment("a", (6, 4), (0, 0), a[:, :1]),
            Fragment("b", (9,), (0,), b[:5]),
            Fragment("a", (6, 4), (0, 1), a[:, 1:]),
        ],
    )
    assert [p.key for p in found.manifest.tensors["a"].pieces] == ["a[0:6,0:1]", "a[0:6,1:4]"]
    mine = torch.full((4, 6), -1.0)
    shard = torch.full((4,), -1.0, dtype=torch.float64)
    parameter = nn.Parameter(torch.zeros(6, 1))
    load_fragments(
        found.folder,
        found.manifest,
        [
            Fragment("a", (6, 4), (1, 1), mine[1:3, 2:5]),
            Fragment("b", (9,), (3,), shard),
            Fragment("a", (6, 4), (0, 3), parameter),
        ],
    )
    assert torch.equal(mine[1:3, 2:5], a[1:3, 1:4]) and int((mine == -1).sum()) == 18
    assert torch.equal(shard, b[3:7])
    assert torch.equal(parameter.detach(), a[:, 3:]) and parameter.requires_grad


class Watched:
    """Records the files that are opened and the sizes of everything that is read from them."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.read: list[int] = []
        self._open = safetensors.safe_open

    def __call__(self, path: Path, **options: Any) -> Any:
        self.opened.append(path.name)
        watch, inner = self, self._open(path, **options)

        class Slice:
            def __init__(self, stored: Any) -> None:
                self._stored = stored
                self.get_shape = stored.get_shape

            def __getitem__(self, at: Any) -> Tensor:
                values: Tensor = self._stored[at]
                watch.read.append(values.nbytes)
                return values

        class File:
            def __enter__(self) -> "File":
                self._file = inner.__enter__()
                return self

            def __exit__(self, *details: Any) -> None:
                inner.__exit__(*details)

            def get_slice(self, key: str) -> Slice:
                return Slice(self._file.get_slice(key))

        return File()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watch = Watched()
    monkeypatch.setattr(safetensors, "safe_open", watch)
    return watch


BIG: list[tuple[Shape, Shape, Shape]] = [
    ((300, 40), (100, 10), (150, 20)),
    ((2, 9000), (0, 0), (2, 9000)),
    ((9000,), (7, ), (8000,)),
    ((4, 5, 600), (1, 0, 100), (2, 5, 500)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "start", "size"), BIG, ids=str)
def test_a_load_reads_what_it_needs_in_small_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Watched, shape: Shape, start: Shape, size: Shape
) -> None:
    logical = numbered(shape, torch.float32)
    found = save(tmp_path, [Fragment("x", shape, (0,) * len(shape), logical)])
    for limit in (1000, 2**20):
        monkeypatch.setattr(tensor_file, "BLOCK_BYTES", limit)
        watched.read.clear()
        target = torch.zeros(size)
        load_fragments(found.folder, found.manifest, [Fragment("x", shape, start, target)])
        assert torch.equal(target, region(logical, start, size))
        assert sum(watched.read) == target.nbytes, "nothing is read that is not needed"
        assert max(watched.read) <= limit
    assert max(watched.read) > 1000, "control: the limit is what bounds the blocks"


@pytest.mark.parametrize("shape", [shape for shape, _, _ in BIG], ids=str)
def test_a_save_copies_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    copied = []
    raw = tensor_file._host_bytes

    def watched_raw(tensor: Tensor) -> memoryview:
        data = raw(tensor)
        copied.append(len(data))
        return data

    monkeypatch.setattr(tensor_file, "_host_bytes", watched_raw)
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 1000)
    logical = numbered(shape, torch.float32)
    # A view that is not contiguous, as a shard of columns is not.
    strided = logical.mT.contiguous().mT if logical.dim() > 1 else logical.repeat_interleave(2)[::2]
    found = save(tmp_path, [Fragment("x", shape, (0,) * len(shape), strided)])
    assert max(copied) <= 1000 and sum(copied) == logical.nbytes
    assert torch.equal(load_tensor(found.folder, found.manifest, "x"), logical)


def test_every_file_is_opened_once_and_only_if_it_is_needed(tmp_path: Path, watched: Watched) -> None:
    """Three ranks saved rows of twenty tensors; one rank reads rows that lie in two or three files."""
    folder = save_by_three(tmp_path)
    targets = [
        Fragment(f"t{i:02}", (9, 4), (first, 0), torch.zeros(3, 4)) for i in range(20) for first in (4, 1)
    ]
    load_fragments(folder.folder, folder.manifest, targets)
    assert watched.opened == [f"rank-0000{r}.safetensors" for r in range(3)]
    assert all(torch.equal(t.values[:, 0], torch.arange(3) + t.start[0] + 0.0) for t in targets)
    watched.opened.clear()
    load_fragments(folder.folder, folder.manifest, [t for t in targets if t.start[0] == 4])
    assert watched.opened == [f"rank-0000{r}.safetensors" for r in (1, 2)]


def save_by_three(folder: Path) -> Checkpoint:
    """Builds the checkpoint of three ranks in one process."""
    from pentatron.checkpoint.format import Manifest, StoredPiece, TensorRecord

    files, pieces = {}, {f"t{i:02}": [] for i in range(20)}
    (folder / "all").mkdir()
    for rank in range(3):
        name = f"rank-0000{rank}.safetensors"
        rows = {
            f"{t}[{3 * rank}:{3 * rank + 3},0:4]": (torch.arange(3.0) + 3 * rank)[:, None].repeat(1, 4)
            for t in pieces
        }
        files[name] = tensor_file.write_tensors(folder / "all" / name, rows)
        for t, key in zip(pieces, rows, strict=True):
            pieces[t].append(StoredPiece(name, key, (3 * rank, 0), (3, 4)))
    tensors = {t: TensorRecord("float32", (9, 4), tuple(p)) for t, p in pieces.items()}
    assert all(record.problem(t) is None for t, record in tensors.items())
    return Checkpoint(folder / "all", Manifest(1, files, tensors, {}, {}))


def test_damage_that_no_checksum_was_asked_for_is_one_sentence(tmp_path: Path) -> None:
    found = save(tmp_path, [Fragment("x", (4, 2), (2 * i, 0), torch.zeros(2, 2)) for i in range(2)])
    data = found.folder / "rank-00000.safetensors"
    content = data.read_bytes()
    target = Fragment("x", (4, 2), (0, 0), torch.zeros(4, 2))
    for before, after in ((b"x[0:2", b"y[0:2"), (b"[2, 2]", b"[1, 4]"), (b"F32", b"I32"), (b"}}", b"}{")):
        assert before in content
        data.write_bytes(content.replace(before, after))
        with pytest.raises(UserError, match=r"rank-00000.safetensors is damaged .*--verify-checkpoint"):
            load_fragments(found.folder, found.manifest, [target])
    data.unlink()
    with pytest.raises(UserError, match="is damaged"):
        load_fragments(found.folder, found.manifest, [target])
    data.write_bytes(content)
    load_fragments(found.folder, found.manifest, [target])


def test_many_pieces_are_found_quickly(tmp_path: Path) -> None:
    """Four thousand pieces on either side: comparing every pair would take sixteen million calls."""
    import pentatron.checkpoint.load as module

    asked = 0
    honest = module.overlap

    def counting(*rectangles: Shape) -> tuple[Shape, Shape] | None:
        nonlocal asked
        asked += 1
        return honest(*rectangles)

    for shape in ((4000, 2), (2, 4000)):
        wide = shape.index(4000)
        logical = numbered(shape, torch.float32)
        pieces = [slab(shape, wide, i, i + 1) for i in range(4000)]
        found = save(
            tmp_path / str(wide), [Fragment("x", shape, s, region(logical, s, n)) for s, n in pieces]
        )
        targets = [Fragment("x", shape, s, torch.zeros(n)) for s, n in pieces]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "overlap", counting)
            load_fragments(found.folder, found.manifest, targets)
        assert all(torch.equal(t.values, region(logical, t.start, tuple(t.values.shape))) for t in targets)
    assert asked == 8000


def test_every_element_lies_at_a_multiple_of_its_width(tmp_path: Path) -> None:
    mixed = {"a": torch.zeros(5, dtype=torch.uint8), "b": torch.zeros(3, dtype=torch.bfloat16)}
    tensor_file.write_tensors(tmp_path / "x", {**mixed, "c": torch.zeros(3), "d": torch.zeros(2).double()})
    content = (tmp_path / "x").read_bytes()
    length = int.from_bytes(content[:8], "little")
    starts = {name: entry["data_offsets"][0] for name, entry in json.loads(content[8 : 8 + length]).items()}
    assert length % 8 == 0 and starts == {"d": 0, "c": 16, "b": 28, "a": 34}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_widen_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    logical = torch.randn(6, 5).to(dtype)
    names = ("weights/x", "exp_avg/x")
    found = save(tmp_path, [Fragment(name, (6, 5), (0, 0), logical) for name in names])

    def load(name: str, into: torch.dtype) -> Tensor:
        values = torch.empty(3, 5, dtype=into)
        load_fragments(found.folder, found.manifest, [Fragment(name, (6, 5), (2, 0), values)])
        return values

    assert load("weights/x", torch.float32).equal(logical[2:5].float())
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    for name, into in (("weights/x", other), ("exp_avg/x", torch.float32)):
        with pytest.raises(UserError, match=f"holds {name} as") as error:
            load(name, into)
        assert ("import the model again with --dtype fp32" in str(error.value)) == name.startswith("weights/")
