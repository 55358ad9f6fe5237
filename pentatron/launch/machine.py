"""What this machine has for training: found by looking, nothing is changed."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pentatron.devices import chip_of
from pentatron.launch.job import CONNECTIONS, OF_NCCL, interface_problem
from pentatron.parallel.rendezvous import loopback_variables
from pentatron.supervise.processes import python_command
from pentatron.text import binary_size, plural

# How much memory the machine has for its processes, as far as the system tells.


_UNLIMITED = 2**60


def host_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Bytes of memory and swap together, and those that are available; no more than the control group allows.
    """
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    found = {name: int(value.split()[0]) * 1024 for name, value in lines.items() if value.split()}
    total = found.get("MemTotal", 0) + found.get("SwapTotal", 0)
    free = found.get("MemAvailable", found.get("MemFree", 0)) + found.get("SwapFree", 0)
    limit, used = _control_group(root / "sys/fs/cgroup")
    return min(total, limit), max(0, min(free, limit - used))


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _given_back(used: Path) -> int:
    """What the kernel takes back as soon as somebody needs it: files that were read are counted as used for
    as long as nobody does.
    """
    try:
        lines = (used.parent / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(found.get("total_inactive_file", found.get("inactive_file", "0")))


def _control_group(folder: Path) -> tuple[int, int]:
    """A container's limit and use, in either version of control groups."""
    for names in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = ((folder / name).read_text(encoding="ascii").strip() for name in names)
        except OSError:
            continue
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
            return int(limit), max(0, int(used) - _given_back(folder / names[1]))
    return _UNLIMITED, 0


OK, NOTE, PROBLEM = "ok", "note", "problem"
_OLDEST_PYTHON, _OLDEST_TORCH = (3, 11), (2, 11)
_LITTLE_SHARED, _LITTLE_DISK, _LITTLE_MEMORY = 2**30, 10 * 2**30, 2 * 2**30

# By what pip calls them, and what each is for.
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
_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what is there, and what to do where something is amiss."""

    group: str
    name: str
    value: str
    state: str = OK
    advice: str = ""


def look(environment: Mapping[str, str], folder: Path) -> list[Finding]:
    """Everything that can be found without starting anything."""
    return [
        *_software(),
        *_gpus(),
        *_hardware(folder),
        *_network(environment),
        *_slurm(environment),
        *_variables(environment),
        *_packages(),
    ]


def _software() -> list[Finding]:
    python = platform.python_version()
    old = sys.version_info < _OLDEST_PYTHON
    found = [
        Finding(
            "software", "Python", f"{python}, {sys.executable}", PROBLEM if old else OK,
            "Python 3.11 or newer is needed: create the environment with one" if old else "",
        )
    ]  # fmt: skip
    if importlib.util.find_spec("torch") is None:
        return [*found, Finding("software", "torch", "missing", PROBLEM, "pip install 'torch>=2.11'")]
    import torch

    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = numbers < _OLDEST_TORCH
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    found.append(
        Finding(
            "software", "torch", f"{torch.__version__}, {built}", PROBLEM if old else OK,
            "pip install --upgrade 'torch>=2.11'" if old else "",
        )
    )  # fmt: skip
    if torch.version.cuda and torch.distributed.is_nccl_available():
        found.append(Finding("software", "NCCL", ".".join(map(str, torch.cuda.nccl.version()))))
    return found


def _gpus() -> list[Finding]:
    driver = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = [Finding("GPUs", "driver", driver)] if driver else []
    if importlib.util.find_spec("torch") is None:
        return found
    import torch

    if not torch.cuda.is_available():
        if driver:
            advice = "torch does not use the GPUs that the driver knows: install a CUDA build of torch that fits the driver"
            return [*found, Finding("GPUs", "count", "0 for torch", PROBLEM, advice)]
        return [
            Finding(
                "GPUs",
                "count",
                "none: runs compute on the CPU",
                NOTE,
                "enough for small models and for trying things out",
            )
        ]
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        found.append(
            Finding(
                "GPUs", f"GPU {number}", f"{about.name}, {binary_size(about.total_memory)}{_peak(about.name)}"
            )
        )
    return found


def _peak(name: str) -> str:
    """The maker's figure, for a GPU that is known here."""
    known = chip_of(name)
    return f", {known.half:.0f} TFLOP/s in half precision by its maker" if known is not None else ""


def _hardware(folder: Path) -> list[Finding]:
    cores = usable_cores()
    there = os.cpu_count() or cores
    of = f" of {there} (this process may use no more)" if cores < there else ""
    found = [Finding("hardware", "cores", f"{cores}{of}")]
    host = host_memory()
    if host is not None:
        memory = host[1]
        little = memory < _LITTLE_MEMORY
        found.append(
            Finding(
                "hardware",
                "memory",
                f"{binary_size(memory)} of {binary_size(host[0])} free",
                NOTE if little else OK,
                "end other programs first" if little else "",
            )
        )
    places = {"disk": (folder, _LITTLE_DISK, "checkpoints of large models will not fit; choose another --run-dir"),
              "/dev/shm": (Path("/dev/shm"), _LITTLE_SHARED,
                           "NCCL and readers of data need more; start the container with --shm-size=8g or --ipc=host")}  # fmt: skip
    for name, (place, enough, advice) in places.items():
        if place.exists():
            free = shutil.disk_usage(place).free
            where = f" in {place}" if name == "disk" else ""
            little = free < enough
            found.append(
                Finding(
                    "hardware",
                    name,
                    f"{binary_size(free)} free{where}",
                    NOTE if little else OK,
                    advice if little else "",
                )
            )
    return found


def _network(environment: Mapping[str, str]) -> list[Finding]:
    interfaces = [name for _, name in socket.if_nameindex()]
    problem = interface_problem(environment, interfaces)
    found = [
        Finding("network", "interfaces", ", ".join(interfaces), PROBLEM if problem else OK, problem or "")
    ]
    gloo = environment.get("GLOO_SOCKET_IFNAME", "")
    if gloo and gloo not in interfaces:
        advice = f"GLOO_SOCKET_IFNAME={gloo} is none of them: export one that is, or unset it"
        found.append(Finding("network", "gloo", gloo, PROBLEM, advice))
    host = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except OSError:
        advice = "other machines cannot find this one by its name: enter it in DNS or /etc/hosts, or use an address as MASTER_ADDR"
        return [*found, Finding("network", "this machine", f"{host} is unknown", NOTE, advice)]
    loopback = all(address.startswith("127.") or address == "::1" for address in addresses)
    advice = (
        "its name means itself only: use an address as MASTER_ADDR where several machines train together"
        if loopback
        else ""
    )
    return [
        *found,
        Finding(
            "network", "this machine", f"{host} is {', '.join(addresses)}", NOTE if loopback else OK, advice
        ),
    ]


def _slurm(environment: Mapping[str, str]) -> list[Finding]:
    version = _first_line("sbatch", "--version")
    if not version:
        return [
            Finding(
                "Slurm", "sbatch", "not here: `pentatron launch torchrun` starts runs on several machines"
            )
        ]
    found = [Finding("Slurm", "sbatch", version)]
    if "SLURM_JOB_ID" in environment:
        place = f"{environment['SLURM_JOB_ID']}, {environment.get('SLURM_NNODES', '?')} nodes"
        found.append(Finding("Slurm", "inside job", place))
    return found


def _variables(environment: Mapping[str, str]) -> list[Finding]:
    given = {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith((OF_NCCL, "TORCH_NCCL_", "CUDA_VISIBLE")) or name in (CONNECTIONS, *_LAUNCHERS)
    }
    found = [Finding("variables", name, value) for name, value in given.items()]
    if "RANK" in given and "WORLD_SIZE" in given:
        advice = "a launcher's words are in this shell, so commands take themselves for its workers: unset RANK WORLD_SIZE"
        found.append(
            Finding("variables", "launcher", f"rank {given['RANK']} of {given['WORLD_SIZE']}", NOTE, advice)
        )
    return found or [Finding("variables", "NCCL, CUDA, launchers", "none is set; sensible values are used")]


def _packages() -> list[Finding]:
    found = []
    for name in _NEEDED:
        version = _version(name)
        found.append(
            Finding(
                "packages",
                name,
                version or "missing",
                OK if version else PROBLEM,
                "" if version else f"pip install {name}",
            )
        )
    for name, purpose in _OPTIONAL.items():
        version = _version(name)
        found.append(Finding("packages", name, version or f"not here; pip install {name} for {purpose}"))
    flash = _version("flash-attn")
    there = f"{flash}, not used" if flash else "not here, not needed"
    return [*found, Finding("packages", "flash-attn", f"{there}: attention is torch's own")]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first_line(*words: str) -> str:
    """Of what a program prints; nothing where it is missing or fails."""
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
    try:
        done = run(words, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


# Quick trials of what training needs most: a matmul, and processes that add numbers up together.


_PATIENCE = 90


def matmul(device: str, size: int = 512) -> Finding:
    """A product compared with one in double precision on the CPU."""
    import torch

    name = f"matmul on {device}"
    try:
        left, right = (torch.randn(size, size, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
        a, b = left.to(device), right.to(device)
        result = a @ b
        began = time.perf_counter()
        result = (a @ b).cpu()
        seconds = time.perf_counter() - began
        off = float((result.double() - left.double() @ right.double()).abs().max())
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        return Finding(
            "trials", name, reason, PROBLEM, "the build of torch does not fit this device or its driver"
        )
    # TF32 keeps ten bits of each factor.
    if off > size * 2**-9:
        return Finding(
            "trials", name, f"off by {off:.3g}", PROBLEM, "the device computes wrongly: do not train on it"
        )
    return Finding("trials", name, f"{2 * size**3 / seconds / 1e9:.0f} GFLOP/s in fp32, off by {off:.1e}")


def all_reduce(backend: str, size: int, environment: Mapping[str, str]) -> Finding:
    """Real processes, as a run has them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = python_command(["-m", "pentatron.launch.handshake", backend])
    processes = [
        subprocess.Popen(
            [*words, str(rank), str(size), str(port)],
            env={
                **environment,
                **loopback_variables(environment),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    name = f"all-reduce, {backend}"
    try:
        ended = [process.communicate(timeout=_PATIENCE) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
            process.communicate()
        return Finding("trials", name, f"no answer within {_PATIENCE} s", PROBLEM, _advice(backend))
    wrong = next((err for process, (_, err) in zip(processes, ended) if process.returncode), None)
    if wrong is not None:
        reason = wrong.strip().splitlines()[-1] if wrong.strip() else "a process died"
        return Finding("trials", name, reason, PROBLEM, _advice(backend))
    slowest = max(float(out.split()[-1]) for out, _ in ended)
    return Finding("trials", name, f"{size} {plural(size, 'process')}, 1 MiB in {slowest * 1e3:.1f} ms", OK)


def _advice(backend: str) -> str:
    if backend == "nccl":
        return "export NCCL_DEBUG=INFO and look at its lines; NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 show which path is at fault"
    return "processes on this machine must reach each other through the loopback interface: look at firewalls and GLOO_SOCKET_IFNAME"
