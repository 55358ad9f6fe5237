"""`pentatron train`, and every guide's training script."""

import ctypes
import faulthandler
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from pentatron.cli.configure import Prepared, prepare
from pentatron.cli.environment import (
    Worker,
    announce_worker,
    find_the_others,
    meeting_point,
    prepare_for_workers,
    require_repeatable_kernels,
)
from pentatron.cli.output import complain, say
from pentatron.cli.worker import BEGAN, this_worker
from pentatron.cli.worker_errors import check_room, explain, last_words
from pentatron.errors import UserError
from pentatron.launch.job import CONNECTIONS, connections_for, describe, interface_problem
from pentatron.monitor.terminal import outlive_output
from pentatron.parallel.rank_status import Whereabouts
from pentatron.parallel.rendezvous import waiting_aloud, what_is_waited_for
from pentatron.settings.entry import EntryPoint
from pentatron.settings.resolve import Resolved
from pentatron.settings.run import RunConfig
from pentatron.settings.settings import Start, how_to_go_on
from pentatron.supervise.hang import STACKS
from pentatron.supervise.heartbeat import beating
from pentatron.supervise.signals import watched_here
from pentatron.text import plural
from pentatron.train.run_folder import RunFolder

if TYPE_CHECKING:
    import torch

    from pentatron.parallel.world import World
    from pentatron.supervise.launcher import Ended
    from pentatron.train.model import Program

# Memory of the host that steps ask for, free, and ask for again.
#
# glibc gives large blocks back to the system when they are freed; whoever asks for them again waits for their
# pages, thousands of them in a step on a CPU. Kept, they are there: a step takes some hundredths less, and a
# process stays as large as its largest step.


# glibc's numbers for them (malloc.h), and the largest block that comes from its heap, which it allows no more of.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK, _KEPT = 32 * 2**20, 2**30


def keep_freed_memory() -> bool:
    """For this process, from now on; whether there is a glibc to tell."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))


# Environment variables that NCCL and CUDA read: what is set where the user has not, and what a run says of
# them.


def limit_connections(config: RunConfig) -> None:
    """Sets how many queues a GPU has, before anything talks to it."""
    wanted = connections_for(config)
    if wanted is not None and config.launch.device != "cpu":
        os.environ.setdefault(wanted.name, wanted.value)


def variable_notes(said: Mapping[str, str], device: "torch.device", alone: bool, nccl: bool) -> list[str]:
    """`said` is the environment as the user left it. `nccl`: GPUs talk to each other through it."""
    on_gpu = device.type == "cuda"
    notes = describe(said, on_gpu, nccl, alone)
    if on_gpu and CONNECTIONS not in said and CONNECTIONS in os.environ:
        written = f"{CONNECTIONS}={os.environ[CONNECTIONS]}"
        notes.append(
            f"{written} is set, so that kernels start in the order in which they were queued; your own value would count"
        )
    return notes


def require_interface(said: Mapping[str, str]) -> None:
    """NCCL itself would say it in lines of its own, after a while."""
    problem = interface_problem(said, [name for _, name in socket.if_nameindex()])
    if problem is not None:
        raise UserError(f"{socket.gethostname()}: {problem}")


_READ_STEP = """
import sys
from pathlib import Path
from pentatron.checkpoint.store import CheckpointStore
print(CheckpointStore(Path(sys.argv[1]), None).newest_own())
"""


def train(
    words: Sequence[str],
    entry: EntryPoint,
    restart: Sequence[str],
    program: "Program | None" = None,
    typed: Sequence[str] | None = None,
) -> int:
    """Trains here, or starts workers that do. `restart` are the words after `python` that run this program again.

    `typed` are all words of the command line, where the program keeps some for itself.
    """
    outlive_output()
    started = time.time()
    own_data = program is not None and not program.reads_named_data
    prepared = prepare(words, entry, starts=True, own_data=own_data)
    check_spec(prepared.resolved)
    if prepared.worker is not None:
        return _work(prepared, entry, prepared.worker, program, started)
    if not needs_launcher(prepared):
        return _work(prepared, entry, Worker(0, 1, 0, 1, "none"), program, started)
    return launch_workers(prepared, [*restart, *(words if typed is None else typed)])


def needs_launcher(prepared: Prepared) -> bool:
    """One process runs in place, where debuggers and profilers see it, unless it is to be started again."""
    return prepared.facts.world_size > 1 or bool(prepared.resolved.config.launch.max_restarts)


def check_spec(resolved: Resolved) -> None:
    """Layers of the user's own, before anything is started."""
    config = resolved.config
    if not config.model.spec:
        return
    if not resolved.given("spec"):
        # Weights and settings are data; whoever wrote them must not choose what runs here.
        raise UserError(
            f"the model that is loaded has layers of its own, which are code; if you trust them, add "
            f"--spec {' '.join(config.model.spec)}"
        )
    from pentatron.models.layer_specs import check_user_spec

    check_user_spec(config.model, config.moe)


@contextmanager
def joined_world(prepared: Prepared, worker: Worker) -> "Iterator[World]":
    """This process as one of the run's, on its device."""
    import torch

    from pentatron.parallel.collectives import on_some_ranks
    from pentatron.parallel.world import choose_device, open_world

    config = prepared.resolved.config
    torch.set_num_threads(config.launch.threads_per_process)
    if config.precision.deterministic_mode:
        require_repeatable_kernels()
        torch.use_deterministic_algorithms(True)
    if worker.world_size > 1:
        announce_worker(worker, config.launch.init_method)
    limit_connections(config)
    device = choose_device(config.launch.device, worker.local_rank)
    if device.type == "cpu":
        keep_freed_memory()
    check_room(config, device, worker)
    timeout = config.launch.distributed_timeout_minutes
    place = (worker.rank, worker.local_rank)
    point = meeting_point(worker)
    if point is not None:
        find_the_others(point, worker.rank, timeout * 60)
    told = what_is_waited_for(worker.rank, worker.world_size, launching_agent() is not None)
    where = Whereabouts()
    with (
        _watched(where, config, worker),
        waiting_aloud(told, lambda text: complain(f"rank {worker.rank}: {text}")) as all_came,
        open_world(config.grid, *place, device, timeout, config.shared(), point, where) as world,
    ):
        all_came()
        on_some_ranks(world.uses_nccl, lambda: require_interface(os.environ), world.everyone)
        yield world


@contextmanager
def _watched(where: Whereabouts, config: RunConfig, worker: Worker) -> "Iterator[None]":
    """Others see whether this rank gets on: our own launcher, or, under another one, the other ranks."""
    from pentatron.supervise.hang import Limits
    from pentatron.supervise.peers import PeerWatch

    place = this_worker()
    limits = Limits(config.launch.heartbeat_timeout, config.launch.distributed_timeout_minutes * 60)
    if place is not None or worker.world_size == 1 or config.launch.heartbeat_timeout == 0:
        with beating(None if place is None else place.heart(where, limits)):
            yield
        return
    peers = PeerWatch(where, worker.rank, worker.world_size, Path(config.run.run_dir), limits, complain)
    where.when_opened = peers.start
    yield
    peers.close()


@contextmanager
def joined_run(prepared: Prepared, worker: Worker) -> "Iterator[tuple[World, Resolved]]":
    """The same, with the settings and what is to be said of them here: also of the environment as the user left it."""
    said = dict(os.environ)
    with joined_world(prepared, worker) as world:
        notes = variable_notes(said, world.device, worker.world_size == 1, world.uses_nccl)
        yield world, prepared.resolved.telling(notes)


def launching_agent() -> int | None:
    """The process that started us, if it passes signals on; without it we would train on, unseen."""
    if (place := this_worker()) is not None:
        return place.launcher
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def _work(
    prepared: Prepared, entry: EntryPoint, worker: Worker, program: "Program | None", started: float
) -> int:
    from pentatron.train.model import CONFIGURED
    from pentatron.train.session import run_training

    config = prepared.resolved.config
    if this_worker() is None:
        # As in a worker of our own launcher: the stacks are written, and the run continues.
        faulthandler.register(STACKS, file=2)
    try:
        with joined_run(prepared, worker) as (world, resolved):
            outcome = run_training(
                resolved,
                world,
                entry.resumes,
                launching_agent(),
                program or CONFIGURED,
                started,
                lambda error: last_words(error, config, worker.rank),
                prepared.attempt,
            )
    except Exception as error:
        code = explain(error, config, worker)
        if code is None:
            raise
        return code
    if outcome.ending is not None:
        return outcome.ending.exit_code
    if prepared.worker is None:
        _what_next(config, outcome.folder)
    return 0


def launch_workers(prepared: Prepared, python_words: Sequence[str]) -> int:
    """Starts this program once for every rank, waits for them, and starts them again when they crash."""
    outlive_output()
    from pentatron.supervise.hang import JobWatch, Limits
    from pentatron.supervise.launcher import run_workers
    from pentatron.supervise.processes import listening
    from pentatron.supervise.supervisor import Supervisor

    config, ranks = prepared.resolved.config, prepared.facts.world_size
    folder = RunFolder(Path(config.run.run_dir))
    # The workers would find out as well, seconds later and each by itself.
    if config.launch.device == "cuda":
        from pentatron.parallel.world import require_gpu

        require_gpu()
    folder.create()
    variables = prepare_for_workers(config.launch.threads_per_process)
    inherited = f" with {', '.join(variables)}" if variables else ""
    limits = Limits(config.launch.heartbeat_timeout, config.launch.distributed_timeout_minutes * 60)
    say(f"starting {ranks} {plural(ranks, 'process')}{inherited} ...")
    with listening(watched_here()) as told:

        def attempt(restart: int) -> "Ended":
            environment = {**os.environ, BEGAN: repr(prepared.attempt.began)}
            place = (ranks, config.launch.master_port, environment, os.getpid())
            return run_workers(python_words, *place, told, JobWatch(limits, folder.path), restart)

        ended = Supervisor(
            attempt,
            ranks,
            config.launch.max_restarts,
            folder.path,
            told,
            prepared.start is Start.RESUME,
            lambda: _saved_step(config),
            complain,
            way_on=how_to_go_on(prepared.start, config.checkpoint.save),
        ).run()
    if ended.exit_code == 0:
        _what_next(config, folder)
    return ended.status


def _saved_step(config: RunConfig) -> int | None:
    """The last step that a restart would go on from.

    Reading it imports torch, some 200 MiB that a launcher would hold from then on: another process reads it, unless torch is here already.
    """
    if "torch" not in sys.modules:
        words = [sys.executable, "-P", "-c", _READ_STEP, config.checkpoint.save]
        read = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
        )
        if read.returncode == 0 and (found := read.stdout.split()):
            return None if found[-1] == "None" else int(found[-1])
    from pentatron.checkpoint.store import CheckpointStore

    return CheckpointStore(Path(config.checkpoint.save), None).newest_own()


def _program(called: Path) -> str:
    """The shortest words that call this program again from here."""
    if called.suffix == ".py":
        return "python -m pentatron"
    if shutil.which(called.name) == str(called):
        return called.name
    return os.path.relpath(called) if called.resolve().is_relative_to(Path.cwd()) else str(called)


def _what_next(config: RunConfig, folder: RunFolder) -> None:
    """Commands to copy, with the program under the name it was called by."""
    program = _program(Path(sys.argv[0]))
    ideas = []
    # Layers of one's own have to be named again, and cannot be exported.
    spec = f" --spec {' '.join(map(quote, config.model.spec))}" if config.model.spec else ""
    if folder.sample.exists():
        ideas.append(
            (f'{program} generate {quote(str(folder.path))} "import "{spec}', "continue a text of yours")
        )
    elif config.checkpoint.load and config.checkpoint.save and _saved_step(config) is not None:
        # Not the run's folder: the checkpoints may be kept elsewhere. There are none after --skip-train from --load.
        saved = quote(os.path.relpath(config.checkpoint.save))
        if config.data.tokenizer_model is not None:
            ideas.append((f'{program} generate {saved} "Once upon a time"{spec}', "continue a text of yours"))
        exported = quote(f"exported/{folder.path.name}")
        if not spec:
            ideas.append((f"{program} export {saved} {exported}", "a Hugging Face folder of it"))
    ideas.append((f"{program} train --help", "every setting, by group"))
    if config.data.corpus is not None:
        wider = f"{program} train --run-dir {quote(f'{folder.path}-wide')} --hidden-size 256"
        ideas.append((wider, "another run beside this one"))
    width = max(len(command) for command, _ in ideas)
    say("\nwhat to try next:")
    for command, meaning in ideas:
        say(f"  {command:<{width}}  # {meaning}")
    if folder.curve.exists():
        say(f"  and look at {folder.curve}: the loss curve, in any browser")
