"""Inspects a machine for `pentatron doctor`, and tests a matmul and an all-reduce."""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pentatron.devices import find_chip
from pentatron.launch.job import CONNECTIONS, NCCL_PREFIX, interface_problem
from pentatron.parallel.rendezvous import loopback_variables
from pentatron.supervise.processes import python_command
from pentatron.text import binary_size, plural

OK, NOTE, PROBLEM = "ok", "note", "problem"
_OLDEST_PYTHON, _OLDEST_TORCH = (3, 11), (2, 11)
# Less free space than this gets a note.
_MIN_SHARED_MEMORY, _MIN_DISK, _MIN_MEMORY = 2**30, 10 * 2**30, 2 * 2**30
# Control groups without a limit report a huge number.
_UNLIMITED = 2**60
_TRIAL_TIMEOUT_SECONDS = 90

# Names for pip; the optional ones with their purpose.
_NEEDED = ("numpy", "safetensors", "tokenizers", "PyYAML", "rich")
_OPTIONAL = {
    "transformers": "comparing with Hugging Face's own models (--verify)",
    "huggingface-hub": "models by their name on the hub",
    "sentencepiece": "tokenizers that are SentencePiece files",
    "tensorboard": "--tensorboard-dir",
    "wandb": "--wandb-project",
    "matplotlib": "pictures of bench as .png",
    "jinja2": "chat templates of fine-tuning",
    "zstandard": "corpora in .zst files",
}
_LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice` says how to fix a `NOTE` or a `PROBLEM`."""

    group: str
    name: str
    value: str
    state: str = OK
    advice: str = ""


# Name, value and, unless all is well, state and advice.
Row = tuple[str, str] | tuple[str, str, str, str]


def host_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Returns total and available bytes of memory and swap within the cgroup limit; None if unknown."""
    lines = dict(line.split(":", 1) for line in _lines_of(root / "proc/meminfo") if ":" in line)
    if not lines:
        return None
    sizes = {name: int(value.split()[0]) * 1024 for name, value in lines.items() if value.split()}
    total = sizes.get("MemTotal", 0) + sizes.get("SwapTotal", 0)
    free = sizes.get("MemAvailable", sizes.get("MemFree", 0)) + sizes.get("SwapFree", 0)
    limit, used = _control_group(root / "sys/fs/cgroup")
    return min(total, limit), max(0, min(free, limit - used))


def _control_group(folder: Path) -> tuple[int, int]:
    """Returns memory limit and usage of a container, from cgroup v2 or v1."""
    v1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    for names in (("memory.max", "memory.current"), v1):
        limit, used = ("".join(_lines_of(folder / name)).strip() for name in names)
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
            lines = _lines_of((folder / names[1]).with_name("memory.stat"))
            stat = dict(line.split() for line in lines if len(line.split()) == 2)
            # Inactive page cache counts as used but is reclaimed on demand.
            cache = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
            return int(limit), max(0, int(used) - cache)
    return _UNLIMITED, 0


def _lines_of(file: Path) -> list[str]:
    """Returns the lines of a file of the kernel, or none if it is missing."""
    with contextlib.suppress(OSError):
        return file.read_text(encoding="ascii").splitlines()
    return []


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def inspect_machine(environment: Mapping[str, str], folder: Path) -> list[Finding]:
    """Inspects the machine without starting processes of a run."""
    groups: dict[str, Iterable[Row]] = {
        "software": _software(),
        "GPUs": _gpus(),
        "hardware": _hardware(folder),
        "network": _network(environment),
        "Slurm": _slurm(environment),
        "variables": _variables(environment),
        "packages": _packages(),
    }
    return [Finding(group, *row) for group, rows in groups.items() for row in rows]


def _row(name: str, value: str, is_bad: bool, state: str, advice: str) -> Row:
    return (name, value, state, advice) if is_bad else (name, value)


def _software() -> Iterator[Row]:
    advice = "Python 3.11 or newer is needed: create the environment with one"
    python = f"{platform.python_version()}, {sys.executable}"
    yield _row("Python", python, sys.version_info < _OLDEST_PYTHON, PROBLEM, advice)
    if importlib.util.find_spec("torch") is None:
        yield "torch", "missing", PROBLEM, "pip install 'torch>=2.11'"
        return
    import torch

    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    advice = "pip install --upgrade 'torch>=2.11'"
    yield _row("torch", f"{torch.__version__}, {built}", numbers < _OLDEST_TORCH, PROBLEM, advice)
    if torch.version.cuda and torch.distributed.is_nccl_available():
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))


def _gpus() -> Iterator[Row]:
    driver = _first_output_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if driver:
        yield "driver", driver
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(number)
            yield f"GPU {number}", f"{gpu.name}, {binary_size(gpu.total_memory)}{_peak(gpu.name)}"
    elif driver:
        advice = "torch does not use the GPUs that the driver knows: install a CUDA build of torch that fits the driver"
        yield "count", "0 for torch", PROBLEM, advice
    else:
        advice = "enough for small models and experiments"
        yield "count", "none: runs compute on the CPU", NOTE, advice


def _peak(name: str) -> str:
    """Returns the vendor's peak throughput of a known GPU."""
    chip = find_chip(name)
    return f", {chip.half:.0f} TFLOP/s in half precision (vendor peak)" if chip is not None else ""


def _hardware(folder: Path) -> Iterator[Row]:
    cores = usable_cores()
    installed = os.cpu_count() or cores
    of = f" of {installed} (this process may use no more)" if cores < installed else ""
    yield "cores", f"{cores}{of}"
    if (memory := host_memory()) is not None:
        total, free = memory
        value = f"{binary_size(free)} of {binary_size(total)} free"
        yield _row("memory", value, free < _MIN_MEMORY, NOTE, "end other programs first")
    another = "checkpoints of large models will not fit; choose another --run-dir"
    larger = "NCCL and readers of data need more; start the container with --shm-size=8g or --ipc=host"
    shared = Path("/dev/shm")
    disk = ("disk", folder, f" in {folder}", _MIN_DISK, another)
    for name, place, where, least, advice in (disk, ("/dev/shm", shared, "", _MIN_SHARED_MEMORY, larger)):
        if place.exists():
            free = shutil.disk_usage(place).free
            yield _row(name, f"{binary_size(free)} free{where}", free < least, NOTE, advice)


def _network(environment: Mapping[str, str]) -> Iterator[Row]:
    interfaces = [name for _, name in socket.if_nameindex()]
    problem = interface_problem(environment, interfaces)
    yield _row("interfaces", ", ".join(interfaces), problem is not None, PROBLEM, problem or "")
    gloo = environment.get("GLOO_SOCKET_IFNAME", "")
    if gloo and gloo not in interfaces:
        advice = f"GLOO_SOCKET_IFNAME={gloo} is none of them: export one that is, or unset it"
        yield "gloo", gloo, PROBLEM, advice
    host = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except OSError:
        advice = "other machines cannot find this one by its name: enter it in DNS or /etc/hosts, or use an address as MASTER_ADDR"
        yield "this machine", f"{host} is unknown", NOTE, advice
        return
    is_loopback = all(address.startswith("127.") or address == "::1" for address in addresses)
    advice = "its name resolves to loopback only: use an address as MASTER_ADDR if several machines train"
    yield _row("this machine", f"{host} is {', '.join(addresses)}", is_loopback, NOTE, advice)


def _slurm(environment: Mapping[str, str]) -> Iterator[Row]:
    version = _first_output_line("sbatch", "--version")
    yield "sbatch", version or "not installed: `pentatron launch torchrun` starts runs on several machines"
    if version and "SLURM_JOB_ID" in environment:
        yield "inside job", f"{environment['SLURM_JOB_ID']}, {environment.get('SLURM_NNODES', '?')} nodes"


def _variables(environment: Mapping[str, str]) -> list[Row]:
    prefixes = (NCCL_PREFIX, "TORCH_NCCL_", "CUDA_VISIBLE")
    names = (CONNECTIONS, *_LAUNCHER_VARIABLES)
    rows: list[Row] = [(n, v) for n, v in sorted(environment.items()) if n.startswith(prefixes) or n in names]
    if "RANK" in environment and "WORLD_SIZE" in environment:
        advice = "RANK and WORLD_SIZE are set in this shell, so commands start as workers of a launcher: unset RANK WORLD_SIZE"
        rows.append(("launcher", f"rank {environment['RANK']} of {environment['WORLD_SIZE']}", NOTE, advice))
    return rows or [("NCCL, CUDA, launchers", "none is set; defaults are used")]


def _packages() -> Iterator[Row]:
    for name in _NEEDED:
        version = _version(name)
        yield _row(name, version or "missing", not version, PROBLEM, f"pip install {name}")
    for name, purpose in _OPTIONAL.items():
        yield name, _version(name) or f"not installed; pip install {name} for {purpose}"
    flash = _version("flash-attn")
    installed = f"{flash}, not used" if flash else "not installed, not needed"
    yield "flash-attn", f"{installed}: attention is torch's own"


def _version(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


def _first_output_line(*words: str) -> str:
    """Runs a program and returns its first line of output; "" if it is missing, fails or prints nothing."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
        return next(iter(result.stdout.strip().splitlines()), "")
    return ""


def check_matmul(device: str, size: int = 512) -> Finding:
    """Compares an fp32 matmul on the device with a float64 matmul on the CPU."""
    import torch

    finding = partial(Finding, "trials", f"matmul on {device}")
    try:
        left, right = (torch.randn(size, size, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
        a, b = left.to(device), right.to(device)
        # The first matmul is a warm-up; the copy to the CPU waits for the second.
        result = a @ b
        began = time.perf_counter()
        result = (a @ b).cpu()
        seconds = time.perf_counter() - began
        error = float((result.double() - left.double() @ right.double()).abs().max())
    except RuntimeError as failure:
        reason = str(failure).strip().splitlines()[0]
        return finding(reason, PROBLEM, "the build of torch does not fit this device or its driver")
    # TF32 rounds each factor to a mantissa of ten bits.
    if error > size * 2**-9:
        return finding(f"off by {error:.3g}", PROBLEM, "the device gave a wrong result: do not train on it")
    return finding(f"{2 * size**3 / seconds / 1e9:.0f} GFLOP/s in fp32, off by {error:.1e}")


def check_all_reduce(backend: str, size: int, environment: Mapping[str, str]) -> Finding:
    """Runs an all-reduce in `size` processes of their own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = python_command(["-m", "pentatron.launch.all_reduce_probe", backend])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables = {**environment, **loopback_variables(environment), **address}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    start = partial(subprocess.Popen, env=variables, text=True, **pipes)
    processes = [start([*words, str(rank), str(size), port]) for rank in range(size)]
    finding = partial(Finding, "trials", f"all-reduce, {backend}")
    if backend == "nccl":
        advice = "export NCCL_DEBUG=INFO and read its output; NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 show which path is at fault"
    else:
        advice = "processes on this machine must reach each other through the loopback interface: look at firewalls and GLOO_SOCKET_IFNAME"
    try:
        outputs = [process.communicate(timeout=_TRIAL_TIMEOUT_SECONDS) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
            process.communicate()
        return finding(f"no answer within {_TRIAL_TIMEOUT_SECONDS} s", PROBLEM, advice)
    failure = next((err for process, (_, err) in zip(processes, outputs) if process.returncode), None)
    if failure is not None:
        return finding((failure.strip().splitlines() or ["a process died"])[-1], PROBLEM, advice)
    slowest = max(float(out.split()[-1]) for out, _ in outputs)
    return finding(f"{size} {plural(size, 'process')}, 1 MiB in {slowest * 1e3:.1f} ms")
