"""A batch script for Slurm: one torchrun on every node, and a way out before the time is over.

What is easy to get wrong, and the reason for most lines: one task per node, because torchrun starts the workers
itself; the node's number read on the node, not in the batch shell; the name of the first node found outside the container,
which has no scontrol; the warning sent to the batch shell and passed on to the steps as SIGTERM, which torchrun hands to
its workers, because srun itself answers SIGTERM by killing the step.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

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

# Between the ports of services and those the system gives to clients; the job's number keeps two jobs on a node apart.
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
