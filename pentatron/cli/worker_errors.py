"""Messages and exit codes for errors of a rank: OOM, nondeterministic kernels, lost ranks, rendezvous."""

import re
from typing import TYPE_CHECKING

from pentatron.cli.environment import RankInfo
from pentatron.cli.output import print_error
from pentatron.cli.worker import current_worker
from pentatron.errors import AgreedError, UserError
from pentatron.launch.machine import host_memory
from pentatron.parallel.rendezvous import CHECKLIST, RendezvousError, collective_error
from pentatron.plan.fit import AvailableMemory, check_device_memory, check_host_memory, out_of_memory
from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.run_config import RunConfig
from pentatron.train.run_folder import error_message

if TYPE_CHECKING:
    import torch

USER_ERROR = 2
LOST_RANK = 1
# Parts of torch's error messages: for a kernel without a deterministic version, for memory in the private
# pools of CUDA graphs, and for host OOM, which is a plain RuntimeError.
_NONDETERMINISTIC = "does not have a deterministic implementation"
_GRAPH_POOLS = "private pools"
_HOST_OOM = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")


def nondeterminism_error(error: RuntimeError) -> UserError | None:
    """Converts torch's error about a nondeterministic kernel; None for any other error."""
    match = re.search(rf"(\S+)[^.]*{_NONDETERMINISTIC}", str(error))
    if match is None:
        return None
    problem = f"--deterministic-mode: {match[1]} {_NONDETERMINISTIC} on this device"
    return UserError(f"{problem}; leave out the flag, or the setting that requires this kernel")


def check_memory(config: RunConfig, device: "torch.device", worker: RankInfo) -> None:
    """Estimates the memory of this rank: warns if it may run out, and raises if the run cannot fit.

    Called before the rendezvous, so that no rank waits for one that was refused. Ranks of the same pipeline
    stage get the same estimate, so only the first of them prints it; a refusal also the first rank of each
    machine.
    """
    if not config.launch.check_memory:
        return
    at = config.grid.coordinates(worker.rank)
    sharing = worker.local_size
    if device.type == "cuda":
        import torch

        sharing = worker.sharing(torch.cuda.device_count())
    room = available_memory(device, sharing)
    verdicts = [None if room is None else check_device_memory(config, at.pipeline, room)]
    in_background = config.checkpoint.async_save and config.checkpoint.save_checkpoints
    offloads = decide(config, DeviceFacts(device.type)).optimizer.in_host_memory
    if device.type != "cpu" and (offloads or in_background):
        host = _host_room(worker.local_size)
        verdicts.append(None if host is None else check_host_memory(config, host))
    first_of_stage = at.tensor == at.context == at.data == 0
    for verdict in filter(None, verdicts):
        if verdict.impossible:
            refusal = UserError if first_of_stage or worker.local_rank == 0 else AgreedError
            raise refusal(f"{verdict.sentence}; to start anyway: --no-check-memory")
        if first_of_stage:
            prefix = f"rank {worker.rank}: " if config.grid.pipeline > 1 else ""
            print_error(f"warning: {prefix}{verdict.sentence}")


def available_memory(device: "torch.device", local_processes: int) -> AvailableMemory | None:
    """Returns total and free memory of one process on the device; None if the system does not report it."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        sharing = -(-local_processes // torch.cuda.device_count())
        return AvailableMemory("GPU", total / sharing, free / sharing)
    return _host_room(local_processes)


def _host_room(local_processes: int) -> AvailableMemory | None:
    host = host_memory()
    return host and AvailableMemory("host", host[0] / local_processes, host[1] / local_processes)


def out_of_memory_message(error: BaseException, config: RunConfig, rank: int) -> str | None:
    """Returns the message for an out-of-memory error of the device or the host; None for any other error."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory(config, rank, _first_line(error), "GPU", has_graphs=_GRAPH_POOLS in str(error))
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _HOST_OOM):
        return out_of_memory(config, rank, _first_line(error), "host")
    return None


def _first_line(error: BaseException) -> str:
    """Returns the part of an OOM message with the requested size, without advice on the allocator."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text.split(". GPU ")[0].split(" If reserved but")[0].rstrip(".")


def report_error(error: BaseException, config: RunConfig, worker: RankInfo) -> int | None:
    """Prints the message for an error of this rank and returns its exit code; None: it needs a traceback.

    An `AgreedError` was raised on all ranks, so only rank 0 prints it.
    """
    if isinstance(error, AgreedError):
        if worker.rank == 0:
            print_error(str(error))
        return error.exit_code
    if isinstance(error, RendezvousError):
        _print_lost_ranks(error, worker)
        return USER_ERROR
    # A `UserError` was raised on this rank only, so this rank prints it.
    message = str(error) if isinstance(error, UserError) else _torch_error_message(error, config, worker.rank)
    if message is not None:
        print_error(message if worker.world_size == 1 else f"rank {worker.rank}: {message}")
        return error.exit_code if isinstance(error, UserError) else USER_ERROR
    lost = _lost_ranks(error, config)
    if worker.world_size == 1 or lost is None:
        return None
    if (supervised := current_worker()) is not None:
        supervised.record_lost_rank(str(lost))
    else:
        _print_lost_ranks(lost, worker)
    return LOST_RANK


def failure_log_message(error: BaseException, config: RunConfig, rank: int) -> str | None:
    """Returns the log line for the error that ended a rank; None if another rank was lost before."""
    message = _torch_error_message(error, config, rank)
    if message is None and _lost_ranks(error, config) is not None:
        return None
    return message or error_message(error)


def _torch_error_message(error: BaseException, config: RunConfig, rank: int) -> str | None:
    """Returns the message for an error of torch that the user can fix; None for any other error."""
    if isinstance(error, RuntimeError) and (nondeterministic := nondeterminism_error(error)):
        return str(nondeterministic)
    is_torch = isinstance(error, RuntimeError | MemoryError)
    return out_of_memory_message(error, config, rank) if is_torch else None


def _lost_ranks(error: BaseException, config: RunConfig) -> UserError | None:
    later = config.launch.distributed_timeout_seconds_after_init
    minutes = later / 60 if later else config.launch.distributed_timeout_minutes
    return collective_error(str(error), minutes) if isinstance(error, RuntimeError) else None


def _print_lost_ranks(error: UserError, worker: RankInfo) -> None:
    print_error(f"rank {worker.rank}: {error}")
    spans_machines = worker.local_size < worker.world_size
    if isinstance(error, RendezvousError) and spans_machines and worker.local_rank == 0:
        # Printed once per machine, because the user may see the output of one machine only.
        print_error("\n".join(CHECKLIST))
