"""Compilation of the layers with torch.compile: trial, compile time, and functions that run uncompiled."""

import logging
import re
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from pentatron.errors import UserError
from pentatron.models.causal_lm import CausalLM
from pentatron.nn.compiled import CompileOptions, CompileReport, compilation_report
from pentatron.parallel.rank_status import RankStatus
from pentatron.settings.decision_types import CompileDecision
from pentatron.text import plural

_NOTHING = CompileReport(0, ())
# First words of torch's warnings: a function reached the recompile limit, or cannot be compiled.
_GIVEN_UP = ("torch._dynamo hit config.", "WON'T CONVERT")


class Compilation:
    """The compiled part of a rank's model.

    `seconds` and `times`: compile time and number of compilations so far. `notes`: logged at the start of a
    run.
    """

    def __init__(self, compiled: CompileReport = _NOTHING, notes: tuple[str, ...] = ()) -> None:
        self.compiled, self.notes = compiled, notes
        self.seconds = 0.0
        self._given_up: dict[str, None] = {}
        self._reported: set[str] = set()
        self._reported_time = False

    def watch(self, status: RankStatus) -> None:
        """Registers callbacks that time the compiler and set the phase of the rank status to "compiling"."""
        from torch._dynamo.callback import callback_handler

        # The compiler's global callbacks must not keep this object, and with it the model, alive.
        reference, running = weakref.ref(self), list[tuple[float, str]]()

        def begin(*_: object) -> None:
            running.append((time.perf_counter(), status.phase))
            status.phase = "compiling"

        def end(*_: object) -> None:
            if not running:
                return
            started, status.phase = running.pop()
            if (this := reference()) is not None:
                this.seconds += time.perf_counter() - started

        def collect_warning(record: logging.LogRecord) -> bool:
            if not str(record.msg).startswith(_GIVEN_UP) or (this := reference()) is None:
                return True
            this.give_up(record.getMessage())
            return False

        log = logging.getLogger("torch._dynamo.convert_frame")
        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)
        log.addFilter(collect_warning)

        def unregister() -> None:
            # A reset of the compiler has removed them already.
            with suppress(ValueError):
                callback_handler.remove_start_callback(begin)
                callback_handler.remove_end_callback(end)
            log.removeFilter(collect_warning)

        weakref.finalize(self, unregister)

    def time_lines(self, step_seconds: float) -> Iterator[str]:
        """Yields a line about the compile time, once, after the first step."""
        if self.compiled.layers and not self._reported_time:
            self._reported_time = True
            layers = f"{self.compiled.layers} {plural(self.compiled.layers, 'layer')}"
            yield f"compiled {layers} in {self.seconds:.1f} s; the first step took {step_seconds:.1f} s with it"

    def give_up(self, message: str) -> None:
        """Keeps a warning of torch, which repeats it for the same function, once."""
        if (line := _in_one_line(message)) not in self._reported:
            self._given_up[line] = None

    def unreported_fallbacks(self) -> list[str]:
        """Returns unreported warnings about functions that run uncompiled."""
        return list(self._given_up)

    def mark_reported(self) -> None:
        """Marks all warnings so far as reported."""
        self._reported.update(self._given_up)
        self._given_up.clear()

    def off(self) -> AbstractContextManager[Any]:
        """Context manager that runs everything eagerly, so that hooks of modules inside layers are called."""
        return torch.compiler.set_stance("force_eager") if self.compiled.layers else nullcontext()


def check_compilation(
    decided: CompileDecision, device: torch.device
) -> tuple[CompileOptions | None, tuple[str, ...]]:
    """Returns the decided compilation if the compiler works on this machine, else None and notes why not."""
    if not decided.on:
        return None, (decided.disabled_reason,) if decided.disabled_reason else ()
    problem = _trial(device)
    if problem and decided.required:
        raise UserError(
            f"--compile on: torch.compile fails on this machine ({problem}); install what is missing (a C++ compiler; on a GPU also triton), or "
            f"use --compile off"
        )
    if problem:
        return None, (
            f"torch.compile fails on this machine ({problem}), so layers run uncompiled and slower; --compile off hides this note",
        )
    # By default a function that does not compile runs eagerly with a warning; with --compile on it is an
    # error.
    torch._dynamo.config.suppress_errors = not decided.required
    # Autotuning may choose other kernels in each run, which sum in another order.
    options = {"deterministic": True} if decided.deterministic else None
    layers, documents = decided.layers_per_graph, decided.documents
    return CompileOptions(options=options, layers_per_graph=layers, documents=documents), ()


def track_compilation(
    compile: CompileOptions | None, notes: tuple[str, ...], stages: Iterable[CausalLM], status: RankStatus
) -> Compilation:
    """Returns the compiled part of stages that were built with the result of `check_compilation`.

    Starts to time the compiler.
    """
    if compile is None:
        return Compilation(notes=notes)
    compiled = compilation_report(layer for stage in stages for layer in stage.layers.values())
    compilation = Compilation(compiled, tuple(f"not compiled: {what}" for what in compiled.graph_breaks))
    if compiled.layers:
        compilation.watch(status)
    return compilation


def _in_one_line(message: str) -> str:
    """Shortens a warning of torch to the function and the reason."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if lines[0].startswith(_GIVEN_UP[1]):
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)[:(]", line)]
        what, reason = lines[0].removeprefix(_GIVEN_UP[1]).strip(), (errors or lines)[-1]
        return f"torch cannot compile {what}, which runs uncompiled ({reason[:200]})"
    what, reason = (
        next((line.removeprefix(begin).strip() for line in lines if line.startswith(begin)), "unknown")
        for begin in ("function:", "last reason:")
    )
    return f"torch's recompile limit is reached for {what}, so further shapes run uncompiled ({reason[:200]})"


def _trial(device: torch.device) -> str:
    """Compiles and runs a small function; returns why that fails, or an empty string."""
    # The log of a failing trial is suppressed: its exception has the reason.
    log = logging.getLogger("torch._inductor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        torch.compile(lambda x: x + x)(torch.ones(8, device=device))
    except Exception as error:  # a missing or broken compiler raises many types
        words = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {words[0][:200]}"
    finally:
        log.setLevel(before)
    return ""
