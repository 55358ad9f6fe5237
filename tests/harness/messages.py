"""Messages between the test process, the zygote and the ranks.

Messages are plain data. Arguments and results are pickled bytes that the zygote forwards without unpickling,
because unpickling could import a test module into the zygote, and all later tests would inherit it.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One function to run on `world` ranks, with the caller's import path, directory and environment."""

    module: str
    main_file: str | None  # the script to load when `module` is `__main__`
    function: str
    arguments: bytes  # pickled keyword arguments
    world: int
    timeout: float  # seconds
    import_path: list[str]
    working_directory: str
    environment: dict[str, str]
    process_group: bool = True  # if False, the rank can fork
    backend: str = "gloo"  # of the process group

    @property
    def name(self) -> str:
        return f"{self.module}.{self.function}"


@dataclass(frozen=True)
class Ready:
    """The zygote has imported everything and takes jobs."""


@dataclass(frozen=True)
class Started:
    """The ranks run in this process group of the OS, which the test process kills if the zygote dies."""

    process_group: int


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    rank: int
    ok: bool
    at: float  # time.monotonic(), which all processes of a machine share
    headline: str = ""  # what went wrong, to follow "rank 2 of 4": "raised ValueError: boom"
    traceback: str = ""  # of the exception, if one was raised
    stack: str = ""  # as faulthandler dumped it, if the rank crashed or hung
    unfinished: bool = False  # it had to be stopped
    peer_lost: bool = False  # the exception only says that another rank is gone
    result: bytes = b""  # pickled return value
    output: str = ""  # what the rank wrote to stdout and stderr


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank in the scratch directory of its test."""

    directory: Path
    rank: int

    @property
    def report(self) -> Path:
        return self.directory / f"rank{self.rank}.report"

    @property
    def output(self) -> Path:
        return self.directory / f"rank{self.rank}.output"

    @property
    def stack(self) -> Path:
        return self.directory / f"rank{self.rank}.stack"
