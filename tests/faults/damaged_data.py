"""Damaged or changed data files: structure is refused at the start, content when it is read."""

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.faults.cases import Outcome, Series
from tests.faults.commands import environment
from tests.faults.injection import Fault
from tests.faults.lab import LAST, Lab, state_of, step_folder, write_corpus

SERIES = Series("damaged data")
LAYOUT = "files"


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flipped(path: Path) -> None:
    """Flips the lowest bit of a token, which stays within the vocabulary."""
    overwritten(path, path.stat().st_size // 4 * 2, lambda old: bytes([old[0] ^ 1]), 1)


def zeroed(path: Path) -> None:
    overwritten(path, 200, lambda old: bytes(len(old)), 64)


def overwritten(path: Path, at: int, new: Callable[[bytes], bytes], count: int) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + count] = new(bytes(content[at : at + count]))
    path.write_bytes(content)


def magic(path: Path) -> None:
    overwritten(path, 0, lambda old: b"MMIDIDY\x00\x00", 9)


def dtype(path: Path) -> None:
    """Replaces dtype uint16 by int32."""
    overwritten(path, 17, lambda old: b"\x04", 1)


def length(path: Path) -> None:
    """Changes the length of the first sequence, which follows the header."""
    overwritten(path, 34, lambda old: struct.pack("<i", struct.unpack("<i", old)[0] + 1), 4)


def pointer(path: Path) -> None:
    """Changes the pointer of the second sequence."""
    overwritten(path, 34 + 60 * 4 + 8, lambda old: struct.pack("<q", struct.unpack("<q", old)[0] + 2), 8)


def of_another_pair(path: Path) -> None:
    other = write_corpus(path.with_name("other"), seed=1)
    shutil.copy(f"{other}{path.suffix}", path)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], bool]] = {
    ".bin cut to half": (".bin", truncated, True),
    ".bin with one bit flipped": (".bin", flipped, True),
    ".bin with zeros in it": (".bin", zeroed, True),
    ".idx without its magic": (".idx", magic, True),
    ".idx with a wrong length": (".idx", length, True),
    ".idx with a wrong pointer": (".idx", pointer, True),
    ".idx with another dtype": (".idx", dtype, True),
    ".bin of another pair": (".bin", of_another_pair, True),
    ".idx of another pair": (".idx", of_another_pair, True),
    # Megatron's files have no checksums, so that only their structure can be checked.
    ".bin cut to half, no checksums": (".bin", truncated, False),
    ".idx with a wrong pointer, no checksums": (".idx", pointer, False),
    ".idx with another dtype, no checksums": (".idx", dtype, False),
}


def is_refused(suffix: str, damage: Callable[[Path], None], sums: bool) -> Callable[[Lab], Outcome]:
    def run(lab: Lab) -> Outcome:
        path = Path(f"{write_corpus(lab.corpus)}{suffix}")
        damage(path)
        if not sums:
            path.with_suffix(".meta").unlink()
        ran, outcome = lab.fork(LAYOUT), Outcome()
        # The error about a pair that does not fit may name either file.
        either = r"corpus\.(bin|idx)" if not sums or damage is of_another_pair else rf"corpus\{suffix}"
        outcome.expect_output(ran, rf"{either}.*bytes? \d+|{either}.*\d+ bytes")
        outcome.ended(ran, 2)
        outcome.expect(
            not list(lab.run.glob("checkpoints/step-*")) or damage in (flipped, zeroed), "steps were saved"
        )
        return outcome

    return run


for _name, (_suffix, _damage, _sums) in DAMAGES.items():
    SERIES.case(_name, quick=_sums)(is_refused(_suffix, _damage, _sums))


@SERIES.case("a bit of .bin flipped, no checksums", control=True)
def unknowable(lab: Lab) -> Outcome:
    """Megatron's format has no checksums; `pentatron data seal` adds them."""
    prefix = write_corpus(lab.corpus)
    Path(f"{prefix}.meta").unlink()
    flipped(Path(f"{prefix}.bin"))
    ran, outcome = lab.fork(LAYOUT), Outcome()
    outcome.exit_code, outcome.detected = ran.code, ran.code != 0
    reference, own = lab.references.state(LAYOUT), lab.newest(10)
    outcome.equal = own is not None and lab.weights_equal(own, reference)
    outcome.expect(not outcome.equal, "the flipped bit changed nothing, so it proves nothing")
    return outcome


def change_refused(
    change: Callable[[Lab], str], named: str, layout: str = LAYOUT
) -> Callable[[Lab], Outcome]:
    """Expects changed data to be refused, accepted with --allow-changed-data, and no effect once restored."""

    def run(lab: Lab) -> Outcome:
        write_corpus(lab.corpus)
        lab.interrupted(layout)
        words = change(lab)
        ran, outcome = lab.fork(layout, words), Outcome()
        outcome.expect_output(ran, named)
        outcome.ended(ran, 2)
        outcome.expect(lab.newest(8) is None, "it trained all the same")
        copy = lab.folder / "allowed"
        shutil.copytree(lab.run, copy)
        allowed = lab.fork(layout, f"{words} --allow-changed-data", run=copy)
        outcome.expect(
            allowed.code == 0 and allowed.find("the data has changed") is not None,
            "--allow-changed-data does not go on:\n" + allowed.text,
        )
        write_corpus(lab.corpus)
        outcome.expect(lab.fork(layout).code == 0, "brought back, it does not go on")
        outcome.lost(0, 0)
        outcome.same_state(lab.is_equal(layout))
        return outcome

    return run


def other_tokens(lab: Lab) -> str:
    write_corpus(lab.corpus, seed=1)
    return ""


def another_blend(lab: Lab) -> str:
    write_corpus(lab.corpus.with_name("second"), seed=2)
    return f"--data-path 3 {lab.corpus.name} 1 second"


SERIES.case("the data changed between two starts")(
    change_refused(other_tokens, r"the data is not what .* was trained on; .*\(.*corpus")
)
SERIES.case("the blend changed between two starts")(
    change_refused(another_blend, r"the data is not what .* was trained on; .*\(.*second is new")
)


@SERIES.case("the tokenizer changed between two starts")
def another_tokenizer(lab: Lab) -> Outcome:
    """The files record the name of the tokenizer that made them."""
    text = lab.folder / "text.jsonl"
    text.write_text("".join(f'{{"text": "document {n} of a few words"}}\n' for n in range(60)))
    prepare = "-m pentatron prepare --input text.jsonl --tokenizer-type ByteTokenizer --output-prefix text --workers 1"
    subprocess.run(
        [sys.executable, *prepare.split()], cwd=lab.folder, env=environment(), check=True, capture_output=True
    )
    words = "--vocab-size 300 --data-path text_text_document --tokenizer-type ByteTokenizer"
    whole = lab.folder / "whole"
    begun = [lab.fork(LAYOUT, words, run=whole), lab.fork(LAYOUT, f"{words} --exit-interval 6")]
    ran, outcome = lab.fork(LAYOUT, f"{words} --tokenizer-type NullTokenizer"), Outcome()
    outcome.expect_output(
        ran, r"text_text_document\.bin was prepared with another tokenizer \(ByteTokenizer .*NullTokenizer"
    )
    outcome.ended(ran, 2)
    begun.append(lab.fork(LAYOUT, words))
    outcome.expect(not any(b.code for b in begun), "\n".join(b.text for b in begun if b.code))
    outcome.lost(6 - begun[-1].resumed_at[-1], 0)
    outcome.same_state(state_of(step_folder(lab.run, LAST)) == state_of(step_folder(whole, LAST)))
    return outcome


def changed_under_the_run(do: str, sums: bool, named: str) -> Callable[[Lab], Outcome]:
    """The run stops before it reads another sample; with the file restored it ends undisturbed."""

    def run(lab: Lab) -> Outcome:
        binary = Path(f"{write_corpus(lab.corpus)}.bin")
        if not sums:
            binary.with_suffix(".meta").unlink()
        # Longer than the interval between two checks of the file: reading a truncated page before the next
        # check is a SIGBUS.
        fault = Fault("update", do, step=5, seconds=0.05, file=str(binary), once=lab.marker())
        ran, outcome = lab.fork(LAYOUT, faults=[fault]), Outcome()
        outcome.expect_output(ran, named, lab.when(), 10)
        outcome.ended(ran, 2)
        outcome.lost(5 - max(int(path.name[5:]) for path in lab.run.glob("checkpoints/step-*")), 2)
        write_corpus(lab.corpus)
        again = lab.fork(LAYOUT)
        outcome.expect(again.code == 0, again.text)
        outcome.same_state(lab.is_equal(LAYOUT) if sums else lab.newest(LAST) is not None)
        return outcome

    return run


SERIES.case(".bin overwritten during the run")(
    changed_under_the_run("zero", True, r"corpus\.bin is damaged between bytes 0 and")
)
SERIES.case(".bin overwritten during the run, no checksums", quick=True)(
    changed_under_the_run("zero", False, r"corpus\.bin changed while it was read \(its modification time")
)
SERIES.case(".bin truncated during the run", quick=True)(
    changed_under_the_run(
        "truncate", True, r"corpus\.bin changed while it was read \(it had \d+ bytes and has 0\)"
    )
)


@SERIES.case("a data worker dies")
def dead_reader(lab: Lab) -> Outcome:
    fault = Fault("sample", "kill", step=0, once=lab.marker())
    ran, outcome = lab.fork(LAYOUT, "--num-workers 1", [fault]), Outcome()
    outcome.expect_output(ran, r"a DataLoader worker died \(killed by SIGKILL\)", lab.when(), 10)
    outcome.ended(ran, 2)
    again = lab.fork(LAYOUT, "--num-workers 1")
    outcome.expect(again.code == 0, again.text)
    outcome.same_state(lab.is_equal(LAYOUT))
    return outcome
