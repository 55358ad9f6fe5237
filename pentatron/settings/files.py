"""Reads YAML, TOML and JSON files of settings, by section or flat, and files that name data."""

import contextlib
import json
import re
import shlex
import tomllib
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pentatron.errors import ConfigError, UserError, explained
from pentatron.settings.command_line import FlagTable, did_you_mean
from pentatron.settings.data_paths import SPLITS, Blend
from pentatron.settings.declaration import Setting, Spelling, coerce
from pentatron.settings.entry_points import EntryPoint
from pentatron.settings.run_config import all_settings, sections
from pentatron.settings.settings import Assigned, Draft
from pentatron.text import parse_json

# Far above any real file. Protects against YAML aliases that expand exponentially.
_MAX_VALUES = 1_000_000
# Sections of Megatron's YAML files.
_MEGATRON_SECTIONS = ("language_model", "model_parallel")


def read_file(path: str, entry: EntryPoint) -> dict[str, Assigned]:
    """Returns the settings of a file. Raises `ConfigError` with all mistakes in it."""
    content = load_file(Path(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no settings: write one 'name: value' a line")
    flags = FlagTable(entry)
    settings: dict[str, tuple[str, Assigned]] = {}
    problems: list[str] = []
    for name, key, written in _lines(content):
        try:
            item, value = _setting(key, written, flags, f"{path}: {name}")
        except UserError as error:
            problems.append(str(error))
            continue
        if item.name in settings:
            problems.append(f"{path}: {settings[item.name][0]} and {name} are the same setting; keep one")
        settings[item.name] = name, Assigned(value, f"file {path}")
    if problems:
        raise ConfigError(problems)
    return {name: assigned for name, (_, assigned) in settings.items()}


def _setting(key: str, written: Any, flags: FlagTable, what: str) -> tuple[Setting, Any]:
    """Returns the setting of a key and its value. `what` names the file and the key in error messages."""
    match, known = flags.find(key), (*sections(), *_MEGATRON_SECTIONS)
    if key in known:
        raise UserError(f"{what} is a section; write its settings indented below it")
    if isinstance(written, dict) and match is None:
        raise UserError(f"{what}: unknown section{did_you_mean(key, known)}; there are {', '.join(known)}")
    if match is None:
        if refusal := flags.refusal(key):
            raise UserError(f"{what} is ambiguous here: {refusal}")
        raise UserError(f"{what}: unknown setting{did_you_mean(key.replace('-', '_'), all_settings())}")
    item, spelling = match
    if item.name == "config":
        raise UserError(f"{what}: a file cannot name another; give --config once, on the command line")
    value = _value(item, spelling, written, what)
    if item.names_code and value != item.default:
        fix = f"remove it from the file and add {item.written(tuple(map(shlex.quote, value)))} to the command"
        raise UserError(f"{what} names code, which only the command line may choose; if you trust it, {fix}")
    return item, value


def _value(item: Setting, spelling: Spelling, written: Any, what: str) -> Any:
    if spelling.takes_value:
        return coerce(item, written, what)
    if written is None and item.base_type is bool and item.optional:
        return None
    if not isinstance(written, bool):
        raise UserError(f"{what} must be true or false, not '{written}'")
    off = not spelling.sets if isinstance(spelling.sets, bool) else item.default
    return spelling.sets if written else off


def _lines(content: dict[Any, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields the name with its section, the key and the value of each setting of a file.

    A mapping under the name of a section is that section.
    """
    for key, value in content.items():
        if isinstance(value, dict | None) and key in (*sections(), *_MEGATRON_SECTIONS):
            yield from ((f"{key}.{inner}", str(inner), v) for inner, v in (value or {}).items())
        else:
            yield str(key), str(key), value


def load_file(path: Path, flag: str = "--config") -> Any:
    """Loads a YAML, TOML or JSON file. `flag` is the flag that named it, for error messages."""
    text = _text(path, f"configuration file {path}", f"check the path given to {flag}")
    try:
        return _parse(path, text)
    except UserError as error:
        raise UserError(f"configuration file {path} {error}") from None
    except Exception as error:
        kind, reason = path.suffix.lstrip(".") or "yaml", " ".join(str(error).split())
        raise UserError(f"configuration file {path} is not valid {kind}: {reason}") from None


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix == ".json":
        return json.loads(text, object_pairs_hook=_without_repeats)
    if path.suffix in (".yaml", ".yml", ""):
        return parse_yaml(text)
    raise UserError("is neither .yaml, .toml nor .json")


def parse_yaml(text: str) -> Any:
    """Parses YAML, and refuses repeated keys and exponential expansion. Raises the errors of PyYAML."""
    try:
        import yaml
    except ImportError:
        raise UserError("needs PyYAML: pip install pyyaml (or write TOML or JSON)") from None

    class Loader(yaml.SafeLoader):
        """Refuses repeated keys, of which PyYAML silently keeps the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            _without_repeats([(key.value, None) for key, _ in node.value])
            return super().construct_mapping(node, deep)

    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_size(node: Any, sizes: dict[int, int]) -> int:
    """Counts the values that a node expands to with all aliases. Raises `UserError` if there are too many.

    `sizes` caches the counts by node; 0 marks a node in progress, so that an alias to an ancestor is found.
    """
    if sizes.get(id(node)) == 0:
        raise UserError("repeats a part within itself; write it out")
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = 0
    inner = node.value if isinstance(node.value, list) else []
    parts = (part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,)))
    size = 1 + sum(_check_size(part, sizes) for part in parts)
    if size > _MAX_VALUES:
        raise UserError(f"expands to more than {_MAX_VALUES} values; write it without repetitions")
    sizes[id(node)] = size
    return size


def _without_repeats(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    unique: dict[Any, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise UserError(f"gives {key} twice; keep one")
        unique[key] = value
    return unique


# --- files that name data ---


def read_data_files(draft: Draft) -> None:
    """Assigns the data named in --data-args-path, --per-split-data-args-path and --data-path-config."""
    files = (
        ("data_args_path", draft.data_args_path, _read_words),
        ("per_split_data_args_path", draft.per_split_data_args_path, _read_per_split),
        ("data_path_config", draft.data_path_config, _read_blend),
    )
    for name, path, read in files:
        if path is None:
            continue
        flag = all_settings()[name].written(path)
        try:
            for target, words in read(Path(path), flag).items():
                if getattr(draft, target) not in ((), words):
                    other = all_settings()[target].written(getattr(draft, target), draft.source(target))
                    raise UserError(f"{flag} and {other} name different data; choose one")
                draft.assign(f"derived: {flag}", **{target: words})
        except UserError as error:
            draft.wrong[name] = str(error)


def _read_words(path: Path, flag: str) -> dict[str, tuple[str, ...]]:
    return {"data_path": _words(_text(path, flag), flag)}


def _read_per_split(path: Path, flag: str) -> dict[str, tuple[str, ...]]:
    with explained(ValueError, f"{flag} is not JSON", "repair it"):
        content = parse_json(_text(path, flag))
    return _by_split(content, flag)


def _read_blend(path: Path, flag: str) -> dict[str, tuple[str, ...]]:
    text = _text(path, flag)
    try:
        content = parse_yaml(text)
    except UserError as error:
        raise UserError(f"{flag} {error}") from None
    except Exception as error:
        raise UserError(f"{flag} is not YAML ({' '.join(str(error).split())}); repair it") from None
    if isinstance(content, dict) and not content.keys().isdisjoint(SPLITS):
        return _by_split(content, flag)
    return {"data_path": _words(content, flag)}


def _by_split(content: Any, flag: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(content, dict) or not content or not content.keys() <= set(SPLITS):
        raise UserError(f"{flag} must hold the keys train, valid and test, or some of them, and no others")
    named = [split for split in SPLITS if content.get(split)]
    return {f"{split}_data_path": _words(content[split], f"{flag} ({split})") for split in named}


def _words(content: Any, flag: str) -> tuple[str, ...]:
    """Converts a string, a list of words or a list of `{weight: W, path: P}` to the words of --data-path."""
    words, example = [], "{weight: 0.7, path: PREFIX}"
    entries = content.split() if isinstance(content, str) else content
    if not isinstance(entries, list):
        raise UserError(f"{flag} must be a list of prefixes, or of entries like {example}")
    for entry in entries:
        if not isinstance(entry, dict):
            words.append(str(entry))
        elif {"path"} <= entry.keys() <= {"path", "weight"}:
            words += [str(entry[key]) for key in ("weight", "path") if key in entry]
        else:
            raise UserError(f"{flag}: {entry} is not an entry; write it like {example}")
    if len({"weight" in entry for entry in entries if isinstance(entry, dict)}) > 1:
        raise UserError(f"{flag} mixes entries with and without a weight; give each one, or none")
    Blend.parse(words, flag)
    return tuple(words)


def _text(path: Path, what: str, fix: str = "check the path") -> str:
    """Reads a text file. `what` names it in error messages."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{what} does not exist; {fix}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{what} cannot be read ({reason})") from None


# --- the config.yaml of a run, reused by another run ---


HEADER = "# Every setting of this run and where it came from. Use it again with: --config THIS_FILE"
# Settings that name files or folders a run writes to. `run_dir` and `save` themselves are not reused.
_WRITTEN_TO = ("tensorboard_dir", "wandb_save_dir", "data_cache_path", "memory_snapshot_path")
# Settings whose relative paths are relative to the run folder.
_RELATIVE_TO_RUN = ("memory_snapshot_path",)
# One setting of the file. Those that another run does not reuse are commented out.
_LINE = re.compile(r"^  (?:# )?(\w+): (.*?)  # .*$", re.MULTILINE)


def saved_values(text: str) -> dict[str, Any]:
    """Returns all settings in the `config.yaml` of a run, including those that another run does not reuse."""
    values: dict[str, Any] = {}
    for name, written in _LINE.findall(text):
        # A line edited by hand may not be JSON.
        with contextlib.suppress(ValueError):
            values[name] = json.loads(written)
    return values


def paths_in_run(file: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Maps settings to the paths inside its folder that the run of a `config.yaml` wrote to.

    A run that uses the file writes to the same paths in its own folder. Empty if the file is not the
    `config.yaml` of a run.
    """
    path = Path(file)
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.startswith(HEADER):
        return {}
    saved = saved_values(text)
    # The file names the first folder of the run, which may have been moved since.
    folders = [path.parent, *(Path(saved[name]) for name in ("run_dir", "save") if saved.get(name))]
    relative: dict[str, str] = {}
    for name, place in ((n, Path(values[n])) for n in _WRITTEN_TO if values.get(n) is not None):
        inside = [f.resolve() for f in folders if place.resolve().is_relative_to(f.resolve())]
        if inside and (place.is_absolute() or name not in _RELATIVE_TO_RUN):
            relative[name] = str(place.resolve().relative_to(inside[0]))
    return relative
