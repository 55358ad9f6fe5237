"""What a run computes with, kept in its checkpoints: with other threads or libraries the same steps give other last bits."""

import platform
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pentatron import __version__
from pentatron.checkpoint.state import TrainState
from pentatron.checkpoint.store import CheckpointStore
from pentatron.devices import FP8_MULTIPLE
from pentatron.errors import AgreedError
from pentatron.models.causal_lm import CausalLM
from pentatron.nn.linear import VocabularyTable, WeightedModule
from pentatron.parallel.collectives import gather_objects, on_some_ranks
from pentatron.parallel.world import World
from pentatron.settings.decision_types import Fp8Decision
from pentatron.settings.decisions import decide
from pentatron.settings.resolve import Resolved
from pentatron.settings.run import RunConfig, sizes_problem
from pentatron.text import plural
from pentatron.train.model import device_facts

# Which matmuls of a run are in fp8, and whether the device has such.


def require_fp8(decided: Fp8Decision) -> None:
    """Refuses to train on a device without matmuls in fp8."""
    if decided.lacking:
        raise AgreedError(
            f"--fp8 {decided.format} needs a GPU with fp8 matmuls (NVIDIA's from compute capability 8.9 on: Ada, Hopper, Blackwell), and "
            f"{decided.lacking}; leave it out"
        )


def left_in_bf16(decided: Fp8Decision, stages: Iterable[CausalLM]) -> list[str]:
    """Notices about matrices that stay in bf16 although fp8 is on. They are named as in their layer."""
    small, without = set[str](), set[str]()
    for stage in stages:
        for number, layer in stage.layers.items():
            for name, module in _in_bf16(layer) if int(number) in decided.layers else ():
                (without if module.options.fp8 is None else small).add(name)
        small |= {"head" for _, module in _in_bf16(_head(stage)) if module.options.fp8 is not None}
    found = []
    if small:
        found.append(
            f"--fp8: matrices stay in bf16 where a side is no multiple of {FP8_MULTIPLE}: {', '.join(sorted(small))}"
        )
    if without:
        found.append(
            f"--fp8: matrices of layers of your own stay in bf16 where they are built without axes: {', '.join(sorted(without))}"
        )
    if decided.experts_left:
        found.append("--fp8: the matmuls of experts stay in bf16")
    return found


def _in_bf16(whole: nn.Module | None) -> Iterator[tuple[str, WeightedModule]]:
    """The matrices of a module that are not in fp8. Those of experts are not among them."""
    for name, module in [] if whole is None else whole.named_modules():
        if isinstance(module, WeightedModule) and module.weight.dim() == 2 and module.fp8 is None:
            yield name, module


def _head(stage: CausalLM) -> VocabularyTable | None:
    if stage.final_norm is None or stage.head is not None:
        return stage.head
    return None if stage.embedding is None else stage.embedding.word


# Whether the layout can take every batch of the run: said before its first step, so that no run ends where
# its batch grows.


def require_fitting_start(resolved: Resolved, world: World) -> None:
    """Before anything is built: that the device can do it, and the batches of a run that certainly begins at its first step."""
    require_fp8(decide(resolved.config, device_facts(resolved.config, world.device)).fp8)
    save, load = resolved.config.checkpoint.save, resolved.config.checkpoint.load
    loads_another = (
        resolved.given("load") and load is not None and Path(load).resolve() != Path(save).resolve()
    )

    def require() -> None:
        if not (loads_another or CheckpointStore(Path(save), keep=None).steps()):
            require_fitting_batches(resolved.config, TrainState())

    on_some_ranks(world.is_first, require, world.everyone)


def require_fitting_batches(config: RunConfig, state: TrainState) -> None:
    """From where a run stands: what is behind it may have had another layout."""
    problem = sizes_problem(config, state.consumed_samples, state.step)
    if problem is not None:
        raise AgreedError(problem)


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
