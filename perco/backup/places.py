"""Where backups are: a folder of them, or a file with one (`layout.py`)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Protocol

from perco.backup.layout import FORMAT, FORMAT_FILE, MANIFEST, Manifest
from perco.errors import BackupDamaged, FormatUnknown, StoreFull, StoreLocked, UnsuitableFolder, UsageError

FILE_SUFFIX: Final = ".tar"
"""A path that ends so is that of a file with one backup."""
_DAMAGED: Final = "damaged"  # in a backup of which a check has found that it cannot be restored
_NAME: Final = re.compile(r"\d{8}T\d{6}-(\d+)")
_NEW: Final = ".new"
_BLOCK: Final = 512  # of a tar archive
_SYNC_BYTES: Final = 1 << 20  # between two syncs: while more is being written out, the syncs of the store wait


class Part:
    """A file of a backup, to read."""

    def __init__(self, path: Path, offset: int = 0, size: int | None = None) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._offset = offset
        self.size: int = os.fstat(self._file).st_size if size is None else size

    def read(self, at: int, size: int) -> bytes:
        """Bytes from `at` on; fewer, if the file ends before."""
        return os.pread(self._file, max(0, min(size, self.size - at)), self._offset + at)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Place(Protocol):
    """Finished backups."""

    path: Path

    def names(self) -> list[str]:
        """The names of the backups, the oldest first."""
        ...

    def open(self, name: str, file: str) -> Part:
        """A file of a backup. Raises: BackupDamaged: it is missing."""
        ...


def manifest_of(place: Place, name: str) -> Manifest:
    """Raises: BackupDamaged."""
    with place.open(name, MANIFEST) as part:
        found = Manifest.unpack(f"{place.path}, backup {name}", part.read(0, part.size))
    if found.name != name:
        raise BackupDamaged(str(place.path), f"backup {name} says that it is {found.name}")
    return found


def chain_of(place: Place, name: str) -> list[Manifest]:
    """A backup and all those that it needs, the full one first (B2). Raises: BackupDamaged."""
    chain = [manifest_of(place, name)]
    while chain[-1].base:
        if chain[-1].base in {each.name for each in chain}:
            raise BackupDamaged(str(place.path), f"backup {chain[-1].base} is its own base")
        chain.append(manifest_of(place, chain[-1].base))
    return chain[::-1]


class Folder:
    """A folder of backups."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = (path / FORMAT_FILE).read_text().strip()
        except OSError as error:
            wrong = "there is no such folder" if not path.exists() else f"it has no file {FORMAT_FILE}"
            raise UsageError(
                f"{path} is not a folder of backups, as `perco backup STORE FOLDER` makes: {wrong}"
            ) from error
        if found != FORMAT:
            raise FormatUnknown(str(path), repr(found), repr(FORMAT))

    def names(self) -> list[str]:
        found = ((_NAME.fullmatch(entry), entry) for entry in os.listdir(self.path))
        return [name for _, name in sorted((int(match[1]), name) for match, name in found if match)]

    def open(self, name: str, file: str) -> Part:
        path = self.path / name / file
        try:
            return Part(path)
        except OSError as error:
            raise BackupDamaged(str(path), error.strerror or str(error)) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from adding and removing backups. Raises: StoreLocked."""
        lock = os.open(self.path / FORMAT_FILE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreLocked(
                    str(self.path), None, "another process that takes or removes a backup", "Wait until it has ended."
                ) from error
            for left in self.path.glob(f"*{_NEW}"):
                shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            os.close(lock)

    def mark(self, name: str, why: str) -> None:
        """Note that a backup cannot be restored, or, with "", that it can. No later backup is based on it. Raises:
        OSError."""
        mark = self.path / name / _DAMAGED
        if why:
            mark.write_text(f"{why}\n")
        else:
            mark.unlink(missing_ok=True)

    def mark_of(self, name: str) -> str:
        """Why a backup cannot be restored, if that was found out; else ""."""
        try:
            return (self.path / name / _DAMAGED).read_text().strip()
        except OSError:
            return ""

    def next_name(self, taken: float) -> str:
        number = max([int(_NAME.fullmatch(name)[1]) for name in self.names()], default=0) + 1  # type: ignore[index]
        return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(taken))}-{number}"

    def remove(self, name: str) -> None:
        """Remove a backup; none that stays may need it. It loses its name first, so none is ever left in part."""
        gone = self.path / f"{name}{_NEW}"
        os.rename(self.path / name, gone)
        sync_folder(self.path)
        shutil.rmtree(gone)


class File:
    """A file with one backup."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._members: dict[str, tarfile.TarInfo] = {}
        try:
            with tarfile.open(path, "r:") as archive:
                self._members = {member.name: member for member in archive.getmembers() if member.isfile()}
        except (OSError, tarfile.TarError) as error:
            raise UsageError(f"{path} is not a backup in a file: {error}") from error
        if FORMAT_FILE not in self._members:
            raise UsageError(f"{path} is not a backup in a file: it has no {FORMAT_FILE}")

    def names(self) -> list[str]:
        return [name.partition("/")[0] for name in self._members if name.endswith(f"/{MANIFEST}")]

    def open(self, name: str, file: str) -> Part:
        found = self._members.get(f"{name}/{file}")
        if found is None:
            raise BackupDamaged(str(self.path), f"{name}/{file} is missing")
        return Part(self.path, found.offset_data, found.size)


def absolute(path: str) -> Path:
    """A path as the user gave it, made absolute."""
    return Path(path).expanduser().absolute()


def open_place(path: str) -> Place:
    """The backups at a path. Raises: UsageError, FormatUnknown."""
    where = absolute(path)
    if not where.exists():
        raise UsageError(f"there is no backup at {where}")
    return File(where) if where.is_file() else Folder(where)


def make_folder(path: Path) -> Folder:
    """The folder of backups at a path, made if there is nothing.

    Raises: UsageError, UnsuitableFolder, FormatUnknown.
    """
    try:
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            path.mkdir(parents=True, exist_ok=True)
            (path / f"{FORMAT_FILE}{_NEW}").write_text(f"{FORMAT}\n")
            os.replace(path / f"{FORMAT_FILE}{_NEW}", path / FORMAT_FILE)
            sync_folder(path)
    except OSError as error:
        raise UnsuitableFolder(str(path), error.strerror or str(error)) from error
    if path.is_file():
        raise UsageError(f"{path} is a file; a backup in a file has a name that ends with {FILE_SUFFIX}")
    return Folder(path)


class Writer:
    """A file of a backup that is being written, and synced now and then. `size`: bytes so far."""

    size: int

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path
        self.size = self._unsynced = 0

    def write(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self.size += len(data)
            self._unsynced += len(data)
            if self._unsynced >= _SYNC_BYTES:
                self.sync()
        except OSError as error:
            raise unwritable(self._path, error) from error

    def sync(self) -> None:
        self._file.flush()
        os.fdatasync(self._file.fileno())
        self._unsynced = 0


class FolderMaking:
    """A backup that is being written into a folder."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self._path = folder.path / f"{name}{_NEW}"
        try:
            self._path.mkdir()
        except OSError as error:
            raise unwritable(self._path, error) from error

    @contextmanager
    def file(self, name: str) -> Iterator[Writer]:
        """A new file of the backup; one at a time."""
        path = self._path / name
        try:
            with open(path, "xb", buffering=1 << 20) as file:
                writer = Writer(file, path)
                yield writer
                writer.sync()
        except OSError as error:
            raise unwritable(path, error) from error

    def finish(self) -> None:
        """Give the backup its name: from now on, it is there."""
        sync_folder(self._path)
        os.rename(self._path, self._folder.path / self._name)
        sync_folder(self._folder.path)

    def abandon(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


class FileMaking:
    """A backup that is being written into a file."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._making = path.with_name(f"{path.name}{_NEW}")
        if path.exists():
            raise UsageError(f"{path} exists, and a file holds one backup: give another name, or a folder")
        try:
            self._file = open(self._making, "wb", buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise unwritable(self._making, error) from error
        self._put(FORMAT_FILE, f"{FORMAT}\n".encode())

    def _put(self, name: str, data: bytes) -> None:
        with self._member(name) as writer:
            writer.write(data)

    @contextmanager
    def file(self, name: str) -> Iterator[Writer]:
        with self._member(f"{self._name}/{name}") as writer:
            yield writer

    @contextmanager
    def _member(self, name: str) -> Iterator[Writer]:
        """A member of the archive. Its head, which has the size, is written last."""
        try:
            at = self._file.tell()
            self._file.write(bytes(_BLOCK))
            writer = Writer(self._file, self._making)
            yield writer
            self._file.write(bytes(-writer.size % _BLOCK))
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = writer.size, int(time.time()), 0o644
            end = self._file.tell()
            self._file.seek(at)
            self._file.write(info.tobuf(tarfile.GNU_FORMAT))
            self._file.seek(end)
        except OSError as error:
            raise unwritable(self._making, error) from error

    def finish(self) -> None:
        try:
            self._file.write(bytes(2 * _BLOCK))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.link(self._making, self._path)  # unlike a rename, this replaces no file
            self._making.unlink()
            sync_folder(self._path.parent)
        except OSError as error:
            raise unwritable(self._path, error) from error

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._making.unlink(missing_ok=True)


Making = FolderMaking | FileMaking


def unwritable(path: Path, error: OSError) -> Exception:
    """The error to raise if a file cannot be written to."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return StoreFull(str(path), error.strerror or str(error))
    return UnsuitableFolder(str(path), error.strerror or str(error))


def sync_folder(path: Path) -> None:
    """Make what was done in a folder durable. Raises: OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
