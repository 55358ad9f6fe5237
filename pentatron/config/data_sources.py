"""Files that name data: --data-args-path, --per-split-data-args-path and --data-path-config."""

from pathlib import Path
from typing import Any

from pentatron.config.blend import SPLITS, Blend
from pentatron.config.draft import Draft
from pentatron.config.files import parse_yaml
from pentatron.config.parsing import parse_json
from pentatron.config.run import table
from pentatron.errors import UserError


def read_data_files(draft: Draft) -> None:
    """Puts the words of --data-args-path, --per-split-data-args-path and --data-path-config where they would be written."""
    files = (
        ("data_args_path", draft.data_args_path, _read_words),
        ("per_split_data_args_path", draft.per_split_data_args_path, _read_per_split),
        ("data_path_config", draft.data_path_config, _read_blend),
    )
    for name, path, read in files:
        if path is None:
            continue
        flag = table()[name].written(path)
        try:
            for target, words in read(Path(path), flag).items():
                _put(draft, target, words, flag)
        except UserError as error:
            draft.wrong[name] = str(error)


def _put(draft: Draft, target: str, words: tuple[str, ...], flag: str) -> None:
    if getattr(draft, target) and getattr(draft, target) != words:
        raise UserError(
            f"{flag} and {table()[target].written(getattr(draft, target), draft.source(target))} name different data; choose one"
        )
    draft.assign(f"derived: {flag}", **{target: words})


def _read_words(path: Path, flag: str) -> dict[str, tuple[str, ...]]:
    words = tuple(_text(path, flag).split())
    Blend.parse(words, flag)
    return {"data_path": words}


def _read_per_split(path: Path, flag: str) -> dict[str, tuple[str, ...]]:
    try:
        content = parse_json(_text(path, flag))
    except ValueError as error:
        raise UserError(f"{flag} is not JSON ({error}); repair it") from None
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
    return {
        f"{split}_data_path": _words(content[split], f"{flag} ({split})")
        for split in SPLITS
        if content.get(split)
    }


def _words(content: Any, flag: str) -> tuple[str, ...]:
    """A text or a list as --data-path would be written, or a list of `{weight: W, path: P}`."""
    words: list[str] = []
    entries = content.split() if isinstance(content, str) else content
    if not isinstance(entries, list):
        raise UserError(
            f"{flag} must be a list of prefixes, or of entries like {{weight: 0.7, path: PREFIX}}"
        )
    for entry in entries:
        if isinstance(entry, dict):
            if not {"path"} <= entry.keys() <= {"path", "weight"}:
                raise UserError(f"{flag}: {entry} is no entry; write it like {{weight: 0.7, path: PREFIX}}")
            words += [str(entry[key]) for key in ("weight", "path") if key in entry]
        else:
            words.append(str(entry))
    weighted = {"weight" in entry for entry in entries if isinstance(entry, dict)}
    if len(weighted) > 1:
        raise UserError(f"{flag} mixes entries with and without a weight; give each one, or none")
    Blend.parse(words, flag)
    return tuple(words)


def _text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{flag} does not exist; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{flag} cannot be read ({reason})") from None
