"""A case of the fault matrix, and its outcome."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.faults.commands import Ran

if TYPE_CHECKING:
    from tests.faults.lab import Lab

GROUPS = (
    "killed rank", "preemption", "frozen or slow", "storage", "damaged checkpoint", "damaged data", "numbers", "other layout", "other",
)  # fmt: skip


@dataclass
class Outcome:
    """The outcome of a fault; None: the field does not apply.

    `detected`: a line or an exit code other than 0 reports the fault. `named`: the line has the right rank or
    file.
    """

    detected: bool = False
    detected_after: float | None = None
    steps_lost: int | None = None
    exit_code: int | None = None
    named: bool | None = None
    equal: bool | None = None
    remark: str = ""
    problems: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.problems.append(otherwise)

    def expect_output(
        self, ran: Ran, pattern: str, since: float | None = None, within: float | None = None
    ) -> None:
        """Expects a line that matches `pattern`, which contains the right rank or file."""
        line = ran.find(pattern)
        self.named = line is not None
        self.detected = self.detected or self.named
        if line is None:
            self.problems.append(
                f"no line has {pattern!r}; the last ones:\n" + "\n".join(ran.text.splitlines()[-12:])
            )
            return
        self.detected_after = max(0.0, line.time - (ran.started if since is None else since))
        if within is not None:
            self.expect(
                self.detected_after <= within,
                f"told after {self.detected_after:.1f} s, later than {within:g}",
            )

    def ended(self, ran: Ran, *codes: int, tracebacks: int = 0) -> None:
        self.exit_code = ran.code
        self.detected = self.detected or ran.code != 0
        self.expect(
            ran.code in codes,
            f"exit codes are {ran.codes}, not {' or '.join(map(str, codes))}:\n"
            + "\n".join(ran.text.splitlines()[-12:]),
        )
        shown = ran.text.count("Traceback (most recent call last)")
        self.expect(
            shown == tracebacks,
            f"{shown} tracebacks are shown, not {tracebacks}:\n" + "\n".join(ran.text.splitlines()[-25:]),
        )
        self.expect(not ran.orphans, f"processes are left: {ran.orphans}")

    def lost(self, steps: int, at_most: int) -> None:
        self.steps_lost = steps
        self.expect(0 <= steps <= at_most, f"{steps} steps were lost, of {at_most} allowed")

    def same_state(self, equal: bool) -> None:
        self.equal = equal
        self.expect(equal, "the state is not that of the undisturbed run")


@dataclass(frozen=True)
class Case:
    """A case of the matrix.

    `control`: the protection is switched off and the fault must go unnoticed, as proof that the table would
    show an unnoticed fault.
    """

    group: str
    fault: str
    run: "Callable[[Lab], Outcome]"
    quick: bool = False
    control: bool = False

    @property
    def name(self) -> str:
        words = "".join(c if c.isalnum() else " " for c in f"{self.group}: {self.fault}".lower()).split()
        return "-".join(words)


@dataclass
class Series:
    """The cases of one group."""

    group: str
    cases: list[Case] = field(default_factory=list)

    def case(
        self, fault: str, quick: bool = False, control: bool = False
    ) -> "Callable[[Callable[[Lab], Outcome]], Callable[[Lab], Outcome]]":
        def add(run: "Callable[[Lab], Outcome]") -> "Callable[[Lab], Outcome]":
            self.cases.append(Case(self.group, fault, run, quick, control))
            return run

        return add
