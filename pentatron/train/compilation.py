"""Whether the layers of a run are compiled, what that took, and what a user should know of it."""

import contextlib
import logging
import re
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pentatron.errors import UserError
from pentatron.models.causal_lm import CausalLM
from pentatron.nn.compiled import Compile, Compiled, compiled_of
from pentatron.parallel.rank_status import Whereabouts
from pentatron.settings.decision_types import CompileDecision
from pentatron.text import plural

_NOTHING = Compiled(0, ())
# Of torch's logger: a function has more versions than it allows, or cannot be compiled; it runs as it is then.
_GIVEN_UP = ("torch._dynamo hit config.", "WON'T CONVERT")


class Compilation:
    """What is compiled of a rank's model. `seconds` and `times` count what the compiler did so far, `notes` are for the beginning of a run."""

    def __init__(self, compiled: Compiled = _NOTHING, notes: tuple[str, ...] = ()) -> None:
        self.compiled, self.notes = compiled, notes
        self.seconds, self.times = 0.0, 0
        self._given_up: dict[str, None] = {}
        self._told: set[str] = set()
        self._took_told = False

    def watch(self, where: Whereabouts) -> None:
        """From now on time is taken, and whoever looks for ranks that hang is told that this one compiles."""
        from torch._dynamo.callback import callback_handler

        own, began = weakref.ref(self), list[tuple[float, str]]()

        def begin(*_: object) -> None:
            began.append((time.perf_counter(), where.phase))
            where.phase = "compiling"

        def end(*_: object) -> None:
            if not began:
                return
            started, where.phase = began.pop()
            if (it := own()) is not None:
                it.seconds += time.perf_counter() - started
                it.times += 1

        def give_up(record: logging.LogRecord) -> bool:
            if not str(record.msg).startswith(_GIVEN_UP) or (it := own()) is None:
                return True
            it.give_up(record.getMessage())
            return False

        log = logging.getLogger("torch._dynamo.convert_frame")
        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)
        log.addFilter(give_up)

        def forget() -> None:
            # A reset of the compiler forgets them too.
            with suppress(ValueError):
                callback_handler.remove_start_callback(begin)
                callback_handler.remove_end_callback(end)
            log.removeFilter(give_up)

        weakref.finalize(self, forget)

    def took(self, step_seconds: float) -> Iterator[str]:
        """Once, after the first step."""
        if self.compiled.layers and not self._took_told:
            self._took_told = True
            layers = f"{self.compiled.layers} {plural(self.compiled.layers, 'layer')}"
            yield f"compiled {layers} in {self.seconds:.1f} s; the first step took {step_seconds:.1f} s with it"

    def give_up(self, message: str) -> None:
        """Torch says so again and again of the same part."""
        if (line := _in_one_line(message)) not in self._told:
            self._given_up[line] = None

    def given_up(self) -> list[str]:
        """Parts that torch no longer compiles, as far as nobody was told."""
        return list(self._given_up)

    def told(self) -> None:
        """All that was given up so far is known."""
        self._told.update(self._given_up)
        self._given_up.clear()

    def off(self) -> AbstractContextManager[Any]:
        """Runs everything as it is written, so that hooks inside layers are called."""
        return torch.compiler.set_stance("force_eager") if self.compiled.layers else nullcontext()


@dataclass(frozen=True)
class CheckedCompile:
    """How layers are compiled on this machine, or None; `notes` say why not."""

    compile: Compile | None = None
    notes: tuple[str, ...] = ()


def checked_compilation(decided: CompileDecision, device: torch.device) -> CheckedCompile:
    """What was decided, if the compiler works here."""
    if not decided.on:
        return CheckedCompile(notes=(decided.held_back,) if decided.held_back else ())
    problem = _trial(device)
    if problem and decided.required:
        raise UserError(
            f"--compile on: nothing can be compiled here ({problem}); install what is missing (a C++ compiler; on a GPU also triton), or "
            f"use --compile off"
        )
    if problem:
        return CheckedCompile(
            notes=(
                f"layers are not compiled, which costs much of the speed: nothing can be compiled here ({problem}); --compile off runs without "
                f"this line",
            )
        )
    # What nobody asked for must not end a run: what turns out not to compile runs as it is, and is told.
    torch._dynamo.config.suppress_errors = not decided.required
    return CheckedCompile(compile_of(decided))


def compile_of(decided: CompileDecision) -> Compile:
    """The compiler's options."""
    # The compiler tries some kernels, and takes those that were fastest then: not the same in every run, and sums in another order.
    options = {"deterministic": True} if decided.deterministic else None
    return Compile(options=options, together=decided.together, documents=decided.documents)


def compilation_of(checked: CheckedCompile, stages: Iterable[CausalLM], where: Whereabouts) -> Compilation:
    """The compiled part of stages that were built with these options."""
    if checked.compile is None:
        return Compilation(notes=checked.notes)
    compiled = compiled_of(layer for stage in stages for layer in stage.layers.values())
    made = Compilation(compiled, tuple(f"not compiled: {what}" for what in compiled.left_out))
    if compiled.layers:
        made.watch(where)
    return made


def _in_one_line(message: str) -> str:
    """What torch says in many, of a function that it does not compile."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if lines[0].startswith(_GIVEN_UP[1]):
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)[:(]", line)]
        what, reason = lines[0].removeprefix(_GIVEN_UP[1]).strip(), (errors or lines)[-1]
        return f"torch cannot compile {what}, which runs as it is ({reason[:200]})"
    what, reason = (
        next((line.removeprefix(begin).strip() for line in lines if line.startswith(begin)), "unknown")
        for begin in ("function:", "last reason:")
    )
    return f"torch compiles no more versions of {what}, which runs as it is where it needs another ({reason[:200]})"


def _trial(device: torch.device) -> str:
    """Why a small function cannot be compiled and run here, in a few words; nothing if it can."""
    with _quiet():
        try:
            torch.compile(_twice)(torch.ones(8, device=device))
        except Exception as error:  # a compiler that is missing, or breaks, tells so in many ways
            words = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {words[0][:200]}"
    return ""


def _twice(x: Tensor) -> Tensor:
    return x + x


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What a failing trial would log is in its exception."""
    log = logging.getLogger("torch._inductor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
