"""Writes job scripts: a Slurm batch script, or a torchrun script to start on each machine by hand.

Details of the Slurm script that are easy to get wrong:

- One task per node, because torchrun starts the workers of a node.
- The node rank is read on the node, not in the batch shell.
- The name of the first node is looked up outside the container, which has no scontrol.
- Slurm signals the batch shell before the time limit. The shell sends SIGTERM to the steps with scancel, and
  torchrun forwards it to its workers; a SIGTERM to srun would kill the step.
"""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from pentatron.launch.job import SBATCH_FIELDS, Job
from pentatron.parallel.rendezvous import SECRET
from pentatron.text import redact

WRITTEN_BY = "# Written by: "
# Without these, SIGUSR1 and SIGUSR2, which schedulers send as warnings, kill torchrun and orphan its workers.
_SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"


# Above the ports of services and below the ephemeral ports; jobs that share a node get different ones.
_SLURM_PORT = "$((20000 + SLURM_JOB_ID % 10000))"
_TORCHRUN_PORT = 29500
_FIRST_NODE = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
_NEW_STORE = [
    "# Restarted workers must not read the addresses of their predecessors from the store of torchrun.",
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
]


# --- lines that both scripts share ---


def _header(command: Sequence[str], equation: str) -> list[str]:
    """Returns the first lines. `WRITTEN_BY` in the second one marks files that may be overwritten."""
    # A word may contain newlines, which must not end the comment.
    written = redact(shlex.join(command)).replace("\n", "\n#   ")
    return ["#!/usr/bin/env bash", f"{WRITTEN_BY}{written}", f"# {equation}"]


def _setup(job: Job, strict: str) -> list[str]:
    """Returns the lines of `--setup`, during which the shell options (`-u`, `-eu`) are off."""
    if not job.setup:
        return []
    return [
        "# Scripts of conda and of environment modules read unset variables.",
        f"set +{strict}",
        job.setup,
        'setup_code=$?; if [ "$setup_code" -ne 0 ]; then',
        '    echo "the last line of --setup failed ($setup_code): fix it, or end it with: || true" >&2; exit 2',
        "fi",
        f"set -{strict}",
    ]


def _exports(job: Job) -> list[str]:
    """Returns the exports for the workers; values that the user has exported take precedence."""
    return [
        line
        for item in job.variables
        for line in (f"# {item.name}: {item.reason}", f'export {item.name}="${{{item.name}:-{item.value}}}"')
    ]


def _safe_path(job: Job) -> list[str]:
    """Returns the lines that keep the current folder off `sys.path`, unless it is a checkout of pentatron."""
    if job.words[0] != "-m" or Path(job.folder, "pentatron", "__main__.py").is_file():
        return []
    return ["# Files in this folder must not shadow packages.", "export PYTHONSAFEPATH=1"]


def _new_secret() -> list[str]:
    """Returns the lines that generate the job secret on the node; the script does not contain it."""
    return [
        "# Shared secret of the ranks of this job, which refuse connections without it.",
        f'[ -n "${{{SECRET}-}}" ] || {SECRET}="$(od -An -N32 -tx1 /dev/urandom | tr -d " \\n")"',
        f"export {SECRET}",
    ]


def _restarts(job: Job, run_id: str) -> list[str]:
    """Returns the lines that restarts by torchrun need."""
    return [f'export RUN_ID="{run_id}"', *_NEW_STORE] if job.max_restarts else []


def _command_array(words: Iterable[str]) -> list[str]:
    """Returns the training command as a shell array, with one flag and its values per line."""
    lines: list[list[str]] = []
    for word in words:
        if not lines or (word.startswith("--") and len(word) > 2):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return ["train=(", *(f"    {' '.join(line)}" for line in lines), ")"]


def _rendezvous(job: Job) -> str:
    """Returns the rendezvous options of torchrun: c10d if restarts must repeat it, else static ranks."""
    if job.max_restarts:
        return f"--rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT --rdzv_id=$RUN_ID --max_restarts={job.max_restarts}"
    return "--node_rank=$NODE_RANK --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT"


def _joined(parts: Sequence[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


# --- Slurm ---


def batch_script(job: Job, command: Sequence[str], equation: str) -> str:
    """Returns the sbatch script of a job. `equation` describes its layout in a comment."""
    srun = "# Since version 22.05 srun does not inherit this from sbatch."
    cores = [srun, 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"']
    parts = [
        [*_header(command, equation), *_sbatch_lines(job)],
        ["set -u", f"cd {shlex.quote(job.folder)} || exit 2"],
        _signal_handlers(job),
        _setup(job, "u"),
        [
            f"export MASTER_ADDR={job.master_addr or _FIRST_NODE}",
            f"export MASTER_PORT={job.master_port or _SLURM_PORT}",
            *_restarts(job, "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"),
            *(cores if job.cpus_per_task else []),
            *_exports(job),
            *_safe_path(job),
            *_new_secret(),
        ],
        _command_array(job.words),
        _srun(job),
        _exit(job),
    ]
    return _joined(parts)


def _sbatch_lines(job: Job) -> list[str]:
    gres = job.gres or (f"gpu:{job.processes}" if job.uses_gpus else "")
    options: dict[str, object] = {"job-name": job.job_name, "nodes": job.nodes, "ntasks-per-node": 1}
    options |= {name: job.option(name) for name in SBATCH_FIELDS} | {"gres": gres}
    # A job that is requeued appends to its output file instead of truncating it.
    options |= {"open-mode": "append", "signal": f"B:USR1@{job.grace}" if job.grace else ""}
    lines = [f"--{name}={value}" for name, value in options.items() if value]
    lines += ["--no-requeue" if job.no_requeue else "--requeue", *job.sbatch_options]
    return [f"#SBATCH {line}" for line in lines]


def _signal_handlers(job: Job) -> list[str]:
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


def _srun(job: Job) -> list[str]:
    # The workers of one node may end first; those of the others must not be killed while they save.
    options = ["--kill-on-bad-exit=0", f"--wait={job.grace or 30}"]
    if job.container_image:
        options += [f"--container-image={job.container_image}", f"--container-mounts={_mounts(job)}"]
        options.append('--container-workdir="$PWD"')
    rendezvous = _rendezvous(job).replace("$NODE_RANK", "$SLURM_NODEID")
    return [
        f"# One torchrun on each of the {job.nodes} nodes, where it reads its node rank.",
        f"srun {' '.join(options)} bash -c '",
        f'    exec "$0" -P -m torch.distributed.run --nnodes={job.nodes} --nproc_per_node={job.processes} \\',
        f"        {_SIGNALS} \\",
        f"        {rendezvous} \\",
        f'        "$@"\' {shlex.quote(job.python)} "${{train[@]}}" &',
        "step=$!",
    ]


def _mounts(job: Job) -> str:
    """Returns the mounts of the user, and the folder of the job unless they include it."""
    mounts = [job.container_mounts] if job.container_mounts else []
    targets = [pair.split(":")[1] for pair in job.container_mounts.split(",") if ":" in pair]
    if not any(Path(job.folder).is_relative_to(target) for target in targets):
        mounts.append('"$PWD:$PWD"')
    return ",".join(mounts)


def _exit(job: Job) -> list[str]:
    lines = [
        "# A signal interrupts wait, not the step.",
        'while kill -0 "$step" 2>/dev/null; do wait "$step"; done',
        'wait "$step"; code=$?',
        'if [ -n "$stopping" ]; then echo "$(date +%FT%T) stopped on request (torchrun exit code $code)"; fi',
    ]
    if not job.no_requeue:
        lines += [
            "# Requeues a job that its time limit or a preemption stopped, to resume from the checkpoint. Slurm itself requeues only",
            "# jobs that it had to kill. A failed job is not requeued.",
            'if [ "$code" -ne 0 ] && { [ -n "$warned" ] ||',
            '    scontrol show job --oneliner "$SLURM_JOB_ID" | grep -q " PreemptTime=[0-9]"; }; then',
            '    echo "$(date +%FT%T) requeued"',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return [*lines, 'exit "$code"']


# --- torchrun on each machine ---


def node_script(job: Job, command: Sequence[str], equation: str) -> str:
    """Returns the script to start on each machine, with the node rank as argument if there are several."""
    shared_secret = [
        f"# If {SECRET} is exported with the same random text on every machine (openssl rand -hex 32), ranks refuse connections",
        "# without it.",
    ]
    parts = [
        [*_header(command, equation), *_instructions(job)],
        ["set -euo pipefail", f"cd {shlex.quote(job.folder)}"],
        _setup(job, "eu"),
        _node_variables(job),
        [
            *_exports(job),
            *_safe_path(job),
            *(_new_secret() if job.nodes == 1 else shared_secret),
            "# The trainer saves a checkpoint on SIGTERM and ends; torchrun waits this long for it.",
            f'export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-{job.grace or 30}}}"',
        ],
        _command_array(job.words),
        _torchrun(job),
    ]
    return _joined(parts)


def _instructions(job: Job) -> list[str]:
    if job.nodes == 1:
        return ["# Run it with bash; further arguments go to the training command."]
    return [
        f"# Run it on each of the {job.nodes} machines, with the machine's number first: bash THIS_FILE 0 on "
        f"{job.master_addr or 'the one that MASTER_ADDR names'}, bash THIS_FILE 1 ...",
        "# All of them need this folder, the same Python packages and the same data; further arguments go to the training command.",
    ]


def _node_variables(job: Job) -> list[str]:
    if job.nodes == 1:
        return _NEW_STORE if job.max_restarts else []
    lines = [
        'case "${1:-}" in',
        '    "" | *[!0-9]*) ;;',
        "    *) NODE_RANK=$1; shift ;;",
        "esac",
        f': "${{NODE_RANK:?give the number of this machine, 0 to {job.nodes - 1}: bash $0 NUMBER}}"',
        f'if [ "$NODE_RANK" -ge {job.nodes} ]; then echo "there is no machine $NODE_RANK of {job.nodes}: '
        f'count from 0" >&2; exit 2; fi',
    ]
    host = ': "${MASTER_ADDR:?export MASTER_ADDR, the address of machine 0}"'
    host = f'export MASTER_ADDR="${{MASTER_ADDR:-{job.master_addr}}}"' if job.master_addr else host
    port = f'export MASTER_PORT="${{MASTER_PORT:-{job.master_port or _TORCHRUN_PORT}}}"'
    return [*lines, host, port, *_restarts(job, f"${{RUN_ID:-{job.job_name}}}")]


def _torchrun(job: Job) -> list[str]:
    if job.nodes == 1:
        rendezvous = f"--standalone --max_restarts={job.max_restarts}"
    else:
        # Quotes each word with a variable, whose value may contain spaces.
        rendezvous = " ".join(f'"{word}"' if "$" in word else word for word in _rendezvous(job).split())
    return [
        f"exec {shlex.quote(job.python)} -P -m torch.distributed.run --nnodes={job.nodes} --nproc_per_node={job.processes} \\",
        f"    {_SIGNALS} \\",
        f'    {rendezvous} "${{train[@]}}" "$@"',
    ]
