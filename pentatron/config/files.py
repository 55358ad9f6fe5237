"""Settings from a YAML, TOML or JSON file: by section or flat, in any spelling."""

import json
import shlex
import tomllib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.config.entry import EntryPoint
from pentatron.config.flags import FlagTable, did_you_mean
from pentatron.config.run import sections, table
from pentatron.config.setting import Setting, Spelling, coerce
from pentatron.config.settings import Assigned
from pentatron.errors import ConfigError, UserError

# A file of settings, or of data sets with their weights, has no more.
_MOST_VALUES = 1_000_000
# Megatron's YAML files put their settings under these two.
_MEGATRON_SECTIONS = ("language_model", "model_parallel")


@dataclass(frozen=True)
class _Line:
    """One `key: value` of a file; `name` is the key with the section before it."""

    name: str
    key: str
    value: Any


def read_file(path: str, entry: EntryPoint) -> dict[str, Assigned]:
    """The settings of one file, or every mistake in it at once."""
    content = load_file(Path(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no settings: write one 'name: value' a line")
    flags = FlagTable(entry)
    found: dict[str, tuple[str, Assigned]] = {}
    problems: list[str] = []
    for line in _lines(content):
        try:
            item, value = _setting(line, flags, f"{path}: {line.name}")
        except UserError as error:
            problems.append(str(error))
            continue
        if item.name in found:
            problems.append(f"{path}: {found[item.name][0]} and {line.name} are the same setting; keep one")
        found[item.name] = line.name, Assigned(value, f"file {path}")
    if problems:
        raise ConfigError(problems)
    return {name: assigned for name, (_, assigned) in found.items()}


def _setting(line: _Line, flags: FlagTable, what: str) -> tuple[Setting, Any]:
    """The setting a line means and its value."""
    found = flags.find(line.key)
    known = (*sections(), *_MEGATRON_SECTIONS)
    if line.key in known:
        raise UserError(f"{what} is a section; write its settings indented below it")
    if isinstance(line.value, dict) and found is None:
        raise UserError(
            f"{what}: unknown section{did_you_mean(line.key, known)}; there are {', '.join(known)}"
        )
    if found is None:
        if refusal := flags.refusal(line.key):
            raise UserError(f"{what} is ambiguous here: {refusal}")
        guess = did_you_mean(line.key.replace("-", "_"), table())
        raise UserError(f"{what}: unknown setting{guess}")
    item, spelling = found
    if item.name == "config":
        raise UserError(f"{what}: a file cannot name another; give --config once, on the command line")
    value = _value(item, spelling, line.value, what)
    if item.names_code and value != item.default:
        raise UserError(
            f"{what} names code, which only the command line may choose; if you trust it, remove it from the file and add "
            f"{item.written(tuple(map(shlex.quote, value)))} to the command"
        )
    return item, value


def _value(item: Setting, spelling: Spelling, written: Any, what: str) -> Any:
    if spelling.takes_value:
        return coerce(item, written, what)
    if written is None and item.base_type is bool and item.optional:
        return None
    if not isinstance(written, bool):
        raise UserError(f"{what} wants true or false, not '{written}'")
    if written:
        return spelling.sets
    return (not spelling.sets) if isinstance(spelling.sets, bool) else item.default


def _lines(content: dict[Any, Any]) -> Iterator[_Line]:
    """Every setting of a file; a mapping under a section's name is that section."""
    for key, value in content.items():
        if isinstance(value, dict | None) and key in (*sections(), *_MEGATRON_SECTIONS):
            yield from (_Line(f"{key}.{inner}", str(inner), v) for inner, v in (value or {}).items())
        else:
            yield _Line(str(key), str(key), value)


def load_file(path: Path, flag: str = "--config") -> Any:
    """What a YAML, TOML or JSON file holds; `flag` is the one that named it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"configuration file {path} does not exist; check the path given to {flag}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"configuration file {path} cannot be read ({reason})") from None
    try:
        return _parse(path, text)
    except UserError as error:
        raise UserError(f"configuration file {path} {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"configuration file {path} is not valid {path.suffix.lstrip('.') or 'yaml'}: {reason}"
        ) from None


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix == ".json":
        return json.loads(text, object_pairs_hook=_without_repeats)
    if path.suffix in (".yaml", ".yml", ""):
        return parse_yaml(text)
    raise UserError("is neither .yaml, .toml nor .json")


def parse_yaml(text: str) -> Any:
    """YAML without repeated keys; raises what the library raises."""
    try:
        import yaml
    except ImportError:
        raise UserError("needs PyYAML: pip install pyyaml (or write TOML or JSON)") from None

    class Loader(yaml.SafeLoader):
        """YAML keeps the last of two equal keys without a word; a file edited by hand must not."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            _without_repeats([(key.value, None) for key, _ in node.value])
            return super().construct_mapping(node, deep)

    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _require_small(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _require_small(node: Any, sizes: dict[int, int]) -> int:
    """How many values a part of a file unfolds to. A few lines that repeat each other can mean more than any memory holds."""
    if id(node) in sizes:
        if sizes[id(node)] == 0:
            raise UserError("repeats a part within itself; write it out")
        return sizes[id(node)]
    sizes[id(node)] = 0
    inner = node.value if isinstance(node.value, list) else []
    parts = (part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,)))
    size = 1 + sum(_require_small(part, sizes) for part in parts)
    if size > _MOST_VALUES:
        raise UserError(f"unfolds to more than {_MOST_VALUES} values; write it without repetitions")
    sizes[id(node)] = size
    return size


def _without_repeats(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key, _ in pairs:
        if key in seen:
            raise UserError(f"gives {key} twice; keep one")
        seen.add(key)
    return dict(pairs)
