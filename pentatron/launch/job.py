"""A job over several machines: what is asked of the cluster and of torchrun, checked before a script is written."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pentatron.launch.variables import Variable
from pentatron.text import one_line

_WORD = re.compile(r"[^\s\x00-\x1f\x7f'\"\\`$;&|<>{}()#]+")
_DAY = 24 * 3600
# Batch lines that the written script depends on: another value would start the wrong number of processes.
_OURS = ("nodes", "ntasks-per-node", "ntasks", "signal", "requeue", "no-requeue", "open-mode", "array")
# Those with a flag of the same name, by which they are checked and the workers' threads are counted.
_FLAGS = (
    "job-name", "cpus-per-task", "gres", "mem", "time", "partition", "account", "qos", "constraint", "output",
    "container-image", "container-mounts",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Empty words leave a matter to the cluster. `processes` of every node have a GPU each if `uses_gpus`."""

    nodes: int
    processes: int
    uses_gpus: bool
    python: str
    words: tuple[str, ...]
    name: str = "pentatron"
    folder: str = "."
    time: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    memory: str = ""
    gres: str = ""
    cpus: int = 0
    output: str = "%x-%j.out"
    container_image: str = ""
    container_mounts: str = ""
    setup: str = ""
    sbatch: str = ""
    address: str = ""
    port: int = 0
    grace: int = 300
    requeues: bool = True
    restarts: int = 0
    # Variables the script sets where the user has not, each with its reason.
    variables: tuple[Variable, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes

    @property
    def batch_lines(self) -> tuple[str, ...]:
        """The user's own words for sbatch."""
        return tuple(shlex.split(self.sbatch))


def seconds_of(time: str) -> int | None:
    """A time limit as Slurm writes it (minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S) in seconds; None if it is none."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return None
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is not None:
        return days * _DAY + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return (first or 0) * 3600 + (second or 0) * 60 + third
    return (first or 0) * 60 + (second or 0)


def problems_of(job: Job) -> list[str]:
    """Every mistake in what was asked of the cluster, each with its fix."""
    found = []
    if job.nodes < 1:
        found.append(f"--nodes {job.nodes} must be at least 1")
    if job.processes < 1:
        found.append(f"--gpus-per-node {job.processes} must be at least 1; on CPUs add --device cpu")
    words = {
        "job-name": job.name, "partition": job.partition, "account": job.account, "qos": job.qos,
        "constraint": job.constraint, "mem": job.memory, "gres": job.gres, "output": job.output,
        "container-image": job.container_image, "container-mounts": job.container_mounts, "master-addr": job.address,
    }  # fmt: skip
    found += [
        f"--{flag} '{one_line(text)}' must be one word without quotes or characters of the shell"
        for flag, text in words.items()
        if text and not _WORD.fullmatch(text)
    ]
    if job.port and not 1024 <= job.port <= 65535:
        found.append(f"--master-port {job.port} must lie between 1024 and 65535")
    if job.restarts < 0:
        found.append(f"--max-restarts {job.restarts} must not be negative")
    if job.container_mounts and not job.container_image:
        found.append(
            "--container-mounts says what a container sees, but there is none; add --container-image"
        )
    if job.container_image and set(job.folder) & set(",:"):
        found.append(
            f"{job.folder} cannot be shown to a container, as mounts are divided by ',' and ':'; start from another folder"
        )
    return [*found, *_time_problems(job), *_own_lines(job)]


def _time_problems(job: Job) -> list[str]:
    if job.grace < 0:
        return [f"--grace {job.grace} must not be negative"]
    if not job.time:
        return []
    limit = seconds_of(job.time)
    if limit is None:
        return [f"--time {job.time} must look like 12:00:00, 2-00:00:00 or a number of minutes"]
    if limit <= job.grace:
        return [
            f"--time {job.time} ({limit} s) leaves nothing to train: the job is asked to save --grace {job.grace} seconds "
            f"before its end; give more time, or a shorter --grace"
        ]
    return []


def _own_lines(job: Job) -> list[str]:
    try:
        lines: Sequence[str] = job.batch_lines
    except ValueError as error:
        return [f"--sbatch '{job.sbatch}' cannot be read as words ({error})"]
    found = []
    for line in lines:
        name = line.removeprefix("--").partition("=")[0]
        if not line.startswith("--") or not _WORD.fullmatch(line):
            found.append(
                f"--sbatch: '{one_line(line)}' must be an option of sbatch in one word, such as --exclusive or --mail-type=END"
            )
        elif name in _OURS:
            found.append(
                f"--sbatch: --{name} is set by the script itself; use --nodes, --gpus-per-node, --grace or --no-requeue"
            )
        elif name in _FLAGS:
            found.append(
                f"--sbatch: {line} would go past the checks of the launch; give it as a flag of its own, without --sbatch"
            )
    return found
