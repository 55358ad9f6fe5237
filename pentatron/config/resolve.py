"""From preset, file and flags to one frozen configuration that knows where every value came from."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pentatron.config.data_sources import read_data_files
from pentatron.config.decided import Decisions
from pentatron.config.decisions import decide, device_of_settings
from pentatron.config.deepspeed import read_deepspeed
from pentatron.config.derive import derive
from pentatron.config.draft import Draft, Facts
from pentatron.config.entry import EntryPoint
from pentatron.config.files import read_file
from pentatron.config.flags import Assigned, did_you_mean, is_written, parse_flags
from pentatron.config.limits import not_available, out_of_limits
from pentatron.config.notices import notices_for, notices_of_decisions
from pentatron.config.presets import presets
from pentatron.config.rules import problems_of
from pentatron.config.run import RunConfig, build, table
from pentatron.config.run_name import name_of_run
from pentatron.config.saved_config import places_in_run
from pentatron.errors import ConfigError, UserError

# Who names data or a starting point does not want the demo underneath.
_REPLACES_DEMO = (
    *("preset", "config", "load", "corpus", "mock_data", "dataset_size"),
    *("data_path", "train_data_path", "data_path_config", "data_args_path", "per_split_data_args_path"),
)


@dataclass(frozen=True)
class Resolved:
    """A configuration, the origin of each value, and what the user should be told.

    `with_epoch` resolves the same words again, for a pass over the data of so many samples: where the run itself tokenizes or counts its data,
    the length of a run with `--epochs` is not known before. `epoch`: how many it was taken for.
    """

    config: RunConfig
    sources: Mapping[str, str]
    notices: Sequence[str]
    with_epoch: "Again"
    epoch: int | None = None

    def given(self, name: str) -> bool:
        """Whether the user wrote this value, rather than inheriting it."""
        return is_written(self.sources[name])

    def telling(self, notes: Sequence[str]) -> "Resolved":
        """The same with more to tell."""
        return replace(
            self,
            notices=[*self.notices, *notes],
            with_epoch=replace(self.with_epoch, notes=(*self.with_epoch.notes, *notes)),
        )


@dataclass(frozen=True)
class Again:
    """The same words, and what was told beside what they led to."""

    draft: Draft
    facts: Facts
    built_only: bool
    notes: tuple[str, ...] = ()

    def __call__(self, samples: int) -> Resolved:
        copy = self.draft.copy()
        copy.epoch = samples
        return resolve(copy, self.facts, self.built_only).telling(self.notes)


def gather(words: Sequence[str], entry: EntryPoint) -> Draft:
    """Collects the written values; later sources win: entry point, preset, file, flags."""
    flags = parse_flags(words, entry)
    layers: list[dict[str, Assigned]] = []
    of_file: dict[str, Assigned] = {}
    if "config" in flags.values:
        of_file = read_file(flags.values["config"].value, entry)
        layers.append(of_file)
    notices = list(flags.notices)
    if "deepspeed_config" in flags.values:
        of_deepspeed, told = read_deepspeed(flags.values["deepspeed_config"].value)
        layers.append(of_deepspeed)
        notices += told
    layers.append(flags.values)
    written = {name: value for layer in layers for name, value in layer.items()}
    preset = written["preset"].value if "preset" in written else None
    if preset is None and entry.default_preset and not any(name in written for name in _REPLACES_DEMO):
        preset = entry.default_preset
    values = {name: Assigned(item.default, "default") for name, item in table().items()}
    values |= {name: Assigned(value, f"default of {entry.name}") for name, value in entry.defaults.items()}
    if preset is not None:
        values |= _preset(preset)
    draft = Draft({**values, **written}, notices)
    if of_file:
        kept = {name: assigned.value for name, assigned in of_file.items() if written[name] is assigned}
        draft.in_run_folder = places_in_run(flags.values["config"].value, kept)
    _drop_idle_default(draft)
    read_data_files(draft)
    if draft["run_dir"] is None:
        # Before anything is learned from what lies in the folder: the same words must always lead to it.
        draft.derive("run_dir", f"runs/{name_of_run(draft)}", "runs/NAME, after the model and the data")
    return draft


def _drop_idle_default(draft: Draft) -> None:
    """A script's usual kind of tokenizer is meant for its files; without them, or with a model that says its kind, it is not."""
    name = "tokenizer_type"
    has_files = draft["vocab_file"] is not None or draft["merge_file"] is not None
    by_script = draft.source(name).startswith("default of")
    if by_script and (not has_files or draft["tokenizer_model"] is not None):
        draft.values[name] = Assigned(table()[name].default, "default")


def _preset(name: str) -> dict[str, Assigned]:
    known = presets()
    if name not in known:
        guess = did_you_mean(name, known)
        raise UserError(f"unknown preset '{name}'{guess}; there are: {', '.join(known)}")
    chosen = known[name]
    values = {key: Assigned(value, f"preset {name}") for key, value in chosen.items()}
    return {**values, "preset": Assigned(name, f"preset {name}")}


def resolve(draft: Draft, facts: Facts, built_only: bool = True) -> Resolved:
    """Fills in what follows from the rest, then checks everything and reports every problem at once.

    Without `built_only` a feature that is still missing is no problem but a notice, for who only looks.
    """
    before = draft.copy()
    problems = _set_aside_wrong_values(draft)
    problems += derive(draft, facts)
    values: dict[str, Any] = {name: assigned.value for name, assigned in draft.values.items()}
    sources = {name: assigned.source for name, assigned in draft.values.items()}
    missing = [] if built_only else not_available(values, sources)
    found = problems_of(values, facts, sources, unsound=draft.wrong)
    problems += [problem for problem in found if problem not in missing]
    if problems:
        raise ConfigError(problems)
    config = build(values)
    told = [
        *draft.notices,
        *missing,
        *notices_for(draft, facts, decide(config, device_of_settings(config))),
    ]
    return Resolved(config, sources, told, Again(before, facts, built_only), draft.epoch)


def notices_of_device(resolved: Resolved, decisions: Decisions) -> list[str]:
    """What could not be told before the device was known: the lines of its decisions that `resolved` has not told."""
    found = notices_of_decisions(resolved.config, resolved.sources, decisions)
    return [line for line in found if line not in resolved.notices]


def problems_beside(draft: Draft, facts: Facts, unknown: Collection[str]) -> list[str]:
    """What is wrong whatever the unknown settings would have been; the draft stays as it is."""
    copy = draft.copy()
    problems = _set_aside_wrong_values(copy)
    for name in unknown:
        copy.values[name] = Assigned(table()[name].default, "default")
    problems += derive(copy, facts)
    values = {name: assigned.value for name, assigned in copy.values.items()}
    sources = {name: assigned.source for name, assigned in copy.values.items()}
    return problems + problems_of(values, facts, sources, unsound={*copy.wrong, *unknown})


def foreseen(draft: Draft, facts: Facts) -> dict[str, Any]:
    """What the values would become if nothing more were learned; the draft stays as it is."""
    copy = draft.copy()
    _set_aside_wrong_values(copy)
    derive(copy, facts)
    return {name: assigned.value for name, assigned in copy.values.items()}


def _set_aside_wrong_values(draft: Draft) -> list[str]:
    """Takes the default in place of a value that is wrong by itself, so that the others can still be checked."""
    draft.wrong |= out_of_limits({name: assigned.value for name, assigned in draft.values.items()})
    for name in draft.wrong:
        draft.values[name] = Assigned(table()[name].default, "default")
    return list(draft.wrong.values())
