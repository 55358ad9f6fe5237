"""Preparing data: its rate against the tokenizers library alone on the same cores, and its memory at two sizes.

The text is the source of Python's standard library, repeated up to the asked size; the vocabulary is trained on it. The library's rate is
that of one `encode_batch_fast` over texts that are in memory already, with as many threads as prepare has workers: reading, parsing,
writing and checksums are what prepare does besides.

    python bench/data.py --megabytes 40 --workers 2
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

from pentatron.data.corpus import python_stdlib_files  # noqa: E402
from pentatron.data.tokenizer import FileTokenizer, train_bpe  # noqa: E402

VOCABULARY = 16384
GOAL = 0.85


def texts_of(megabytes: float) -> list[str]:
    texts: list[str] = []
    left = megabytes * 1e6
    sources = [path.read_text(encoding="utf-8", errors="replace") for path in python_stdlib_files()]
    while left > 0:
        for text in sources:
            texts.append(text)
            left -= len(text.encode())
            if left <= 0:
                break
    return texts


def library_seconds(folder: Path, texts: list[str]) -> float:
    started = time.perf_counter()
    FileTokenizer(folder)._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return time.perf_counter() - started


def raw_rate(folder: Path, workers: int) -> None:
    """Runs in a process of its own: the number of threads is read once."""
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").open()]
    seconds = library_seconds(folder, texts)
    print(sum(len(text.encode()) for text in texts) / 1e6 / seconds)


def prepare_once(folder: Path, workers: int, name: str) -> tuple[float, float, float]:
    """Seconds, and the peak memory in MB of the command itself and of its largest worker."""
    words = [*("--input", str(folder / "text.jsonl")), *("--output-prefix", str(folder / name))]
    words += [
        "--tokenizer-type",
        "HFTokenizer",
        "--tokenizer-model",
        str(folder),
        "--append-eod",
        "--overwrite",
    ]
    body = (
        "import resource, sys\n"
        "from pentatron.cli.main import main\n"
        "if __name__ == '__main__':\n"
        "    code = main(sys.argv[1:])\n"
        "    own, theirs = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))\n"
        "    print('memory', own, theirs)\n"
        "    sys.exit(code)\n"
    )
    script = folder / "prepare_once.py"
    script.write_text(body)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    result = subprocess.run(
        [sys.executable, str(script), "prepare", *words, "--workers", str(workers)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.perf_counter() - started
    own, theirs = map(int, result.stdout.rsplit("memory", 1)[1].split())
    return seconds, own / 1000, theirs / 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--raw", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.raw is not None:
        raw_rate(given.raw, given.workers)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = texts_of(given.megabytes)
        train_bpe(iter(texts_of(10)), VOCABULARY).save(str(folder / "tokenizer.json"))
        memory = []
        ratios = []
        megabytes = 0.0
        for size in (given.megabytes / 4, given.megabytes):
            texts = texts_of(size)
            megabytes = sum(len(text.encode()) for text in texts) / 1e6
            with (folder / "text.jsonl").open("w") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
            del texts
            repeats = given.repeats if size == given.megabytes else 1
            for _ in range(repeats):
                environment = {**os.environ, "RAYON_NUM_THREADS": str(given.workers)}
                command = [sys.executable, __file__, "--raw", name, "--workers", str(given.workers)]
                out = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=True
                ).stdout
                seconds, own, theirs = prepare_once(folder, given.workers, "out")
                rate = megabytes / seconds
                ratios.append(rate / float(out))
                print(
                    f"{megabytes:6.1f} MB  prepare {rate:5.2f} MB/s with everything  library alone {float(out):5.2f} MB/s  "
                    f"ratio {ratios[-1]:.2f}  memory {own:.0f} MB, largest worker {theirs:.0f} MB",
                    flush=True,
                )
                memory.append((megabytes, own, theirs))
    middle = statistics.median(ratios[1:])
    print(f"ratio at {megabytes:.0f} MB, {given.workers} workers: {middle:.2f} (goal {GOAL})")
    small, large = memory[0], memory[-1]
    print(
        f"memory from {small[0]:.0f} to {large[0]:.0f} MB of text: {small[1]:.0f} → {large[1]:.0f} MB, "
        f"largest worker {small[2]:.0f} → {large[2]:.0f} MB"
    )
    sys.exit(middle < GOAL)


if __name__ == "__main__":
    main()
