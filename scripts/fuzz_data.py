"""Damages random .bin/.idx/.meta files and checks that no wrong token is read.

python scripts/fuzz_data.py --cases 10000 [--seed N]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.data.fuzzed_pairs import try_many


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    given = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = try_many(given.seed, given.cases, Path(folder) / "case")
    for outcome, count in outcomes.most_common():
        print(f"{count:7d}  {outcome}")
    print(
        f"{given.cases} damaged pairs in {time.perf_counter() - started:.0f} s: nothing wrong in silence, no crash"
    )


if __name__ == "__main__":
    main()
