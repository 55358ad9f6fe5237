"""Environment variables of launchers and libraries: reads rank and world size, sets what workers need."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pentatron.errors import UserError
from pentatron.parallel import rendezvous
from pentatron.text import parse_rendezvous_url


@dataclass(frozen=True)
class RankInfo:
    """Rank and world size of this process, on its machine (`local_`) and in the job."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    launcher: str
    # GPUs of the machine; 0 if the launcher does not state them.
    local_gpus: int = 0

    def sharing(self, visible: int) -> int:
        """Returns how many processes share the visible GPUs.

        Slurm may make different GPUs visible to each process.
        """
        if self.local_gpus <= visible:
            return self.local_size
        return -(-self.local_size * visible // self.local_gpus)


def find_worker(environment: Mapping[str, str]) -> RankInfo | None:
    """Returns the rank that torchrun or Slurm assigned, or None for a process that was started alone."""
    # First: torchrun in a Slurm step inherits the variables of Slurm, whose task is torchrun itself.
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        local_rank = _number(environment, "LOCAL_RANK", rank)
        local_size = _number(environment, "LOCAL_WORLD_SIZE", world)
        worker = RankInfo(rank, world, local_rank, local_size, "torchrun")
    elif "SLURM_STEP_ID" in environment and _number(environment, "SLURM_NTASKS", 1) > 1:
        worker = _slurm(environment)
    else:
        return None
    if not (0 <= worker.rank < worker.world_size and 0 <= worker.local_rank < worker.local_size):
        place = f"rank {worker.rank} of {worker.world_size}, {worker.local_rank} of {worker.local_size}"
        said = f"{worker.launcher} says that this process is {place} on this machine"
        raise UserError(f"{said}, but ranks are from 0 to the number of ranks - 1; check the launcher")
    return worker


def _slurm(environment: Mapping[str, str]) -> RankInfo:
    world = _number(environment, "SLURM_NTASKS")
    per_node = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", str(world)))
    node = _number(environment, "SLURM_NODEID", 0)
    rank, local_rank = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_LOCALID")
    local_size = per_node[node] if node < len(per_node) else per_node[0]
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    return RankInfo(rank, world, local_rank, local_size, "Slurm", int(gpus) if gpus.isdecimal() else 0)


def tasks_per_node(text: str) -> list[int]:
    """Parses `4(x2),3` to [4, 4, 3]: four tasks on each of two nodes, three on the last."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE is '{text}', which is not a list like 4(x2),3")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def nested_launcher_notices(environment: Mapping[str, str]) -> list[str]:
    """Detects a common mistake in batch scripts: several tasks per node with a torchrun in each."""
    text = environment.get("SLURM_STEP_NUM_TASKS", "")
    tasks = int(text) if text.isdecimal() else 1
    launchers = environment.get("GROUP_WORLD_SIZE", "")
    if not launchers.isdecimal() or tasks <= int(launchers):
        return []
    problem = f"Slurm started torchrun {tasks} times, but this run consists of {launchers} of them"
    fix = "use --ntasks-per-node=1, because torchrun starts the workers of a node"
    script = "`pentatron launch slurm` writes such a script"
    return [f"{problem}; if all should be one run, {fix} ({script})"]


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in environment and default is not None:
        return default
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        actual = f"it is '{environment[name]}'" if name in environment else "it is missing"
        must = f"the environment variable {name} must be a number"
        raise UserError(f"{must}, {actual}; check the launcher") from None


def export_rank_variables(worker: RankInfo, init_method: str | None) -> None:
    """Exports the variables of `env://` rendezvous (RANK, MASTER_ADDR, ...) that the launcher has not set."""
    sizes = {"RANK": worker.rank, "WORLD_SIZE": worker.world_size, "LOCAL_RANK": worker.local_rank}
    os.environ.update({name: str(size) for name, size in sizes.items()})
    if init_method is not None and "MASTER_ADDR" not in os.environ:
        host, port = parse_init_method(init_method)
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    if "MASTER_ADDR" not in os.environ:
        problem = f"{worker.launcher} started {worker.world_size} processes, but MASTER_ADDR is not set"
        fix = "export MASTER_ADDR and MASTER_PORT, or give --init-method tcp://HOST:PORT"
        raise UserError(f"{problem}; {fix}")
    os.environ.setdefault("MASTER_PORT", "29500")


def rendezvous_address(worker: RankInfo) -> rendezvous.Rendezvous | None:
    """Returns the rendezvous address of the ranks from the environment; None for one process.

    If all ranks are on this machine, sets the variables that make gloo and NCCL listen on loopback only.
    """
    if worker.world_size == 1:
        # A program written for Megatron initializes a process group of one rank.
        os.environ.update(rendezvous.loopback_variables(os.environ, [rendezvous.GLOO_INTERFACE]))
        return None
    if rendezvous.is_single_machine(os.environ):
        os.environ.update(rendezvous.loopback_variables(os.environ))
    # Removed, so that child processes of this rank do not try to use the socket.
    listener = os.environ.pop(rendezvous.LISTENER, "")
    inherited = int(listener) if listener.isdecimal() else None
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = (os.environ["MASTER_ADDR"], _number(os.environ, "MASTER_PORT"))
    return rendezvous.Rendezvous(*address, is_served, inherited, rendezvous.job_secret(os.environ))


def parse_init_method(url: str) -> tuple[str, str]:
    """Parses `tcp://host:1234` to (host, 1234)."""
    address = parse_rendezvous_url(url)
    if address is None:
        example = "tcp://HOST:PORT, for example tcp://localhost:12345"
        raise UserError(f"--init-method {url} must look like {example}")
    return address[0], str(address[1])


def set_worker_environment(threads: int) -> list[str]:
    """Sets the environment that workers inherit, except what the user has set; returns what was set."""
    defaults = {"OMP_NUM_THREADS": str(threads)}
    if sys.platform == "linux":
        # All workers are on this machine, whose hostname may not resolve to a reachable address.
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    missing = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(missing)
    return [f"{name}={value}" for name, value in missing.items()]


def set_cublas_workspace() -> None:
    """Sets a fixed cuBLAS workspace size, without which cuBLAS is not deterministic."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def nccl_timeout_seconds(environment: Mapping[str, str]) -> float | None:
    """Returns NCCL_TIMEOUT if it is a positive number.

    Guides tell users to set it, but torch does not read it.
    """
    text = environment.get("NCCL_TIMEOUT", "")
    number = float(text) if re.fullmatch(r"\d+(\.\d*)?", text.strip()) else 0.0
    return number or None
