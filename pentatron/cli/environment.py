"""What the environment says: is this a worker of some launcher, and which one?"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pentatron.config.errors import UserError


@dataclass(frozen=True)
class Worker:
    """This process's place among those a launcher started."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    launcher: str


def find_worker(environment: Mapping[str, str]) -> Worker | None:
    """The place given by torchrun or Slurm, or None when nobody launched this process as one of several."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        local = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
        local_size = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else world
        return Worker(rank, world, local, local_size, "torchrun")
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        tasks_here = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_NTASKS", "1"))
        return Worker(
            rank=_number(environment, "SLURM_PROCID"),
            world_size=_number(environment, "SLURM_NTASKS"),
            local_rank=_number(environment, "SLURM_LOCALID"),
            # "4(x2)" means four tasks on each of two nodes.
            local_size=int(tasks_here.split("(")[0].split(",")[0]),
            launcher="Slurm",
        )
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        found = environment.get(name, "missing")
        raise UserError(
            f"the environment variable {name} must be a number, it is '{found}'; check the launcher"
        ) from None


def announce_worker(worker: Worker, meeting_point: str | None) -> None:
    """Puts what torch.distributed looks for into the environment, where the launcher did not."""
    os.environ.update(
        RANK=str(worker.rank), WORLD_SIZE=str(worker.world_size), LOCAL_RANK=str(worker.local_rank)
    )
    if meeting_point is not None and "MASTER_ADDR" not in os.environ:
        host, port = split_meeting_point(meeting_point)
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    if "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"{worker.launcher} started {worker.world_size} processes but no meeting point is known; "
            f"export MASTER_ADDR and MASTER_PORT, or give --init-method tcp://HOST:PORT"
        )
    os.environ.setdefault("MASTER_PORT", "29500")


def split_meeting_point(url: str) -> tuple[str, str]:
    """`tcp://host:1234` → (host, 1234)."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    if not url.startswith("tcp://") or not host or not port.isdigit():
        raise UserError(
            f"--init-method {url} must look like tcp://HOST:PORT, for example tcp://localhost:12345"
        )
    return host, port


def prepare_for_workers(threads: int) -> None:
    """Environment the workers inherit. The user's own values win."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if sys.platform == "linux":
        # All workers are on this machine; its name need not resolve to an address that works.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def timeout_minutes(configured: float) -> float:
    """NCCL_TIMEOUT (seconds) is what guides tell people to set; torch itself does not read it."""
    seconds = os.environ.get("NCCL_TIMEOUT", "")
    return float(seconds) / 60 if seconds.replace(".", "", 1).isdigit() else configured
