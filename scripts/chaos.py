"""Kills random ranks and the launcher of a TP2×PP2×DP2 run, and checks the state in which it ends.

    python scripts/chaos.py [--kills 50] [--seed 1] [--steps 200] [--fresh-processes] [--keep]
        [-- further settings]

The run must end with the state of an undisturbed run, bit for bit, and leave no process and no temporary
checkpoint behind. Prints what the kills cost. The exit code is 1 if any of this does not hold.

Ranks are forked from this process, because importing torch eight times takes longer than all the rest;
--fresh-processes starts them as a user does.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# Before torch is imported: forked processes inherit the threads of its libraries.
os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=str(ROOT))

from pentatron.checkpoint.find import find_step  # noqa: E402
from tests.chaos.campaign import Campaign, ChaosFailed, Log  # noqa: E402
from tests.chaos.launching import prepare_to_fork, start_fresh, start_launcher  # noqa: E402
from tests.checkpoint.digest import StateDigest, state_digest  # noqa: E402

RANKS = 8
INTERVAL = 3
# Both kinds of dropout, so that RNG states count.
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 61 --dataset-size 400 --lr 1e-3 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --micro-batch-size 1 --global-batch-size 4 --eval-interval 0 --sample-tokens 0 "
    "--device cpu --threads-per-process 1 --log-interval 1 --progress-bar off"
)
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="steps of the run (default: four for each kill)")
    parser.add_argument(
        "--ranks", type=int, default=RANKS, help="number of ranks; 2 or 4 for quicker runs in smaller layouts"
    )
    parser.add_argument("--fresh-processes", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the runs")
    parser.add_argument("further", nargs="*", help="further settings of the run")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pentatron-chaos-"))
    try:
        return play(chosen, folder)
    except ChaosFailed as failure:
        chosen.keep = True
        print(f"chaos: {failure}\n{_last_lines(folder / 'disturbed' / 'console.log')}\nsee {folder}")
        return 1
    finally:
        if not chosen.keep:
            shutil.rmtree(folder, ignore_errors=True)


def play(chosen: argparse.Namespace, folder: Path) -> int:
    steps = chosen.steps or max(4 * chosen.kills, 20)
    layout = {RANKS: LAYOUT, 4: LAYOUT, 2: "--zero-stage 1"}[chosen.ranks]
    common = (
        f"{MODEL} {layout} --nproc-per-node {chosen.ranks} --train-iters {steps} --save-interval {INTERVAL} "
        f"--max-restarts {chosen.kills + 5}"
    ).split() + chosen.further
    prepare_to_fork()
    start = start_fresh if chosen.fresh_processes else start_launcher
    data = chosen.ranks // (4 if chosen.ranks > 2 else 1)
    print(
        f"chaos: {chosen.kills} kills over {steps} steps on {chosen.ranks} processes ({layout}; {data} replicas), seed {chosen.seed}"
    )

    calm = folder / "undisturbed"
    calm.mkdir()
    begun = time.monotonic()
    launcher, log, first = (
        start([*common, "--run-dir", str(calm)], calm / "console.log"),
        Log(calm / "train.log"),
        0.0,
    )
    while launcher.poll() is None:
        if log.read() and not first:
            first = time.monotonic()
        time.sleep(0.005)
    ended = time.monotonic()
    if launcher.returncode:
        raise ChaosFailed(f"the undisturbed run failed:\n{_last_lines(calm / 'console.log')}")
    step_seconds = (ended - first) / steps
    print(
        f"undisturbed: {ended - begun:.1f} s, of which the start took {first - begun:.1f} s, and a step {step_seconds:.3f} s with its saves"
    )

    wild = folder / "disturbed"
    wild.mkdir()
    campaign = Campaign(
        [*common, "--run-dir", str(wild)],
        wild,
        chosen.ranks,
        start,
        first - begun,
        step_seconds,
        random.Random(chosen.seed),
    )
    wall = campaign.run(chosen.kills, steps, INTERVAL, lambda line: print(line, flush=True))
    _report(campaign, steps, wall, step_seconds * steps)
    left = [entry.name for entry in (wild / "checkpoints").glob(".*") if entry.name != ".lock"]
    different = _state(calm).differences(_state(wild))
    for complaint in (
        f"the final state is another one: {', '.join(different)}" if different else "",
        f"left behind: {', '.join(left)}" if left else "",
    ):
        if complaint:
            print(f"FAILED: {complaint}")
    if not different and not left:
        print(f"the final state is that of the undisturbed run, bit for bit: {_state(wild).whole[:16]}…")
    return int(bool(different or left))


def _report(campaign: Campaign, steps: int, wall: float, useful: float) -> None:
    print(f"\n{'place':<14}{'kills':>6}{'steps lost':>12}{'at most':>9}{'back after':>12}{'at most':>10}")
    kills = campaign.kills
    for place in sorted({kill.place for kill in kills}):
        found = [kill for kill in kills if kill.place == place]
        _row(place, found)
    _row("all", kills)
    launchers = [kill for kill in kills if kill.victims.startswith("the launcher")]
    print(
        f"\nof them {len(launchers)} of the launcher; it was started again {campaign.launchers_killed} times after that, and "
        f"{campaign.gave_up} times after it had given up"
    )
    cost = (wall - useful) / len(kills)
    print(
        f"{campaign.log.computed} steps were computed for {steps}, in {wall:.0f} s\n"
        f"effective-time ratio: {useful:.0f} s of {wall:.0f} s = {useful / wall:.1%}, with a kill every {wall / len(kills):.1f} s; a kill costs "
        f"{cost:.1f} s here, so that with one an hour it would be {3600 / (3600 + cost):.1%}"
    )


def _row(name: str, kills: list) -> None:
    lost = [kill.lost for kill in kills]
    back = [kill.back_after for kill in kills if kill.back_after is not None] or [0.0]
    print(
        f"{name:<14}{len(kills):>6}{sum(lost):>12}{max(lost):>9}{statistics.median(back):>10.1f} s{max(back):>8.1f} s"
    )


def _state(run: Path) -> StateDigest:
    found, complaints = find_step(run)
    if complaints:
        raise ChaosFailed(f"the last checkpoint is damaged: {complaints[0]}")
    return state_digest(found.folder, found.manifest)


def _last_lines(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:]) if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
