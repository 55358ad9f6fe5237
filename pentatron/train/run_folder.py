"""The folder of a run: what lies where, and what happens to an earlier run in the same place."""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pentatron.errors import AgreedError, UserError
from pentatron.files import make_folder, numbered, rename, write_file
from pentatron.monitor.report import FAILED
from pentatron.monitor.terminal import append_line
from pentatron.settings.files import HEADER
from pentatron.settings.resolve import Resolved
from pentatron.settings.run import RunConfig, table
from pentatron.supervise.signals import StoppedEarly
from pentatron.text import one_line, redacted_value

if TYPE_CHECKING:
    from pentatron.parallel.world import World

# When a run came to which point, in milliseconds since the epoch.


class Moments:
    def __init__(self, started: float) -> None:
        self.taken = {"app_start_time": round(started * 1000)}

    def mark(self, name: str) -> None:
        """`model_init_start` → `app_model_init_start_time`, now."""
        self.taken[f"app_{name}_time"] = round(time.time() * 1000)

    def write(self, path: Path) -> None:
        write_file(path, f"{json.dumps(self.taken, indent=2)}\n".encode())


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
            make_folder(self.path.resolve())
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
            raise UserError(
                f"the run folder {self.path} cannot be written ({reason}); choose another with --run-dir or --save"
            ) from None
        if (
            os.path.lexists(self.config)
            and not is_config_of_a_run(self.config)
            and not damaged_config(self.config)
        ):
            raise UserError(f"{self.config} is not the file of a run; choose another folder with --run-dir")

    def set_metrics_aside(self) -> Path:
        """Those of other training in this folder: its steps have the numbers that now come again."""
        aside = numbered(self.metrics.with_suffix(""), ".", self.metrics.suffix)
        if self.metrics.exists():
            rename(self.metrics, aside)
        return aside

    def holds_metrics_of_another(self, resolved: Resolved) -> bool:
        """Whether other settings than these wrote the metrics: a run that is started again as it was computes its steps once more."""
        if not self.metrics.exists() or not self.config.exists():
            return False
        text = self.config.read_text(encoding="utf-8", errors="replace")
        return _chosen(text) != _chosen(config_text(resolved))

    def write_config(self, resolved: Resolved) -> None:
        # Names of files that are not UTF-8 are written as escapes, as JSON has them.
        write_file(self.config, config_text(resolved).encode(errors="backslashreplace"))


def is_config_of_a_run(file: Path) -> bool:
    return file.is_file() and file.read_bytes().startswith(HEADER.encode()) and damaged_config(file) is None


def damaged_config(file: Path) -> str | None:
    """What is wrong with a `config.yaml` that a run wrote and a disk lost, or half of it; None: nothing, or it is another file."""
    if not file.is_file():
        return None
    found, header = file.read_bytes(), HEADER.encode()
    if not found.strip(b"\0"):
        return "it holds nothing but NULs" if found else "it is empty"
    if found[: len(header)] != header[: len(found)]:
        return None
    if b"\0" in found:
        return "it holds NULs"
    try:
        found.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"
    return None if found.endswith(b"\n") else "its end is missing"


def _chosen(text: str) -> list[str]:
    """The lines of values that follow from nothing else, without their origins."""
    lines = [line.partition("  # ")[0] for line in text.splitlines()]
    return [line for line in lines if line.strip()]


def config_text(resolved: Resolved) -> str:
    """The configuration as YAML with the origin of every value; derived values are comments, so that the file can
    be given to --config on another machine or with other sizes. So are values that name code, which no file may choose."""
    lines = [HEADER]
    section = ""
    values: Mapping[str, object] = resolved.config.flat()
    left_out = _OF_THIS_RUN_ALONE | ({"load"} if _loads_itself(resolved.config) else set())
    for name, item in table().items():
        if item.section != section:
            section = item.section
            lines.append(f"\n{section}:")
        source = resolved.sources[name]
        inherited = source.startswith("derived") or name in left_out or item.names_code
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
    from pentatron.checkpoint.retention import STEP_NAME

    named = Path(load).resolve()
    own = {Path(save).resolve()} if save is not None else set()
    if run is not None:
        own |= {Path(run).resolve(), checkpoints_of(Path(run)).resolve()}
    # One of its steps; other folders beside them are not the run.
    steps = {named.parent} if STEP_NAME.fullmatch(named.name) else set()
    return not own.isdisjoint({named} | steps)


# What a run failed with, as the last line of its log: who looks back at it finds the reason there, not only
# on a terminal.


# The sentence for an error, or None where this rank has nothing to say of it.
Sentence = Callable[[BaseException], str | None]


def sentence_of(error: BaseException) -> str | None:
    """An error of the user's as it is, another by its name; an end that somebody asked for is none."""
    if isinstance(error, UserError):
        return str(error)
    if not isinstance(error, Exception):
        return None
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def write_last_words(folder: RunFolder, world: "World", error: BaseException, sentence: Sentence) -> None:
    """Into the log of the run's folder, which must be ours. What all ranks say alike, the first writes."""
    if isinstance(error, StoppedEarly):
        if world.is_first:
            append_line(folder.log, str(error))
        return
    agreed = isinstance(error, AgreedError)
    text = sentence(error) if world.is_first or not agreed else None
    if text is None:
        return
    of_rank = "" if agreed or world.everyone.size == 1 else f"rank {world.everyone.rank}: "
    # A full disk may be what the run failed with.
    append_line(folder.log, f"{FAILED}{of_rank}{' '.join(text.split())}")
