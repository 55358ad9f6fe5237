"""Tests the error message for a prefix without a pair."""

from pathlib import Path

from pentatron.data.indexed import missing_pairs_message

ADVICE = "give the prefix of a prepared .bin/.idx pair without its ending"


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def test_the_pair_that_was_meant_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "wiki_text_document.bin", "wiki_text_document.idx", "half.idx", "half_text.idx")
    pair = tmp_path / "wiki_text_document"
    assert missing_pairs_message([pair]) == ""
    # Wrong prefixes: the one given to prepare, a folder, or one file of the pair.
    assert (
        missing_pairs_message([tmp_path / "wiki"])
        == f"no data file {tmp_path}/wiki.idx; did you mean {pair}?"
    )
    assert missing_pairs_message([tmp_path]) == f"no data file {tmp_path}.idx; did you mean {pair}?"
    assert missing_pairs_message([f"{pair}.bin"]).endswith(f"; give {pair}, without the ending")
    assert missing_pairs_message([f"{pair}.idx"]).endswith(f"; give {pair}, without the ending")
    # An incomplete pair counts as missing.
    assert missing_pairs_message([tmp_path / "half"]) == f"no data file {tmp_path}/half.bin; {ADVICE}"


def test_all_that_are_missing_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "b.bin", "b.idx")
    names = [tmp_path / name for name in ("a", "b", "[c]")]
    assert missing_pairs_message(names) == f"no data files {tmp_path}/a.idx, {tmp_path}/[c].idx; {ADVICE}"
