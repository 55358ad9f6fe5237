"""A batch script for Slurm: one torchrun on every node, and a way out before the time is over.

What is easy to get wrong, and the reason for most lines: one task per node, because torchrun starts the
workers itself; the node's number read on the node, not in the batch shell; the name of the first node found
outside the container, which has no scontrol; the warning sent to the batch shell and passed on to the steps
as SIGTERM, which torchrun hands to its workers, because srun itself answers SIGTERM by killing the step.
"""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from pentatron.launch.job import Job
from pentatron.parallel.rendezvous import SECRET
from pentatron.text import redacted

# Text that both kinds of script share: quoted words, variables, the line that starts the workers of one
# machine.


WRITTEN_BY = "# Written by: "
# SIGUSR1 and SIGUSR2, which schedulers send as warnings, would end torchrun and leave its workers behind.
SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"


def head(command: Sequence[str], equation: str) -> list[str]:
    """The first lines; the second one tells a script of ours from any other file."""
    # A word may hold several lines, of which none may leave the comment.
    written = redacted(shlex.join(command)).replace("\n", "\n#   ")
    return ["#!/usr/bin/env bash", f"{WRITTEN_BY}{written}", f"# {equation}"]


def setup_lines(job: Job, strict: str) -> list[str]:
    """The user's own lines, without the strictness (`-u`, `-eu`) of the rest: scripts of conda and of modules
    read what is not set.
    """
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
    """Workers of `-m pentatron` import nothing from the current folder, unless the package itself is there: a
    checkout need not be installed.
    """
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
    """How the machines meet.

    Restarts need a meeting that can be repeated; otherwise every node keeps its number.
    """
    if job.restarts:
        return f"--rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT --rdzv_id=$RUN_ID --max_restarts={job.restarts}"
    return "--node_rank=$NODE_RANK --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT"


# Between the ports of services and those the system gives to clients; the job's number keeps two jobs on a
# node apart.
_PORT = "$((20000 + SLURM_JOB_ID % 10000))"
_FIRST_NODE = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


def batch_script(job: Job, command: Sequence[str], equation: str) -> str:
    parts = [
        [*head(command, equation), *_requests(job)],
        ["set -u", f"cd {shlex.quote(job.folder)} || exit 2"],
        _way_out(job),
        setup_lines(job, "u"),
        [
            f"export MASTER_ADDR={job.address or _FIRST_NODE}",
            f"export MASTER_PORT={job.port or _PORT}",
            *(_repeatable_meeting() if job.restarts else []),
            *_cores(job),
            *exports(job),
            *import_lines(job),
            *secret_lines(),
        ],
        words_array(job.words),
        _step(job),
        _end(job),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _requests(job: Job) -> list[str]:
    asked = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(job.cpus or ""),
        "gres": job.gres or (f"gpu:{job.processes}" if job.uses_gpus else ""),
        "mem": job.memory,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "output": job.output,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value]
    # A job that starts again adds to its output instead of replacing it.
    lines.append("#SBATCH --open-mode=append")
    if job.grace:
        lines.append(f"#SBATCH --signal=B:USR1@{job.grace}")
    lines.append(f"#SBATCH --{'requeue' if job.requeues else 'no-requeue'}")
    return [*lines, *(f"#SBATCH {line}" for line in job.batch_lines)]


def _cores(job: Job) -> list[str]:
    if not job.cpus:
        return []
    return [
        "# Since version 22.05 srun does not take this over from sbatch.",
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    ]


def _repeatable_meeting() -> list[str]:
    return [
        'export RUN_ID="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        *new_addresses(),
    ]


def _way_out(job: Job) -> list[str]:
    return [
        "# The trainer saves a checkpoint on SIGTERM and ends; torchrun waits this long for it.",
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.grace or 30}",
        'warned="" stopping=""',
        "ask_to_stop() {",
        '    if [ -n "$stopping" ]; then return; fi',
        "    stopping=yes",
        '    echo "$(date +%FT%T) asking the workers to save and stop"',
        '    scancel --signal=TERM "$SLURM_JOB_ID"',
        "}",
        "trap 'warned=yes; ask_to_stop' USR1",
        "trap ask_to_stop TERM",
    ]


def _step(job: Job) -> list[str]:
    container = []
    if job.container_image:
        container.append(f"--container-image={job.container_image}")
        container.append(f"--container-mounts={_mounts(job)}")
        container.append('--container-workdir="$PWD"')
    # A node whose workers end first must not take the others down while they still save.
    options = ["--kill-on-bad-exit=0", f"--wait={job.grace or 30}", *container]
    return [
        f"# One torchrun on each of the {job.nodes} nodes; it knows its number only there.",
        f"srun {' '.join(options)} bash -c '",
        f'    exec "$0" -P -m torch.distributed.run --nnodes={job.nodes} --nproc_per_node={job.processes} \\',
        f"        {SIGNALS} \\",
        f"        {_per_node(job)} \\",
        f'        "$@"\' {shlex.quote(job.python)} "${{train[@]}}" &',
        "step=$!",
    ]


def _mounts(job: Job) -> str:
    """What the user asked for, and the folder that the job runs in: a container sees nothing else."""
    seen = [pair.split(":")[1] for pair in job.container_mounts.split(",") if ":" in pair]
    here = Path(job.folder)
    own = [] if any(here.is_relative_to(place) for place in seen) else ['"$PWD:$PWD"']
    return ",".join([*([job.container_mounts] if job.container_mounts else []), *own])


def _per_node(job: Job) -> str:
    return meeting(job).replace("$NODE_RANK", "$SLURM_NODEID")


def _end(job: Job) -> list[str]:
    lines = [
        "# A signal interrupts wait, not the step.",
        'while kill -0 "$step" 2>/dev/null; do wait "$step"; done',
        'wait "$step"; code=$?',
        'if [ -n "$stopping" ]; then echo "$(date +%FT%T) stopped as asked; torchrun calls that a failure ($code)"; fi',
    ]
    if job.requeues:
        lines += [
            "# Cut short by its time limit or by another job: back into the queue, to go on from the checkpoint. Slurm does that",
            "# itself only for a job that it had to kill. A failure is not repeated.",
            'if [ "$code" -ne 0 ] && { [ -n "$warned" ] ||',
            '    scontrol show job --oneliner "$SLURM_JOB_ID" | grep -q " PreemptTime=[0-9]"; }; then',
            '    echo "$(date +%FT%T) back into the queue"',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return [*lines, 'exit "$code"']


# A script that starts torchrun on one machine of several; the same file runs on all of them.


_USUAL_PORT = 29500


def node_script(job: Job, command: Sequence[str], equation: str) -> str:
    """For one machine without a meeting point; for several the machine's number is the script's first word.
    """
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
