"""The run folder: paths of its files, the saved configuration, timestamps, and the log of a failure."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pentatron.errors import AgreedError, UserError
from pentatron.files import make_folder, next_numbered_name, rename, write_file
from pentatron.monitor.report import ERROR_PREFIX
from pentatron.monitor.terminal import append_line
from pentatron.settings.files import HEADER
from pentatron.settings.resolve import Resolved
from pentatron.settings.run_config import RunConfig, all_settings
from pentatron.supervise.signals import StoppedEarly
from pentatron.text import one_line, redact_value

if TYPE_CHECKING:
    from pentatron.parallel.world import World


class AppMetrics:
    """Timestamps of the phases of a run in milliseconds since the epoch, as in Megatron's app metrics."""

    def __init__(self, started: float) -> None:
        self.times = {"app_start_time": round(started * 1000)}

    def mark(self, name: str) -> None:
        """Records the current time: `model_init_start` as `app_model_init_start_time`."""
        self.times[f"app_{name}_time"] = round(time.time() * 1000)

    def write(self, path: Path) -> None:
        write_file(path, f"{json.dumps(self.times, indent=2)}\n".encode())


# Written as comments: a run that reads this configuration must not use this run's folder.
_OF_THIS_RUN_ALONE = frozenset({"config", "preset", "fresh", "local_rank", "run_dir", "save"})


class RunFolder:
    """Paths of the files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.log = path / "train.log"
        self.metrics = path / "metrics.jsonl"
        self.app_metrics = path / "app_metrics.json"
        self.curve = path / "loss.svg"
        self.sample = path / "sample.txt"
        self.data = path / "data"

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
        exists = os.path.lexists(self.config)
        if exists and not is_run_config(self.config) and not damaged_config(self.config):
            raise UserError(f"{self.config} is not the file of a run; choose another folder with --run-dir")

    def set_metrics_aside(self) -> Path:
        """Renames the metrics of earlier training, whose step numbers would occur twice."""
        aside = next_numbered_name(self.metrics.with_suffix(""), ".", self.metrics.suffix)
        if self.metrics.exists():
            rename(self.metrics, aside)
        return aside

    def holds_metrics_of_another(self, resolved: Resolved) -> bool:
        """Whether the metrics were written with other settings. An identical restart repeats its steps."""
        if not self.metrics.exists() or not self.config.exists():
            return False
        text = self.config.read_text(encoding="utf-8", errors="replace")
        return _chosen(text) != _chosen(config_text(resolved))

    def write_config(self, resolved: Resolved) -> None:
        # Paths that are not UTF-8 are escaped.
        write_file(self.config, config_text(resolved).encode(errors="backslashreplace"))


def is_run_config(file: Path) -> bool:
    return file.is_file() and file.read_bytes().startswith(HEADER.encode()) and damaged_config(file) is None


def damaged_config(file: Path) -> str | None:
    """Returns how the `config.yaml` of a run is damaged, as after a power loss.

    None if it is intact, missing, or not the file of a run.
    """
    if not file.is_file():
        return None
    content, header = file.read_bytes(), HEADER.encode()
    if not content.strip(b"\0"):
        return "it contains only NUL bytes" if content else "it is empty"
    if content[: len(header)] != header[: len(content)]:
        return None
    if b"\0" in content:
        return "it holds NULs"
    try:
        content.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"
    return None if content.endswith(b"\n") else "its end is missing"


def _chosen(text: str) -> list[str]:
    """Returns the lines of chosen values, without comments: derived values are comments."""
    lines = [line.partition("  # ")[0] for line in text.splitlines()]
    return [line for line in lines if line.strip()]


def config_text(resolved: Resolved) -> str:
    """Formats the configuration as YAML with the origin of every value.

    Derived values are comments, so that --config accepts the file on another machine or with other sizes. So
    are values that name code, which no file may choose.
    """
    lines, section = [HEADER], ""
    values: Mapping[str, object] = resolved.config.flat()
    left_out = _OF_THIS_RUN_ALONE | ({"load"} if _loads_itself(resolved.config) else set())
    for name, item in all_settings().items():
        if item.section != section:
            section = item.section
            lines.append(f"\n{section}:")
        source = resolved.sources[name]
        is_comment = source.startswith("derived") or name in left_out or item.names_code
        value = redact_value(values[name])
        text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
        lines.append(f"  {'# ' if is_comment else ''}{name}: {text}  # {one_line(source)}")
    return "\n".join(lines) + "\n"


def _loads_itself(config: RunConfig) -> bool:
    """Whether --load names this run itself, rather than the origin of its weights."""
    load, save, run = config.checkpoint.load, config.checkpoint.save, config.run.run_dir
    if load is None:
        return True
    # Imported here, as they import torch: the launcher creates the folder without it.
    from pentatron.checkpoint.find import default_checkpoint_folder
    from pentatron.checkpoint.retention import STEP_NAME

    target = Path(load).resolve()
    own_folders = {Path(save).resolve()} if save is not None else set()
    if run is not None:
        own_folders |= {Path(run).resolve(), default_checkpoint_folder(Path(run)).resolve()}
    # A step of the run. Other folders beside the steps are not the run.
    steps = {target.parent} if STEP_NAME.fullmatch(target.name) else set()
    return not own_folders.isdisjoint({target} | steps)


# Returns the message for an error, or None if this rank does not log it.
ErrorMessage = Callable[[BaseException], str | None]


def error_message(error: BaseException) -> str | None:
    """Returns the message of a user error, or type and first line of another; None for a requested end."""
    if isinstance(error, UserError):
        return str(error)
    if not isinstance(error, Exception):
        return None
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def log_failure(folder: RunFolder, world: "World", error: BaseException, sentence: ErrorMessage) -> None:
    """Appends the error that ends the run to its log, whose folder this run must hold.

    The first rank alone writes an error that all ranks have in common.
    """
    if isinstance(error, StoppedEarly):
        if world.is_first:
            append_line(folder.log, str(error))
        return
    agreed = isinstance(error, AgreedError)
    text = sentence(error) if world.is_first or not agreed else None
    if text is None:
        return
    prefix = "" if agreed or world.all_ranks.size == 1 else f"rank {world.all_ranks.rank}: "
    # Ignores errors: a full disk may be the failure itself.
    append_line(folder.log, f"{ERROR_PREFIX}{prefix}{' '.join(text.split())}")
