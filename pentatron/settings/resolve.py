"""Resolves preset, files and flags into one frozen `RunConfig`, with the origin of every value."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from pentatron.errors import ConfigError, UserError
from pentatron.settings.command_line import did_you_mean, parse_flags
from pentatron.settings.data_paths import Blend
from pentatron.settings.decision_types import Decisions, DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.declaration import Setting
from pentatron.settings.deepspeed import read_deepspeed
from pentatron.settings.derive import derive
from pentatron.settings.entry_points import EntryPoint
from pentatron.settings.files import paths_in_run, read_data_files, read_file
from pentatron.settings.presets import presets
from pentatron.settings.rules import out_of_limits, problems_of, unsupported_features
from pentatron.settings.run_config import RunConfig, all_settings
from pentatron.settings.run_length import derive_length
from pentatron.settings.settings import Assigned, Draft, ProcessFacts, Settings, is_unset

# If one of these is given, the default preset is not used.
_REPLACES_DEFAULT_PRESET = (
    *("preset", "config", "load", "corpus", "mock_data", "dataset_size"),
    *("data_path", "train_data_path", "data_path_config", "data_args_path", "per_split_data_args_path"),
)
_MAX_NAME = 40
# Names of folders that do not identify a model.
_GENERIC_NAME = re.compile(
    r"checkpoints|latest|huggingface|snapshots|release|step-\d+.*|iter_\d+.*|[0-9a-f]{40}|\.*"
)


@dataclass(frozen=True)
class Resolved:
    """A resolved configuration, its settings with their origins, and the notices for the user.

    `before_length`: the settings before the length of the run is derived, if it depends on an epoch that only
    the run can count (`--epochs`).
    """

    config: RunConfig
    settings: Settings
    notices: Sequence[str]
    before_length: Draft | None = None

    def given(self, name: str) -> bool:
        """Whether the user gave this value in a flag or a file."""
        return self.settings.given(name)

    @property
    def sources(self) -> Mapping[str, str]:
        """The origins of all values."""
        return self.settings.sources

    def with_notices(self, notes: Sequence[str]) -> "Resolved":
        """Returns a copy with further notices."""
        draft = None if self.before_length is None else self.before_length.copy()
        if draft is not None:
            draft.further_notices.extend(notes)
        return replace(self, notices=[*self.notices, *notes], before_length=draft)

    def with_epoch(self, samples: int) -> "Resolved":
        """Derives the length of the run from the number of samples per epoch."""
        assert self.before_length is not None, "the length is known"
        draft = self.before_length.copy()
        draft.epoch_samples = samples
        return _with_length(draft)


def gather(words: Sequence[str], entry: EntryPoint) -> Draft:
    """Collects the given values.

    Later sources override earlier ones: entry point, preset, file, DeepSpeed, flags.
    """
    parsed = parse_flags(words, entry)
    flags = _defaults_with(parsed.values)
    from_file = {} if flags.config is None else read_file(flags.config, entry)
    from_deepspeed, ignored = read_deepspeed(flags.deepspeed_config) if flags.deepspeed_config else ({}, [])
    given = {**from_file, **from_deepspeed, **parsed.values}
    preset = _defaults_with(given).preset
    if preset is None and given.keys().isdisjoint(_REPLACES_DEFAULT_PRESET):
        preset = entry.default_preset
    values = {name: Assigned(item.default, "default") for name, item in all_settings().items()}
    values |= {name: Assigned(value, f"default of {entry.name}") for name, value in entry.defaults.items()}
    if preset is not None:
        values |= _preset(preset)
    draft = Draft({**values, **given}, [*parsed.notices, *ignored])
    if flags.config is not None:
        kept = {name: assigned.value for name, assigned in from_file.items() if given[name] is assigned}
        draft.in_run_folder = paths_in_run(flags.config, kept)
    has_files = draft.vocab_file is not None or draft.merge_file is not None
    by_script = draft.source("tokenizer_type").startswith("default of")
    if by_script and (not has_files or draft.tokenizer_model is not None):
        # The tokenizer of the script needs its vocabulary files.
        draft.assign("default", tokenizer_type=None)
    read_data_files(draft)
    if is_unset(draft.run_dir):
        # Before the folder is read: the same command must always lead to the same folder.
        draft.derive("runs/NAME, after the model and the data", run_dir=f"runs/{default_run_name(draft)}")
    return draft


def _defaults_with(given: Mapping[str, Assigned]) -> Settings:
    return Settings.defaults(**{name: assigned.value for name, assigned in given.items()})


def _preset(name: str) -> dict[str, Assigned]:
    known = presets()
    if name not in known:
        raise UserError(f"unknown preset '{name}'{did_you_mean(name, known)}; there are: {', '.join(known)}")
    return {key: Assigned(value, f"preset {name}") for key, value in {**known[name], "preset": name}.items()}


def resolve(draft: Draft, facts: ProcessFacts, refuse_unimplemented: bool = True) -> Resolved:
    """Derives unset values, checks all settings and freezes them. Raises `ConfigError` with all problems.

    Without `refuse_unimplemented` a missing feature is a notice rather than a problem, for commands that
    start no run.
    """
    draft = draft.copy()
    draft.facts, draft.refuse_unimplemented = facts, refuse_unimplemented
    _set_aside_wrong_values(draft)
    derive(draft)
    return _with_length(draft)


def _with_length(draft: Draft) -> Resolved:
    """Derives the length of the run, checks all settings and freezes them."""
    before = draft.copy()
    derive_length(draft)
    missing = [] if draft.refuse_unimplemented else unsupported_features(draft)
    found = [problem for problem in problems_of(draft, draft.wrong) if problem not in missing]
    if problems := draft.problems + found:
        raise ConfigError(problems)
    config = RunConfig.of(draft)
    device = DeviceFacts("" if config.launch.device == "auto" else config.launch.device)
    notices = notices_for(draft, decide(config, device))
    is_open = draft.epochs is not None and not draft.is_synthetic and draft.epoch_samples is None
    notices = [*draft.notices, *missing, *notices, *draft.further_notices]
    return Resolved(config, draft, notices, before if is_open else None)


def notices_of_device(resolved: Resolved, decisions: Decisions) -> list[str]:
    """Returns the notices of decisions that were unknown before the device was queried."""
    lines = notices_of_decisions(resolved.settings, decisions)
    return [line for line in lines if line not in resolved.notices]


def problems_independent_of(draft: Draft, facts: ProcessFacts, unknown: Collection[str]) -> list[str]:
    """Returns the problems that do not depend on the `unknown` settings. Does not change the draft."""
    copy = derived_settings(draft, facts, unknown)
    return copy.problems + problems_of(copy, {*copy.wrong, *unknown})


def derived_settings(draft: Draft, facts: ProcessFacts, unknown: Collection[str] = ()) -> Draft:
    """Returns a copy with values as `resolve` would derive them now, and `unknown` ones at their defaults."""
    copy = draft.copy()
    copy.facts = facts
    _set_aside_wrong_values(copy)
    copy.assign("default", **{name: all_settings()[name].default for name in unknown})
    derive(copy)
    derive_length(copy)
    return copy


def _set_aside_wrong_values(draft: Draft) -> None:
    """Records errors and replaces invalid values by defaults, so that other settings can still be checked."""
    draft.wrong |= out_of_limits(draft)
    draft.assign("default", **{name: all_settings()[name].default for name in draft.wrong})
    draft.problems.extend(draft.wrong.values())


# --- notices ---


def notices_for(s: Settings, decisions: Decisions) -> list[str]:
    """Returns all notices for these settings. `decisions`: as the settings alone determine them."""

    def why_no_effect(item: Setting) -> str:
        notice = item.notice if getattr(s, item.name) != item.default else ""
        return notice or decisions.no_effect.get(item.name) or item.unmet_need(s)

    lines = _notices_of_settings(s, why_no_effect)
    if s.attention_dropout > 0:
        effect = "the dropout mask depends on the layout, so other parallel sizes give other losses"
        hidden = "the mask of hidden dropout does not depend on it"
        lines.append(f"--attention-dropout {s.attention_dropout}: {effect} ({hidden})")
    lines += [*_default_recompute(s), *_pipeline_bubble(s)]
    if s.num_experts is not None and (s.add_bias_linear or s.add_mlp_bias):
        others = "the other linear layers have one (--disable-bias-linear removes it there too)"
        mlps = "--add-mlp-bias applies to MLPs without experts and to shared experts"
        lines.append(f"experts have no bias here; {others if s.add_bias_linear else mlps}")
    if not (s.save_checkpoints or s.given("save_checkpoints") or s.skip_train):
        lines.append("no checkpoint is written, as --save is not given")
    return [*lines, *decisions.remarks]


def notices_of_decisions(s: Settings, decisions: Decisions) -> list[str]:
    """Returns a notice for each given setting that has no effect by these decisions."""
    return [*_notices_of_settings(s, lambda item: decisions.no_effect.get(item.name, "")), *decisions.remarks]


def _notices_of_settings(s: Settings, why_no_effect: Callable[[Setting], str]) -> list[str]:
    requested = [item for name, item in all_settings().items() if _is_requested(s, name)]
    reasons = [(item, reason) for item in requested if (reason := why_no_effect(item))]
    return [f"{i.written(getattr(s, i.name), s.source(i.name))}: {reason}" for i, reason in reasons]


def _default_recompute(s: Settings) -> list[str]:
    """Reports the default method of full recompute, which Megatron would require."""
    if s.recompute_granularity != "full" or s.given("recompute_method"):
        return []
    written = all_settings()["recompute_granularity"].written("full", s.source("recompute_granularity"))
    together = f"every {s.recompute_num_layers} layers are recomputed together"
    chunks = together if s.recompute_num_layers > 1 else "every layer is recomputed by itself"
    return [f"{written}: no --recompute-method is given, so uniform is used: {chunks}"]


def _pipeline_bubble(s: Settings) -> list[str]:
    """Reports the pipeline bubble if there are fewer micro-batches than pipeline ranks."""
    ranks, virtual = s.pipeline_model_parallel_size, s.virtual_stages
    if ranks == 1 or not s.global_batch_size or not s.micro_batch_size:
        return []
    count, rest = divmod(s.global_batch_size, s.micro_batch_size * s.data_parallel_size)
    if rest or count >= ranks:
        return []
    # The usual estimate of the bubble: every rank is idle while the others fill and drain the pipeline.
    waiting = (ranks - 1) / (ranks - 1 + count * virtual)
    batches = "1 micro-batch a step leaves" if count == 1 else f"{count} micro-batches a step leave"
    fix = "a smaller --micro-batch-size or a larger --global-batch-size gives more micro-batches"
    return [f"{batches} {ranks} pipeline ranks waiting {waiting:.0%} of the time; {fix}"]


def _is_requested(s: Settings, name: str) -> bool:
    """Whether a setting was given by a flag, or by a file with another value than the default.

    A file may list all settings, so a default in a file does not count.
    """
    return s.by_flag(name) or (s.given(name) and getattr(s, name) != all_settings()[name].default)


# --- name of the run folder ---


def default_run_name(draft: Draft) -> str:
    """Returns the default name of a run: `MODEL-DATA`, such as `qwen3-0.6b-chats`."""
    return "-".join(filter(None, (_model(draft), _data(draft)))) or "run"


def _model(draft: Draft) -> str:
    if draft.preset is not None:
        return _plain(draft.preset)
    if draft.given("load") and (name := _name_in_path(draft.load)):
        return name
    sizes = f"{draft.num_layers}l-{draft.hidden_size}h"
    return f"{sizes}-{draft.num_experts}e" if draft.num_experts else sizes


def _name_in_path(load: str) -> str:
    """Returns the last part of a path that is not generic.

    In the Hub's cache that is `models--OWNER--NAME`.
    """
    for part in reversed(PurePath(load).parts):
        if part.startswith("models--"):
            return _plain(part.rpartition("--")[2])
        if not _GENERIC_NAME.fullmatch(part):
            return _plain(part)
    return ""


def _data(draft: Draft) -> str:
    if draft.corpus:
        return "" if draft.preset is not None else _plain(draft.corpus)
    words = draft.data_path or draft.train_data_path
    if not words:
        return "mock" if draft.mock_data else "synthetic" if draft.dataset_size is not None else ""
    try:
        prefixes = Blend.parse(words).prefixes
    except UserError:
        # A rule reports the invalid blend.
        prefixes = words
    stem = PurePath(prefixes[0]).name.removesuffix(".jsonl").removesuffix(".json")
    stem = stem.removesuffix("_text_document")
    more = f"-and-{len(prefixes) - 1}-more" if len(prefixes) > 1 else ""
    return f"{_plain(stem)}{more}"


def _plain(text: str) -> str:
    """Converts a text to lower-case letters, digits and `. _ -`, which shells need not quote."""
    return re.sub(r"[^\w.]+", "-", text.lower()).strip("-._")[:_MAX_NAME].strip("-._")
