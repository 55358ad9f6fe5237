"""`pentatron verify`: checks that a parallel layout computes the same numbers as one process."""

import dataclasses
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.cli import environment
from pentatron.cli.layout import resolve_layout
from pentatron.cli.options import Options, flags_of, option, options_help, parse_options_and_settings, usage
from pentatron.cli.output import print_error, say, say_json, with_help
from pentatron.errors import ConfigError, UserError
from pentatron.settings.entry_points import LAYOUT
from pentatron.settings.rules import unsupported_features
from pentatron.settings.run_config import RunConfig
from pentatron.text import plural

if TYPE_CHECKING:
    from pentatron.compare.verify import LayoutVerdict


@dataclass(frozen=True)
class VerifyLayoutOptions(Options):
    shrink_data: bool = option(
        False,
        "reduce the data-parallel size to 2, or to the smallest that can hold the experts, for layouts too large for this machine",
    )
    everything: bool = option(False, "print all parameters in the table, not only the worst")
    json: bool = option(False, "print JSON")


USAGE = f"""{usage("pentatron verify", VerifyLayoutOptions, "[--setting value ...]")}

Trains a small model of the same structure for a few steps, in the layout of the settings and on one process, and
compares losses, gradient norms, every gradient and every weight. It runs on this machine's CPU and reads no data. Ends
with code 0 if all numbers agree, with 1 if any differs.

{options_help(VerifyLayoutOptions)}

  pentatron verify --tp_size 2 --pp_size 2
  pentatron verify --preset llama3-8b --tp_size 4 --sequence-parallel --dp_size 2 --zero-stage 2
"""
_MOST_PROCESSES = 16
_MOST_ROWS = 8
_TIMEOUT_MINUTES = 5.0
_WORKER = "--worker"
VERIFY = dataclasses.replace(LAYOUT, name="pentatron verify", own=flags_of(VerifyLayoutOptions))
_RESTART = ("-m", "pentatron", "verify")


@with_help(USAGE)
def verify_command(words: Sequence[str], restart: Sequence[str] = _RESTART) -> int:
    """Runs the command. `restart`: the words after `python` that run it again, for the workers."""
    if _WORKER in words:
        return _work(Path(words[-1]))
    options, settings = parse_options_and_settings(VerifyLayoutOptions, words, VERIFY)
    full = resolve_layout(settings, VERIFY).config
    config = _small_model(full, options.shrink_data)
    if not options.json:
        from pentatron.compare import verify

        for note in verify.uncompared_settings(full):
            say(f"note: {note}")
    verdict, seconds = _compare(config, restart, quiet=options.json)
    if options.json:
        say_json(_json(config, verdict))
    else:
        say(f"{_table(verdict, options.everything)}\n\n{_conclusion(verdict)} ({seconds:.0f} s)")
    return 0 if verdict.passes else 1


def _small_model(config: RunConfig, shrink: bool) -> RunConfig:
    """Returns the settings of a small model in the same layout; raises if it needs too many processes."""
    if missing := unsupported_features(config.settings):
        raise ConfigError(missing)
    from pentatron.compare.verify import fewest_replicas, small_twin

    fewest = fewest_replicas(config)
    replicas = fewest if shrink else config.grid.data
    of_a_replica = config.grid.world_size // config.grid.data
    world, smaller = of_a_replica * replicas, of_a_replica * fewest
    if world > _MOST_PROCESSES:
        can_shrink = smaller <= _MOST_PROCESSES and not shrink
        advice = f"add --shrink-data to run {smaller}" if can_shrink else "use smaller parallel sizes"
        most = f"the {_MOST_PROCESSES} that verify starts on one machine"
        raise UserError(f"this layout needs {world} processes, more than {most}; {advice}")
    return small_twin(config, replicas)


def _compare(config: RunConfig, restart: Sequence[str], quiet: bool) -> tuple["LayoutVerdict", float]:
    import torch

    from pentatron.compare import verify
    from pentatron.files import scratch_folder
    from pentatron.parallel.world import single_process

    started = time.perf_counter()
    world = config.grid.world_size
    progress = (lambda text: None) if quiet else say
    progress(f"{verify.describe_config(config)}\n\none process ...")
    reference = verify.run_reference(config)
    progress(f"{world} {plural(world, 'process')} in the layout ...")
    with scratch_folder("verify") as folder:
        if world == 1:
            verify.run_rank(config, single_process(torch.device("cpu")), folder)
        else:
            verify.write_settings(config, folder)
            _run_ranks(world, [*restart, _WORKER, str(folder)], config)
        results = verify.read_ranks(folder, world)
    progress("")
    return verify.compare_trajectories(results, reference), time.perf_counter() - started


def _run_ranks(world: int, python_words: Sequence[str], config: RunConfig) -> None:
    from pentatron.supervise.launcher import run_workers

    environment.set_worker_environment(1)
    ended = run_workers(python_words, world, config.launch.master_port, os.environ, os.getpid())
    if ended.stopped_by is not None:
        raise KeyboardInterrupt
    if ended.exit_code != 0:
        raise UserError(f"the layout did not finish: {ended.failure_message(world)}")


def _work(folder: Path) -> int:
    import torch

    from pentatron.compare.verify import read_settings, run_rank
    from pentatron.parallel.world import open_world

    worker = environment.find_worker(os.environ)
    if worker is None:
        raise UserError(f"{_WORKER} is only for the processes that verify starts; leave it out")
    config = read_settings(folder)
    torch.set_num_threads(1)
    environment.export_rank_variables(worker, None)
    ranks = (worker.rank, worker.local_rank, torch.device("cpu"))
    point = environment.rendezvous_address(worker)
    try:
        with open_world(config.grid, *ranks, _TIMEOUT_MINUTES, config.shared(), point) as world:
            run_rank(config, world, folder)
    except UserError as error:
        print_error(f"rank {worker.rank}: {error}")
        return 2
    return 0


# --- report ---


def _table(verdict: "LayoutVerdict", everything: bool) -> str:
    lines = ["largest gaps as a share of the tolerance; above 100% differs", ""]
    lines += [f"  {name:<46}{_share(ratio)}" for name, ratio in verdict.numbers()]
    rows = verdict.tensors()
    kinds = list(rows[0][1])
    lines += ["", f"  {'parameter':<46}" + "".join(f"{kind:>14}" for kind in kinds)]
    shown = rows if everything else rows[:_MOST_ROWS]
    for name, ratios in shown:
        lines.append(f"  {name:<46}" + "".join(_share(ratios.get(kind, math.inf)) for kind in kinds))
    if len(shown) < len(rows):
        lines.append(f"  ... {len(rows) - len(shown)} more parameters (--everything shows them)")
    return "\n".join(lines)


def _share(ratio: float) -> str:
    text = "not finite" if not math.isfinite(ratio) else f"{ratio:.1%}" if ratio < 10 else f"{ratio:.3g} ×"
    return f"{text:>14}"


def _conclusion(verdict: "LayoutVerdict") -> str:
    first = verdict.first
    if first is None:
        return f"the layout computes the same numbers as one process: all {len(verdict.judged)} comparisons agree"
    count = sum(gap.fails for gap in verdict.judged)
    differ = f"the layout computes different numbers: {count} of {len(verdict.judged)} comparisons differ"
    worst = f"the worst parameter is {verdict.tensors()[0][0]}"
    return f"{differ}; the first in the order of computation is {first.what}, {worst}"


def _json(config: RunConfig, verdict: "LayoutVerdict") -> dict[str, Any]:
    def finite(ratios: Mapping[str, float]) -> dict[str, float | None]:
        return {name: ratio if math.isfinite(ratio) else None for name, ratio in ratios.items()}

    return {
        "passes": verdict.passes,
        "processes": config.grid.world_size,
        "comparisons": len(verdict.judged),
        "first": None if verdict.first is None else verdict.first.what,
        "numbers": finite(dict(verdict.numbers())),
        "parameters": {name: finite(ratios) for name, ratios in verdict.tensors()},
    }
