"""`pentatron doctor`: reports what this machine has for training, what is missing, and how to fix it."""

import dataclasses
import importlib.util
import itertools
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.cli.options import Options, option, options_help, parse_options, usage
from pentatron.cli.output import say, say_json, with_help
from pentatron.launch import machine


@dataclass(frozen=True)
class DoctorOptions(Options):
    json: bool = option(False, "print JSON")
    no_trials: bool = option(False, "skip the matmul and all-reduce tests")


USAGE = f"""{usage("pentatron doctor", DoctorOptions)}

Reports what this machine has for training and what is missing, and tests what every run needs: a matmul and an
all-reduce (over gloo, and over NCCL if there are GPUs). Exit code 0: runs will start; 1: a problem must be fixed.

{options_help(DoctorOptions)}
"""
_MARKS = {machine.OK: " ", machine.NOTE: "~", machine.PROBLEM: "!"}
_WIDTH = 110


@with_help(USAGE)
def doctor_command(words: Sequence[str]) -> int:
    stray = "pentatron doctor takes only flags, not '{word}'"
    options, _ = parse_options(DoctorOptions, words, "pentatron doctor", stray=stray)
    findings = machine.inspect_machine(os.environ, Path.cwd())
    if not options.no_trials and importlib.util.find_spec("torch") is not None:
        findings += _trials()
    problems = [finding for finding in findings if finding.state == machine.PROBLEM]
    if options.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        say_json({"healthy": not problems, "findings": rows}, ascii_only=False)
    else:
        say("\n".join(_lines(findings)))
    return 1 if problems else 0


def _trials() -> list[machine.Finding]:
    import torch

    # The same environment as the workers of a run: gloo uses the loopback interface, whatever the host name
    # resolves to.
    environment = dict(os.environ)
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    findings = [machine.check_matmul(device) for device in ("cpu", *(f"cuda:{n}" for n in range(gpus)))]
    findings.append(machine.check_all_reduce("gloo", 2, environment))
    if gpus and torch.distributed.is_nccl_available():
        findings.append(machine.check_all_reduce("nccl", gpus, environment))
    return findings


def _lines(findings: Sequence[machine.Finding]) -> list[str]:
    width = max(len(finding.name) for finding in findings)
    first, rest = " " * (width + 4) + "→ ", " " * (width + 6)
    lines: list[str] = []
    for group, members in itertools.groupby(findings, lambda finding: finding.group):
        lines.append(group)
        for finding in members:
            lines.append(f"{_MARKS[finding.state]} {finding.name:<{width}}  {finding.value}")
            lines += textwrap.wrap(finding.advice, _WIDTH, initial_indent=first, subsequent_indent=rest)
        lines.append("")
    states = [finding.state for finding in findings]
    problems, notes = states.count(machine.PROBLEM), states.count(machine.NOTE)
    verdict = f"{problems} to fix first (!)" if problems else "runs will start on this machine"
    return [*lines, verdict + (f"; {notes} notes (~)" if notes else "")]
