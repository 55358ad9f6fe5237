"""Measures `pentatron prepare` against the tokenizers library on the same cores.

The text is the source of Python's standard library, repeated up to the requested size; the vocabulary is
trained on it. The rate of the library is that of one `encode_batch_fast` over texts in memory, with as many
threads as prepare has workers. `pentatron prepare` also reads, parses, writes, computes checksums and starts
processes. Memory is measured at two sizes: a quarter of the text and all of it. On a machine with other load,
compare the CPU seconds.

    python bench/data.py --megabytes 160 --workers 2
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pentatron.data.python_corpus import python_stdlib_files  # noqa: E402
from pentatron.data.tokenizer import FileTokenizer, train_bpe  # noqa: E402

VOCABULARY = 16384
GOAL = 0.85
PREPARE = """
import json, resource, sys
from pentatron.cli.main import main
if __name__ == "__main__":
    code = main(sys.argv[1:])
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(part.ru_utime + part.ru_stime for part in usage)
    print("\\n" + json.dumps([seconds, *(part.ru_maxrss / 1000 for part in usage)]))
    sys.exit(code)
"""


def write_texts(path: Path, megabytes: float) -> float:
    """Writes about `megabytes` of text as JSON lines; returns the megabytes written."""
    sources = [file.read_text(encoding="utf-8", errors="replace") for file in python_stdlib_files()]
    written, limit = 0, megabytes * 1e6
    with path.open("w") as file:
        while written < limit:
            for text in sources:
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
                if written >= limit:
                    break
    return written / 1e6


def encode_raw(folder: Path) -> None:
    """Encodes all texts with the library; prints seconds and CPU seconds.

    Runs in its own process, because the library reads its number of threads only once.
    """
    with (folder / "text.jsonl").open() as file:
        texts = [json.loads(line)["text"] for line in file]
    tokenizer = FileTokenizer(folder)._tokenizer
    tokenizer.encode_batch_fast(texts[:8], add_special_tokens=False)
    started, processor = time.perf_counter(), time.process_time()
    tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    print(json.dumps([time.perf_counter() - started, time.process_time() - processor]))


def run(command: list[str], threads: int) -> list[float]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    numbers: list[float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def measure(folder: Path, workers: int, megabytes: float) -> dict[str, float]:
    raw_seconds, raw_processor = run([__file__, "--raw", str(folder)], workers)
    words = ["--input", str(folder / "text.jsonl"), "--output-prefix", str(folder / "out"), "--append-eod"]
    words += ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(folder), "--workers", str(workers)]
    started = time.perf_counter()
    processor, own, worker = run([str(folder / "once.py"), "prepare", "--overwrite", *words], workers)
    seconds = time.perf_counter() - started
    found = {
        "rate": megabytes / seconds,
        "raw_rate": megabytes / raw_seconds,
        "ratio": raw_seconds / seconds,
        "processor": processor,
        "raw_processor": raw_processor,
        "own": own,
        "worker": worker,
    }
    print(
        f"{megabytes:6.1f} MB: prepare {found['rate']:.2f} MB/s, library alone {found['raw_rate']:.2f} MB/s, ratio {found['ratio']:.2f}, "
        f"of processor seconds {raw_processor / processor:.2f}; memory {own:.0f} MB, largest worker {worker:.0f} MB",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=160)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--raw", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.raw is not None:
        encode_raw(given.raw)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "once.py").write_text(PREPARE)
        write_texts(folder / "text.jsonl", 5)
        with (folder / "text.jsonl").open() as file:
            trained = train_bpe((json.loads(line)["text"] for line in file), VOCABULARY)
        trained.save(str(folder / "tokenizer.json"))
        small = measure(folder, given.workers, write_texts(folder / "text.jsonl", given.megabytes / 4))
        megabytes = write_texts(folder / "text.jsonl", given.megabytes)
        large = [measure(folder, given.workers, megabytes) for _ in range(given.repeats)]
    ratio = statistics.median(found["ratio"] for found in large)
    raw, own = (statistics.median(found[name] for found in large) for name in ("raw_processor", "processor"))
    # The difference between two sizes cancels the time in which processes start.
    further = (raw - small["raw_processor"]) / (own - small["processor"])
    print(
        f"{given.workers} workers, {megabytes:.0f} MB: {ratio:.2f} of the library's rate, {raw / own:.2f} by processor seconds, {further:.2f} for "
        f"every further MB (goal {GOAL})\nmemory at a quarter of the text and at all of it: {small['own']:.0f} and {large[-1]['own']:.0f} MB, largest "
        f"worker {small['worker']:.0f} and {large[-1]['worker']:.0f} MB"
    )
    sys.exit(ratio < GOAL)


if __name__ == "__main__":
    main()
