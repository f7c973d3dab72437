"""How backups lie in a folder, or in one file. Pure, except for `Backups`, which reads and writes.

    backups/
      perco-backups           the version of this format; locked (flock) while a backup is taken or removed
      20260301T120000-1/      a backup: its time, and how many backups there were before it in this folder, plus one
        manifest.json         what it is, and the digests of its other files
        docs-0.index          of tablet 0 of table `docs`: its pages in the next file, and pages no longer used
        docs-0.pages          the pages, one after the other
      20260301T130000-2.new   unfinished: never read, and removed by the next backup

B2  A backup with a *base* has only the pages that the base and the backups below it do not have, so it needs all of
    them. A backup without a base is *full*. It gets its name when all of its files are on disk.
B3  A page is recognized by its number and the digest of its bytes. A page that a backup no longer uses is named, so
    that a later backup stores it again, even with the same bytes.

A backup in one file is a tar archive of the same files. It is always full.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any, Final

from perco.errors import BackupDamaged

FORMAT: Final = "perco backups 1"
FORMAT_FILE: Final = "perco-backups"
MANIFEST: Final = "manifest.json"
INDEX: Final = ".index"
PAGES: Final = ".pages"
DIGEST_BYTES: Final = 16
_HEAD: Final = struct.Struct("<8sIQQQ")  # magic, bytes of a page, pages in all, pages here, pages no longer used
_MAGIC: Final = b"percoidx"
_RECORD: Final = struct.Struct(f"<QI{DIGEST_BYTES}s")  # number of the first page, how many pages, their digest
_NUMBER: Final = struct.Struct("<Q")


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class TabletFiles:
    """A tablet in a backup.

    Attributes:
        table, number: which tablet.
        name: of its two files, without suffix.
        page: bytes of a page.
        pages: how many of them it uses.
        stored: how many of them are in this backup.
        size: bytes of both files.
        index: the digest of the index, in hex.
        state: the digest of all pages that the tablet uses, in hex: equal files have equal states.
    """

    table: str
    number: int
    name: str
    page: int
    pages: int
    stored: int
    size: int
    index: str
    state: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a backup.

    Attributes:
        name: its name.
        base: the name of the backup below it; "": it is full.
        store: the identity of the store.
        path: where the store was.
        at: every transaction that committed at or before this timestamp is in the backup as a whole, and a snapshot at
            it is the same in the store and after a restore.
        last: the last timestamp that had been handed out; the backup also has transactions with timestamps up to it.
        bound: the oracle's durable bound.
        time: when the backup was taken, in seconds since 1970.
        version: of perco.
        tablets: see `TabletFiles`.
    """

    name: str
    base: str
    store: str
    path: str
    at: int
    last: int
    bound: int
    time: float
    version: str
    tablets: tuple[TabletFiles, ...]

    @property
    def size(self) -> int:
        """Bytes of the files of all tablets in this backup."""
        return sum(tablet.size for tablet in self.tablets)

    def pack(self) -> bytes:
        """JSON, with a digest of the rest."""
        told: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        return json.dumps({**told, "digest": _digest_of(told)}, indent=1).encode() + b"\n"

    @classmethod
    def unpack(cls, where: str, data: bytes) -> Manifest:
        """Raises: BackupDamaged."""
        try:
            told = json.loads(data)
            found = told.pop("digest")
            if told.get("format") != FORMAT:
                raise BackupDamaged(where, f"its format is {told.get('format')!r}, and this version reads {FORMAT!r}")
            if found != _digest_of(told):
                raise BackupDamaged(where, "it is not what was written: its digest differs")
            tablets = tuple(TabletFiles(**each) for each in told.pop("tablets"))
            del told["format"]
            return cls(**told, tablets=tablets)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BackupDamaged(where, f"it cannot be read: {error}") from error


def _digest_of(told: dict[str, Any]) -> str:
    return digest(json.dumps(told, sort_keys=True).encode()).hex()


@dataclass(slots=True)
class Index:
    """The pages of a tablet in one backup.

    Attributes:
        page: bytes of a page.
        total: pages of the file, free ones included.
        meta: the meta page.
        stored: for each unit in the file of pages, in order: the number of its first page, how many pages, the digest.
        gone: numbers of pages that begin a unit below this backup, and are not used as such any more.
    """

    page: int
    total: int
    meta: bytes
    stored: list[tuple[int, int, bytes]] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)

    def pack(self) -> bytes:
        head = _HEAD.pack(_MAGIC, self.page, self.total, len(self.stored), len(self.gone))
        parts = [head, self.meta, *(_RECORD.pack(*each) for each in self.stored), *map(_NUMBER.pack, self.gone)]
        return b"".join(parts)

    @classmethod
    def unpack(cls, where: str, data: bytes, wanted: str) -> Index:
        """`wanted`: its digest, in hex. Raises: BackupDamaged."""
        if digest(data).hex() != wanted:
            raise BackupDamaged(where, "it is not what was written: its digest differs")
        magic, page, total, stored, gone = _HEAD.unpack_from(data)
        assert magic == _MAGIC, "its digest is right"
        at = _HEAD.size + page
        end = at + stored * _RECORD.size
        records = list(_RECORD.iter_unpack(data[at:end]))
        numbers = [number for (number,) in _NUMBER.iter_unpack(data[end : end + gone * _NUMBER.size])]
        return cls(page, total, data[_HEAD.size : at], records, numbers)


class Used:
    """The pages that a tablet uses, and their digests: by the number of the first page of each unit."""

    def __init__(self) -> None:
        self._digests = bytearray()

    def grow(self, total: int) -> None:
        """Make room for pages with numbers below `total`."""
        self._digests.extend(bytes(max(0, total * DIGEST_BYTES - len(self._digests))))

    def get(self, number: int) -> bytes | None:
        at = number * DIGEST_BYTES
        found = bytes(self._digests[at : at + DIGEST_BYTES])
        return found if any(found) else None

    def put(self, number: int, digest: bytes) -> None:
        at = number * DIGEST_BYTES
        self._digests[at : at + DIGEST_BYTES] = digest

    def apply(self, index: Index) -> None:
        """Go from the state below a backup to that of the backup."""
        self.grow(index.total)
        for number in index.gone:
            self.put(number, bytes(DIGEST_BYTES))
        for number, _, found in index.stored:
            self.put(number, found)

    def numbers(self) -> Iterator[int]:
        """The numbers of the first pages of all units."""
        none = bytes(DIGEST_BYTES)
        for at in range(0, len(self._digests), DIGEST_BYTES):
            if self._digests[at : at + DIGEST_BYTES] != none:
                yield at // DIGEST_BYTES

    def state(self) -> str:
        """A digest of them all, in hex."""
        return digest(bytes(self._digests).rstrip(b"\0")).hex()
