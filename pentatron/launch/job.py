"""A job over several machines: what is asked of the cluster and of torchrun, checked before a script is written."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.run import RunConfig
from pentatron.text import one_line

# Environment variables of a run: what a launcher sets where the user has not, and what acts on whom.


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# Read by NCCL itself, in every worker; NCCL_TIMEOUT is read by nobody but us.
OF_NCCL = "NCCL_"
OUR_OWN = ("NCCL_TIMEOUT",)


@dataclass(frozen=True)
class Variable:
    name: str
    value: str
    reason: str


def connections_for(config: RunConfig) -> Variable | None:
    """One queue to the GPU lets communication start in the order of the computation that it hides behind.

    Sharded parameters are gathered beside the computation, and so are updated ones with --overlap-param-gather, which one queue would
    forbid: what is gathered later stands before what is computed now.
    """
    sizes = config.parallel
    if sizes.tensor_model_parallel_size * sizes.context_parallel_size == 1:
        return None
    if decide(config, DeviceFacts()).param_overlap.on:
        return None
    return Variable(CONNECTIONS, "1", "so that kernels start in the order in which they were queued")


def variables_of_a_job(
    config: RunConfig, nodes: int, processes: int, cpus: int, uses_gpus: bool
) -> list[Variable]:
    """What the script of a job sets, each unless the user has; without `cpus` the node counts its cores itself."""
    counted = f"$(( $(nproc) > {processes} ? $(nproc) / {processes} : 1 ))"
    threads = str(max(1, cpus // processes)) if cpus else counted
    found = [Variable("OMP_NUM_THREADS", threads, "the cores of a node divided among its workers")]
    connections = connections_for(config)
    if uses_gpus and connections is not None:
        found.append(connections)
    if uses_gpus and nodes > 1:
        found.append(
            Variable("NCCL_DEBUG", "WARN", "NCCL says what goes wrong between nodes, and nothing else")
        )
    return found


def describe(environment: Mapping[str, str], on_gpu: bool, nccl: bool, alone: bool) -> list[str]:
    """Lines that say which of the user's variables act on this run, and which cannot."""
    given = [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if name.startswith(OF_NCCL) and name not in OUR_OWN
    ]
    lines = []
    if given and nccl:
        lines.append(f"NCCL reads from the environment: {', '.join(given)}")
    elif given:
        reason = (
            "one process sends no messages" if alone else "messages go through gloo here, not through NCCL"
        )
        lines.append(f"{', '.join(given)}: {reason}, so this changes nothing")
    if CONNECTIONS in environment:
        written = f"{CONNECTIONS}={environment[CONNECTIONS]}"
        lines.append(
            f"CUDA reads from the environment: {written}" if on_gpu else f"{written}: there is no GPU here"
        )
    return lines


def chosen_interfaces(pattern: str, interfaces: Sequence[str]) -> list[str]:
    """The interfaces NCCL_SOCKET_IFNAME lets NCCL use: prefixes by commas, `^` all but those, `=` whole names."""
    exclude, text = pattern.startswith("^"), pattern.lstrip("^")
    exact, text = text.startswith("="), text.lstrip("=")
    names = [name for name in text.split(",") if name]
    if not names:
        return list(interfaces)

    def matches(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names)

    return [interface for interface in interfaces if matches(interface) != exclude]


def interface_problem(environment: Mapping[str, str], interfaces: Sequence[str]) -> str | None:
    pattern = environment.get("NCCL_SOCKET_IFNAME", "")
    if not pattern or chosen_interfaces(pattern, interfaces):
        return None
    return (
        f"NCCL_SOCKET_IFNAME={pattern} names no network interface of this machine, which has {', '.join(interfaces)}; "
        f"export one of those, or unset the variable"
    )


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
