"""Settings from a YAML, TOML or JSON file: by section or flat, in any spelling."""

import json
import tomllib
from pathlib import Path
from typing import Any

from pentatron.config.entry import EntryPoint
from pentatron.config.errors import ConfigError, UserError
from pentatron.config.flags import Assigned, FlagTable, did_you_mean
from pentatron.config.run import sections, table
from pentatron.config.setting import coerce


def read_file(path: str, entry: EntryPoint) -> dict[str, Assigned]:
    """The settings of one file, or every mistake in it at once."""
    content = _load(Path(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no settings: write one 'name: value' a line")
    flags = FlagTable(entry)
    values: dict[str, Assigned] = {}
    problems: list[str] = []
    for where, key, value in _entries(content):
        origin = f"{path}: {where}{key}"
        found = flags.find(str(key))
        if found is None:
            known = dict.fromkeys((*table(), *sections()))
            guess = did_you_mean(str(key).replace("-", "_"), known)
            problems.append(f"{origin}: unknown setting{guess}")
            continue
        item, spelling = found
        try:
            if spelling.takes_value:
                values[item.name] = Assigned(coerce(item, value, origin), f"file {path}")
            elif isinstance(value, bool):
                wanted = spelling.sets if value else _opposite(spelling.sets, item.default)
                values[item.name] = Assigned(wanted, f"file {path}")
            else:
                problems.append(f"{origin}: wants true or false, not '{value}'")
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return values


def _opposite(sets: Any, default: Any) -> Any:
    return (not sets) if isinstance(sets, bool) else default


def _entries(content: dict[Any, Any]) -> list[tuple[str, Any, Any]]:
    """(section prefix, key, value) of every setting; a mapping under a section's name is that section."""
    found = []
    for key, value in content.items():
        if isinstance(value, dict):
            found += [(f"{key}.", inner, inner_value) for inner, inner_value in value.items()]
        else:
            found.append(("", key, value))
    return found


def _load(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"configuration file {path} does not exist; check the path given to --config"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"configuration file {path} cannot be read: {error}") from None
    try:
        return _parse(path, text)
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"configuration file {path} is not valid {path.suffix.lstrip('.') or 'YAML'}: {reason}"
        ) from None


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix in (".yaml", ".yml", ""):
        try:
            import yaml
        except ImportError:
            raise UserError(
                f"reading {path} needs PyYAML: pip install pyyaml (or write TOML or JSON)"
            ) from None
        return yaml.safe_load(text)
    raise UserError(f"configuration file {path} is neither .yaml, .toml nor .json")
