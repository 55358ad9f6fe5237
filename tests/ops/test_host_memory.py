"""Tests that freed memory stays in the process, so that later allocations have few page faults."""

import subprocess
import sys

import pytest

# Writes and frees four blocks, again and again. Runs in a fresh interpreter, because threads have heaps of
# their own, with other rules.
PROGRAM = """
import resource, sys
from pentatron.cli.train import keep_freed_memory
if sys.argv[1] == "keeps" and not keep_freed_memory():
    sys.exit("there is no glibc here")
for number in range(7):
    if number == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (24 * 2**20) for _ in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_waited_for(how: str) -> int:
    words = [sys.executable, "-c", PROGRAM, how]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.stderr.startswith("there is no glibc"):
        pytest.skip(ended.stderr)
    return int(ended.stdout)


def test_pages_are_there_the_next_time() -> None:
    assert pages_waited_for("keeps") < pages_waited_for("gives back") / 5
