"""What ends a rank of a run, in sentences: for the commands, and for programs that call the steps of a run themselves."""

import re
from typing import TYPE_CHECKING

from pentatron.cli.environment import Worker
from pentatron.cli.output import complain
from pentatron.cli.worker import this_worker
from pentatron.errors import AgreedError, UserError
from pentatron.launch.machine import host_memory
from pentatron.parallel.rendezvous import MeetingError, checklist, lost_contact
from pentatron.plan.fit import Room, Verdict, judge, judge_host, out_of_memory
from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.run import RunConfig
from pentatron.train.run_folder import sentence_of

if TYPE_CHECKING:
    import torch

# --deterministic-mode: what cannot be repeated to the bit is refused in a sentence.


_SIGN = "does not have a deterministic implementation"


def unrepeatable(error: RuntimeError) -> UserError | None:
    """Torch's refusal of a kernel, in a sentence; None if the error is another one."""
    found = re.search(rf"(\S+)[^.]*{_SIGN}", str(error))
    if found is None:
        return None
    return UserError(
        f"--deterministic-mode: {found[1]} {_SIGN} on this device, and the run needs it; leave the flag out, or the setting that asks for it"
    )


# The memory a process has: its share of a GPU, or of the machine.


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


USER_ERROR = 2
LOST = 1


def explain(error: BaseException, config: RunConfig, worker: Worker) -> int | None:
    """Says what an error of this rank means and returns the exit code; None of one that only its traceback explains.

    What all ranks have agreed upon is said by the first of them.
    """
    if isinstance(error, AgreedError):
        if worker.rank == 0:
            complain(str(error))
        return error.exit_code
    if isinstance(error, MeetingError):
        _say_who_is_missing(error, worker)
        return USER_ERROR
    if isinstance(error, UserError):
        # Met by this rank alone: nobody else will say it.
        _say(error, worker)
        return error.exit_code
    problem = _own_sentence(error, config, worker.rank)
    if problem is not None:
        _say(problem, worker)
        return USER_ERROR
    lost = _lost(error, config)
    if worker.world_size == 1 or lost is None:
        return None
    if (place := this_worker()) is not None:
        place.lost(str(lost))
    else:
        _say_who_is_missing(lost, worker)
    return LOST


def last_words(error: BaseException, config: RunConfig, rank: int) -> str | None:
    """What the log says of the error that ended a rank; nothing where it only missed another one, which knows more."""
    problem = _own_sentence(error, config, rank)
    if problem is None and _lost(error, config) is not None:
        return None
    return problem or sentence_of(error)


def _own_sentence(error: BaseException, config: RunConfig, rank: int) -> str | None:
    """Of what torch raises and the user can mend."""
    if not isinstance(error, RuntimeError | MemoryError):
        return None
    refused = unrepeatable(error) if isinstance(error, RuntimeError) else None
    return str(refused) if refused is not None else memory_sentence(error, config, rank)


def _lost(error: BaseException, config: RunConfig) -> UserError | None:
    if not isinstance(error, RuntimeError):
        return None
    later = config.launch.distributed_timeout_seconds_after_init
    return lost_contact(str(error), later / 60 if later else config.launch.distributed_timeout_minutes)


def _say(problem: object, worker: Worker) -> None:
    complain(str(problem) if worker.world_size == 1 else f"rank {worker.rank}: {problem}")


def _say_who_is_missing(error: UserError, worker: Worker) -> None:
    complain(f"rank {worker.rank}: {error}")
    if isinstance(error, MeetingError) and worker.local_size < worker.world_size and worker.local_rank == 0:
        # Once on each machine: the reader may see one of them only.
        complain("\n".join(checklist("every machine")))
