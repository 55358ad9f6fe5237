"""`pentatron train`, and every guide's training script."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pentatron.cli.environment import (
    Worker,
    announce_worker,
    prepare_for_workers,
    require_repeatable_kernels,
    timeout_minutes,
)
from pentatron.cli.prepare import Prepared, prepare
from pentatron.cli.terminal import complain, say
from pentatron.config.entry import EntryPoint

if TYPE_CHECKING:
    from pentatron.train.session import Outcome


_USER_ERROR = 2


def train(words: Sequence[str], entry: EntryPoint, restart: Sequence[str]) -> int:
    """Trains here, or starts workers that do. `restart` are the words after `python` that run this program again."""
    prepared = prepare(words, entry)
    if prepared.worker is not None:
        return _work(prepared, entry, prepared.worker)
    if prepared.facts.world_size == 1:
        return _work(prepared, entry, Worker(0, 1, 0, 1, "none"))
    return _launch(prepared, [*restart, *words])


def _work(prepared: Prepared, entry: EntryPoint, worker: Worker) -> int:
    import torch

    from pentatron.parallel.world import choose_device, open_world
    from pentatron.train.session import run_training

    config = prepared.resolved.config
    assert config.launch.threads_per_process is not None
    torch.set_num_threads(config.launch.threads_per_process)
    if config.precision.deterministic_mode:
        require_repeatable_kernels()
        torch.use_deterministic_algorithms(True)
    if worker.world_size > 1:
        announce_worker(worker, config.launch.init_method)
    device = choose_device(config.launch.device, worker.local_rank)
    timeout = timeout_minutes(config.launch.distributed_timeout_minutes)
    with open_world(config.grid, worker.rank, worker.local_rank, worker.local_size, device, timeout) as world:
        outcome = run_training(prepared.resolved, world, entry.resumes)
    if worker.rank == 0 and outcome.stopped_by is None:
        _what_next(outcome)
    alone = prepared.worker is None
    return 128 + outcome.stopped_by if outcome.stopped_by is not None and alone else 0


def _launch(prepared: Prepared, python_words: Sequence[str]) -> int:
    from pentatron.launch.local import run_workers
    from pentatron.train.run_folder import RunFolder

    config = prepared.resolved.config
    assert config.launch.threads_per_process is not None and config.run.run_dir is not None
    # The workers would find out as well, seconds later and each by itself.
    RunFolder(Path(config.run.run_dir)).create()
    prepare_for_workers(config.launch.threads_per_process)
    ended = run_workers(python_words, prepared.facts.world_size, config.launch.master_port)
    if ended.failed_rank is not None and ended.exit_code != _USER_ERROR:
        complain(
            f"rank {ended.failed_rank} of {prepared.facts.world_size} {_how(ended.exit_code)}; the others were stopped. "
            f"Its last checkpoint is intact: the same command goes on from there"
        )
        return 1
    return ended.exit_code


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"failed with exit code {exit_code} (its error is above)"
    import signal

    return f"was killed by {signal.Signals(-exit_code).name}"


def _what_next(outcome: "Outcome") -> None:
    folder = outcome.folder.path
    program = "pentatron" if not sys.argv[0].endswith(".py") else "python -m pentatron"
    say("")
    say("what to try next:")
    if outcome.folder.sample.exists():
        say(f'  {program} generate {folder} "import "          continue a text of yours')
    say(f"  open {outcome.folder.curve}{' ' * 20}the loss curve")
    say(f"  {program} train --help{' ' * 24}every setting, by group")
    say(f"  {program} train --run-dir runs/mine --hidden-size 256   another run beside this one")
