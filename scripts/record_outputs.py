"""Records the outputs that a refactoring must not change, or compares two recordings.

    python scripts/record_outputs.py --out before [--tree PATH] [--only "settings plan"]
    python scripts/record_outputs.py --compare before after

Records outputs of the commands, exit codes, help pages, settings with their origins, refusals, plans,
layouts, and the files that short CPU runs leave. Each has one file, without times, paths and other noise.
`--tree` records the code of another checkout. Compare only recordings of one machine: numbers depend on the
processor and on torch.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from recorded.commands import Recorder, import_package
from recorded.configurations import record_questions
from recorded.differences import compare
from recorded.inputs import write_inputs
from recorded.noise import Noise
from recorded.runs import record_runs

ROOT = Path(__file__).resolve().parents[1]
# Groups are recorded at the same time, each in its own process.
GROUPS = ("runs", "settings", "help listed presets files layout plan")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the recording; it must not exist")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to record (default: this one)")
    parser.add_argument("--only", default=" ".join(GROUPS), help=f"some of: {' '.join(GROUPS)}")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="compare two recordings")
    parser.add_argument("--values", action="store_true", help="compare only settings, flags and numbers")
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.compare:
        missing = [str(folder) for folder in options.compare if not folder.is_dir()]
        if missing:
            parser.error(f"no such folder: {', '.join(missing)}")
        return compare(*options.compare, values_only=options.values)
    if options.out is None:
        parser.error("give --out FOLDER, or --compare A B")
    if options.place is not None:
        return _record_here(options.out, options.tree, options.place, options.only.split())
    if options.out.exists():
        parser.error(f"{options.out} exists; choose another folder, or remove it")
    if not (options.tree / "pentatron/__main__.py").is_file():
        parser.error(f"{options.tree} is no checkout: it has no pentatron/__main__.py")
    return _record(options.out.resolve(), options.tree.resolve(), options.only.split())


def _record(out: Path, tree: Path, only: Sequence[str]) -> int:
    """Starts a process for each of `GROUPS` that imports `tree`, without the user's environment."""
    began = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="recording-"))
    out.mkdir(parents=True)
    environment = {
        **{name: os.environ[name] for name in ("PATH", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ},
        "PYTHONPATH": str(tree),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(work),
        "LANG": "C.UTF-8",
        "COLUMNS": "120",
        "NO_COLOR": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        started = []
        for group in GROUPS:
            if chosen := [name for name in group.split() if name in only]:
                place = work / group.split()[0]
                words = ["--out", out, "--tree", tree, "--place", place, "--only", " ".join(chosen)]
                started.append(
                    subprocess.Popen([sys.executable, __file__, *words], cwd=work, env=environment)
                )
        codes = [process.wait() for process in started]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    count = sum(path.is_file() for path in out.rglob("*"))
    print(f"{out}: {count} outputs of {tree} in {time.monotonic() - began:.0f} s")
    return max(codes, default=2)


def _record_here(out: Path, tree: Path, place: Path, only: Sequence[str]) -> int:
    place.mkdir()
    write_inputs(place)
    import_package(tree)
    noise = Noise({"PLACE": place, "WORK": place.parent, "TREE": tree, "PYTHON": sys.prefix})
    recorder = Recorder(out, place, noise)
    record_questions(recorder, tree, only)
    if "runs" in only:
        record_runs(recorder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
