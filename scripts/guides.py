"""Runs the commands of the guides in small form, prints a table and writes docs/guides/README.md."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ROOT / "docs/guides/commands.yaml"
PAGE = ROOT / "docs/guides/README.md"
LIMIT_S = 300

_OF_EXAMPLE = "--num-layers=4 --hidden-size=64 --num-attention-heads=4 --vocab-size=200 --seq-length=32 --dataset-size=64"
SIZES = {
    "SMALL": f"{_OF_EXAMPLE} --batch-size=8 --train-steps=4",
    "PROJECT": "--vocab_size 200 --hidden_size 64 --num_layers 4 --max_seq_len 32 --max_steps 3",
    "TINY": "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 512 --train-iters 3 --global-batch-size 8 --eval-interval 0 --lr-decay-iters 100",
    "QWEN": "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 16 "
    "--num-query-groups 2 --seq-length 32 --max-position-embeddings 128 --padded-vocab-size 512",
}


@dataclass(frozen=True)
class Command:
    guide: str
    shows: str
    command: str
    exits: int = 0
    says: Sequence[str] = ()
    leaves: Sequence[str] = ()
    steps: Mapping[str, int] = field(default_factory=dict)
    needs: str = ""
    quick: bool = False


@dataclass(frozen=True)
class Outcome:
    exit_code: int | None
    problems: Sequence[str]
    seconds: float
    output: str
    not_run: str = ""


def load_commands(path: Path = COMMANDS) -> list[Command]:
    return [Command(**raw) for raw in yaml.safe_load(path.read_text(encoding="utf-8"))["commands"]]


def make_workplace(folder: Path) -> None:
    """Copies the repository and adds what readers of the guides have: a model, its tokenizer, texts."""
    # Copies new files in folders of the repository, but not what users keep beside those folders.
    ours = {name.split("/")[0] for name in _listed("-c")}
    for name in _listed("-co", "--exclude-standard", "--", *sorted(ours)):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run([sys.executable, str(ROOT / "scripts/guide_files.py"), str(folder)], check=True)


def _listed(*words: str) -> list[str]:
    """Returns files of the repository, as `git ls-files` names them."""
    listed = subprocess.run(["git", "ls-files", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def run(command: Command, folder: Path, port: int) -> Outcome:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if command.needs and shutil.which(command.needs, path=path) is None:
        return Outcome(None, [], 0.0, "", not_run=f"{command.needs} is not installed")
    environment = {**os.environ, **SIZES, "PATH": path, "PORT": str(port), "PYTHONPATH": str(folder)}
    environment["PYTHON"] = sys.executable
    environment.pop("NCCL_TIMEOUT", None)
    began = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-uc", command.command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        code = None
    return Outcome(code, problems(command, code, output, folder), time.monotonic() - began, output)


def problems(command: Command, code: int | None, output: str, folder: Path) -> list[str]:
    """Returns the conditions that a command violates; nothing for a command that holds."""
    if code is None:
        return [f"did not end within {LIMIT_S} s"]
    found = [] if code == command.exits else [f"exit code {code} instead of {command.exits}"]
    # Only tracebacks through the package count: launchers print their own when a worker fails.
    if command.exits != 0 and any("/pentatron/" in line for line in output.splitlines() if 'File "' in line):
        found.append("a refusal came with a traceback")
    found += [f"does not say '{text}'" for text in command.says if text not in output]
    found += [f"no {name}" for name in command.leaves if not (folder / name).exists()]
    for run_folder, steps in command.steps.items():
        metrics = folder / run_folder / "metrics.jsonl"
        rows = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        if len(rows) != steps or any(json.loads(row).get("loss", 1.0) <= 0 for row in rows):
            found.append(f"{run_folder} has {len(rows)} steps instead of {steps}")
    return found


def telling(output: str) -> list[str]:
    """Returns the lines that explain a failure: our own messages, or else the last lines."""
    lines = output.splitlines()
    return [line for line in lines if line.startswith("pentatron:")][:6] or lines[-12:]


def checked(command: Command) -> str:
    parts = [f"exit code {command.exits}"]
    parts += [f"`{text}` is said" for text in command.says]
    parts += [f"`{name}` is there" for name in command.leaves]
    parts += [f"{steps} steps in `{name}`" for name, steps in command.steps.items()]
    return "; ".join(parts)


def page(commands: Sequence[Command], outcomes: Sequence[Outcome]) -> str:
    held = sum(not o.problems and not o.not_run for o in outcomes)
    lines = [
        "# The guides' commands",
        "",
        "Written by `make guides`, which runs each command of [commands.yaml](commands.yaml) from the root of a fresh copy of this "
        "repository, one after the other; names in capitals are sizes for a small machine.",
        "",
        f"{held} of {len(commands)} hold; those that need a program that is not installed are not run.",
        "",
        "| guide | shows | command | exit code | checked | holds |",
        "|---|---|---|---|---|---|",
    ]
    for command, outcome in zip(commands, outcomes):
        text = " ".join(command.command.split()).replace("|", "\\|")
        verdict = "yes" if not outcome.problems else "no: " + "; ".join(outcome.problems)
        verdict = f"not run: {outcome.not_run}" if outcome.not_run else verdict
        lines.append(
            f"| {command.guide} | {command.shows} | `{text}` | {outcome.exit_code} | {checked(command)} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip())
    parser.add_argument(
        "--only",
        default="",
        help="run only the commands of a guide, or those whose description contains this",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the folder in which the commands ran and print its path"
    )
    options = parser.parse_args(argv)
    everything = load_commands()
    chosen = [c for c in everything if options.only in (c.guide, "") or options.only in c.shows]
    if not chosen:
        parser.error(f"no guide or command contains {options.only!r}")
    place = Path(tempfile.mkdtemp(prefix="pentatron-guides-"))
    outcomes: list[Outcome] = []
    try:
        make_workplace(place)
        for number, command in enumerate(chosen):
            outcome = run(command, place, 29600 + number)
            outcomes.append(outcome)
            state = "----" if outcome.not_run else "ok  " if not outcome.problems else "FAIL"
            print(
                f"{state} {command.guide}  {command.shows:<72.72} {outcome.exit_code!s:>4} {outcome.seconds:6.1f} s",
                flush=True,
            )
            if outcome.not_run:
                print(f"       not run: {outcome.not_run}")
            for problem in outcome.problems:
                print(f"       {problem}")
            if outcome.problems:
                print("".join(f"       | {line}\n" for line in telling(outcome.output)), end="")
    finally:
        if options.keep:
            print(f"kept: {place}")
        else:
            shutil.rmtree(place, ignore_errors=True)
    held = sum(not o.problems and not o.not_run for o in outcomes)
    left_out = sum(bool(o.not_run) for o in outcomes)
    print(f"guides: {held} of {len(chosen)} commands hold" + (f", {left_out} not run" if left_out else ""))
    if len(chosen) == len(everything):
        PAGE.write_text(page(chosen, outcomes), encoding="utf-8")
    return int(held + left_out != len(chosen))


if __name__ == "__main__":
    sys.exit(main())
