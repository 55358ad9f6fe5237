"""The description of a job on several machines, its checks, and the environment variables of its workers."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.run_config import RunConfig
from pentatron.text import one_line

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# Prefix of the variables that NCCL reads, and those with the prefix that only pentatron reads.
NCCL_PREFIX = "NCCL_"
PENTATRON_ONLY = ("NCCL_TIMEOUT",)
# One word that a shell passes on as it is.
_WORD = re.compile(r"[^\s\x00-\x1f\x7f'\"\\`$;&|<>{}()#]+")
# sbatch options that the script sets itself: another value would start the wrong number of processes.
_SET_BY_SCRIPT = (
    "nodes", "ntasks-per-node", "ntasks", "signal", "requeue", "no-requeue", "open-mode", "array",
)  # fmt: skip
# sbatch options that have a flag here, which checks them and counts the threads of the workers: fields of
# `Job`.
SBATCH_FIELDS = (
    "job-name", "cpus-per-task", "gres", "mem", "time", "partition", "account", "qos", "constraint", "output",
)  # fmt: skip
# Fields of `Job` whose value is one word of the script.
_ONE_WORD = (
    *("job-name", "partition", "account", "qos", "constraint", "mem", "gres", "output"),
    *("container-image", "container-mounts", "master-addr"),
)


@dataclass(frozen=True)
class Variable:
    """An environment variable to set unless the user has, and the reason, which scripts show."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Job:
    """A job for Slurm or torchrun, with fields as the flags of `pentatron launch`.

    Empty strings leave the choice to the cluster. `processes`: workers per node, one per GPU if `uses_gpus`.
    `words`: the training command after `python`.
    """

    nodes: int
    processes: int
    uses_gpus: bool
    python: str
    words: tuple[str, ...]
    job_name: str = "pentatron"
    folder: str = "."
    time: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    mem: str = ""
    gres: str = ""
    cpus_per_task: int | None = None
    output: str = "%x-%j.out"
    container_image: str = ""
    container_mounts: str = ""
    setup: str = ""
    sbatch: str = ""
    master_addr: str = ""
    master_port: int | None = None
    grace: int = 300
    no_requeue: bool = False
    max_restarts: int = 0
    # Set by the script unless the user has set them.
    variables: tuple[Variable, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes

    def option(self, flag: str) -> Any:
        """Returns the field that a flag (`job-name`) sets."""
        return getattr(self, flag.replace("-", "_"))

    @property
    def sbatch_options(self) -> tuple[str, ...]:
        """Further sbatch options of the user (`--sbatch`)."""
        return tuple(shlex.split(self.sbatch))


def parse_time_limit(time: str) -> int | None:
    """Parses a Slurm time limit (minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S); None if it is invalid."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    # Without days, one or two numbers are minutes and seconds.
    if match[1] is None and match[4] is None:
        return first * 60 + second
    return days * 24 * 3600 + first * 3600 + second * 60 + third


def job_problems(job: Job) -> list[str]:
    """Returns every error in the options of the job, each with its fix."""
    port, image = job.master_port, job.container_image
    words = [(f, text) for f in _ONE_WORD if (text := job.option(f)) and not _WORD.fullmatch(text)]
    one_word = "must be one word without quotes or characters of the shell"
    no_image = "--container-mounts mounts folders in a container, but there is none; add --container-image"
    unmountable = f"{job.folder} cannot be shown to a container, as mounts are divided by ',' and ':'"
    checks = {
        f"--nodes {job.nodes} must be at least 1": job.nodes < 1,
        f"--gpus-per-node {job.processes} must be at least 1; on CPUs add --device cpu": job.processes < 1,
        **{f"--{flag} '{one_line(text)}' {one_word}": True for flag, text in words},
        f"--master-port {port} must lie between 1024 and 65535": port and not 1024 <= port <= 65535,
        f"--max-restarts {job.max_restarts} must not be negative": job.max_restarts < 0,
        no_image: job.container_mounts and not image,
        f"{unmountable}; start from another folder": image and set(job.folder) & set(",:"),
    }
    found = [problem for problem, is_wrong in checks.items() if is_wrong]
    return [*found, *_time_problems(job), *_sbatch_problems(job)]


def _time_problems(job: Job) -> list[str]:
    if job.grace < 0:
        return [f"--grace {job.grace} must not be negative"]
    limit = parse_time_limit(job.time)
    if job.time and limit is None:
        return [f"--time {job.time} must look like 12:00:00, 2-00:00:00 or a number of minutes"]
    if limit is not None and limit <= job.grace:
        asked = f"the job is asked to save --grace {job.grace} seconds before its end"
        fix = "give more time, or a shorter --grace"
        return [f"--time {job.time} ({limit} s) leaves nothing to train: {asked}; {fix}"]
    return []


def _sbatch_problems(job: Job) -> list[str]:
    try:
        lines: Sequence[str] = job.sbatch_options
    except ValueError as error:
        return [f"--sbatch '{job.sbatch}' cannot be split into words ({error})"]
    problems = []
    for line in lines:
        name = line.removeprefix("--").partition("=")[0]
        if not line.startswith("--") or not _WORD.fullmatch(line):
            one_word = "must be an option of sbatch in one word, such as --exclusive or --mail-type=END"
            problems.append(f"'{one_line(line)}' {one_word}")
        elif name in _SET_BY_SCRIPT:
            instead = "use --nodes, --gpus-per-node, --grace or --no-requeue"
            problems.append(f"--{name} is set by the script itself; {instead}")
        elif name in {*SBATCH_FIELDS, "container-image", "container-mounts"}:
            problems.append(f"{line} would bypass the checks of launch; give it as a flag, without --sbatch")
    return [f"--sbatch: {problem}" for problem in problems]


def cuda_connections(config: RunConfig) -> Variable | None:
    """Returns CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor and context parallelism, else None.

    With one hardware queue, kernels start in launch order, so that communication overlaps with the
    computation it was launched before. Not with an overlapped parameter all-gather (ZeRO 3,
    --overlap-param-gather): in one queue, the prefetch would block the computation launched after it.
    """
    prefetches = decide(config, DeviceFacts()).optimizer.overlap_gather
    if config.grid.tensor * config.grid.context == 1 or prefetches:
        return None
    return Variable(CONNECTIONS, "1", "so that kernels start in the order in which they were queued")


def job_variables(job: Job, config: RunConfig) -> list[Variable]:
    """Returns the variables that a job script sets."""
    # Without `cpus_per_task`, the script counts the cores of the node.
    counted = f"$(( $(nproc) > {job.processes} ? $(nproc) / {job.processes} : 1 ))"
    threads = str(max(1, job.cpus_per_task // job.processes)) if job.cpus_per_task else counted
    variables = [Variable("OMP_NUM_THREADS", threads, "the cores of a node divided among its workers")]
    if job.uses_gpus and (connections := cuda_connections(config)) is not None:
        variables.append(connections)
    if job.uses_gpus and job.nodes > 1:
        variables.append(Variable("NCCL_DEBUG", "WARN", "NCCL prints warnings and errors only"))
    return variables


def environment_notices(
    given: Mapping[str, str], environment: Mapping[str, str], on_gpu: bool, nccl: bool, alone: bool
) -> list[str]:
    """Returns notices about the variables of NCCL and CUDA that affect this run.

    Args:
        given: the environment as the user set it; `environment` also has what the run has set.
        nccl: whether the run uses NCCL.
    """
    found = {n: v for n, v in given.items() if n.startswith(NCCL_PREFIX) and n not in PENTATRON_ONLY}
    written = ", ".join(f"{name}={value}" for name, value in sorted(found.items()))
    lines = []
    if written and nccl:
        lines.append(f"NCCL reads from the environment: {written}")
    elif written:
        by_gloo = "messages go through gloo here, not through NCCL"
        reason = "one process sends no messages" if alone else by_gloo
        lines.append(f"{written}: {reason}, so this has no effect")
    connections = f"{CONNECTIONS}={environment.get(CONNECTIONS)}"
    if CONNECTIONS in given:
        read = f"CUDA reads from the environment: {connections}"
        lines.append(read if on_gpu else f"{connections}: this machine has no GPU")
    elif on_gpu and CONNECTIONS in environment:
        order = "so that kernels start in the order in which they were queued"
        lines.append(f"{connections} is set, {order}; a value that you export has precedence")
    return lines


def matching_interfaces(pattern: str, interfaces: Sequence[str]) -> list[str]:
    """Returns the interfaces that NCCL_SOCKET_IFNAME matches.

    The pattern has comma-separated prefixes; `^` excludes them, `=` makes them exact names.
    """
    exclude, text = pattern.startswith("^"), pattern.lstrip("^")
    exact, text = text.startswith("="), text.lstrip("=")
    names = tuple(filter(None, text.split(",")))
    return [
        interface
        for interface in interfaces
        if not names or (interface in names if exact else interface.startswith(names)) != exclude
    ]


def interface_problem(environment: Mapping[str, str], interfaces: Sequence[str]) -> str | None:
    """Returns the error if NCCL_SOCKET_IFNAME matches no interface of this machine."""
    pattern = environment.get("NCCL_SOCKET_IFNAME", "")
    if not pattern or matching_interfaces(pattern, interfaces):
        return None
    has = f"no network interface of this machine, which has {', '.join(interfaces)}"
    return f"NCCL_SOCKET_IFNAME={pattern} names {has}; export one of those, or unset the variable"
