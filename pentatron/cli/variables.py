"""Environment variables that NCCL and CUDA read: what is set where the user has not, and what a run says of them."""

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pentatron.config.run import RunConfig
from pentatron.errors import UserError
from pentatron.launch.variables import CONNECTIONS, connections_for, describe, interface_problem

if TYPE_CHECKING:
    import torch


def limit_connections(config: RunConfig) -> None:
    """Sets how many queues a GPU has, before anything talks to it."""
    wanted = connections_for(config)
    if wanted is not None and config.launch.device != "cpu":
        os.environ.setdefault(wanted.name, wanted.value)


def variable_notes(said: Mapping[str, str], device: "torch.device", alone: bool, nccl: bool) -> list[str]:
    """`said` is the environment as the user left it. `nccl`: GPUs talk to each other through it."""
    on_gpu = device.type == "cuda"
    notes = describe(said, on_gpu, nccl, alone)
    if on_gpu and CONNECTIONS not in said and CONNECTIONS in os.environ:
        written = f"{CONNECTIONS}={os.environ[CONNECTIONS]}"
        notes.append(
            f"{written} is set, so that kernels start in the order in which they were queued; your own value would count"
        )
    return notes


def require_interface(said: Mapping[str, str]) -> None:
    """NCCL itself would say it in lines of its own, after a while."""
    problem = interface_problem(said, [name for _, name in socket.if_nameindex()])
    if problem is not None:
        raise UserError(f"{socket.gethostname()}: {problem}")
