"""Which data a run reads, in few enough words to be kept in its checkpoints and compared when it goes on."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pentatron.data.indexed import pair_paths, read_sidecar
from pentatron.errors import UserError
from pentatron.parallel.collectives import gather_objects
from pentatron.parallel.encoding import sendable
from pentatron.parallel.world import World
from pentatron.settings.data_paths import Blend


@sendable
@dataclass(frozen=True)
class FileIdentity:
    """One pair: its index, and the size of the tokens it describes, which may be too many to read before every start.

    `tokens`: the checksum of their checksums, where a sidecar has those.
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
        with index.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        sidecar = read_sidecar(prefix)
        known = None if sidecar is None else f"{sidecar.sums_crc32:08x}"
        return cls(prefix, digest, binary.stat().st_size, known)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "FileIdentity":
        """Raises TypeError for what is none."""
        found = cls(**saved)
        kinds = ((found.name, str), (found.index, str), (found.bytes, int), (found.tokens or "", str))
        if not all(isinstance(value, kind) for value, kind in kinds):
            raise TypeError(f"{found!r:.100}")
        return found

    @property
    def fingerprint(self) -> str:
        return f"{self.index} {self.bytes}" if self.index else ""


@sendable
@dataclass(frozen=True)
class DataIdentity:
    """The fingerprint of all that is read, and of which files it is made, if of any."""

    fingerprint: str
    files: tuple[FileIdentity, ...] = ()

    @classmethod
    def of_blends(cls, train: Blend, valid: Blend | None) -> "DataIdentity":
        """Of one corpus that of its files; of several, of all of them and their weights."""
        blends = [blend for blend in (train, valid) if blend is not None]
        read = {prefix: FileIdentity.read(prefix) for blend in blends for prefix in blend.prefixes}
        files = tuple(read.values())
        if train.weights is None and len(train.prefixes) == 1 and valid == train:
            return cls(files[0].fingerprint, files)
        named = [
            [list(blend.weights or ()), [read[prefix].fingerprint for prefix in blend.prefixes]]
            for blend in blends
        ]
        return cls(f"blend {hashlib.sha256(json.dumps(named).encode()).hexdigest()}", files)

    @classmethod
    def from_json(cls, fingerprint: str, files: Sequence[Mapping[str, Any]]) -> "DataIdentity":
        try:
            return cls(fingerprint, tuple(map(FileIdentity.from_json, files)))
        except TypeError as error:
            raise UserError(
                f"what the checkpoint says of its data cannot be read ({error}); go on from another step, or take the weights alone with "
                f"--finetune"
            ) from None

    def files_as_json(self) -> list[dict[str, Any]]:
        return [asdict(file) for file in self.files]

    def changes_since(self, before: "DataIdentity") -> str:
        """What is not as it was, in words; empty where the samples are the same."""
        if self.fingerprint != before.fingerprint:
            return self._other_files(before)
        # A corpus that has moved is the same; a checksum that only one of them knows says nothing.
        return "; ".join(
            f"{now.name}.bin holds other tokens: the checksum of its checksums was {then.tokens}, is {now.tokens}"
            for then, now in zip(before.files, self.files)
            if None not in (then.tokens, now.tokens) and then.tokens != now.tokens
        )

    def _other_files(self, before: "DataIdentity") -> str:
        if not before.files or not self.files:
            return f"its fingerprint was '{before.fingerprint}', is '{self.fingerprint}'"
        then, now = ({file.fingerprint for file in identity.files} for identity in (before, self))
        gone = [file.name for file in before.files if file.fingerprint not in now]
        new = [file.name for file in self.files if file.fingerprint not in then]
        if not gone and not new:
            return "the files are the same, their weights or their order are not"
        both = [name for name in new if name in gone]
        parts = [f"{name} has changed" for name in both]
        parts += [f"{name} is no longer read" for name in gone if name not in both]
        parts += [f"{name} is new" for name in new if name not in both]
        return "; ".join(parts)

    def knowing(self, before: "DataIdentity") -> "DataIdentity":
        """The same data with the checksums that an earlier run knew, where a sidecar has been lost since."""
        if self.fingerprint != before.fingerprint or len(self.files) != len(before.files):
            return self
        files = (replace(n, tokens=n.tokens or t.tokens) for n, t in zip(self.files, before.files))
        return replace(self, files=tuple(files))


def require_same_data(identity: DataIdentity, world: World) -> None:
    """Machines without a shared file system may hold different copies: ranks would train on different samples, unseen."""
    everyone: Sequence[DataIdentity] = gather_objects(identity, world.everyone)
    for rank, other in enumerate(everyone):
        if changes := other.changes_since(everyone[0]):
            raise UserError(
                f"rank {rank} reads other data than rank 0 ({changes}); copy the same files to every machine"
            )
