"""A script that starts torchrun on one machine of several; the same file runs on all of them."""

import shlex
from collections.abc import Sequence

from pentatron.launch.job import Job
from pentatron.launch.script import (
    SIGNALS,
    exports,
    head,
    import_lines,
    meeting,
    new_addresses,
    secret_lines,
    setup_lines,
    words_array,
)
from pentatron.parallel.meeting import SECRET

_USUAL_PORT = 29500


def node_script(job: Job, command: Sequence[str], equation: str) -> str:
    """For one machine without a meeting point; for several the machine's number is the script's first word."""
    parts = [
        [*head(command, equation), *_how_to_run(job)],
        ["set -euo pipefail", f"cd {shlex.quote(job.folder)}"],
        setup_lines(job, "eu"),
        _place(job),
        [
            *exports(job),
            *import_lines(job),
            *(secret_lines() if job.nodes == 1 else _shared_secret()),
            "# The trainer saves a checkpoint on SIGTERM and ends; torchrun waits this long for it.",
            f'export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-{job.grace or 30}}}"',
        ],
        words_array(job.words),
        _start(job),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _how_to_run(job: Job) -> list[str]:
    if job.nodes == 1:
        return ["# Run it with bash; further words go to the training command."]
    return [
        f"# Run it on each of the {job.nodes} machines, with the machine's number first: bash THIS_FILE 0 on "
        f"{job.address or 'the one that MASTER_ADDR names'}, bash THIS_FILE 1 ...",
        "# All of them need this folder, the same Python packages and the same data; further words go to the training command.",
    ]


def _shared_secret() -> list[str]:
    return [
        f"# Where {SECRET} is exported, the same random text on every machine (openssl rand -hex 32), ranks refuse processes that do not",
        "# know it.",
    ]


def _place(job: Job) -> list[str]:
    if job.nodes == 1:
        return new_addresses() if job.restarts else []
    lines = [
        'case "${1:-}" in',
        '    "" | *[!0-9]*) ;;',
        "    *) NODE_RANK=$1; shift ;;",
        "esac",
        f': "${{NODE_RANK:?give the number of this machine, 0 to {job.nodes - 1}: bash $0 NUMBER}}"',
        f'if [ "$NODE_RANK" -ge {job.nodes} ]; then echo "there is no machine $NODE_RANK of {job.nodes}: '
        f'count from 0" >&2; exit 2; fi',
    ]
    if job.address:
        lines.append(f'export MASTER_ADDR="${{MASTER_ADDR:-{job.address}}}"')
    else:
        lines.append(': "${MASTER_ADDR:?export MASTER_ADDR, the address of machine 0}"')
    lines.append(f'export MASTER_PORT="${{MASTER_PORT:-{job.port or _USUAL_PORT}}}"')
    if job.restarts:
        lines += [
            f'export RUN_ID="${{RUN_ID:-{job.name}}}"',
            *new_addresses(),
        ]
    return lines


def _start(job: Job) -> list[str]:
    where = f"--standalone --max_restarts={job.restarts}" if job.nodes == 1 else _quoted(meeting(job))
    return [
        f"exec {shlex.quote(job.python)} -P -m torch.distributed.run --nnodes={job.nodes} --nproc_per_node={job.processes} \\",
        f"    {SIGNALS} \\",
        f'    {where} "${{train[@]}}" "$@"',
    ]


def _quoted(words: str) -> str:
    """Each word that holds a variable in quotes: a name may have anything in it."""
    return " ".join(f'"{word}"' if "$" in word else word for word in words.split())
