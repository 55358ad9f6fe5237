"""From preset, file and flags to one frozen configuration that knows where every value came from."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from pentatron.errors import ConfigError, UserError
from pentatron.settings.command_line import did_you_mean, parse_flags
from pentatron.settings.data_paths import NAMED, Blend
from pentatron.settings.decision_types import Decisions
from pentatron.settings.decisions import decide, device_of_settings
from pentatron.settings.declaration import first_unmet
from pentatron.settings.deepspeed import read_deepspeed
from pentatron.settings.derive import derive
from pentatron.settings.entry import EntryPoint
from pentatron.settings.files import places_in_run, read_data_files, read_file
from pentatron.settings.parameters import has_mlp_bias
from pentatron.settings.presets import presets
from pentatron.settings.rules import not_available, out_of_limits, problems_of
from pentatron.settings.run import RunConfig, table
from pentatron.settings.schedule import derive_length
from pentatron.settings.settings import Assigned, Draft, Facts, Settings, unset

# Notices for the user: settings that were given but have no effect in this run, and consequences worth a
# line.


def notices_for(s: Settings, decisions: Decisions) -> list[str]:
    """Every notice for these settings. `decisions`: as far as the settings alone decide them."""
    found = []
    for name, item in table().items():
        if not _asked_for(s, name):
            continue
        reason = item.notice if getattr(s, name) != item.default else ""
        if reason := reason or decisions.idle.get(name, "") or first_unmet(item.needs, s):
            found.append(f"{item.written(getattr(s, name), s.source(name))}: {reason}")
    if s.attention_dropout > 0:
        found.append(
            f"--attention-dropout {s.attention_dropout}: which attention weights are dropped depends on the "
            f"layout, so other parallel sizes give other losses (hidden dropout does not depend on it)"
        )
    found += [*_every_layer_recomputed(s), *_idle_pipeline(s), *_no_bias_in_experts(s)]
    found += _without_checkpoints(s)
    return [*found, *decisions.remarks]


def notices_of_decisions(s: Settings, decisions: Decisions) -> list[str]:
    """One line for each setting that was given and that these decisions leave without effect."""
    idle = {name: reason for name, reason in decisions.idle.items() if reason and _asked_for(s, name)}
    lines = [f"{table()[n].written(getattr(s, n), s.source(n))}: {idle[n]}" for n in table() if n in idle]
    return [*lines, *decisions.remarks]


def _without_checkpoints(s: Settings) -> list[str]:
    if s.save_checkpoints or s.given("save_checkpoints") or s.skip_train:
        return []
    return ["no checkpoint is written, as --save is not given"]


def _no_bias_in_experts(s: Settings) -> list[str]:
    if s.num_experts is None or not has_mlp_bias(s):
        return []
    if not s.add_bias_linear:
        return [
            "experts have no bias here; --add-mlp-bias acts on MLPs without experts and on shared experts"
        ]
    return [
        "experts have no bias here; the other linear layers have one (--disable-bias-linear takes it away there too)"
    ]


def _every_layer_recomputed(s: Settings) -> list[str]:
    """Megatron refuses full recompute without a method; here there is a usual one, and it is named."""
    if s.recompute_granularity != "full" or s.given("recompute_method"):
        return []
    written = table()["recompute_granularity"].written("full", s.source("recompute_granularity"))
    each = s.recompute_num_layers
    return [
        f"{written}: no --recompute-method is given, so uniform is used: every {each} layers are recomputed together"
        if each > 1
        else f"{written}: no --recompute-method is given, so uniform is used: every layer is recomputed by itself"
    ]


def _idle_pipeline(s: Settings) -> list[str]:
    """A pipeline with few micro-batches waits most of the time, which is rarely what anyone wants."""
    ranks, virtual = s.pipeline_model_parallel_size, s.virtual_stages
    total, micro, copies = (
        getattr(s, n) for n in ("global_batch_size", "micro_batch_size", "data_parallel_size")
    )
    if ranks == 1 or not total or not micro or total % (micro * copies) or total >= ranks * micro * copies:
        return []
    count = total // (micro * copies)
    # The usual estimate: every rank waits while the others fill and drain the pipeline.
    waiting = (ranks - 1) / (ranks - 1 + count * virtual)
    batches = "1 micro-batch a step leaves" if count == 1 else f"{count} micro-batches a step leave"
    return [
        f"{batches} {ranks} pipeline ranks waiting {waiting:.0%} of the time; a smaller --micro-batch-size or a larger "
        f"--global-batch-size gives more micro-batches"
    ]


def _asked_for(s: Settings, name: str) -> bool:
    """A file may list every setting there is; only a flag, or a value of its own, is a wish."""
    by_flag = s.source(name).startswith("flag")
    return by_flag or (s.given(name) and getattr(s, name) != table()[name].default)


# The name of a run that is given none: after its model and its data, so that the same command finds the same
# folder.


_LONGEST_PART = 40
# Folders that are called the same for every model.
_SAID_BY_NO_NAME = re.compile(
    r"checkpoints|latest|huggingface|snapshots|release|step-\d+.*|iter_\d+.*|[0-9a-f]{40}|\.*"
)
_OF_PREPARED_TEXT = "_text_document"


def name_of_run(draft: Draft) -> str:
    """`MODEL-DATA`, such as `qwen3-0.6b-chats`; a preset that brings its own data is named alone."""
    return "-".join(filter(None, (_model(draft), _data(draft)))) or "run"


def _model(draft: Draft) -> str:
    if draft.preset is not None:
        return _plain(draft.preset)
    if draft.given("load") and (named := _named_model(draft.load)):
        return named
    sizes = f"{draft.num_layers}l-{draft.hidden_size}h"
    return f"{sizes}-{draft.num_experts}e" if draft.num_experts else sizes


def _named_model(load: str) -> str:
    """The last part of the path that is a name. The hub's cache says it as `models--OWNER--NAME`."""
    for part in reversed(PurePath(load).parts):
        if part.startswith("models--"):
            return _plain(part.rpartition("--")[2])
        if not _SAID_BY_NO_NAME.fullmatch(part):
            return _plain(part)
    return ""


def _data(draft: Draft) -> str:
    if draft.corpus:
        return "" if draft.preset is not None else _plain(draft.corpus)
    words = next((getattr(draft, name) for name in NAMED[:2] if getattr(draft, name)), ())
    if words:
        return _files(words)
    return "mock" if draft.mock_data else "synthetic" if draft.dataset_size is not None else ""


def _files(words: tuple[str, ...]) -> str:
    """The first file, and how many there are besides."""
    try:
        prefixes = Blend.parse(words).prefixes
    except UserError:
        # A rule says what is wrong with the words.
        prefixes = words
    first = PurePath(prefixes[0])
    stem = first.name.removesuffix(".jsonl").removesuffix(".json").removesuffix(_OF_PREPARED_TEXT)
    more = f"-and-{len(prefixes) - 1}-more" if len(prefixes) > 1 else ""
    return f"{_plain(stem)}{more}"


def _plain(text: str) -> str:
    """Lower-case letters, digits and `. _ -`, which every file system and every shell takes as they are."""
    kept = re.sub(r"[^\w.]+", "-", text.lower()).strip("-._")
    return kept[:_LONGEST_PART].strip("-._")


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
