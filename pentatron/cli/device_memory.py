"""The memory a process has: its share of a GPU, or of the machine."""

from pathlib import Path
from typing import TYPE_CHECKING

from pentatron.cli.environment import Worker
from pentatron.cli.terminal import complain
from pentatron.config.errors import AgreedError, UserError
from pentatron.config.run import RunConfig
from pentatron.plan.fit import Room, Verdict, judge, judge_host, out_of_memory

if TYPE_CHECKING:
    import torch

# What torch says when the host gives no memory; it is a plain RuntimeError.
_HOST_SIGNS = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")
_UNLIMITED = 2**60


def check_room(config: RunConfig, device: "torch.device", worker: Worker) -> None:
    """Warns of a run that may not fit and refuses one that cannot, before any process waits for another.

    Ranks that share a stage would say the same, and so do those of one machine about what cannot be; the first of them says it.
    """
    if not config.launch.check_memory:
        return
    at = config.grid.coordinates(worker.rank)
    room = room_of(device, worker.local_size)
    _act_on(None if room is None else judge(config, at.pipeline, room), config, worker)
    if device.type != "cpu" and config.parallel.optimizer_cpu_offload:
        host = _host_room(worker.local_size)
        _act_on(None if host is None else judge_host(config, host), config, worker)


def _act_on(verdict: Verdict | None, config: RunConfig, worker: Worker) -> None:
    if verdict is None:
        return
    at = config.grid.coordinates(worker.rank)
    if verdict.impossible:
        refusal = UserError if worker.local_rank == 0 else AgreedError
        raise refusal(f"{verdict.sentence}; to try all the same: --no-check-memory")
    if at.tensor == at.context == at.data == 0:
        of_rank = f"rank {worker.rank}: " if config.grid.pipeline > 1 else ""
        complain(f"warning: {of_rank}{verdict.sentence}")


def room_of(device: "torch.device", local_processes: int) -> Room | None:
    """None where the system does not tell."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        sharing = -(-local_processes // torch.cuda.device_count())
        return Room("GPU", total / sharing, free / sharing)
    return _host_room(local_processes)


def _host_room(local_processes: int) -> Room | None:
    host = host_memory()
    return None if host is None else Room("host", host[0] / local_processes, host[1] / local_processes)


def host_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Bytes of memory and swap together, and those that are available; no more than the control group allows."""
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
            return int(limit), int(used)
    return _UNLIMITED, 0


def memory_sentence(error: BaseException, config: RunConfig, rank: int) -> str | None:
    """What to tell the user of an error, if it says that memory ran out."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory(config, rank, _first_line(error), "GPU")
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _HOST_SIGNS):
        return out_of_memory(config, rank, _first_line(error), "host")
    return None


def _first_line(error: BaseException) -> str:
    """The part that says how much was asked for; what follows is about the allocator's settings."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text.split(". GPU ")[0].split(" If reserved but")[0].rstrip(".")
