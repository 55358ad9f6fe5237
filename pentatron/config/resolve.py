"""From preset, file and flags to one frozen configuration that knows where every value came from."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pentatron.config.data_sources import read_data_files
from pentatron.config.decided import Decisions
from pentatron.config.decisions import decide, device_of_settings
from pentatron.config.deepspeed import read_deepspeed
from pentatron.config.derive import derive
from pentatron.config.derive_schedule import derive_length
from pentatron.config.draft import Draft
from pentatron.config.entry import EntryPoint
from pentatron.config.files import read_file
from pentatron.config.flags import did_you_mean, parse_flags
from pentatron.config.notices import notices_for, notices_of_decisions
from pentatron.config.presets import presets
from pentatron.config.rules import not_available, out_of_limits, problems_of
from pentatron.config.run import RunConfig, table
from pentatron.config.run_name import name_of_run
from pentatron.config.saved_config import places_in_run
from pentatron.config.settings import Assigned, Facts, Settings, unset
from pentatron.errors import ConfigError, UserError

# Who names data or a starting point does not want the demo underneath.
_REPLACES_DEMO = (
    *("preset", "config", "load", "corpus", "mock_data", "dataset_size"),
    *("data_path", "train_data_path", "data_path_config", "data_args_path", "per_split_data_args_path"),
)


@dataclass(frozen=True)
class Resolved:
    """A configuration, its settings with their origins, and the notices for the user.

    `open`: the settings before the length of the run was derived, if `--epochs` asks for passes over data that only the
    run can count.
    """

    config: RunConfig
    settings: Settings
    notices: Sequence[str]
    open: Draft | None = None

    def given(self, name: str) -> bool:
        """Whether the user wrote this value, rather than inheriting it."""
        return self.settings.given(name)

    @property
    def sources(self) -> Mapping[str, str]:
        """The origin of every value."""
        return self.settings.sources

    def telling(self, notes: Sequence[str]) -> "Resolved":
        """Adds notices."""
        told = self.open
        if told is not None:
            told = told.copy()
            told.further_notices.extend(notes)
        return replace(self, notices=[*self.notices, *notes], open=told)

    def with_epoch(self, samples: int) -> "Resolved":
        """Derives the length of the run from the samples of one pass over its data."""
        assert self.open is not None, "the length is known"
        counted = self.open.copy()
        counted.epoch_samples = samples
        return _with_length(counted)


def gather(words: Sequence[str], entry: EntryPoint) -> Draft:
    """Collects the written values; later sources win: entry point, preset, file, flags."""
    flags = parse_flags(words, entry)
    asked = Settings.defaults(**{name: assigned.value for name, assigned in flags.values.items()})
    layers: list[dict[str, Assigned]] = []
    of_file: dict[str, Assigned] = {}
    if asked.config is not None:
        of_file = read_file(asked.config, entry)
        layers.append(of_file)
    notices = list(flags.notices)
    if asked.deepspeed_config is not None:
        of_deepspeed, told = read_deepspeed(asked.deepspeed_config)
        layers.append(of_deepspeed)
        notices += told
    layers.append(flags.values)
    written = {name: value for layer in layers for name, value in layer.items()}
    preset = Settings.defaults(**{name: assigned.value for name, assigned in written.items()}).preset
    if preset is None and entry.default_preset and not any(name in written for name in _REPLACES_DEMO):
        preset = entry.default_preset
    values = {name: Assigned(item.default, "default") for name, item in table().items()}
    values |= {name: Assigned(value, f"default of {entry.name}") for name, value in entry.defaults.items()}
    if preset is not None:
        values |= _preset(preset)
    draft = Draft({**values, **written}, notices)
    if asked.config is not None:
        kept = {name: assigned.value for name, assigned in of_file.items() if written[name] is assigned}
        draft.in_run_folder = places_in_run(asked.config, kept)
    _drop_idle_default(draft)
    read_data_files(draft)
    if unset(draft.run_dir):
        # Before anything is learned from what lies in the folder: the same words must always lead to it.
        draft.derive("runs/NAME, after the model and the data", run_dir=f"runs/{name_of_run(draft)}")
    return draft


def _drop_idle_default(draft: Draft) -> None:
    """A script's usual kind of tokenizer is meant for its files; without them, or with a model that says its kind, it is not."""
    name = "tokenizer_type"
    has_files = draft.vocab_file is not None or draft.merge_file is not None
    by_script = draft.source(name).startswith("default of")
    if by_script and (not has_files or draft.tokenizer_model is not None):
        draft.assign("default", **{name: table()[name].default})


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

    Without `built_only` a feature that is still missing is no problem but a notice, for commands that start nothing.
    """
    draft = draft.copy()
    draft.facts, draft.built_only = facts, built_only
    draft.problems.extend(_set_aside_wrong_values(draft))
    draft.problems.extend(derive(draft))
    return _with_length(draft)


def _with_length(draft: Draft) -> Resolved:
    """Derives the length of the run, checks everything and freezes the settings."""
    before = draft.copy()
    problems = [*draft.problems, *derive_length(draft)]
    missing = [] if draft.built_only else not_available(draft)
    problems += [problem for problem in problems_of(draft, draft.wrong) if problem not in missing]
    if problems:
        raise ConfigError(problems)
    config = RunConfig.of(draft)
    notices = notices_for(draft, decide(config, device_of_settings(config)))
    is_open = draft.epochs is not None and not draft.is_synthetic and draft.epoch_samples is None
    told = [*draft.notices, *missing, *notices, *draft.further_notices]
    return Resolved(config, draft, told, before if is_open else None)


def notices_of_device(resolved: Resolved, decisions: Decisions) -> list[str]:
    """The notices that wait for the device: those of its decisions that are not among the notices of `resolved`."""
    found = notices_of_decisions(resolved.settings, decisions)
    return [line for line in found if line not in resolved.notices]


def problems_beside(draft: Draft, facts: Facts, unknown: Collection[str]) -> list[str]:
    """The problems that remain whatever the unknown settings are; the draft stays as it is."""
    copy = draft.copy()
    copy.facts = facts
    problems = _set_aside_wrong_values(copy)
    copy.assign("default", **{name: table()[name].default for name in unknown})
    problems += [*derive(copy), *derive_length(copy)]
    return problems + problems_of(copy, {*copy.wrong, *unknown})


def foreseen(draft: Draft, facts: Facts) -> Settings:
    """The settings as they would be if nothing more were learned; the draft stays as it is."""
    copy = draft.copy()
    copy.facts = facts
    _set_aside_wrong_values(copy)
    derive(copy)
    derive_length(copy)
    return copy


def _set_aside_wrong_values(draft: Draft) -> list[str]:
    """Takes the default in place of a value that is wrong by itself, so that the others can still be checked."""
    draft.wrong |= out_of_limits(draft)
    draft.assign("default", **{name: table()[name].default for name in draft.wrong})
    return list(draft.wrong.values())
