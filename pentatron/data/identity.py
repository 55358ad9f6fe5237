"""Identifies the data of a run by fingerprints, which are stored in checkpoints and compared on resume."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pentatron.checksums import digest_of_file
from pentatron.data.indexed import pair_paths, read_sidecar
from pentatron.errors import UserError, explained
from pentatron.parallel.collectives import gather_objects
from pentatron.parallel.serialization import sendable
from pentatron.parallel.world import World
from pentatron.settings.data_paths import Blend


@sendable
@dataclass(frozen=True)
class FileIdentity:
    """Identifies a `.bin/.idx` pair by the hash of its index and the size of its tokens.

    The tokens are not hashed, as they may be too large to read at every start. `tokens` is the checksum
    of their block checksums, if the pair has a sidecar.
    """

    name: str
    index: str
    bytes: int
    tokens: str | None = None

    @classmethod
    def read(cls, prefix: str) -> "FileIdentity":
        binary, index = pair_paths(prefix)
        if not (binary.exists() and index.exists()):
            return cls(prefix, "", 0)
        sidecar = read_sidecar(prefix)
        tokens = None if sidecar is None else f"{sidecar.sums_crc32:08x}"
        return cls(prefix, digest_of_file(index, 0), binary.stat().st_size, tokens)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "FileIdentity":
        """Parses a saved identity; raises TypeError if it is invalid."""
        file = cls(**saved)
        texts = all(isinstance(text, str) for text in (file.name, file.index, file.tokens or ""))
        if not texts or not isinstance(file.bytes, int):
            raise TypeError(f"{file!r:.100}")
        return file

    @property
    def fingerprint(self) -> str:
        return f"{self.index} {self.bytes}" if self.index else ""


@sendable
@dataclass(frozen=True)
class DataIdentity:
    """The fingerprint of all data that a run reads, and the files it consists of."""

    fingerprint: str
    files: tuple[FileIdentity, ...] = ()

    @classmethod
    def of_blends(cls, *blends_or_none: Blend | None) -> "DataIdentity":
        """Identifies blends: by the file for a single corpus, else by all files and weights."""
        blends = [blend for blend in blends_or_none if blend is not None]
        read = {prefix: FileIdentity.read(prefix) for blend in blends for prefix in blend.prefixes}
        files = tuple(read.values())
        if blends[0].weights is None and len(blends[0].prefixes) == 1 and blends == [blends[0]] * 2:
            return cls(files[0].fingerprint, files)
        content = [[list(b.weights or ()), [read[p].fingerprint for p in b.prefixes]] for b in blends]
        return cls(f"blend {hashlib.sha256(json.dumps(content).encode()).hexdigest()}", files)

    @classmethod
    def from_json(cls, fingerprint: str, files: Sequence[Mapping[str, Any]]) -> "DataIdentity":
        advice = "resume from another step, or load only the weights with --finetune"
        with explained(TypeError, "the identity of the data in the checkpoint cannot be read", advice):
            return cls(fingerprint, tuple(map(FileIdentity.from_json, files)))

    def files_as_json(self) -> list[dict[str, Any]]:
        return [asdict(file) for file in self.files]

    def changes_since(self, before: "DataIdentity") -> str:
        """Describes what differs from an earlier identity; empty if the samples are the same."""
        if self.fingerprint == before.fingerprint:
            # The file name is not compared, so a corpus may move; checksums are compared if both are known.
            return "; ".join(
                f"{now.name}.bin holds other tokens: the checksum of its checksums was {then.tokens}, is {now.tokens}"
                for then, now in zip(before.files, self.files)
                if None not in (then.tokens, now.tokens) and then.tokens != now.tokens
            )
        if not before.files or not self.files:
            return f"its fingerprint was '{before.fingerprint}', is '{self.fingerprint}'"
        then, now = ({file.fingerprint for file in identity.files} for identity in (before, self))
        gone = [file.name for file in before.files if file.fingerprint not in now]
        new = [file.name for file in self.files if file.fingerprint not in then]
        parts = [f"{name} has changed" for name in new if name in gone]
        parts += [f"{name} is no longer read" for name in gone if name not in new]
        parts += [f"{name} is new" for name in new if name not in gone]
        return "; ".join(parts) or "the files are the same, their weights or their order are not"

    def with_checksums_of(self, before: "DataIdentity") -> "DataIdentity":
        """Returns this identity with missing checksums filled in from an earlier one."""
        if self.fingerprint != before.fingerprint or len(self.files) != len(before.files):
            return self
        files = [replace(new, tokens=new.tokens or old.tokens) for new, old in zip(self.files, before.files)]
        return replace(self, files=tuple(files))


def require_same_data(identity: DataIdentity, world: World) -> None:
    """Raises UserError if nodes without a shared file system have different copies of the data."""
    identities: Sequence[DataIdentity] = gather_objects(identity, world.all_ranks)
    for rank, other in enumerate(identities):
        if changes := other.changes_since(identities[0]):
            raise UserError(
                f"rank {rank} reads other data than rank 0 ({changes}); copy the same files to every machine"
            )
