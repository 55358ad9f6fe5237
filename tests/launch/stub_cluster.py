"""Stubs of Slurm's commands as shell scripts, which run batch scripts without a cluster."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

NODES = ("first", "second", "third", "fourth")

# Starts its arguments as often as the batch script requests, on every node; ends with the worst exit code.
SRUN = r"""#!/usr/bin/env bash
echo "srun $*" >> "$STUB/calls"
while [ "${1#--}" != "$1" ]; do case "$1" in --jobid) shift 2 ;; *) shift ;; esac; done
pids=() number=0
for ((node = 0; node < SLURM_NNODES; node++)); do
    for ((task = 0; task < TASKS_PER_NODE; task++)); do
        SLURM_NODEID=$node SLURM_PROCID=$number "$@" &
        pids+=($!); echo $! >> "$STUB/tasks"; number=$((number + 1))
    done
done
worst=0
for pid in "${pids[@]}"; do wait "$pid" || worst=$?; done
exit $worst
"""
SCONTROL = r"""#!/usr/bin/env bash
echo "scontrol $*" >> "$STUB/calls"
if [ "$2" = hostnames ]; then for name in $3; do echo "$name"; done; fi
if [ "$2" = job ]; then echo "JobId=$4 PreemptTime=${PREEMPTED:-None} Restarts=0"; fi
"""
SCANCEL = r"""#!/usr/bin/env bash
echo "scancel $*" >> "$STUB/calls"
kill -TERM $(cat "$STUB/tasks")
"""
# In place of Python: records its node and arguments, then ends with the requested exit code.
RECORDER = r"""#!/usr/bin/env bash
trap 'echo "$SLURM_NODEID saved" >> "$STUB/ended"; exit 1' TERM
echo "$SLURM_NODEID $*" >> "$STUB/started"
echo "${PENTATRON_JOB_SECRET:-}" >> "$STUB/secrets"
if [ -n "${WORKS:-}" ]; then while true; do sleep 0.05; done; fi
exit "${ENDS_WITH:-0}"
"""


class StubCluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        scripts = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "python": RECORDER}
        for name, text in scripts.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def start(self, script: Path, *words: str, cwd: Path, **variables: str) -> "subprocess.Popen[str]":
        """Runs a batch script as slurmd would, with the nodes and tasks of its #SBATCH lines."""
        asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(), re.MULTILINE))
        nodes = int(asked["nodes"])
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_", "NCCL_"))}
        environment = kept | {
            "PATH": f"{self.folder}:{os.environ['PATH']}", "STUB": str(self.folder), "PYTHON": "python",
            "SLURM_JOB_ID": "12345", "SLURM_NNODES": str(nodes), "SLURM_JOB_NODELIST": " ".join(NODES[:nodes]),
            "SLURM_CPUS_PER_TASK": asked.get("cpus-per-task", "1"), "TASKS_PER_NODE": asked["ntasks-per-node"],
            "SLURM_GPUS_PER_NODE": asked.get("gpus-per-node", ""),
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", str(script), *words],
            cwd=cwd,
            env={**environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, script: Path, *words: str, cwd: Path, **variables: str) -> int:
        process = self.start(script, *words, cwd=cwd, **variables)
        process.communicate(timeout=30)
        return process.returncode

    def warn(self, process: "subprocess.Popen[str]", tasks: int) -> tuple[int, str]:
        """Sends SIGUSR1 once that many tasks run; waits for the end."""
        deadline = time.monotonic() + 30
        while len(self.started()) < tasks:
            assert time.monotonic() < deadline, "the tasks do not start"
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=30)
        return process.returncode, out

    def started(self) -> list[tuple[int, str]]:
        """Returns the node and the arguments of every launcher, ordered by node."""
        return sorted(
            (int(node), words) for node, _, words in (line.partition(" ") for line in self._read("started"))
        )

    def secrets(self) -> list[str]:
        """Returns the secret of every launcher, in order of their starts."""
        return self._read("secrets")

    def ended(self) -> list[str]:
        return sorted(self._read("ended"))

    def calls(self, program: str) -> list[str]:
        return [line for line in self._read("calls") if line.startswith(program)]

    def _read(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []
