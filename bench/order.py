"""Measures building, caching and reading of the sample index.

Builds all three indices (documents, samples, shuffle) of a corpus of a million documents and a billion tokens
in CPU time of one core, in turns with megatron-core's compiled helper if it is installed. Then measures
opening the index from the cache, drawing the order of a blend, the rate of a loader, and the memory that
reading takes.

    python bench/order.py
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pentatron.data.blending import greedy_order  # noqa: E402
from pentatron.data.gpt_dataset import GPTDataset  # noqa: E402
from pentatron.data.indexed import IndexedDataset  # noqa: E402
from pentatron.data.indexed_writer import IndexedDatasetWriter  # noqa: E402
from pentatron.data.loader import build_loader  # noqa: E402
from pentatron.data.sample_index import IndexCache, build_sample_index  # noqa: E402

SEED = 1234
BUILD_GOAL, OPEN_GOAL, LOADER_GOAL = 1.5, 0.050, 20e6
WEIGHTS = (0.5, 0.3, 0.15, 0.05)


def seconds_of(action: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    started = clock()
    action()
    return clock() - started


class Lengths:
    """Corpus with document lengths only, whose tokens are never read."""

    def __init__(self, documents: int, tokens: int) -> None:
        draw = np.random.default_rng(0)
        self.sequence_lengths = draw.integers(1, 2 * tokens // documents, size=documents).astype(np.int32)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Any:
        raise NotImplementedError


def their_builder() -> Callable[[np.ndarray, int, int], None] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from megatron.core.datasets import helpers
            from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index
        except ImportError:
            return None

    def build(lengths: np.ndarray, length: int, epochs: int) -> None:
        random = np.random.RandomState(SEED)
        everything = np.arange(len(lengths), dtype=np.int32)
        tokens = int(np.sum(lengths[everything]))
        documents = _build_document_index(everything, epochs, random, False)
        starts = helpers.build_sample_idx(lengths.copy(), documents, length, epochs, tokens, True, True)
        _build_shuffle_index(len(starts) - 1, len(starts) - 1, random)

    return build


def compare_building(corpus: Lengths, length: int, epochs: int, repeats: int) -> float | None:
    lengths, theirs = corpus.sequence_lengths, their_builder()
    samples = (epochs * int(lengths.sum(dtype=np.int64)) - 1) // length
    own, other = [], []
    for _ in range(repeats):
        own.append(
            seconds_of(lambda: build_sample_index(lengths, range(len(lengths)), samples, length, SEED))
        )
        if theirs is not None:
            other.append(seconds_of(lambda: theirs(lengths, length, epochs)))
    line = f"length {length}, {epochs} epoch(s), {samples:,} samples: built in {min(own):.3f} s"
    if not other:
        print(f"{line} (megatron-core is not installed)")
        return None
    ratio = statistics.median(own) / statistics.median(other)
    print(f"{line}, theirs {min(other):.3f} s; ratio of medians {ratio:.2f} (goal {BUILD_GOAL})", flush=True)
    return ratio


def measure_cache(corpus: Lengths, length: int, repeats: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        cache = IndexCache(Path(folder))

        def find() -> None:
            GPTDataset(
                corpus, range(len(corpus.sequence_lengths)), 10**9 // length, length, SEED, cache=cache
            )

        first = seconds_of(find, time.perf_counter)
        again = [seconds_of(find, time.perf_counter) for _ in range(repeats)]
    print(
        f"length {length}: built and written in {first:.3f} s; found again, with its checksum compared, in "
        f"{min(again) * 1000:.0f} ms, median {statistics.median(again) * 1000:.0f} ms (goal {OPEN_GOAL * 1000:.0f} ms)",
        flush=True,
    )
    return min(again)


def write_corpus(prefix: Path, documents: int) -> None:
    draw = np.random.default_rng(1)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for _ in range(documents):
            writer.add_document(draw.integers(0, 50_000, size=draw.integers(500, 5000)))


def read_all(prefix: Path, documents: int, length: int) -> tuple[int, float]:
    """Reads every sample through the loader; returns the tokens and the peak growth of memory in MB.

    Only anonymous memory of this process counts.
    """
    before = anonymous_memory()
    dataset = GPTDataset(
        IndexedDataset(prefix, 50_257), range(documents), None, length, SEED, vocab_size=50_257
    )
    batches = iter(build_loader(dataset, 0, 8, 0, 1))
    peak, count = before, len(dataset) // 8
    for _ in range(count):
        next(batches)
        peak = max(peak, anonymous_memory())
    return count * 8 * length, (peak - before) / 1e6


def anonymous_memory() -> int:
    """Returns the bytes of RssAnon: without pages of files, which the kernel may drop."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def measure_memory(folder: Path, length: int) -> None:
    """Measures fresh processes that read a corpus, and one of eight times its size."""
    for documents in (4000, 32_000):
        prefix = folder / f"of-{documents}"
        write_corpus(prefix, documents)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            tokens, grown = pool.apply(read_all, (prefix, documents, length))
        print(f"reading {tokens / 1e6:.0f} million tokens takes {grown:.1f} MB of memory", flush=True)


def measure_loader(folder: Path, length: int, documents: int) -> float:
    write_corpus(folder / "x", documents)
    source = IndexedDataset(folder / "x", 50_257)
    rates = []
    for _ in range(3):
        dataset = GPTDataset(source, range(documents), None, length, SEED, vocab_size=50_257)
        batches = iter(build_loader(dataset, 0, 8, 0, 1))
        count = len(dataset) // 8
        started = time.process_time()
        for _ in range(count):
            next(batches)
        rates.append(count * 8 * length / (time.process_time() - started))
    print(
        f"loader at length {length}, micro-batches of 8, checksums at first touch in the first pass: "
        f"{', '.join(f'{rate / 1e6:.1f}' for rate in rates)} million tokens/s of one process (goal {LOADER_GOAL / 1e6:.0f})",
        flush=True,
    )
    return max(rates)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=10**6)
    parser.add_argument("--tokens", type=int, default=10**9)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    corpus = Lengths(given.documents, given.tokens)
    ratios = [compare_building(corpus, *case, given.repeats) for case in ((4096, 1), (1024, 1), (1024, 3))]
    opened = measure_cache(corpus, 1024, given.repeats)
    drawn = seconds_of(lambda: greedy_order(WEIGHTS, 5_000_000))
    print(f"a blend of {len(WEIGHTS)}: five million draws in {drawn:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        rate = measure_loader(Path(folder), 4096, 4000)
        measure_memory(Path(folder), 4096)
    slow = [ratio for ratio in ratios if ratio is not None and ratio > BUILD_GOAL]
    sys.exit(bool(slow) or opened > OPEN_GOAL or rate < LOADER_GOAL)


if __name__ == "__main__":
    main()
