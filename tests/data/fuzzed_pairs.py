"""Random pairs with random damage, for the tests and scripts/fuzz_data.py."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np

from pentatron.data.indexed import IndexedDataset
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.errors import UserError

Documents = list[list[np.ndarray]]
ENDINGS = (".bin", ".idx", ".meta")


def random_documents(draw: random.Random, dtype: str) -> Documents:
    """Returns documents of sequences; some corpora are larger than a checksum block."""
    numbers = np.random.default_rng(draw.randrange(2**32))
    longest = draw.choice((3, 40, 40, 20000))
    high = min(np.iinfo(dtype).max, 60000)
    return [
        [
            numbers.integers(0, high, draw.randint(1, longest)).astype(dtype)
            for _ in range(draw.choice((0, 1, 1, 1, 2)))
        ]
        for _ in range(draw.randint(1, 12))
    ]


def write(prefix: Path, documents: Documents, dtype: str) -> None:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            tokens = np.concatenate([*document, np.empty(0, dtype)])
            writer.add_document(tokens, [len(part) for part in document])


def read(prefix: Path) -> Documents:
    """Reads every sequence, in one or two parts."""
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices.tolist()
    found: Documents = []
    for first, last in pairwise(bounds):
        parts = []
        for number in range(first, last):
            half = int(dataset.sequence_lengths[number]) // 2
            parts.append(np.concatenate([dataset.get(number, half), dataset.get(number, 0, half)][::-1]))
        found.append(parts)
    return found


def same(one: Documents, other: Documents) -> bool:
    def listed(documents: Documents) -> list[list[list[int]]]:
        return [[part.tolist() for part in document] for document in documents]

    return listed(one) == listed(other)


def flip_bits(draw: random.Random, content: bytearray) -> None:
    for _ in range(draw.choice((1, 1, 2, 20))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def zero(draw: random.Random, content: bytearray) -> None:
    begin = draw.randrange(len(content))
    end = min(len(content), begin + draw.choice((1, 8, 512, 4096, 10**6)))
    content[begin:end] = bytes(end - begin)


def overwrite(draw: random.Random, content: bytearray) -> None:
    begin = draw.randrange(len(content))
    end = min(len(content), begin + draw.choice((1, 2, 8, 4096)))
    content[begin:end] = draw.randbytes(end - begin)


def truncate(draw: random.Random, content: bytearray) -> None:
    del content[draw.choice((0, len(content) - 1, len(content) // 2, draw.randrange(len(content)))) :]


def extend(draw: random.Random, content: bytearray) -> None:
    content += draw.randbytes(draw.choice((1, 2, 8, 4096)))


def swap(draw: random.Random, content: bytearray) -> None:
    size = draw.choice((1, 2, 4, 8, 512))
    one, other = (draw.randrange(max(1, len(content) - size)) for _ in range(2))
    if abs(one - other) >= size:
        content[one : one + size], content[other : other + size] = (
            content[other : other + size],
            content[one : one + size],
        )


def shift(draw: random.Random, content: bytearray) -> None:
    at = draw.randrange(len(content))
    del content[at]
    content.append(draw.randrange(256))


def adjust_number(draw: random.Random, content: bytearray) -> None:
    """Changes a number of the index slightly, which is the damage closest to valid data."""
    at = draw.randrange(len(content))
    content[at] = (content[at] + draw.choice((-2, -1, 1, 2))) % 256


DAMAGES: tuple[Callable[[random.Random, bytearray], None], ...] = (
    *(flip_bits, zero, overwrite, truncate, extend, swap, shift, adjust_number),
)


def try_one(seed: int, folder: Path) -> str:
    """Damages one random pair and returns the outcome, or raises AssertionError with the case."""
    draw = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dtype = draw.choice(("uint16", "uint16", "int32", "uint8", "int64"))
    prefix, documents = folder / "pair", random_documents(draw, dtype)
    write(prefix, documents, dtype)
    with_sidecar = draw.random() < 0.7
    if not with_sidecar:
        Path(f"{prefix}.meta").unlink()
    path = Path(f"{prefix}{draw.choice(ENDINGS if with_sidecar else ENDINGS[:2])}")
    if draw.random() < 0.1:
        # The file of another pair, sometimes of the same shape.
        others = documents if draw.random() < 0.5 else random_documents(draw, dtype)
        others = [[(part + 1).astype(dtype) for part in document] for document in others]
        write(folder / "other", others, dtype)
        content = (folder / f"other{path.suffix}").read_bytes()
        damage = "another pair's"
    else:
        chosen = draw.choice(DAMAGES)
        changed = bytearray(path.read_bytes())
        if changed:
            chosen(draw, changed)
        content, damage = bytes(changed), chosen.__name__
    untouched = content == path.read_bytes()
    path.write_bytes(content)
    case = f"case {seed}: {damage} {path.suffix}{'' if with_sidecar else ' without a sidecar'}"
    try:
        found = read(prefix)
    except UserError as error:
        assert not untouched, f"{case}: a good pair was refused: {error}"
        assert str(prefix) in str(error) and "byte" in str(error), (
            f"{case}: the sentence names no place: {error}"
        )
        return "refused"
    except Exception as error:
        raise AssertionError(f"{case}: no sentence but {error!r}") from error
    right = same(found, documents)
    assert right or not (with_sidecar or untouched), f"{case}: wrong tokens were read in silence"
    return "untouched" if untouched else "read rightly" if right else "wrong, but without a sidecar"


def try_many(first: int, count: int, folder: Path) -> Counter[str]:
    # fsync is disabled: no power cut is simulated here, and it would take most of the time.
    with mock.patch("pentatron.files.os.fsync"):
        return Counter(try_one(seed, folder) for seed in range(first, first + count))
