"""`pentatron checkpoint diff`: two steps, or a step and a Hugging Face folder, compared."""

import contextlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.cli.checkpoint import DiffOptions, nothing_at, read_checkpoint_options
from pentatron.cli.output import remark, show_report

if TYPE_CHECKING:
    from pentatron.checkpoint.compare import Difference, Side
    from pentatron.checkpoint.store import Found

# So many of each kind are written out; --json has all.
_SHOWN = 20


@dataclass(frozen=True)
class _Opened:
    side: "Side"
    config: dict[str, Any]
    run_state: dict[str, Any]
    is_huggingface: bool
    step: "Found | None" = None


@dataclass(frozen=True)
class _Compared:
    """What was found. `told` are settings, states and names by kind; `beyond` are the tensors that differ by more than tolerated."""

    paths: Sequence[str]
    same: bool
    told: dict[str, list[Any]]
    differing: "Sequence[Difference]"
    beyond: "Sequence[Difference]"
    compared: int
    tolerance: float


def diff(words: Sequence[str]) -> int:
    options, paths = read_checkpoint_options(DiffOptions, words, 2, 2, "diff A B")
    from pentatron.checkpoint.compare import NO_STATE, compare_tensor, differing_values
    from pentatron.checkpoint.load import WEIGHTS
    from pentatron.checkpoint.streaming import Progress
    from pentatron.monitor.display import Silent, open_display

    with contextlib.ExitStack() as closing:
        ours, theirs = (_open(Path(path), closing) for path in paths)
        weights_only = options.weights_only or ours.is_huggingface or theirs.is_huggingface
        names = [
            [n for n in one.side.outlines if n.startswith(WEIGHTS) or not weights_only]
            for one in (ours, theirs)
        ]
        common = [name for name in names[0] if name in theirs.side.outlines]
        total = sum(one.side.outlines[name].bytes for name in common for one in (ours, theirs))
        display = Silent() if options.json else open_display(options.progress_bar)
        closing.callback(display.close)
        progress = Progress(display, "comparing", total)
        found = [compare_tensor(name, ours.side, theirs.side, progress.add) for name in common]
    differing = [f for f in found if not f.is_equal]
    told: dict[str, list[Any]] = {
        "settings": [] if weights_only else list(differing_values(ours.config, theirs.config)),
        "run state": [] if weights_only else list(differing_values(ours.run_state, theirs.run_state)),
        "only in A": sorted(set(names[0]) - set(names[1])),
        "only in B": sorted(set(names[1]) - set(names[0])),
    }
    beyond = [f for f in differing if not f.within(options.tolerance)]
    # Settings are told of, and decide nothing: the same numbers may come from another layout or another machine.
    states = [name for name, _, _ in told["run state"] if name.partition(".")[0] not in NO_STATE]
    same = not (beyond or told["only in A"] or told["only in B"] or states)
    if not same:
        _tell_of_damage([one.step for one in (ours, theirs) if one.step is not None])
    compared = _Compared(paths, same, told, differing, beyond, len(common), options.tolerance)
    show_report(compared, options.json, _as_text, _as_data)
    return 0 if same else 1


def _tell_of_damage(steps: "Sequence[Found]") -> None:
    """Two steps may differ because one of them is no longer what was saved."""
    from pentatron.checkpoint.verify import check_sums

    for step in steps:
        for problem in check_sums(step.folder, step.manifest, min(8, os.cpu_count() or 1), lambda _: None):
            remark(f"{problem.sentence}; the difference may be this damage")


def _open(path: Path, closing: contextlib.ExitStack) -> _Opened:
    from pentatron.checkpoint.compare import Side
    from pentatron.checkpoint.find import find_step, is_step, steps_at
    from pentatron.checkpoint.load import StepReader
    from pentatron.compare.reshard import outlines_of

    if not is_step(path) and steps_at(path) is None:
        if (path / "config.json").is_file():
            return _open_huggingface(path, closing)
        raise nothing_at(path)
    found, complaints = find_step(path)
    for complaint in complaints:
        remark(f"{complaint}; {found.folder.name} is compared")
    reader = closing.enter_context(StepReader(found.folder, found.manifest))
    side = Side(str(found.folder), outlines_of(found.manifest), reader.read)
    return _Opened(side, found.manifest.config, found.manifest.run_state, is_huggingface=False, step=found)


def _open_huggingface(path: Path, closing: contextlib.ExitStack) -> _Opened:
    from pentatron.checkpoint.compare import Side
    from pentatron.checkpoint.load import WEIGHTS
    from pentatron.hf.architecture import settings_in
    from pentatron.hf.convert import ImportOptions, config_for, tensors_of
    from pentatron.hf.folder import open_folder

    folder = closing.enter_context(open_folder(path))
    outlines, read = tensors_of(folder, config_for(settings_in(folder)), ImportOptions())
    side = Side(
        str(path),
        {f"{WEIGHTS}{name}": outline for name, outline in outlines.items()},
        lambda name, start, size: read(name.removeprefix(WEIGHTS), start, size),
    )
    return _Opened(side, {}, {}, is_huggingface=True)


def _as_data(report: _Compared) -> dict[str, Any]:
    paths, told = report.paths, report.told
    return {
        "a": paths[0],
        "b": paths[1],
        "same": report.same,
        "compared": report.compared,
        **{
            kind.replace(" ", "_"): [{"name": n, "a": a, "b": b} for n, a, b in told[kind]]
            for kind in ("settings", "run state")
        },
        "only_in_a": told["only in A"],
        "only_in_b": told["only in B"],
        "tensors": [
            {
                "name": f.name,
                "elements": f.elements,
                "differing": f.differing,
                "largest": _number(f.largest),
                "largest_relative": _number(f.largest_relative),
                "relative_norm": _number(f.relative_norm),
                "ulps": f.ulps,
                "first": f.first,
                "types": f.types,
                "shapes": f.shapes,
                "within_tolerance": f not in report.beyond,
            }
            for f in report.differing
        ],
    }


def _number(value: float) -> float | str:
    """JSON has no word for infinity."""
    return value if math.isfinite(value) else str(value)


def _as_text(report: _Compared) -> list[str]:
    paths, told, differing = report.paths, report.told, report.differing
    lines: list[str] = []
    for kind in ("settings", "run state"):
        values = [f"{name}: {_short(a)} and {_short(b)}" for name, a, b in told[kind]]
        lines += _block(f"differing {kind}", values)
    lines += _block(f"tensors only in {paths[0]}", told["only in A"])
    lines += _block(f"tensors only in {paths[1]}", told["only in B"])
    lines += _block("tensors that differ", [f.sentence() for f in differing])
    equal = report.compared - len(differing)
    verdict = f"{equal} of {report.compared} tensors are equal bit by bit"
    if differing and report.tolerance:
        verdict += f", {len(differing) - len(report.beyond)} more within a relative {report.tolerance:g}"
    return [*lines, f"{'same' if report.same else 'different'}: {verdict}"]


def _block(title: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    shown = [f"  {entry}" for entry in entries[:_SHOWN]]
    if len(entries) > _SHOWN:
        shown.append(f"  and {len(entries) - _SHOWN} more (--json has all)")
    return [f"{title} ({len(entries)}):", *shown, ""]


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
