"""What the test process, the zygote and the ranks tell each other.

Plain data only. Arguments and results travel as pickled bytes that the zygote passes on unopened: opening
them could import a test's own modules into the zygote, and every later test would inherit those.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One function to be run on `world` ranks, in the surroundings the caller had at that moment."""

    module: str
    main_file: str | None  # the script to load when `module` is `__main__`
    function: str
    arguments: bytes  # pickled keyword arguments
    world: int
    timeout: float  # seconds
    import_path: list[str]
    working_directory: str
    environment: dict[str, str]
    process_group: bool = True  # without: one process, which can fork
    backend: str = "gloo"  # of the process group

    @property
    def name(self) -> str:
        return f"{self.module}.{self.function}"


@dataclass(frozen=True)
class Ready:
    """The zygote has imported everything and takes jobs."""


@dataclass(frozen=True)
class Started:
    """The ranks run, in this process group; the test process can kill it should the zygote die."""

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
