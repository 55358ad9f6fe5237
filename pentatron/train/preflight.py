"""Checks before the first step: fp8 support, batch sizes that fit the layout, software environment."""

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
from pentatron.nn.linear import VocabParallelEmbedding, WeightedModule
from pentatron.parallel.collectives import gather_objects, run_on_some_ranks
from pentatron.parallel.world import World
from pentatron.settings.decision_types import Fp8Decision
from pentatron.settings.decisions import decide
from pentatron.settings.resolve import Resolved
from pentatron.settings.run_config import RunConfig, remaining_batch_sizes_problem
from pentatron.text import plural
from pentatron.train.model import device_facts


def check_fp8_support(decided: Fp8Decision) -> None:
    """Raises an error if fp8 is on and the device has no fp8 matmuls."""
    if decided.unsupported_reason:
        raise AgreedError(
            f"--fp8 {decided.format} needs a GPU with fp8 matmuls (NVIDIA's from compute capability 8.9 on: Ada, Hopper, Blackwell), and "
            f"{decided.unsupported_reason}; leave it out"
        )


def fp8_notices(decided: Fp8Decision, stages: Iterable[CausalLM]) -> list[str]:
    """Returns notices about weights that stay in bf16 although fp8 is on, with their names in the layer."""
    # Names of weights with a side that is not a multiple of FP8_MULTIPLE, and of those without fp8 options.
    small, without = set[str](), set[str]()
    for stage in stages:
        for number, layer in stage.layers.items():
            for name, module in _in_bf16(layer) if int(number) in decided.layers else ():
                (without if module.options.fp8 is None else small).add(name)
        small |= {"head" for _, module in _in_bf16(_head(stage)) if module.options.fp8 is not None}
    where_small = f"--fp8: matrices stay in bf16 where a side is not a multiple of {FP8_MULTIPLE}"
    where_own = "--fp8: matrices of custom layers that are built without `axes` stay in bf16"
    lists = ((where_small, small), (where_own, without))
    notices = [f"{where}: {', '.join(sorted(names))}" for where, names in lists if names]
    return [*notices, *["--fp8: the matmuls of experts stay in bf16"] * decided.experts_in_bf16]


def _in_bf16(whole: nn.Module | None) -> Iterator[tuple[str, WeightedModule]]:
    """Yields the two-dimensional weights of a module that are not in fp8, without those of experts."""
    for name, module in [] if whole is None else whole.named_modules():
        if isinstance(module, WeightedModule) and module.weight.dim() == 2 and module.fp8 is None:
            yield name, module


def _head(stage: CausalLM) -> VocabParallelEmbedding | None:
    if stage.final_norm is None or stage.head is not None:
        return stage.head
    return None if stage.embedding is None else stage.embedding.word


def check_start(resolved: Resolved, world: World) -> None:
    """Checks, before the model is built, fp8 support and, if the run starts at step 0, its batch sizes."""
    check_fp8_support(decide(resolved.config, device_facts(resolved.config, world.device)).fp8)
    save, load = Path(resolved.config.checkpoint.save), resolved.config.checkpoint.load
    loads_another = resolved.given("load") and load is not None and Path(load).resolve() != save.resolve()

    def require() -> None:
        if not (loads_another or CheckpointStore(save, keep=None).steps()):
            check_batch_sizes(resolved.config, TrainState())

    run_on_some_ranks(world.is_first, require, world.all_ranks)


def check_batch_sizes(config: RunConfig, state: TrainState) -> None:
    """Checks that the layout can run every batch size from here on, so that no ramp-up ends the run."""
    if (problem := remaining_batch_sizes_problem(config, state.consumed_samples, state.step)) is not None:
        raise AgreedError(problem)


def _listed(value: Any, separator: str) -> str:
    """Joins a list, at most a line long. A damaged or foreign checkpoint may have any other value instead."""
    entries = value if isinstance(value, list) else [value]
    return f"{separator.join(map(str, entries[:64])):.200}"


# Descriptions of the values. They accept any value, as a checkpoint may contain any.
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
    """Returns what may change the last bits of results: versions, devices, threads, ... Collective."""
    # The order of sums depends on the instruction set, not on the model of the CPU.
    on_gpu, capability = world.device.type == "cuda", torch.backends.cpu.get_cpu_capability()
    device = torch.cuda.get_device_name(world.device) if on_gpu else f"CPU ({capability})"
    local = (device, torch.get_num_threads(), socket.gethostname())
    devices, threads, hosts = (sorted(set(values)) for values in zip(*gather_objects(local, world.all_ranks)))
    return {
        "pentatron": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "devices": devices,
        "cuda": torch.version.cuda if on_gpu else None,
        "threads": threads,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "backend": _backend(world),
        "machines": len(hosts),
    }


def _backend(world: World) -> str | None:
    if world.all_ranks.size == 1:
        return None
    if "nccl" in (name := str(dist.get_backend_config())):
        return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return "gloo" if "gloo" in name else name


def update_environment(world: World, state: TrainState) -> list[str]:
    """Stores the environment in `state`; returns a note if it differs from the checkpoint's. Collective."""
    before, now = state.environment, environment_here(world)
    state.environment = now
    different = {name: before[name] for name in _WORDS if name in before and before[name] != now[name]}
    # A change between one and several processes is reported as a change of the layout. Threads matter on CPUs
    # only.
    ignored = {"backend", "machines"} if None in (before.get("backend"), now["backend"]) else set()
    if world.device.type == "cuda" and before.get("cuda"):
        ignored.add("threads")
    then = {name: value for name, value in different.items() if name not in ignored}
    if not then:
        return []
    here = describe_environment({name: now[name] for name in then})
    return [
        f"the checkpoint was made with {describe_environment(then)}, and this run has {here}: numbers may differ in the last bits"
    ]


def describe_environment(environment: Mapping[str, Any]) -> str:
    """Describes an environment in one line."""
    return ", ".join(words(environment[name]) for name, words in _WORDS.items() if name in environment)
