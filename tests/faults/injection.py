"""Injects faults into a training process: at a point, on a rank, with an action.

The product has no hooks for this. A point is a function that is wrapped from outside, or a file operation,
which a Python audit event reports before it is done and which is identified by the name of the file.
"""

import fnmatch
import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ALONE = -1


@dataclass(frozen=True)
class Fault:
    """An action, and the point, rank and step at which it happens.

    `at`: a name of POINTS, `open GLOB` before a file is opened for writing, or `rename GLOB` before a file
    gets that name. `rank`: ALONE for a run of one process. `step` counts from 1 and is ignored for a file,
    whose name has the step. `once`: a file that is created with time and step when the fault happens, so that
    it happens once; without it, the fault happens in every step from `step` on. `after`: calls in a process
    that pass before it.
    """

    at: str
    do: str
    rank: int = ALONE
    step: int = 1
    seconds: float = 0.0
    bytes: int = 0
    after: int = 0
    file: str = ""
    once: str | None = None

    def word(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, word: str) -> "Fault":
        return cls(**json.loads(word))


def happened(marker: Path) -> tuple[float, int]:
    """Returns the time of a fault and the step in progress (0: before the first)."""
    content = json.loads(marker.read_text())
    return content["time"], content["step"]


class Injector:
    """Installs the faults of this rank."""

    def __init__(self, faults: list[Fault], rank: int) -> None:
        self.step = 0
        self._faults = [fault for fault in faults if fault.rank == rank]

    def install(self) -> None:
        if not self._faults:
            return
        import pentatron.train.step as step_module

        _wrap(step_module, "start_step", self._count)
        # Python ignores SIGXFSZ, so that a write beyond RLIMIT_FSIZE is an error. The default action, which
        # ends the process, is restored here, before other threads run.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        for fault in self._faults:
            kind, _, pattern = fault.at.partition(" ")
            if kind in ("open", "rename"):
                sys.addaudithook(self._on_file(fault, kind, pattern))
            else:
                owner, name = POINTS[fault.at]()
                _wrap(owner, name, self._at(fault))

    def _count(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        # The fourth argument of `start_step` is the number of the step, from 0.
        self.step = given[3] + 1
        return original(*given, **named)

    def _at(self, fault: Fault) -> Callable[..., Any]:
        passed = itertools.count()

        def called(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
            due = self.step == fault.step if fault.once else self.step >= fault.step
            if not due or next(passed) < fault.after or not self._first_time(fault):
                return original(*given, **named)
            return ACTIONS[fault.do](fault, original, *given, **named)

        return called

    def _on_file(self, fault: Fault, kind: str, pattern: str) -> Callable[[str, tuple[Any, ...]], None]:
        def hook(event: str, details: tuple[Any, ...]) -> None:
            if event == "open" == kind:
                path, _, flags = details
                concerned = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            elif event == "os.rename" and kind == "rename":
                path, concerned = details[1], True
            else:
                return
            if concerned and fnmatch.fnmatch(str(path), pattern) and self._first_time(fault):
                ACTIONS[fault.do](fault, lambda: None)

        return hook

    def _first_time(self, fault: Fault) -> bool:
        if fault.once is None:
            return True
        try:
            descriptor = os.open(fault.once, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            json.dump({"time": time.time(), "step": self.step}, file)
        return True


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def wrapped(*given: Any, **named: Any) -> Any:
        return wrapper(original, *given, **named)

    setattr(owner, name, wrapped)


def _forward() -> tuple[Any, str]:
    from pentatron.train.model import Program

    return Program, "forward"


def _backward() -> tuple[Any, str]:
    import torch

    return torch.autograd, "backward"


def _update() -> tuple[Any, str]:
    """Called for the weights with weight decay, then for the others."""
    from pentatron.optim.update_rules import Adam

    return Adam, "_update"


def _optimizer() -> tuple[Any, str]:
    from pentatron.optim.optimizer import Optimizer

    return Optimizer, "step"


def _send() -> tuple[Any, str]:
    from pentatron.parallel.messages import Messages

    return Messages, "post_send"


def _receive() -> tuple[Any, str]:
    from pentatron.parallel.messages import Messages

    return Messages, "post_receive"


def _all_to_all() -> tuple[Any, str]:
    from pentatron.parallel import collectives

    return collectives, "all_to_all_into"


def _sum_of_step() -> tuple[Any, str]:
    """The collective over all ranks that ends a step's computation."""
    from pentatron.train import step

    return step, "all_reduce_"


def _saving() -> tuple[Any, str]:
    from pentatron.train.trainer import Trainer

    return Trainer, "save"


def _sample() -> tuple[Any, str]:
    from pentatron.data import loader

    return loader, "collate"


POINTS: dict[str, Callable[[], tuple[Any, str]]] = {
    "forward": _forward,
    "backward": _backward,
    "update": _update,
    "optimizer": _optimizer,
    "send": _send,
    "receive": _receive,
    "all-to-all": _all_to_all,
    "sum": _sum_of_step,
    "save": _saving,
    "sample": _sample,
}


def _kill(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    time.sleep(fault.seconds)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _kill_after(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    original(*given, **named)
    return _kill(fault, original)


def _kill_in_the_next_write(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Lets the kernel end this process when a file that it writes reaches `fault.bytes`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (fault.bytes, fault.bytes))
    return original(*given, **named)


def _freeze(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)
    return original(*given, **named)


def _loop(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    while True:
        time.sleep(0.01)


def _dawdle(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    time.sleep(fault.seconds)
    return original(*given, **named)


def _record(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Records which samples are read; not a fault."""
    with Path(fault.file).open("a") as file:
        for sample in given[0]:
            file.write(hashlib.sha256(sample["tokens"].tobytes()).hexdigest() + "\n")
    return original(*given, **named)


def _fill(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Fills a file system except for `fault.bytes`."""
    room = shutil.disk_usage(Path(fault.file).parent).free
    with suppress(OSError), Path(fault.file).open("wb") as file:
        # A save in progress may take the space first.
        file.write(bytes(room - fault.bytes))
    return original(*given, **named)


def _truncate(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Truncates a file in place, as a program that rewrites it does first."""
    os.truncate(fault.file, fault.bytes)
    time.sleep(fault.seconds)
    return original(*given, **named)


def _zero(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Overwrites a file with zeros; inode and size stay the same."""
    with Path(fault.file).open("r+b") as file:
        file.write(bytes(os.fstat(file.fileno()).st_size))
    time.sleep(fault.seconds)
    return original(*given, **named)


def _delete(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Deletes a file, as another program would."""
    Path(fault.file).unlink()
    return original(*given, **named)


def _move(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Moves a folder, as another program would."""
    Path(fault.file).rename(f"{fault.file}-moved")
    return original(*given, **named)


def _set_clock_back(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Sets back the clock of this process only."""
    now = time.time
    time.time = lambda: now() - fault.seconds
    return original(*given, **named)


def _raise(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    raise RuntimeError("an error that was planted")


def _leave_out(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Skips a collective and returns its first argument, as an in-place collective does."""
    return given[0]


def _scaled_loss(factor: float) -> Callable[..., Any]:
    def action(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return original(*given, **named) * factor

    return action


def _scaled_gradient(factor: float) -> Callable[..., Any]:
    def action(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        made = original(*given, **named)
        made.register_hook(lambda gradient: gradient * factor)
        return made

    return action


def _change_weight(change: Callable[[float], float]) -> Callable[..., Any]:
    """Changes a weight of this rank only, after the update, as a bad memory cell does."""

    def action(fault: Fault, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        weight = next(iter(given[0].model_weights())).values.view(-1)
        weight[3] = change(float(weight[3]))
        return found

    return action


ACTIONS: dict[str, Callable[..., Any]] = {
    "kill": _kill,
    "kill after": _kill_after,
    "kill in the next write": _kill_in_the_next_write,
    "freeze": _freeze,
    "loop": _loop,
    "dawdle": _dawdle,
    "record": _record,
    "fill": _fill,
    "truncate": _truncate,
    "zero": _zero,
    "delete": _delete,
    "move": _move,
    "set the clock back": _set_clock_back,
    "raise": _raise,
    "leave out": _leave_out,
    "loss becomes nan": _scaled_loss(float("nan")),
    "loss becomes inf": _scaled_loss(float("inf")),
    "loss becomes large": _scaled_loss(1e4),
    "gradient becomes nan": _scaled_gradient(float("nan")),
    "gradient becomes inf": _scaled_gradient(float("inf")),
    "weight becomes nan": _change_weight(lambda weight: float("nan")),
    "weight drifts": _change_weight(lambda weight: weight + 1e-3),
    "weight loses a bit": _change_weight(lambda weight: weight * 2),
}
