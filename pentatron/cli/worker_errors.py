"""What ends a rank of a run, in sentences: for the commands, and for programs that call the steps of a run themselves."""

from pentatron.cli.device_memory import memory_sentence
from pentatron.cli.environment import Worker
from pentatron.cli.repeatable import unrepeatable
from pentatron.cli.terminal import complain
from pentatron.config.errors import AgreedError, UserError
from pentatron.config.run import RunConfig
from pentatron.parallel.meeting import MeetingError, checklist, lost_contact

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
    if not isinstance(error, RuntimeError | MemoryError):
        return None
    problem: object = unrepeatable(error) if isinstance(error, RuntimeError) else None
    problem = problem or memory_sentence(error, config, worker.rank)
    if problem is not None:
        _say(problem, worker)
        return USER_ERROR
    lost = lost_contact(str(error), config.launch.distributed_timeout_minutes)
    if worker.world_size == 1 or lost is None:
        return None
    _say_who_is_missing(lost, worker)
    return LOST


def _say(problem: object, worker: Worker) -> None:
    complain(str(problem) if worker.world_size == 1 else f"rank {worker.rank}: {problem}")


def _say_who_is_missing(error: UserError, worker: Worker) -> None:
    complain(f"rank {worker.rank}: {error}")
    if isinstance(error, MeetingError) and worker.local_size < worker.world_size and worker.local_rank == 0:
        # Once on each machine: the reader may see one of them only.
        complain("\n".join(checklist("every machine")))
