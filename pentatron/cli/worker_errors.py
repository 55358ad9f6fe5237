"""What ends a rank of a run, in sentences: for the commands, and for programs that call the steps of a run themselves."""

from pentatron.cli.device_memory import memory_sentence
from pentatron.cli.environment import Worker
from pentatron.cli.repeatable import unrepeatable
from pentatron.cli.supervised import this_worker
from pentatron.cli.terminal import complain
from pentatron.config.run import RunConfig
from pentatron.errors import AgreedError, UserError
from pentatron.parallel.meeting import MeetingError, checklist, lost_contact
from pentatron.train.last_words import sentence_of

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
