"""Tests the index cache: reuse, sharing, rebuilding when damaged, operation without files."""

from pathlib import Path

import numpy as np
import pytest

from pentatron.data.gpt_dataset import CountingSequences, GPTDataset
from pentatron.data.sample_index import Arrays, DamagedIndexCache, IndexCache, read_arrays, write_arrays

ARRAYS: Arrays = {"a": np.arange(1000, dtype=np.int32), "b": np.ones((3, 2)), "none": np.empty(0, np.uint32)}


def same(found: Arrays) -> bool:
    return found.keys() == ARRAYS.keys() and all(
        np.array_equal(found[name], array) and found[name].dtype == array.dtype
        for name, array in ARRAYS.items()
    )


class Builder:
    def __init__(self) -> None:
        self.calls = 0
        self.said: list[str] = []

    def __call__(self) -> Arrays:
        self.calls += 1
        return ARRAYS

    def get(self, folder: Path | None, builds: bool = True, entries: int = 9) -> Arrays:
        return IndexCache(folder, builds, 5, self.said.append).get({"seed": 1}, entries, self)


def test_built_once_and_found_again(tmp_path: Path) -> None:
    builder = Builder()
    assert same(builder.get(tmp_path / "new")) and same(builder.get(tmp_path / "new"))
    assert same(builder.get(tmp_path / "new", builds=False))
    assert builder.calls == 1 and not builder.said
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".order"], "nothing temporary is left"


def test_without_a_file_everyone_builds_in_memory(tmp_path: Path) -> None:
    """Builds in memory if another node writes the folder, for a small order, and without a folder."""
    builder = Builder()
    assert same(builder.get(tmp_path, builds=False)) and same(builder.get(tmp_path, entries=4))
    assert same(builder.get(None))
    assert builder.calls == 3 and not list(tmp_path.iterdir())


def test_every_damage_is_noticed_and_mended(tmp_path: Path) -> None:
    builder = Builder()
    builder.get(tmp_path)
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    damages = [good[:-1], good[:5], b"", good + b"x", b"x" + good[1:], good.replace(b'"bytes"', b'"bites"')]
    # Every seventh of the first 300 bytes, then one in the middle and the last one.
    places = [*range(0, 300, 7), len(good) // 2, len(good) - 1]
    damages += [good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :] for at in places]
    for number, bad in enumerate(damages, start=1):
        path.write_bytes(bad)
        assert same(builder.get(tmp_path)), number
        assert len(builder.said) == number and builder.said[-1].endswith("it is rebuilt")
        assert path.read_bytes() == good
    # A flipped bit in the content is only detected by the checksum.
    path.write_bytes(damages[-1])
    read_arrays(path, verify=False)
    with pytest.raises(DamagedIndexCache, match="checksum"):
        read_arrays(path, verify=True)


def test_unwritable_cache_folder_is_reported_and_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    builder = Builder()
    assert same(builder.get(tmp_path / "file" / "folder"))
    assert len(builder.said) <= 2 and "kept in memory" in builder.said[-1]


def test_a_killed_writer_leaves_nothing_under_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pentatron.files.commit", lambda *paths: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_arrays(tmp_path / "x.order", ARRAYS)
    assert not list(tmp_path.iterdir())


def test_datasets_are_the_same_from_files(tmp_path: Path) -> None:
    source = CountingSequences(np.arange(3, 60, dtype=np.int32), 100, eod=99)

    def build(seed: int = 1, folder: Path | None = tmp_path, stop: int = 50, samples: int = 90) -> GPTDataset:
        return GPTDataset(source, range(2, stop), samples, 8, seed, later=[600], cache=IndexCache(folder))

    plain, first, again = build(folder=None), build(), build()
    assert len(list(tmp_path.iterdir())) == len(first.parts) == 2
    for i in range(0, len(plain), 7):
        assert plain[i]["tokens"].tolist() == first[i]["tokens"].tolist() == again[i]["tokens"].tolist()
    assert again.parts[0].epochs == plain.parts[0].epochs
    # Everything that determines the order is part of the file name.
    for other in ({"seed": 2}, {"stop": 49}, {"samples": 91}):
        before = len(list(tmp_path.iterdir()))
        build(**other)  # type: ignore[arg-type]
        assert len(list(tmp_path.iterdir())) > before
