"""`pentatron train` and the guides' training scripts: starts workers, joins the process group and trains."""

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

from pentatron.cli import environment
from pentatron.cli.configure import Prepared, prepare
from pentatron.cli.environment import RankInfo
from pentatron.cli.output import print_error, say
from pentatron.cli.worker import BEGAN, current_worker
from pentatron.cli.worker_errors import check_memory, failure_log_message, report_error
from pentatron.errors import UserError
from pentatron.launch.job import cuda_connections, environment_notices, interface_problem
from pentatron.monitor.terminal import ignore_output_errors
from pentatron.parallel.rank_status import RankStatus
from pentatron.parallel.rendezvous import slow_rendezvous_notice, slow_rendezvous_text, wait_for_rendezvous
from pentatron.settings.entry_points import EntryPoint
from pentatron.settings.resolve import Resolved
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import Start, how_to_resume
from pentatron.supervise.hang import STACKS_SIGNAL
from pentatron.supervise.heartbeat import running_heartbeat
from pentatron.supervise.signals import handle_signals
from pentatron.text import plural
from pentatron.train.run_folder import RunFolder

if TYPE_CHECKING:
    from pentatron.parallel.world import World
    from pentatron.supervise.launcher import JobResult
    from pentatron.train.model import Program

# Parameters of glibc's mallopt (malloc.h). 32 MiB is the largest mmap threshold that glibc accepts.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES, _TRIM_THRESHOLD_BYTES = 32 * 2**20, 2**30
# Run in another process, which prints the newest step.
_READ_STEP = """
import sys
from pathlib import Path
from pentatron.checkpoint.store import CheckpointStore
print(CheckpointStore(Path(sys.argv[1]), None).newest_saved_step())
"""


def train(
    words: Sequence[str],
    entry: EntryPoint,
    restart: Sequence[str],
    program: "Program | None" = None,
    typed: Sequence[str] | None = None,
) -> int:
    """Trains in this process, or launches workers.

    Args:
        restart: the words after `python` that run this program again.
        typed: all words of the command line, if the program has consumed some of them.
    """
    ignore_output_errors()
    began = time.time()
    own_data = program is not None and not program.reads_named_data
    prepared = prepare(words, entry, starts=True, own_data=own_data)
    check_spec(prepared.resolved)
    if prepared.worker is not None:
        return _work(prepared, entry.resumes, prepared.worker, program, began)
    if not needs_launcher(prepared):
        return _work(prepared, entry.resumes, RankInfo(0, 1, 0, 1, "none"), program, began)
    return launch_workers(prepared, [*restart, *(words if typed is None else typed)])


def needs_launcher(prepared: Prepared) -> bool:
    """Whether workers are launched.

    A single process without restarts trains in place, for debuggers and profilers.
    """
    return prepared.facts.world_size > 1 or bool(prepared.resolved.config.launch.max_restarts)


def check_spec(resolved: Resolved) -> None:
    """Checks the layer spec of the user (`--spec`) before anything is started."""
    config = resolved.config
    if not config.model.spec:
        return
    if not resolved.given("spec"):
        # Security: a checkpoint is data, so it must not choose which code runs.
        own = "the loaded model uses a custom layer spec, which is code"
        raise UserError(f"{own}; if you trust it, add --spec {' '.join(config.model.spec)}")
    from pentatron.models.layer_specs import check_user_spec

    check_user_spec(config.model, config.moe)


@contextmanager
def joined_process_group(prepared: Prepared, worker: RankInfo) -> "Iterator[tuple[World, Resolved]]":
    """Joins the process group of the run; yields the world and the settings with the device's notices."""
    import torch

    from pentatron.parallel.collectives import run_on_some_ranks
    from pentatron.parallel.world import choose_device, open_world

    config = prepared.resolved.config
    # Notices are about variables that the user set, not about those set below.
    given = dict(os.environ)
    torch.set_num_threads(config.launch.threads_per_process)
    if config.precision.deterministic_mode:
        environment.set_cublas_workspace()
        torch.use_deterministic_algorithms(True)
    if worker.world_size > 1:
        environment.export_rank_variables(worker, config.launch.init_method)
    # Before the first CUDA call, which reads the variable.
    set_cuda_connections(config)
    device = choose_device(config.launch.device, worker.local_rank)
    if device.type == "cpu":
        keep_freed_memory()
    check_memory(config, device, worker)
    timeout = config.launch.distributed_timeout_minutes
    point = environment.rendezvous_address(worker)

    def warn(text: str) -> None:
        print_error(f"rank {worker.rank}: {text}")

    if point is not None:
        wait_for_rendezvous(point, worker.rank, timeout * 60, warn)
    reminder = slow_rendezvous_text(worker.rank, worker.world_size, launcher_pid() is not None)
    status = RankStatus()
    ranks = (worker.rank, worker.local_rank)
    with (
        _heartbeats(status, config, worker),
        slow_rendezvous_notice(reminder, warn) as all_joined,
        open_world(config.grid, *ranks, device, timeout, config.shared(), point, status) as world,
    ):
        all_joined()
        run_on_some_ranks(world.uses_nccl, lambda: check_nccl_interface(os.environ), world.all_ranks)
        on_gpu = world.device.type == "cuda"
        notes = environment_notices(given, os.environ, on_gpu, world.uses_nccl, worker.world_size == 1)
        yield world, prepared.resolved.with_notices(notes)


@contextmanager
def _heartbeats(status: RankStatus, config: RunConfig, worker: RankInfo) -> "Iterator[None]":
    """Sends heartbeats to pentatron's launcher or, under another launcher, to the other ranks."""
    from pentatron.supervise.hang import HangLimits, PeerWatchdog

    supervised = current_worker()
    limits = HangLimits(config.launch.heartbeat_timeout, config.launch.distributed_timeout_minutes * 60)
    if supervised is not None or worker.world_size == 1 or config.launch.heartbeat_timeout == 0:
        with running_heartbeat(None if supervised is None else supervised.heartbeat_writer(status, limits)):
            yield
        return
    folder = Path(config.run.run_dir)
    peers = PeerWatchdog(status, worker.rank, worker.world_size, folder, limits, print_error)
    status.on_opened = peers.start
    yield
    peers.close()


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory in this process; returns False without glibc.

    By default glibc returns large freed blocks to the system, and the next step on a CPU page-faults
    thousands of times to get them back. Keeping them makes a step a few percent faster, and the process stays
    as large as its largest step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    parameters = ((_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES), (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES))
    return all(mallopt(parameter, value) for parameter, value in parameters)


def set_cuda_connections(config: RunConfig) -> None:
    """Sets CUDA_DEVICE_MAX_CONNECTIONS; CUDA reads it once, when it is initialized."""
    variable = cuda_connections(config)
    if variable is not None and config.launch.device != "cpu":
        os.environ.setdefault(variable.name, variable.value)


def check_nccl_interface(variables: Mapping[str, str]) -> None:
    """Raises if NCCL_SOCKET_IFNAME names no network interface; NCCL itself fails later and less clearly."""
    problem = interface_problem(variables, [name for _, name in socket.if_nameindex()])
    if problem is not None:
        raise UserError(f"{socket.gethostname()}: {problem}")


def launcher_pid() -> int | None:
    """Returns the pid of the launcher if it forwards signals; training stops once that process has died."""
    if (worker := current_worker()) is not None:
        return worker.launcher
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def _work(
    prepared: Prepared, resumes: bool, worker: RankInfo, program: "Program | None", began: float
) -> int:
    """Trains on this rank; returns the exit code."""
    from pentatron.train.model import CONFIGURED
    from pentatron.train.session import open_session

    config = prepared.resolved.config
    if current_worker() is None:
        # Writes stack traces on the signal and continues, as in a worker of pentatron's launcher.
        faulthandler.register(STACKS_SIGNAL, file=2)
    try:
        with (
            joined_process_group(prepared, worker) as (world, resolved),
            open_session(
                resolved,
                world,
                resumes,
                launcher=launcher_pid(),
                program=program or CONFIGURED,
                started=began,
                sentence=lambda error: failure_log_message(error, config, worker.rank),
                attempt=prepared.attempt,
            ) as session,
        ):
            session.set_up()
            outcome = session.conclude(session.trainer.run())
    except Exception as error:
        code = report_error(error, config, worker)
        if code is None:
            raise
        return code
    if outcome.ending is not None:
        return outcome.ending.exit_code
    if prepared.worker is None:
        _print_next_commands(config, outcome.folder)
    return 0


def launch_workers(prepared: Prepared, python_words: Sequence[str]) -> int:
    """Starts one process of this program per rank, supervises them, and restarts them after a failure."""
    ignore_output_errors()
    from pentatron.supervise.hang import HangLimits, JobWatchdog
    from pentatron.supervise.launcher import run_workers
    from pentatron.supervise.processes import ReceivedSignals
    from pentatron.supervise.supervisor import Supervisor

    config, ranks = prepared.resolved.config, prepared.facts.world_size
    folder = RunFolder(Path(config.run.run_dir))
    if config.launch.device == "cuda":
        # Checked here, because the workers would all fail with it seconds later.
        from pentatron.parallel.world import require_gpu

        require_gpu()
    folder.create()
    inherited = environment.set_worker_environment(config.launch.threads_per_process)
    environment_note = f" with {', '.join(inherited)}" if inherited else ""
    limits = HangLimits(config.launch.heartbeat_timeout, config.launch.distributed_timeout_minutes * 60)
    say(f"starting {ranks} {plural(ranks, 'process')}{environment_note} ...")
    with handle_signals(ReceivedSignals()) as signals:

        def attempt(restart: int) -> "JobResult":
            inherits = {**os.environ, BEGAN: repr(prepared.attempt.began)}
            job = (ranks, config.launch.master_port, inherits, os.getpid())
            return run_workers(python_words, *job, signals, JobWatchdog(limits, folder.path), restart)

        ended = Supervisor(
            attempt,
            ranks,
            config.launch.max_restarts,
            folder.path,
            signals,
            prepared.start is Start.RESUME,
            lambda: _saved_step(config),
            print_error,
            resume_hint=how_to_resume(prepared.start, config.checkpoint.save),
        ).run()
    if ended.exit_code == 0:
        _print_next_commands(config, folder)
    return ended.status


def _saved_step(config: RunConfig) -> int | None:
    """Returns the checkpoint step that a restart resumes from.

    Reading it imports torch, which would cost the launcher 200 MiB for the rest of the job, so another
    process reads it.
    """
    if "torch" not in sys.modules:
        words = [sys.executable, "-P", "-c", _READ_STEP, config.checkpoint.save]
        read = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if read.returncode == 0 and (output := read.stdout.split()):
            return None if output[-1] == "None" else int(output[-1])
    from pentatron.checkpoint.store import CheckpointStore

    return CheckpointStore(Path(config.checkpoint.save), None).newest_saved_step()


def _program_name(called: Path) -> str:
    """Returns the shortest command that runs this program from the current folder."""
    if called.suffix == ".py":
        return "python -m pentatron"
    if shutil.which(called.name) == str(called):
        return called.name
    return os.path.relpath(called) if called.resolve().is_relative_to(Path.cwd()) else str(called)


def _print_next_commands(config: RunConfig, folder: RunFolder) -> None:
    """Prints commands to try after the run."""
    program = _program_name(Path(sys.argv[0]))
    ideas = []
    # A model with a layer spec needs --spec again, and cannot be exported.
    spec = f" --spec {' '.join(map(quote, config.model.spec))}" if config.model.spec else ""
    if folder.sample.exists():
        path = quote(str(folder.path))
        ideas.append((f'{program} generate {path} "import "{spec}', "continue your own text"))
    elif config.checkpoint.load and config.checkpoint.save and _saved_step(config) is not None:
        # Checkpoints may lie outside the run folder (--save), and --skip-train with --load saves none.
        saved = quote(os.path.relpath(config.checkpoint.save))
        if config.data.tokenizer_model is not None:
            ideas.append((f'{program} generate {saved} "Once upon a time"{spec}', "continue your own text"))
        exported = quote(f"exported/{folder.path.name}")
        if not spec:
            ideas.append((f"{program} export {saved} {exported}", "export to Hugging Face format"))
    ideas.append((f"{program} train --help", "list all settings by group"))
    if config.data.corpus is not None:
        wide = quote(f"{folder.path}-wide")
        ideas.append((f"{program} train --run-dir {wide} --hidden-size 256", "train a wider model"))
    width = max(len(command) for command, _ in ideas)
    lines = [f"  {command:<{width}}  # {meaning}" for command, meaning in ideas]
    say("\n".join(["\nnext steps:", *lines]))
    if folder.curve.exists():
        say(f"  loss curve: {folder.curve} (open it in a browser)")
