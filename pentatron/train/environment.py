"""What a run computes with, kept in its checkpoints: with other threads or libraries the same steps give other last bits."""

import platform
import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pentatron import __version__
from pentatron.parallel.collectives import gather_objects
from pentatron.parallel.world import World
from pentatron.text import plural
from pentatron.train.state import TrainState


def _listed(value: Any, separator: str) -> str:
    """Entries of a list; whatever else a checkpoint has in its place, as text. Either is shown no longer than a line."""
    entries = value if isinstance(value, list) else [value]
    return f"{separator.join(map(str, entries[:64])):.200}"


# In which words a difference is told. They say something of any value, as a checkpoint may hold any.
_WORDS: dict[str, Callable[[Any], str]] = {
    "pentatron": lambda v: f"Pentatron {_listed(v, ' ')}",
    "torch": lambda v: f"torch {_listed(v, ' ')}",
    "python": lambda v: f"Python {_listed(v, ' ')}",
    "devices": lambda v: _listed(v, " and "),
    "cuda": lambda v: f"CUDA {_listed(v, ' ')}" if v else "no CUDA",
    "threads": lambda v: f"{_listed(v, ' or ')} {'thread' if v == [1] else 'threads'} a process",
    "deterministic": lambda v: (
        "deterministic kernels alone" if v else "kernels that need not be deterministic"
    ),
    "backend": lambda v: _listed(v, " ") if v else "no communication",
    "machines": lambda v: f"{_listed(v, ' ')} {plural(v, 'machine')}",
}


def environment_here(world: World) -> dict[str, Any]:
    """Of all ranks together; every rank must ask."""
    own = (_device(world.device), torch.get_num_threads(), socket.gethostname())
    devices, threads, hosts = (sorted(set(found)) for found in zip(*gather_objects(own, world.everyone)))
    return {
        "pentatron": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "devices": devices,
        "cuda": torch.version.cuda if world.device.type == "cuda" else None,
        "threads": threads,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "backend": _backend(world),
        "machines": len(hosts),
    }


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Which instructions are used is what sums depend on, rather than the name of the processor.
    return f"CPU ({torch.backends.cpu.get_cpu_capability()})"


def _backend(world: World) -> str | None:
    if world.everyone.size == 1:
        return None
    if "nccl" in (name := str(dist.get_backend_config())):
        return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return "gloo" if "gloo" in name else name


def settle_environment(world: World, state: TrainState) -> list[str]:
    """Writes into the state what the run computes with from here on; returns what to tell of differences."""
    before, now = state.environment, environment_here(world)
    state.environment = now
    different = [name for name in _WORDS if name in before and before[name] != now[name]]
    # Another number of processes is another layout, which is told as that; and where GPUs compute, threads do not.
    if None in (before.get("backend"), now["backend"]):
        different = [name for name in different if name not in ("backend", "machines")]
    if world.device.type == "cuda" and before.get("cuda"):
        different = [name for name in different if name != "threads"]
    if not different:
        return []
    then, here = (", ".join(_WORDS[name](kept[name]) for name in different) for kept in (before, now))
    return [
        f"the checkpoint was made with {then}, and this run has {here}: numbers may differ in the last bits"
    ]


def told(environment: Mapping[str, Any]) -> str:
    """All of it in one line, for whoever looks into a checkpoint."""
    return ", ".join(words(environment[name]) for name, words in _WORDS.items() if name in environment)
