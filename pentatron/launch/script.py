"""Text that both kinds of script share: quoted words, variables, the line that starts the workers of one machine."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from pentatron.launch.job import Job
from pentatron.parallel.meeting import SECRET
from pentatron.text import redacted

WRITTEN_BY = "# Written by: "
# SIGUSR1 and SIGUSR2, which schedulers send as warnings, would end torchrun and leave its workers behind.
SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"


def head(command: Sequence[str], equation: str) -> list[str]:
    """The first lines; the second one tells a script of ours from any other file."""
    # A word may hold several lines, of which none may leave the comment.
    written = redacted(shlex.join(command)).replace("\n", "\n#   ")
    return ["#!/usr/bin/env bash", f"{WRITTEN_BY}{written}", f"# {equation}"]


def setup_lines(job: Job, strict: str) -> list[str]:
    """The user's own lines, without the strictness (`-u`, `-eu`) of the rest: scripts of conda and of modules read what is not set."""
    if not job.setup:
        return []
    return [
        "# Scripts of conda and of environment modules read variables that nobody has set.",
        f"set +{strict}",
        job.setup,
        'setup_code=$?; if [ "$setup_code" -ne 0 ]; then',
        '    echo "the last line of --setup failed ($setup_code): mend it, or end it with: || true" >&2; exit 2',
        "fi",
        f"set -{strict}",
    ]


def exports(job: Job) -> list[str]:
    """What the workers inherit; the user's own values win."""
    lines = []
    for item in job.variables:
        lines += [f"# {item.name}: {item.reason}", f'export {item.name}="${{{item.name}:-{item.value}}}"']
    return lines


def import_lines(job: Job) -> list[str]:
    """Workers of `-m pentatron` import nothing from the current folder, unless the package itself is there: a checkout need not be installed."""
    if job.words[0] != "-m" or Path(job.folder, "pentatron", "__main__.py").is_file():
        return []
    return ["# Files in this folder do not stand in for packages.", "export PYTHONSAFEPATH=1"]


def secret_lines() -> list[str]:
    """Made where the job runs, so that the script holds none."""
    return [
        "# What the ranks of this job know and no other process does; they refuse those that do not.",
        f'[ -n "${{{SECRET}-}}" ] || {SECRET}="$(od -An -N32 -tx1 /dev/urandom | tr -d " \\n")"',
        f"export {SECRET}",
    ]


def new_addresses() -> list[str]:
    """For restarts by torchrun."""
    return [
        "# Workers that start again must not find the addresses of those that died.",
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    ]


def words_array(words: Iterable[str]) -> list[str]:
    """The training command as an array, a flag with its values on a line."""
    lines: list[list[str]] = []
    for word in words:
        if not lines or (word.startswith("--") and len(word) > 2):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return ["train=(", *(f"    {' '.join(line)}" for line in lines), ")"]


def meeting(job: Job) -> str:
    """How the machines meet. Restarts need a meeting that can be repeated; otherwise every node keeps its number."""
    if job.restarts:
        return f"--rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT --rdzv_id=$RUN_ID --max_restarts={job.restarts}"
    return "--node_rank=$NODE_RANK --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT"
