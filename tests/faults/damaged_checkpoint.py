"""The newest step is damaged: it is named and set aside, and the run resumes from the step before."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.faults.cases import Outcome, Series
from tests.faults.lab import SAVE_INTERVAL, Lab, step_folder

SERIES = Series("damaged checkpoint")
LAYOUT = "dp2"
SHARD, OTHER, MANIFEST = "rank-00001.safetensors", "rank-00000.safetensors", "manifest.json"
NEWEST, BEFORE = 6, 4


def truncated(name: str, keep: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda step: os.truncate(step / name, keep((step / name).stat().st_size))


def flipped(name: str, at: int | None = None) -> Callable[[Path], None]:
    """Flips a bit at byte `at`, by default in the middle.

    In a shard that is a bit of a tensor, and not one of the lowest, which the next update may round away.
    """

    def damage(step: Path) -> None:
        content = bytearray((step / name).read_bytes())
        content[len(content) // 8 * 4 + 2 if at is None else at] ^= 16
        (step / name).write_bytes(content)

    return damage


def flipped_number(step: Path) -> None:
    """Changes a digit of the run state; the manifest remains valid JSON."""
    path = step / MANIFEST
    text = path.read_text()
    at = text.index('"consumed_samples": ') + len('"consumed_samples": ')
    path.write_text(text[:at] + str(int(text[at]) ^ 1) + text[at + 1 :])


def extra(step: Path) -> None:
    shutil.copy(step / OTHER, step / "rank-00002.safetensors")


def swapped(step: Path) -> None:
    (step / OTHER).rename(step / "between")
    (step / SHARD).rename(step / OTHER)
    (step / "between").rename(step / SHARD)


def of_another_step(step: Path) -> None:
    shutil.copy(step.with_name(f"step-{BEFORE:08d}") / SHARD, step / SHARD)


def manifest_of_another_step(step: Path) -> None:
    shutil.copy(step.with_name(f"step-{BEFORE:08d}") / MANIFEST, step / MANIFEST)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a shard cut to half": (truncated(SHARD, lambda size: size // 2), SHARD),
    "a shard cut by one byte": (truncated(SHARD, lambda size: size - 1), SHARD),
    "a shard cut to 0 bytes": (truncated(SHARD, lambda size: 0), SHARD),
    "a bit of a shard's tensors flipped": (
        flipped(SHARD),
        rf"{SHARD}: sha256 is .*of its \d+ tensors \S+ is damaged",
    ),
    "a bit of a shard's header flipped": (flipped(SHARD, 20), SHARD),
    "a bit of the manifest flipped": (flipped(MANIFEST, 200), MANIFEST),
    "a digit of the run's state changed": (flipped_number, MANIFEST),
    "the manifest cut to half": (truncated(MANIFEST, lambda size: size // 2), MANIFEST),
    "the manifest missing": (lambda step: (step / MANIFEST).unlink(), f"step-{NEWEST:08d}"),
    "a shard missing": (lambda step: (step / SHARD).unlink(), SHARD),
    "a shard too many": (extra, "rank-00002.safetensors"),
    "two shards swapped": (swapped, r"rank-0000\d\.safetensors"),
    "a shard of another step": (of_another_step, SHARD),
    "the manifest of another step": (manifest_of_another_step, f"step-{NEWEST:08d}"),
}


def goes_on_from_the_one_before(damage: Callable[[Path], None], named: str) -> Callable[[Lab], Outcome]:
    def run(lab: Lab) -> Outcome:
        damage(lab.interrupted(LAYOUT, NEWEST))
        ran, outcome = lab.fork(LAYOUT), Outcome()
        outcome.expect_output(
            ran, f"note: .*step-{NEWEST:08d}.*{named}.*set aside|note: .*{named}.*set aside"
        )
        outcome.ended(ran, 0)
        outcome.lost(NEWEST - ran.resumed_at[0] if ran.resumed_at else -1, SAVE_INTERVAL)
        outcome.same_state(lab.is_equal(LAYOUT))
        return outcome

    return run


# Not quick: `make test` has similar cases.
SLOW = (
    "a shard cut by one byte",
    "a shard cut to 0 bytes",
    "the manifest cut to half",
    "a shard of another step",
)
for _name, (_damage, _named) in DAMAGES.items():
    SERIES.case(_name, quick=_name not in SLOW)(goes_on_from_the_one_before(_damage, _named))


def pointer(content: str | None) -> Callable[[Lab], Outcome]:
    """Damages `latest`: the newest step is found without it, and the next save writes it again."""

    def run(lab: Lab) -> Outcome:
        lab.interrupted(LAYOUT, NEWEST)
        latest = lab.run / "checkpoints" / "latest"
        if content is None:
            latest.unlink()
        else:
            latest.write_text(content)
        ran, outcome = lab.fork(LAYOUT), Outcome(remark="not relied on")
        outcome.ended(ran, 0)
        outcome.detected = ran.resumed_at == [NEWEST]
        outcome.lost(NEWEST - ran.resumed_at[0] if ran.resumed_at else -1, 0)
        outcome.same_state(lab.is_equal(LAYOUT))
        outcome.expect(latest.read_text() == "step-00000010\n", "the pointer was not mended")
        return outcome

    return run


SERIES.case("latest is empty", quick=True)(pointer(""))
SERIES.case("latest names an older step")(pointer(f"step-{BEFORE:08d}\n"))
SERIES.case("latest names a step that is not there")(pointer("step-00000099\n"))


@SERIES.case("every step damaged", quick=True)
def every_step(lab: Lab) -> Outcome:
    lab.interrupted(LAYOUT, NEWEST)
    for step in range(SAVE_INTERVAL, NEWEST + 1, SAVE_INTERVAL):
        flipped(SHARD)(step_folder(lab.run, step))
    ran, outcome = lab.fork(LAYOUT), Outcome(remark="refused, no new run started")
    outcome.expect_output(ran, rf"{SHARD}: sha256")
    outcome.ended(ran, 2)
    outcome.expect(not step_folder(lab.run, 2).exists() and not ran.find("^step "), "it trained all the same")
    return outcome


@SERIES.case("a bit flipped, with --no-verify-checkpoint", quick=True, control=True)
def unverified(lab: Lab) -> Outcome:
    """Without verification the run ends with another state, and nothing reports it."""
    flipped(SHARD)(lab.interrupted(LAYOUT, NEWEST))
    ran, outcome = lab.fork(LAYOUT, "--no-verify-checkpoint"), Outcome()
    outcome.exit_code = ran.code
    outcome.detected = ran.find(SHARD) is not None
    outcome.equal = lab.is_equal(LAYOUT)
    outcome.expect(not outcome.equal, "the flipped bit changed nothing, so it proves nothing")
    return outcome
