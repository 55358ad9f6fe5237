"""`pentatron checkpoint inspect`: lists the steps of a run in a table, or shows one step in full."""

import contextlib
import fnmatch
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from pentatron.checkpoint.find import ListedStep, count_elements, format_layout, is_resumable, list_steps
from pentatron.checkpoint.format import Manifest
from pentatron.checkpoint.load import WEIGHTS, StepReader
from pentatron.checkpoint.verify import tensor_statistics
from pentatron.cli.checkpoint import InspectOptions, no_checkpoint_error
from pentatron.cli.output import show_report
from pentatron.cli.subcommands import parse_options_and_paths
from pentatron.errors import UserError
from pentatron.settings.settings import Settings
from pentatron.text import decimal_size, format_count
from pentatron.train.lr_schedule import OptimizerSchedule
from pentatron.train.preflight import describe_environment

_SHOWN_FILES = 12
# Entries of the run state in the text report; --json has all of them.
_COUNTS = {
    "consumed_samples": "samples",
    "consumed_tokens": "tokens",
    "updates": "updates",
    "skipped_steps": "skipped steps",
    "nan_steps": "steps with a NaN or inf loss",
}


def inspect(words: Sequence[str]) -> int:
    options, paths = parse_options_and_paths(InspectOptions, words, "checkpoint inspect PATH", 0, 1)
    pattern = options.tensors or ("*" if options.stats else None)
    if not paths and options.tensors not in (None, "*"):
        # A lone word after --tensors is the path.
        paths, pattern = [str(options.tensors)], "*"
    if not paths:
        raise UserError("expected a checkpoint: pentatron checkpoint inspect PATH")
    steps = list_steps(Path(paths[0]))
    if not steps:
        raise no_checkpoint_error(Path(paths[0]))
    if len(steps) > 1 and pattern is not None:
        raise UserError(f"--tensors and --stats need one step; name it, for example {steps[-1].folder}")
    shown = pattern, options.stats

    def as_text(steps: Sequence[ListedStep]) -> Iterable[str]:
        return _table(steps) if len(steps) > 1 else _step_lines(steps[0], *shown)

    show_report(steps, options.json, as_text, lambda steps: [_step_data(step, *shown) for step in steps])
    return 0


def _table(steps: Sequence[ListedStep]) -> list[str]:
    rows = [("step", "saved", "size", "files", "layout", "holds", "state")]
    for facts in steps:
        known = ("?", "?", "?")
        if (manifest := facts.manifest) is not None:
            content = "resumable" if is_resumable(manifest) else "weights only"
            known = (str(len(manifest.files)), format_layout(manifest.config), content)
        saved = (facts.folder.name, _when(facts.saved_at), decimal_size(facts.bytes))
        rows.append((*saved, *known, facts.state))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    total = sum(facts.bytes for facts in steps)
    problems = [f"{facts.folder.name}: {facts.problem}" for facts in steps if facts.problem]
    note = "sizes and structure are checked here; `pentatron checkpoint verify` compares every checksum"
    return [*lines, "", f"{format_count(len(steps), 'step')}, {decimal_size(total)}; {note}", *problems]


def _step_lines(facts: ListedStep, pattern: str | None, with_statistics: bool) -> Iterator[str]:
    yield f"{facts.folder}: {facts.state}"
    if facts.manifest is None:
        yield f"  {facts.problem}"
        return
    manifest = facts.manifest
    environment: Any = manifest.run_state.get("environment")
    # An edited manifest may have anything here, which is then shown as it is.
    with contextlib.suppress(TypeError, AttributeError):
        environment = environment and describe_environment(environment)
    rows = {
        "step": str(manifest.step),
        "saved": f"{_when(facts.saved_at)}, {decimal_size(facts.bytes)} in {format_count(len(manifest.files), 'file')}",
        "holds": "all that resuming needs" if is_resumable(manifest) else "weights only",
        "model": _model(manifest),
        "layout": format_layout(manifest.config),
        "state": _state(manifest.run_state),
        "per dataset": _pairs(manifest.run_state.get("drawn")),
        "learning rate": _learning_rate(manifest),
        "loss scale": _pairs(manifest.run_state.get("loss_scaling")),
        "environment": environment,
    }
    yield from (f"  {name:<14} {text}" for name, text in rows.items() if text)
    yield "files"
    for name, record in islice(manifest.files.items(), _SHOWN_FILES):
        yield f"  {name:<28} {decimal_size(record.bytes):>12}  {format_count(len(manifest.tensors_in(name)), 'tensor')}  sha256 {record.sha256[:12]}…"
    if len(manifest.files) > _SHOWN_FILES:
        yield f"  and {len(manifest.files) - _SHOWN_FILES} more (--json has all)"
    kinds = Counter(name.partition("/")[0] for name in manifest.tensors)
    how = "" if pattern else " (--tensors [PATTERN] lists them, --stats adds statistics)"
    yield f"tensors: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}{how}"
    if pattern is not None:
        yield from map(_tensor_line, _tensor_data(facts, pattern, with_statistics))


def _model(manifest: Manifest) -> str:
    sections = {name: manifest.config.get(name, {}) for name in ("model", "moe")}
    settings = Settings.of_sections(sections)
    weights = count_elements(manifest, WEIGHTS)
    types = sorted({r.dtype for name, r in manifest.tensors.items() if name.startswith(WEIGHTS)})
    parts = [f"{weights:,} parameters as {', '.join(types)}"]
    if {"num_layers", "hidden_size"} <= sections["model"].keys():
        parts.append(f"{settings.num_layers} layers of width {settings.hidden_size}")
    groups = f" in {settings.num_query_groups} groups" if settings.num_query_groups else ""
    parts += [f"{settings.num_attention_heads} heads{groups}"] if settings.num_attention_heads else []
    parts += [f"{settings.num_experts} experts"] if settings.num_experts else []
    parts += [f"vocabulary {settings.vocab_size}"] if settings.vocab_size else []
    return ", ".join(parts)


def _state(state: Mapping[str, Any]) -> str:
    counts = [(state[name], word) for name, word in _COUNTS.items() if state.get(name)]
    # A manifest may have any value in place of a count, which is then shown as it is.
    return ", ".join(f"{n:,} {w}" if isinstance(n, int | float) else f"{n!r:.60} {w}" for n, w in counts)


def _learning_rate(manifest: Manifest) -> str:
    """Formats the learning rate of the schedule after the consumed samples."""
    saved = manifest.run_state.get("schedule")
    samples = manifest.run_state.get("scheduled_samples")
    if not saved or samples is None:
        return ""
    try:
        schedule = OptimizerSchedule.from_json(saved)
        style, decay, rate = schedule.learning_rate, schedule.weight_decay, schedule.learning_rate(samples)
    except (TypeError, KeyError, ValueError, ArithmeticError):
        # Saved by a version with other schedules.
        return _pairs(saved)
    return f"{rate:.3e} ({style.style} from {style.peak:g} to {style.floor:g}), weight decay {decay.end:g}"


def _pairs(table: Any) -> str:
    pairs = table.items() if isinstance(table, Mapping) else ()
    return ", ".join(f"{name} {value}" for name, value in pairs)


def _tensor_data(facts: ListedStep, pattern: str, with_statistics: bool) -> Iterator[dict[str, Any]]:
    manifest = facts.manifest
    assert manifest is not None
    # A pattern without wildcards matches any part of a name.
    glob = pattern if any(mark in pattern for mark in "*?[") else f"*{pattern}*"
    names = [name for name in manifest.tensors if fnmatch.fnmatchcase(name, glob)]
    if not names:
        first = f"its first tensor is {next(iter(manifest.tensors))}"
        raise UserError(f"--tensors {pattern}: {facts.folder} has no such tensor; {first}")
    with StepReader(facts.folder, manifest) as reader:
        for name in names:
            record = manifest.tensors[name]
            row: dict[str, Any] = {"name": name, "dtype": record.dtype, "shape": list(record.shape)}
            row |= {"pieces": len(record.pieces), "files": sorted({piece.file for piece in record.pieces})}
            if with_statistics:
                s = tensor_statistics(reader, name)
                least, most, mean = (s.least, s.most, s.mean) if s.finite else (None, None, None)
                row |= {"min": least, "max": most, "mean": mean}
                row |= {"norm": s.norm, "nan": s.nans, "inf": s.infinities}
            yield row


def _tensor_line(row: Mapping[str, Any]) -> str:
    text = f"  {row['name']}  {row['dtype']} {row['shape']}  {format_count(row['pieces'], 'piece')}"
    if "norm" not in row:
        return text
    values = {name: row[name] for name in ("min", "max", "mean", "norm")}
    known = {n: "none" if v is None or math.isnan(v) else f"{v:.4g}" for n, v in values.items()}
    bad = f", {row['nan']:,} NaN, {row['inf']:,} infinite" if row["nan"] or row["inf"] else ""
    return f"{text}  {', '.join(f'{name} {value}' for name, value in known.items())}{bad}"


def _step_data(facts: ListedStep, pattern: str | None, with_statistics: bool) -> dict[str, Any]:
    manifest = facts.manifest
    state = facts.state.partition(",")[0]
    data: dict[str, Any] = {"folder": str(facts.folder), "saved": _when(facts.saved_at), "bytes": facts.bytes}
    data |= {"state": state, "base": facts.is_base, "latest": facts.is_latest}
    data["problem"] = facts.problem or None
    if manifest is None:
        return data
    layout = format_layout(manifest.config)
    data |= {"step": manifest.step, "resumable": is_resumable(manifest), "layout": layout}
    data |= {"run_state": manifest.run_state, "config": manifest.config}
    data["files"] = {name: record.bytes for name, record in manifest.files.items()}
    rows = None if pattern is None else list(_tensor_data(facts, pattern, with_statistics))
    return {**data, "tensors": len(manifest.tensors) if rows is None else rows}


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
