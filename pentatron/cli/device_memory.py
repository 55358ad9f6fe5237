"""The memory a process has: its share of a GPU, or of the machine."""

from typing import TYPE_CHECKING

from pentatron.cli.environment import Worker
from pentatron.cli.terminal import complain
from pentatron.config.decided import DeviceFacts
from pentatron.config.decisions import decide
from pentatron.config.run import RunConfig
from pentatron.errors import AgreedError, UserError
from pentatron.launch.host_memory import host_memory
from pentatron.plan.fit import Room, Verdict, judge, judge_host, out_of_memory

if TYPE_CHECKING:
    import torch

# What torch says of memory that is kept for recorded graphs, where there is any.
_GRAPHS_SIGN = "private pools"
# What torch says when the host gives no memory; it is a plain RuntimeError.
_HOST_SIGNS = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")


def check_room(config: RunConfig, device: "torch.device", worker: Worker) -> None:
    """Warns of a run that may not fit and refuses one that cannot, before any process waits for another.

    Ranks that share a stage would say the same, and so do those of one machine about what cannot be; the first of them says it.
    """
    if not config.launch.check_memory:
        return
    at = config.grid.coordinates(worker.rank)
    room = room_of(device, _sharing(device, worker))
    _act_on(None if room is None else judge(config, at.pipeline, room), config, worker)
    in_background = config.checkpoint.async_save and config.checkpoint.save_checkpoints
    offloads = decide(config, DeviceFacts(device.type)).offload.on
    if device.type != "cpu" and (offloads or in_background):
        host = _host_room(worker.local_size)
        _act_on(None if host is None else judge_host(config, host), config, worker)


def _sharing(device: "torch.device", worker: Worker) -> int:
    if device.type != "cuda":
        return worker.local_size
    import torch

    return worker.sharing(torch.cuda.device_count())


def _act_on(verdict: Verdict | None, config: RunConfig, worker: Worker) -> None:
    if verdict is None:
        return
    at = config.grid.coordinates(worker.rank)
    # Stages need different memory, and those of one stage the same.
    first_of_stage = at.tensor == at.context == at.data == 0
    if verdict.impossible:
        refusal = UserError if first_of_stage or worker.local_rank == 0 else AgreedError
        raise refusal(f"{verdict.sentence}; to try all the same: --no-check-memory")
    if first_of_stage:
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


def memory_sentence(error: BaseException, config: RunConfig, rank: int) -> str | None:
    """What to tell the user of an error, if it says that memory ran out."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory(config, rank, _first_line(error), "GPU", has_graphs=_GRAPHS_SIGN in str(error))
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _HOST_SIGNS):
        return out_of_memory(config, rank, _first_line(error), "host")
    return None


def _first_line(error: BaseException) -> str:
    """The part that says how much was asked for; what follows is about the allocator's settings."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text.split(". GPU ")[0].split(" If reserved but")[0].rstrip(".")
