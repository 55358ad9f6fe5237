"""`pentatron checkpoint diff`: compares two steps, or a step and a Hugging Face folder."""

import contextlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.checkpoint import compare
from pentatron.checkpoint.compare import ComparedTensors, Difference
from pentatron.checkpoint.find import find_step, find_steps_folder, is_step
from pentatron.checkpoint.load import WEIGHTS, StepReader
from pentatron.checkpoint.store import Checkpoint
from pentatron.checkpoint.streaming import Progress
from pentatron.checkpoint.verify import verify_digests
from pentatron.cli.checkpoint import DiffOptions, no_checkpoint_error
from pentatron.cli.output import print_note, show_report
from pentatron.cli.subcommands import parse_options_and_paths
from pentatron.compare.reshard import outlines_of
from pentatron.monitor.display import SilentDisplay, open_display

# Entries of each kind in the text report.
_MOST_ENTRIES = 20
# Fields of a `Difference` in the JSON report.
_FIELDS = "name elements differing largest largest_relative relative_norm ulps first types shapes".split()


@dataclass(frozen=True)
class _Comparison:
    """Result of a comparison. `differences` are settings, state and tensor names by kind; `beyond` are the
    tensors that differ by more than the tolerance."""

    paths: Sequence[str]
    same: bool
    differences: dict[str, list[Any]]
    differing: Sequence[Difference]
    beyond: Sequence[Difference]
    compared: int
    tolerance: float


def diff(words: Sequence[str]) -> int:
    options, paths = parse_options_and_paths(DiffOptions, words, "checkpoint diff A B", 2, 2)
    with contextlib.ExitStack() as closing:
        (first, first_step), (second, second_step) = (_open(Path(path), closing) for path in paths)
        weights_only = options.weights_only or first_step is None or second_step is None
        kind = WEIGHTS if weights_only else ""
        a, b = ({name for name in side.outlines if name.startswith(kind)} for side in (first, second))
        common = [name for name in first.outlines if name in a & b]
        total = sum(side.outlines[name].bytes for name in common for side in (first, second))
        display = SilentDisplay() if options.json else open_display(options.progress_bar)
        closing.callback(display.close)
        progress = Progress(display, "comparing", total)
        results = [compare.compare_tensor(name, first, second, progress.add) for name in common]
    differences: dict[str, list[Any]] = {"settings": [], "run state": []}
    if first_step is not None and second_step is not None and not weights_only:
        one, other = first_step.manifest, second_step.manifest
        differences["settings"] += compare.differing_values(one.config, other.config)
        differences["run state"] += compare.differing_values(one.run_state, other.run_state)
    differences |= {"only in A": sorted(a - b), "only in B": sorted(b - a)}
    differing = [result for result in results if not result.is_equal]
    beyond = [result for result in differing if not result.within(options.tolerance)]
    # Settings do not decide: another layout or machine may save the same numbers.
    states = {name.partition(".")[0] for name, _, _ in differences["run state"]} - set(compare.NO_STATE)
    same = not (beyond or a ^ b or states)
    # Two steps may differ because of damage after saving.
    threads = min(8, os.cpu_count() or 1)
    for step in [step for step in (first_step, second_step) if step is not None and not same]:
        for problem in verify_digests(step.folder, step.manifest, threads, lambda _: None):
            print_note(f"{problem.sentence}; the difference may be this damage")
    comparison = _Comparison(paths, same, differences, differing, beyond, len(common), options.tolerance)
    show_report(comparison, options.json, _as_text, _as_data)
    return 0 if same else 1


def _open(path: Path, closing: contextlib.ExitStack) -> tuple[ComparedTensors, Checkpoint | None]:
    """Opens a step, or a Hugging Face folder, which has only weights and no step."""
    if is_step(path) or find_steps_folder(path) is not None:
        step, complaints = find_step(path)
        for complaint in complaints:
            print_note(f"{complaint}; {step.folder.name} is compared")
        reader = closing.enter_context(StepReader(step.folder, step.manifest))
        return ComparedTensors(str(step.folder), outlines_of(step.manifest), reader.read), step
    if not (path / "config.json").is_file():
        raise no_checkpoint_error(path)
    from pentatron.hf.convert import ImportOptions, config_for, tensors_of
    from pentatron.hf.folder import open_folder
    from pentatron.hf.model_config import settings_from_folder

    folder = closing.enter_context(open_folder(path))
    outlines, read = tensors_of(folder, config_for(settings_from_folder(folder)), ImportOptions())
    weights = {f"{WEIGHTS}{name}": outline for name, outline in outlines.items()}
    return ComparedTensors(
        str(path), weights, lambda name, start, size: read(name.removeprefix(WEIGHTS), start, size)
    ), None


def _as_data(report: _Comparison) -> dict[str, Any]:
    data: dict[str, Any] = dict(zip("ab", report.paths))
    data |= {"same": report.same, "compared": report.compared}
    for kind in ("settings", "run state"):
        values = [{"name": name, "a": a, "b": b} for name, a, b in report.differences[kind]]
        data[kind.replace(" ", "_")] = values
    data |= {f"only_in_{side.lower()}": report.differences[f"only in {side}"] for side in "AB"}
    tensors = [_tensor_data(tensor, tensor not in report.beyond) for tensor in report.differing]
    return {**data, "tensors": tensors}


def _tensor_data(tensor: Difference, within_tolerance: bool) -> dict[str, Any]:
    """Returns a difference with infinity and NaN as strings, since JSON has no such numbers."""
    values = {name: getattr(tensor, name) for name in _FIELDS}
    bad = {name: str(v) for name, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return {**values, **bad, "within_tolerance": within_tolerance}


def _as_text(report: _Comparison) -> list[str]:
    differences, differing = report.differences, report.differing
    lines: list[str] = []
    for kind in ("settings", "run state"):
        values = [f"{name}: {_shortened(a)} and {_shortened(b)}" for name, a, b in differences[kind]]
        lines += _block(f"differing {kind}", values)
    for path, side in zip(report.paths, "AB"):
        lines += _block(f"tensors only in {path}", differences[f"only in {side}"])
    lines += _block("tensors that differ", [f.sentence() for f in differing])
    verdict = f"{report.compared - len(differing)} of {report.compared} tensors are equal bit by bit"
    if differing and report.tolerance:
        verdict += f", {len(differing) - len(report.beyond)} more within a relative {report.tolerance:g}"
    return [*lines, f"{'same' if report.same else 'different'}: {verdict}"]


def _block(title: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    shown = [f"  {entry}" for entry in entries[:_MOST_ENTRIES]]
    if len(entries) > _MOST_ENTRIES:
        shown.append(f"  and {len(entries) - _MOST_ENTRIES} more (--json has all)")
    return [f"{title} ({len(entries)}):", *shown, ""]


def _shortened(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
