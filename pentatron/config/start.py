"""How a run treats what its folder already holds: decided once, from the command and from whether this is a restart."""

from enum import Enum
from pathlib import Path

from pentatron.config.settings import Settings, unset

# They choose what is taken from what is loaded.
CHOOSING = ("finetune", "no_load_optim", "no_load_rng")


class Start(Enum):
    """`RESUME`: goes on from the run's own newest step; without one, begins with what `--load` names, else with new weights.

    `ANEW`: moves an earlier run in the folder aside, then begins with what `--load` names, else with new weights.

    `IN_PLACE`: moves nothing, as `--load` names the folder itself or something inside it, and begins with that; steps that are
    there already belong to earlier runs.
    """

    RESUME = "resume"
    ANEW = "anew"
    IN_PLACE = "in place"


def start_of(s: Settings, load_given: bool, resumes: bool) -> Start:
    """The start of a run with these settings. `resumes`: the program goes on by itself, or this is a restart of its job."""
    if s.fresh:
        return Start.ANEW
    if resumes or (s.skip_train and not load_given):
        return Start.RESUME
    if not load_given or unset(s.load):
        return Start.ANEW
    chooses = s.finetune or s.no_load_optim or s.no_load_rng
    if not chooses and names_checkpoints(s.load, s.save):
        return Start.RESUME
    inside = is_inside(s.load, s.run_dir, s.save)
    return Start.IN_PLACE if inside or s.skip_train else Start.ANEW


def how_to_go_on(start: Start, save: str) -> str:
    """What goes on from the last checkpoint, for the command whose start this is."""
    if start is Start.RESUME:
        return "the same command goes on from there"
    return f"the same command with --load {save}, and without --finetune, goes on from there"


def another_run(run_dir: str) -> str:
    """Begins the refusal of a run whose folder was named after its model and data, and holds something else."""
    return f"another run is in {run_dir}; choose --run-dir for this one"


def names_checkpoints(load: str, save: str) -> bool:
    """Whether `load` means the folder of checkpoints `save`: itself, or the run that keeps them."""
    own = Path(save).resolve()
    return own in (Path(load).resolve(), (Path(load) / "checkpoints").resolve())


def is_inside(path: str, *folders: str) -> bool:
    """Whether a path is one of the folders, or lies in one."""
    return any(Path(path).resolve().is_relative_to(Path(folder).resolve()) for folder in folders)
