"""The folder of a run: what lies where, and what happens to an earlier run in the same place."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.config.errors import UserError
from pentatron.config.printable import one_line
from pentatron.config.redaction import redacted_value
from pentatron.config.resolve import Resolved
from pentatron.config.run import RunConfig, table
from pentatron.config.saved_config import HEADER
from pentatron.config.start import is_inside
from pentatron.train.run_files import divide_files, is_config_of_a_run

# A later run that reads the saved configuration must not end up in this run's folder.
_OF_THIS_RUN_ALONE = frozenset({"config", "preset", "fresh", "local_rank", "run_dir", "save"})


@dataclass(frozen=True)
class Moved:
    """Where an earlier run lies now, and what stayed beside the new one, as no run made it."""

    folder: Path
    stayed: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.stayed[:3]) + (" ..." if len(self.stayed) > 3 else "")
        stayed = f"; {shown}, which no run made, stayed" if self.stayed else ""
        return f"the earlier run was moved to {self.folder}{stayed}"


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def app_metrics(self) -> Path:
        return self.path / "app_metrics.json"

    @property
    def curve(self) -> Path:
        return self.path / "loss.svg"

    @property
    def sample(self) -> Path:
        return self.path / "sample.txt"

    @property
    def data(self) -> Path:
        return self.path / "data"

    def create(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
            raise UserError(
                f"the run folder {self.path} cannot be written ({reason}); choose another with --run-dir or --save"
            ) from None
        if self.config.exists() and not is_config_of_a_run(self.config):
            raise UserError(f"{self.config} is not the file of a run; choose another folder with --run-dir")

    def move_aside(self, inputs: Sequence[str] = ()) -> Moved | None:
        """Keeps an earlier run under a new name: nothing is ever overwritten, and what no run made stays where it is.

        `inputs`: what the run that takes its place reads.
        """
        made, others = divide_files(self.path)
        if not any(entry.name != ".lock" for entry in made):
            return None
        for path in inputs:
            if is_inside(path, *map(str, made)):
                raise UserError(
                    f"{path} is a file of the earlier run in {self.path}, which would be moved aside; choose another --save or --run-dir"
                )
        whole = self.path.resolve()
        number = 1
        while (aside := whole.with_name(f"{whole.name}.{number}")).exists():
            number += 1
        try:
            if others or Path.cwd().is_relative_to(whole):
                # The folder a command is typed in stays that folder.
                aside.mkdir()
                for entry in made:
                    if entry.name != ".lock":
                        entry.rename(aside / entry.name)
            else:
                whole.rename(aside)
        except OSError as error:
            raise UserError(
                f"the earlier run {self.path} cannot be moved to {aside} ({error.strerror}); move it yourself, or choose another "
                f"--save or --run-dir"
            ) from None
        return Moved(aside, tuple(entry.name for entry in others))

    def set_metrics_aside(self) -> Path:
        """Those of other training in this folder: its steps have the numbers that now come again."""
        number = 1
        while (aside := self.metrics.with_name(f"metrics.{number}.jsonl")).exists():
            number += 1
        if self.metrics.exists():
            self.metrics.rename(aside)
        return aside

    def holds_metrics_of_another(self, resolved: Resolved) -> bool:
        """Whether other settings than these wrote the metrics: a run that is started again as it was computes its steps once more."""
        if not self.metrics.exists() or not self.config.exists():
            return False
        text = self.config.read_text(encoding="utf-8", errors="replace")
        return _chosen(text) != _chosen(config_text(resolved))

    def write_config(self, resolved: Resolved) -> None:
        self.config.write_text(config_text(resolved), encoding="utf-8")


def _chosen(text: str) -> list[str]:
    """The lines of values that follow from nothing else, without their origins."""
    lines = [line.partition("  # ")[0] for line in text.splitlines()]
    return [line for line in lines if line.strip()]


def config_text(resolved: Resolved) -> str:
    """The configuration as YAML with the origin of every value; derived values are comments, so that the file can
    be given to --config on another machine or with other sizes."""
    lines = [HEADER]
    section = ""
    values: Mapping[str, object] = resolved.config.flat()
    left_out = _OF_THIS_RUN_ALONE | ({"load"} if _loads_itself(resolved.config) else set())
    for name, item in table().items():
        if item.section != section:
            section = item.section
            lines.append(f"\n{section}:")
        source = resolved.sources[name]
        inherited = source.startswith("derived") or name in left_out
        value = redacted_value(values[name])
        text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
        lines.append(f"  {'# ' if inherited else ''}{name}: {text}  # {one_line(source)}")
    return "\n".join(lines) + "\n"


def _loads_itself(config: RunConfig) -> bool:
    """Whether --load names this run. Anything else is what its weights came from, and a later run is to begin there too."""
    load, save, run = config.checkpoint.load, config.checkpoint.save, config.run.run_dir
    if load is None:
        return True
    # A launcher makes the folder without torch, which these bring in.
    from pentatron.checkpoint.find import checkpoints_of
    from pentatron.checkpoint.store import STEP_NAME

    named = Path(load).resolve()
    own = {Path(save).resolve()} if save is not None else set()
    if run is not None:
        own |= {Path(run).resolve(), checkpoints_of(Path(run)).resolve()}
    # One of its steps; other folders beside them are not the run.
    steps = {named.parent} if STEP_NAME.fullmatch(named.name) else set()
    return not own.isdisjoint({named} | steps)
