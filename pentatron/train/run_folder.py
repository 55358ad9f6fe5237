"""The folder of a run: what lies where, and what happens to an earlier run in the same place."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pentatron.config.errors import UserError
from pentatron.config.printable import one_line
from pentatron.config.redaction import redacted_value
from pentatron.config.resolve import Resolved
from pentatron.config.run import RunConfig, table

_HEADER = "# Every setting of this run and where it came from. Use it again with: --config THIS_FILE"
# A later run that reads the saved configuration must not end up in this run's folder.
_OF_THIS_RUN_ALONE = frozenset({"config", "preset", "fresh", "local_rank", "run_dir", "save"})


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
        if self.config.exists() and not self.config.read_text(encoding="utf-8", errors="replace").startswith(
            _HEADER
        ):
            raise UserError(f"{self.config} is not the file of a run; choose another folder with --run-dir")

    def move_aside(self) -> Path | None:
        """Keeps an earlier run under a new name; nothing is ever overwritten, and nothing foreign is moved."""
        entries = {entry.name for entry in self.path.iterdir()} - {".lock"}
        if not entries:
            return None
        # A run that was refused while it began leaves its log alone.
        if not entries & {"config.yaml", "metrics.jsonl", "checkpoints", "latest", "data", "train.log"}:
            raise UserError(
                f"{self.path} holds other files than a run's, so it is not moved aside; choose another folder"
            )
        whole = self.path.resolve()
        number = 1
        while (aside := whole.with_name(f"{whole.name}.{number}")).exists():
            number += 1
        try:
            whole.rename(aside)
        except OSError as error:
            raise UserError(f"the earlier run {self.path} cannot be moved aside ({error.strerror})") from None
        return aside

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
    lines = [_HEADER]
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
