"""The folder of an embedded store: its owner, its format, its tablets.

    web/
      perco-format        the format's version; a store of any other version is refused (FormatUnknown)
      owner               locked (flock) by the owner while it has the store open; names the process and its term
      socket              the owner's, while it serves other processes of the same user
      identity            the store's id, by which a copy of the folder is recognized (`identity.py`)
      closed              exists while no process has the store open, if the last one closed it cleanly
      unsynced            exists until a store with durability="process" is closed cleanly; holds the id of the boot
      tablets/NAME-N/     one LMDB environment per tablet; NAME-N.new: unfinished; NAME-N.next: replaces NAME-N

P6  A compaction writes a tablet's new files to NAME-N.new, which is renamed to NAME-N.next when all of them are on
    disk. From that moment, the new files are valid, and NAME-N is not: it is removed, and NAME-N.next gets its name. If
    the process is stopped at any point, the valid files, old or new, are complete; the next owner removes the others.

A folder has one writing process at a time; others may read beside it. The kernel releases the owner's lock only when
the owner has ended, however it ended, so the next owner can safely take over (O1).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import sys
import time
import urllib.parse
import warnings
from collections.abc import Callable
from pathlib import Path

from perco.errors import (
    FormatUnknown,
    NeedsCheck,
    PercoWarning,
    StoreFull,
    StoreLocked,
    UnsuitableFolder,
    UsageError,
)
from perco.storage.identity import identify, identity_of, mark_closed, must_be_whole, put_identity

FORMAT = "perco 1"
_ADDRESS = re.compile(r"(^|/)(unix|tcp|tls|postgresql|bigtable):/")  # as in the path that an address makes
_PORT = re.compile(r"^[^:]+:[0-9]+$")  # a name like this was meant as a server's address
_FORMAT_FILE = "perco-format"
_OWNER_FILE = "owner"
_OWNER_BYTES = 1024
_UNSYNCED_FILE = "unsynced"
_TABLETS = "tablets"
_LOADS = "loads"
_NEW = ".new"  # unfinished: never opened as a tablet
_NEXT = ".next"  # whole, and replaces the folder without the suffix (P6)
_GLANCES_MAX, _GLANCE_S = 50, 0.002

# File systems on which flock and shared maps do not work between hosts.
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "9p", "fuse.sshfs", "lustre", "gfs2"}
VOLATILE = {"tmpfs", "ramfs"}

# Folders this process has open: LMDB forbids opening an environment twice in one process.
_open_here: set[Path] = set()


class Folder:
    """An open folder. Use `Folder.claim` to own it, `Folder.beside` to read beside the owner."""

    path: Path
    readonly: bool
    owner_alive: bool
    id = ""

    def __init__(self, path: Path, lock: int, *, readonly: bool, owner_alive: bool) -> None:
        self.path, self.readonly, self.owner_alive = path, readonly, owner_alive
        self._lock = lock
        self._unsynced = False

    @classmethod
    def claim(cls, path: Path, *, durable: bool, accept_loss: bool, shared: bool = False) -> Folder:
        """Become the folder's owner; make the folder if there is none. `shared`: this process will serve others, which
        may already be waiting for it.

        Raises: StoreLocked, FormatUnknown, UnsuitableFolder, NeedsCheck, CopiedWhileOpen, StoreFull, UsageError.
        """
        path = path.absolute()
        _refuse_other_encodings(path)
        _check_file_system(path)
        _refuse_if_open_here(path)
        try:
            made = [new for new in (path, *path.parents) if not new.exists()]
            path.mkdir(parents=True, exist_ok=True)
            known = _read_format(path)
            # Other users may read this file, so that those who may read the store can test its lock.
            lock = os.open(path / _OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unusable(path, error) from error
        if not _locked_for_us(lock):
            os.close(lock)
            raise _locked(path)
        try:
            _open_here.add(_identity(path))
            # Written in place, with a fixed length: taking over a store needs no space on a full disk.
            command = " ".join(sys.argv)[:200].replace("\n", " ")
            lines = str(os.getpid()), _boot_id(), secrets.token_hex(8), command, "shared" if shared else "alone", ""
            who = "\n".join(lines)
            record = who.encode(errors="replace")
            os.pwrite(lock, record.ljust(_OWNER_BYTES, b"\n"), 0)
            if not known:  # new, or the process that made it was stopped before it had synced it
                for new in made or [path]:
                    _sync_entry(new)
                _write_durably(path / _FORMAT_FILE, FORMAT + "\n")
            folder = cls(path, lock, readonly=False, owner_alive=False)
            if not accept_loss:
                must_be_whole(path)  # I1: before anything in it is changed
            for newer in path.glob(f"{_TABLETS}/*{_NEXT}"):  # P6: the last owner was stopped
                _settle(newer)
            shutil.rmtree(path / _LOADS, ignore_errors=True)  # P7: of bulk loads that the last owner knew
            for unfinished in path.glob(f"{_TABLETS}/*{_NEW}"):  # may be as large as a tablet: free its space
                shutil.rmtree(unfinished, ignore_errors=True)
            folder._check_unsynced(durable=durable, accept_loss=accept_loss)
            folder.id = identify(path)
        except BaseException as error:
            _open_here.discard(_identity(path))
            os.close(lock)
            if isinstance(error, OSError):
                raise _unusable(path, error) from error
            raise
        return folder

    @classmethod
    def beside(cls, path: Path, *, accept_loss: bool = False) -> Folder:
        """Open the folder for reading, beside its owner if it has one.

        Raises: FormatUnknown, UnsuitableFolder, CopiedWhileOpen, UsageError.
        """
        path = path.absolute()
        _refuse_other_encodings(path)
        if not path.is_dir():
            raise UnsuitableFolder(
                str(path),
                "it is a file"
                if path.exists()
                else "this takes a store's folder, and not an address: run it on the store's host"
                if _ADDRESS.search(str(path))
                else "there is no such folder; a store is made by the program that opens it with its schema"
                + ("; where one is served, write tcp://HOST:PORT" if _PORT.search(path.name) else ""),
            )
        _refuse_remote(path)
        _refuse_if_open_here(path)
        try:
            if not _read_format(path):
                raise FormatUnknown(str(path), "the folder is empty", "")
            lock = os.open(path / _OWNER_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UnsuitableFolder(
                str(path),
                f"{error.strerror or error}. To read a store, a process needs read permission on all of its files.",
            ) from error
        try:
            # A shared lock keeps a new owner out while we read without LMDB's reader table.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            alive = False
        except BlockingIOError:
            alive = True
        writable = os.access(path / _TABLETS, os.W_OK)
        if writable and not alive:
            fcntl.flock(lock, fcntl.LOCK_UN)
        if alive and not writable:
            os.close(lock)
            raise UnsuitableFolder(
                str(path),
                f"process {owner(path)[0]} is writing to it, and reading alongside a writer needs write permission "
                "on LMDB's lock files. Run as the same user, or wait until it has ended.",
            )
        try:
            id = identity_of(path).id if alive or accept_loss else must_be_whole(path)
        except BaseException:
            os.close(lock)
            raise
        _open_here.add(_identity(path))
        folder = cls(path, lock, readonly=True, owner_alive=alive)
        folder.id = id
        folder.without_lock = not writable
        return folder

    without_lock = False  # a read-only folder without owner: LMDB's reader table is not writable, and not needed

    def term(self) -> bytes:
        """The term of the folder's current or last owner. Every claim begins a new term, before a tablet is opened."""
        return os.pread(self._lock, _OWNER_BYTES, 0)

    def owned_by_another(self) -> bool:
        """Whether a writing process has the folder open at this moment (for a reader beside it)."""
        probe = os.open(self.path / _OWNER_FILE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(probe)
        return False

    def _check_unsynced(self, *, durable: bool, accept_loss: bool) -> None:
        marker = self.path / _UNSYNCED_FILE
        if marker.exists() and marker.read_text().strip() != _boot_id() and not accept_loss:
            raise NeedsCheck(str(self.path))
        if durable:
            self._sync_tablets_and_unmark()
        else:
            _write_durably(marker, _boot_id() + "\n")
            self._unsynced = True

    def _sync_tablets_and_unmark(self) -> None:
        """Sync all tablets, then remove the mark (S2); the last owner may have been killed."""
        marker = self.path / _UNSYNCED_FILE
        if marker.exists():
            for data in self.path.glob(f"{_TABLETS}/*/data.mdb"):
                with open(data, "rb+") as file:
                    os.fsync(file.fileno())
            marker.unlink()
            _sync_folder(self.path)

    def lock_file(self) -> int:
        """The descriptor of the owner's lock. A process that inherits it keeps the folder owned while it lives."""
        return self._lock

    def make_tablet_folder(self, table: str, number: int, fill: Callable[[Path], None] = lambda path: None) -> Path:
        """The path of a tablet's folder. If there is no folder, it is made and filled under another name, and renamed
        when all of it is on disk, so that a power loss leaves all of it or none (S2). `fill` syncs the files that it
        makes.
        """
        path = tablet_path(self.path, table, number)
        if not self.readonly:
            if not path.exists():
                making = self.begin_tablet(table, number)
                try:
                    fill(making)
                except OSError as error:
                    raise _unusable(path, error) from error
                self.place_tablet(table, number)
            else:
                self._sync_tablets_folder()
        return path

    def begin_tablet(self, table: str, number: int) -> Path:
        """Make an empty folder for a new tablet. First remove one that was begun, but never recorded (P4)."""
        path = tablet_path(self.path, table, number)
        making = path.with_name(path.name + _NEW)
        self.remove_tablet(table, number)
        try:
            making.mkdir(parents=True)
        except OSError as error:
            raise _unusable(path, error) from error
        return making

    def place_tablet(self, table: str, number: int) -> Path:
        """Give the folder of a new tablet, whose files are all on disk, its final name, durably (S2)."""
        path = tablet_path(self.path, table, number)
        making = path.with_name(path.name + _NEW)
        try:
            _sync_folder(making)
            making.rename(path)
        except OSError as error:
            raise _unusable(path, error) from error
        self._sync_tablets_folder()
        return path

    def remove_tablet(self, table: str, number: int) -> None:
        """Remove the folder of a tablet that is not recorded, even if the folder already has its final name."""
        path = tablet_path(self.path, table, number)
        for left in (path.with_name(path.name + _NEW), path):
            shutil.rmtree(left, ignore_errors=True)

    def tablet_paths(self) -> list[Path]:
        """The folders of all tablets, except unfinished and replaced ones."""
        there = {path for path in (self.path / _TABLETS).glob("*") if path.is_dir() and path.suffix != _NEW}
        return [path for path in there if path.suffix == _NEXT or path.with_name(path.name + _NEXT) not in there]

    # ------------------------------------------------------------ bulk loads

    def begin_load(self, id: str, token: str) -> Path:
        """Make a folder for the files of a bulk load, with a file `token` (P7)."""
        path = self.path / _LOADS / id
        try:
            path.mkdir(parents=True)
            (path / "token").write_text(token)
        except OSError as error:
            raise _unusable(path, error) from error
        return path

    def place_loaded(self, file: Path, table: str, number: int) -> Path:
        """Make a file of a bulk load, which is complete and on disk, the file of a new tablet (S2).

        Raises: UsageError if there is no such file; StoreFull, UnsuitableFolder.
        """
        if not file.exists():
            raise UsageError(f"a file of the bulk load is missing: {file.parent.name!r} has not been finished")
        making = self.begin_tablet(table, number)
        try:
            file.rename(making / file.name)
        except OSError as error:
            raise _unusable(making, error) from error
        return self.place_tablet(table, number)

    def end_load(self, id: str) -> None:
        """Remove the files of a bulk load that are left."""
        shutil.rmtree(self.path / _LOADS / id, ignore_errors=True)

    # ------------------------------------------------------------ replacing a tablet's files

    def begin_next(self, table: str, number: int) -> Path:
        """Make an empty folder for a tablet's new files (P6)."""
        making = self._own(table, number, _NEW)
        try:
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
        except OSError as error:
            raise _unusable(making, error) from error
        return making

    def place_next(self, table: str, number: int) -> Path:
        """Switch to the new files, which are complete and on disk: now they are valid, and the old ones are not (P6,
        S2). If this raises, ask `has_next` which files are valid."""
        making, placed = self._own(table, number, _NEW), self._own(table, number, _NEXT)
        try:
            _sync_folder(making)
            making.rename(placed)
            _sync_folder(placed.parent)
        except OSError as error:
            raise _unusable(making, error) from error
        return placed

    def has_next(self, table: str, number: int) -> bool:
        """Whether there are new files that are valid; the old ones may still be there."""
        return self._own(table, number, _NEXT).exists()

    def drop_next(self, table: str, number: int) -> None:
        """Remove the unfinished files."""
        shutil.rmtree(self._own(table, number, _NEW), ignore_errors=True)

    def settle_next(self, table: str, number: int) -> Path:
        """Remove the old files of a tablet, and give the new ones their name. If this is interrupted, the new files
        stay valid, and the next owner completes the step."""
        path = self._own(table, number)
        try:
            _settle(path.with_name(path.name + _NEXT))
        except OSError as error:
            raise _unusable(path, error) from error
        return path

    def _own(self, table: str, number: int, suffix: str = "") -> Path:
        return self.path / _TABLETS / f"{_name_of(table, number)}{suffix}"

    def _sync_tablets_folder(self) -> None:
        try:
            _sync_folder(self.path / _TABLETS)
            _sync_folder(self.path)
        except OSError as error:
            raise _unusable(self.path, error) from error

    def forget(self) -> None:
        """In a forked child: drop its copy of the lock, which would otherwise outlive the parent's."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            _open_here.discard(_identity(self.path))

    def release(self, *, clean: bool) -> None:
        """Release the folder; `clean` says that its tablets have been closed after their last write."""
        if self._lock < 0:
            return
        if clean and self._unsynced:
            self._sync_tablets_and_unmark()
        if clean and not self.readonly:
            with contextlib.suppress(OSError):  # on a full disk; a plain copy of the folder is then refused
                mark_closed(self.path, self.tablet_paths())
        os.close(self._lock)
        self._lock = -1
        _open_here.discard(_identity(self.path))


def tablet_path(folder: Path, table: str, number: int) -> Path:
    """A tablet's folder: the one with the newer files, if there are two (P6)."""
    path = folder / _TABLETS / _name_of(table, number)
    newer = path.with_name(path.name + _NEXT)
    return newer if newer.exists() else path


def _name_of(table: str, number: int) -> str:
    """The name of a tablet's folder; quoted, because a table's name may hold any character."""
    return f"{urllib.parse.quote(table, safe='')}-{number}"


def _settle(newer: Path) -> None:
    path = newer.with_name(newer.name.removesuffix(_NEXT))
    shutil.rmtree(path, ignore_errors=True)
    newer.rename(path)
    _sync_folder(path.parent)


def owner(path: Path) -> tuple[int | None, str]:
    """(pid, command) of the process that owns or last owned the folder."""
    try:
        lines = (path / _OWNER_FILE).read_text(errors="replace").splitlines()
    except OSError:
        return None, ""
    pid = int(lines[0]) if lines and lines[0].isdigit() else None
    return pid, lines[3] if len(lines) > 3 else ""


def make_store(path: Path) -> None:
    """Make an empty folder a store, whose tablets are put there next. Raises: OSError."""
    (path / _TABLETS).mkdir()
    put_identity(path)
    _write_durably(path / _FORMAT_FILE, FORMAT + "\n")


def shared_by_owner(path: Path) -> bool:
    """Whether the process that owns, or last owned, the folder serves others over a socket in it."""
    try:
        lines = (path / _OWNER_FILE).read_text(errors="replace").splitlines()
    except OSError:
        return False
    return len(lines) > 4 and lines[4] == "shared"


def doubt_of(path: Path) -> str:
    """Whether a store's newest writes are in doubt: "", no; "since this boot": they may be in memory only, and are safe
    as long as the machine runs (S2); "before a restart": they may be lost or torn, and opening raises NeedsCheck;
    "copied while open": opening raises CopiedWhileOpen (I1)."""
    if identity_of(path).is_torn:
        return "copied while open"
    try:
        boot = (path / _UNSYNCED_FILE).read_text().strip()
    except OSError:
        return ""
    return "since this boot" if boot == _boot_id() else "before a restart"


def accept(path: Path) -> None:
    """Accept a store as it is, after a check: sync its tablets, and remove the "unsynced" mark (S2). A copy becomes a
    store of its own (I1).

    Raises: StoreLocked, FormatUnknown, UnsuitableFolder, UsageError.
    """
    Folder.claim(path, durable=True, accept_loss=True).release(clean=True)


def _identity(path: Path) -> Path:
    """The one name of a folder, whatever links lead to it."""
    return Path(os.path.realpath(path))


def _refuse_other_encodings(path: Path) -> None:
    """Refuse a path that is not UTF-8: LMDB accepts no other path, and error messages are text."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise UsageError(
            f"{shown}: the path of a store must be UTF-8, and this one is not; rename the folder"
        ) from error


def _refuse_if_open_here(path: Path) -> None:
    if _identity(path) in _open_here:
        raise UsageError(f"{path} is already open in this process; share that Database instead of opening it again")


def _locked_for_us(lock: int) -> bool:
    """Try to take the owner's lock. A process that only checks for an owner shares the lock for a moment: wait for
    that moment to pass."""
    for _ in range(_GLANCES_MAX):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # another process owns the folder
        fcntl.flock(lock, fcntl.LOCK_UN)
        time.sleep(_GLANCE_S)
    return False


def _locked(path: Path) -> StoreLocked:
    pid, command = owner(path)
    return StoreLocked(str(path), pid, command)


def _unusable(path: Path, error: OSError) -> StoreFull | UnsuitableFolder:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(str(path), error.strerror or str(error))
    if path.exists() and not path.is_dir():
        return UnsuitableFolder(str(path), "it is a file, and a store is a folder")
    return UnsuitableFolder(
        str(path),
        f"{error.strerror or error}. perco needs a folder that it may write to; "
        "to read a store without writing use perco.open(path, schema, readonly=True).",
    )


def is_store(path: Path) -> bool:
    """Whether there is a store in a folder. Raises: FormatUnknown, UnsuitableFolder."""
    try:
        return _read_format(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _read_format(path: Path) -> bool:
    """Whether the folder holds a store of our format; False: it is empty, and may become one."""
    try:
        found = (path / _FORMAT_FILE).read_text(errors="replace").strip()
    except FileNotFoundError:
        found = ""
    if not found and not (path / _TABLETS).exists():  # new, or the format was never synced
        strange = sorted(set(os.listdir(path)) - {_OWNER_FILE, _FORMAT_FILE}) if path.is_dir() else []
        if strange:
            inside = next((path / name for name in strange if os.path.isfile(path / name / _FORMAT_FILE)), None)
            meant = f". Did you mean {inside}?" if inside is not None else ""
            raise FormatUnknown(str(path), f"it holds other files ({', '.join(strange[:3])}){meant}", "")
        return False
    if found != FORMAT:
        raise FormatUnknown(str(path), f"format {found!r}", FORMAT)
    return True


def _refuse_remote(path: Path) -> str:
    kind = file_system(path)
    if kind in REMOTE:
        raise UnsuitableFolder(
            str(path),
            f"it lies on {kind}, where neither locks nor shared memory maps can be trusted between hosts. "
            "Put the store on a local disk.",
        )
    return kind


def _check_file_system(path: Path) -> None:
    kind = _refuse_remote(path)
    if kind in VOLATILE:
        warnings.warn(f"{path} lies on {kind}: files there do not survive power loss", PercoWarning, stacklevel=3)


def file_system(path: Path) -> str:
    """The type of the file system on which `path` is, or would be; "" if that is unknown."""
    real = os.fsencode(os.path.realpath(path))
    best, kind = b"", ""
    for line in _mount_table().splitlines():
        left, _, right = line.partition(b" - ")
        point = re.sub(rb"\\([0-7]{3})", _octal, left.split(b" ")[4])
        inside = real == point or real.startswith(point.rstrip(b"/") + b"/")
        if inside and len(point) >= len(best):  # a later mount on the same point hides the earlier one
            best, kind = point, right.split(b" ")[0].decode()
    return kind


def _mount_table() -> bytes:
    with contextlib.suppress(OSError):
        return Path("/proc/self/mountinfo").read_bytes()
    return b""


def _octal(escaped: re.Match[bytes]) -> bytes:
    return bytes([int(escaped[1], 8)])


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _sync_entry(path: Path) -> None:
    """Sync the directory entry of a file or folder. If this process may enter the directory, but not read it, that is
    impossible, and skipped."""
    with contextlib.suppress(PermissionError):
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
