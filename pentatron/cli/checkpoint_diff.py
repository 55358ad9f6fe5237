"""`pentatron checkpoint diff`: compares two steps, or a step and a Hugging Face folder."""

import contextlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.cli.checkpoint import DiffOptions, no_checkpoint_error, read_checkpoint_options
from pentatron.cli.output import print_note, show_report

if TYPE_CHECKING:
    from pentatron.checkpoint.compare import ComparedTensors, Difference
    from pentatron.checkpoint.store import Checkpoint

# Entries of each kind in the text report.
_MOST_ENTRIES = 20


@dataclass(frozen=True)
class _Opened:
    """A step or a Hugging Face folder, which has no `step`, opened for comparison."""

    side: "ComparedTensors"
    config: dict[str, Any]
    run_state: dict[str, Any]
    step: "Checkpoint | None"


@dataclass(frozen=True)
class _Comparison:
    """Result of a comparison. `differences` are settings, state and tensor names by kind; `beyond` are the
    tensors that differ by more than the tolerance."""

    paths: Sequence[str]
    same: bool
    differences: dict[str, list[Any]]
    differing: "Sequence[Difference]"
    beyond: "Sequence[Difference]"
    compared: int
    tolerance: float


def diff(words: Sequence[str]) -> int:
    options, paths = read_checkpoint_options(DiffOptions, words, 2, 2, "diff A B")
    from pentatron.checkpoint.compare import NO_STATE, compare_tensor, differing_values
    from pentatron.checkpoint.load import WEIGHTS
    from pentatron.checkpoint.streaming import Progress
    from pentatron.monitor.display import SilentDisplay, open_display

    with contextlib.ExitStack() as closing:
        first, second = (_open(Path(path), closing) for path in paths)
        # A Hugging Face folder has weights only.
        weights_only = options.weights_only or first.step is None or second.step is None
        names = [
            [n for n in opened.side.outlines if n.startswith(WEIGHTS) or not weights_only]
            for opened in (first, second)
        ]
        common = [name for name in names[0] if name in second.side.outlines]
        total = sum(opened.side.outlines[name].bytes for name in common for opened in (first, second))
        display = SilentDisplay() if options.json else open_display(options.progress_bar)
        closing.callback(display.close)
        progress = Progress(display, "comparing", total)
        results = [compare_tensor(name, first.side, second.side, progress.add) for name in common]
    differing = [result for result in results if not result.is_equal]
    differences: dict[str, list[Any]] = {
        "settings": [] if weights_only else list(differing_values(first.config, second.config)),
        "run state": [] if weights_only else list(differing_values(first.run_state, second.run_state)),
        "only in A": sorted(set(names[0]) - set(names[1])),
        "only in B": sorted(set(names[1]) - set(names[0])),
    }
    beyond = [result for result in differing if not result.within(options.tolerance)]
    # Settings do not decide: another layout or machine may save the same numbers.
    states = [name for name, _, _ in differences["run state"] if name.partition(".")[0] not in NO_STATE]
    same = not (beyond or differences["only in A"] or differences["only in B"] or states)
    if not same:
        _report_damage([opened.step for opened in (first, second) if opened.step is not None])
    comparison = _Comparison(paths, same, differences, differing, beyond, len(common), options.tolerance)
    show_report(comparison, options.json, _as_text, _as_data)
    return 0 if same else 1


def _report_damage(steps: "Sequence[Checkpoint]") -> None:
    """Reports damaged files, since two steps may differ because of damage after saving."""
    from pentatron.checkpoint.verify import verify_digests

    for step in steps:
        for problem in verify_digests(
            step.folder, step.manifest, min(8, os.cpu_count() or 1), lambda _: None
        ):
            print_note(f"{problem.sentence}; the difference may be this damage")


def _open(path: Path, closing: contextlib.ExitStack) -> _Opened:
    from pentatron.checkpoint.compare import ComparedTensors
    from pentatron.checkpoint.find import find_step, find_steps_folder, is_step
    from pentatron.checkpoint.load import StepReader
    from pentatron.compare.reshard import outlines_of

    if not is_step(path) and find_steps_folder(path) is None:
        if (path / "config.json").is_file():
            return _open_huggingface(path, closing)
        raise no_checkpoint_error(path)
    step, complaints = find_step(path)
    for complaint in complaints:
        print_note(f"{complaint}; {step.folder.name} is compared")
    reader = closing.enter_context(StepReader(step.folder, step.manifest))
    side = ComparedTensors(str(step.folder), outlines_of(step.manifest), reader.read)
    return _Opened(side, step.manifest.config, step.manifest.run_state, step)


def _open_huggingface(path: Path, closing: contextlib.ExitStack) -> _Opened:
    from pentatron.checkpoint.compare import ComparedTensors
    from pentatron.checkpoint.load import WEIGHTS
    from pentatron.hf.convert import ImportOptions, config_for, tensors_of
    from pentatron.hf.folder import open_folder
    from pentatron.hf.model_config import settings_from_folder

    folder = closing.enter_context(open_folder(path))
    outlines, read = tensors_of(folder, config_for(settings_from_folder(folder)), ImportOptions())
    side = ComparedTensors(
        str(path),
        {f"{WEIGHTS}{name}": outline for name, outline in outlines.items()},
        lambda name, start, size: read(name.removeprefix(WEIGHTS), start, size),
    )
    return _Opened(side, {}, {}, None)


def _as_data(report: _Comparison) -> dict[str, Any]:
    paths, differences = report.paths, report.differences
    return {
        "a": paths[0],
        "b": paths[1],
        "same": report.same,
        "compared": report.compared,
        **{
            kind.replace(" ", "_"): [{"name": n, "a": a, "b": b} for n, a, b in differences[kind]]
            for kind in ("settings", "run state")
        },
        "only_in_a": differences["only in A"],
        "only_in_b": differences["only in B"],
        "tensors": [
            {
                "name": f.name,
                "elements": f.elements,
                "differing": f.differing,
                "largest": _json_number(f.largest),
                "largest_relative": _json_number(f.largest_relative),
                "relative_norm": _json_number(f.relative_norm),
                "ulps": f.ulps,
                "first": f.first,
                "types": f.types,
                "shapes": f.shapes,
                "within_tolerance": f not in report.beyond,
            }
            for f in report.differing
        ],
    }


def _json_number(value: float) -> float | str:
    """Converts infinity and NaN to strings, since JSON has no such numbers."""
    return value if math.isfinite(value) else str(value)


def _as_text(report: _Comparison) -> list[str]:
    paths, differences, differing = report.paths, report.differences, report.differing
    lines: list[str] = []
    for kind in ("settings", "run state"):
        values = [f"{name}: {_shortened(a)} and {_shortened(b)}" for name, a, b in differences[kind]]
        lines += _block(f"differing {kind}", values)
    lines += _block(f"tensors only in {paths[0]}", differences["only in A"])
    lines += _block(f"tensors only in {paths[1]}", differences["only in B"])
    lines += _block("tensors that differ", [f.sentence() for f in differing])
    equal = report.compared - len(differing)
    verdict = f"{equal} of {report.compared} tensors are equal bit by bit"
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
