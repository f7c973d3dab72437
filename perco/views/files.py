"""A sink in a folder: a file for each row.

The hidden folder `.perco` in it has an SQLite file with the version of each row, and files that are being written.

SF1 A delivery notes the versions of its rows, as begun; then it puts the files in place; then it notes that they are
    there. A row is taken if its version is newer than the noted one, or the same and only begun. So after a crash in
    between, the row that is delivered again is written again, and no older one is. A lock on the folder keeps the
    deliveries of several processes apart.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sqlite3
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, Final
from urllib.parse import unquote

from perco.errors import StoreError, UsageError
from perco.schema.codecs import Codec
from perco.schema.schema import Column, Table
from perco.views.compiled import codecs_of, key_of, parts_of
from perco.views.sinking import Delivered

_OWN: Final = ".perco"
_NAME_BYTES_MAX: Final = 255  # of a file, in all usual file systems
_KEYS: Final = frozenset({"text", "int64", "bytes"})
_CONTENTS: Final = frozenset({"text", "bytes", "json"})
_ESCAPED: Final = frozenset('%/\\:*?"<>|')
_EMPTY: Final = "%"  # no text has this name, because the sign is escaped
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS made (named TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rows (
  key BLOB PRIMARY KEY, name TEXT NOT NULL, version INTEGER NOT NULL, gone INTEGER NOT NULL, begun INTEGER NOT NULL
) WITHOUT ROWID;
"""


class Files:
    """A folder with a file for each row, for `Views.sink` with one column: the content of the files. Give each sink a
    folder of its own; other files in it are left alone.

    The name of a file is the key, with the suffix: the text of a TEXT key, the digits of an INT64 key, the hexadecimal
    digits of a BYTES key. Characters that a name cannot have, or should not, are written as in URLs: `a/b` is the file
    `a%2Fb`. The parts of a tuple key but the last are folders. `name_of` and `key_of` convert. A row whose name would
    be longer than 255 bytes is not stored, and so ends on the failed list.

    A file is replaced as a whole: a program that reads it sees the old content or the new one. A delivery that has
    returned survives a power failure. Texts are stored as UTF-8, JSON as text.

    Args:
        path: of the folder, on a disk of this machine. It is made if it does not exist.
        suffix: of all names: ".md".

    Raises: UsageError.
    """

    path: str

    def __init__(self, path: str | PathLike[str], *, suffix: str = "") -> None:
        self.path, self._suffix = os.fspath(path), suffix
        if not isinstance(suffix, str) or _escaped(f"x{suffix}") != f"x{suffix}":
            raise UsageError(f"Files: a suffix is the end of a file's name, like '.md', not {suffix!r}")
        self._lock = threading.Lock()
        self._open: tuple[int, _Folder] | None = None

    def bind(self, table: Table[Any], columns: Sequence[Column[Any, Any]]) -> None:
        """Called by `Views.sink`. Raises: UsageError for a table whose rows are no files."""
        what = f"Files {self.path!r}"
        if len(columns) != 1 or columns[0].codec.name not in _CONTENTS:
            raise UsageError(f"{what}: give the sink one column of TEXT, BYTES or JSON, with the content of the files")
        if not {codec.name for codec in codecs_of(table.key)} <= _KEYS:
            raise UsageError(f"{what}: keys are TEXT, INT64, BYTES or tuples of these, and {table!r} has others")
        self._of: Codec[Any] = table.key
        self._column = columns[0]
        self._named = f"{table.name}.{columns[0].first_name} {table.key.name} {self._suffix}"

    # ------------------------------------------------------------ names

    def name_of(self, key: Any) -> str:
        """The path of a row's file, below the folder. Raises: ValueError if a name would be too long."""
        parts = [_part(codec, part) for codec, part in zip(codecs_of(self._of), parts_of(self._of, key), strict=True)]
        parts[-1] += self._suffix
        for part in parts:
            size = len(part.encode())
            if size > _NAME_BYTES_MAX:
                raise ValueError(f"the name of row {key!r} would have {size} bytes, and {_NAME_BYTES_MAX} are the most")
        return "/".join(parts)

    def key_of(self, name: str) -> Any:
        """The key of the row with this file. Raises: ValueError if `name_of` gives no such path."""
        parts, codecs = name.split("/"), codecs_of(self._of)
        if len(parts) == len(codecs) and parts[-1].endswith(self._suffix):
            parts[-1] = parts[-1][: len(parts[-1]) - len(self._suffix)]
            with contextlib.suppress(ValueError):
                key = key_of(self._of, tuple(map(_from_part, codecs, parts)))
                if self.name_of(key) == name:
                    return key
        raise ValueError(f"{name!r} is not the name of a row's file")

    # ------------------------------------------------------------ a sink

    def deliver(self, rows: list[Delivered]) -> None:
        """Take rows, each if it is newer than the one that is there (V11, SF1).

        Raises: StoreError if the folder cannot be written.
        """
        with self._opened() as folder:
            try:
                given = [(self._of.encode(row.key), self.name_of(row.key), row) for row in rows]
            except ValueError as error:
                raise StoreError(f"the sink {self.path}: {error}") from error
            newest: dict[bytes, tuple[str, Delivered]] = {}
            for key, name, row in given:
                if key not in newest or newest[key][1].version < row.version:
                    newest[key] = name, row
            folder.take({key: (name, row.version, self._content(row)) for key, (name, row) in newest.items()})

    def rows(self) -> Iterator[Delivered]:
        """All rows whose files are there, in the order of their keys."""
        last: bytes | None = None
        while True:
            with self._opened() as folder:
                some = [(key, version, folder.read(name)) for key, name, version in folder.known(last)]
            for key, version, data in some:
                if data is not None:
                    yield Delivered(self._of.decode(key), {self._column.name: self._value(data)}, version)
            if not some:
                return
            last = some[-1][0]

    def count(self) -> int:
        """The number of rows."""
        with self._opened() as folder:
            return folder.count()

    def forget(self, before: int) -> int:
        """Remove what is kept of rows that were gone before a timestamp: see `SqliteTable.forget`."""
        with self._opened() as folder:
            return folder.forget(before)

    def close(self) -> None:
        """Close the folder. The next delivery opens it again."""
        with self._lock:
            if self._open is not None and self._open[0] == os.getpid():
                self._open[1].close()
            self._open = None

    def _content(self, row: Delivered) -> bytes | None:
        if row.values is None:
            return None
        value = row.values[self._column.name]
        if self._column.codec.name == "bytes":
            return bytes(value)
        text: str = value if self._column.codec.name == "text" else json.dumps(value, ensure_ascii=False)
        return text.encode()

    def _value(self, data: bytes) -> Any:
        """The value of a file that may have been changed by others."""
        if self._column.codec.name == "bytes":
            return data
        text = data.decode(errors="replace")
        if self._column.codec.name == "text":
            return text
        try:
            return json.loads(text)
        except ValueError:
            return text

    @contextmanager
    def _opened(self) -> Iterator[_Folder]:
        """The folder, for this thread of this process alone. Raises: StoreError."""
        with self._lock:
            try:
                if self._open is None or self._open[0] != os.getpid():
                    self._open = os.getpid(), _Folder(self.path)
                folder = self._open[1]
                with folder.locked(self._named):
                    yield folder
            except (OSError, sqlite3.Error) as error:
                raise StoreError(f"the sink {self.path}: {error}") from error


class _Folder:
    """The files of a folder, and their versions. Files are opened below the folder, without following links."""

    def __init__(self, path: str) -> None:
        self._path, self._checked = path, False
        os.makedirs(os.path.join(path, _OWN), exist_ok=True)
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._own = os.open(_OWN, _FOLDER, dir_fd=self._root)
            self._db = sqlite3.connect(
                os.path.join(path, _OWN, "versions.db"), isolation_level=None, check_same_thread=False
            )
        except BaseException:
            os.close(self._root)
            raise

    def close(self) -> None:
        self._db.close()
        os.close(self._own)
        os.close(self._root)

    @contextmanager
    def locked(self, named: str) -> Iterator[None]:
        """Keep out other processes, and check that the folder is of this sink. Raises: StoreError."""
        lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666, dir_fd=self._own)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._checked:
                self._check(named)
                self._checked = True
            yield
        finally:
            os.close(lock)

    def _check(self, named: str) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_TABLES)
        found = self._db.execute("SELECT named FROM made").fetchone()
        if found is None:
            self._db.execute("INSERT INTO made VALUES (?)", [named])
            os.fsync(self._own)
            os.fsync(self._root)
            above = os.open(os.path.dirname(os.path.abspath(self._path)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(above)
            finally:
                os.close(above)
        elif found[0] != named:
            raise StoreError(
                f"the sink {self._path}: the folder belongs to another sink, of {found[0]!r}, and this one is of "
                f"{named!r}. Give each a folder of its own, or remove this one and rebuild the sink"
            )

    # ------------------------------------------------------------ deliveries

    def take(self, rows: dict[bytes, tuple[str, int, bytes | None]]) -> None:
        """Take rows, (name, version, content) by key, each if it is newer (SF1)."""
        there = {}
        for key in rows:
            found = self._db.execute("SELECT version, begun FROM rows WHERE key = ?", [key]).fetchone()
            if found is not None:
                there[key] = found
        newer = {}
        for key, row in rows.items():
            version, begun = there.get(key, (-1, False))
            if row[1] > version or (row[1] == version and begun):
                newer[key] = row
        if not newer:
            return
        temporary = {key: self._written(number, row[2]) for number, (key, row) in enumerate(newer.items())}
        self._note(
            "INSERT INTO rows VALUES (?, ?, ?, ?, 1) ON CONFLICT (key) DO UPDATE SET version = excluded.version, "
            "gone = excluded.gone, begun = 1",
            [(key, name, version, content is None) for key, (name, version, content) in newer.items()],
        )
        changed: set[str] = set()
        for key, (name, _, _) in newer.items():
            changed |= self._put(name, temporary[key])
        for folder in sorted(changed):
            with self._inside(folder, make=False) as handle:
                if handle is not None:  # else it has been removed with its last file
                    os.fsync(handle)
        self._note("UPDATE rows SET begun = 0 WHERE key = ?", [(key,) for key in newer])

    def _note(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany(statement, rows)
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def _written(self, number: int, content: bytes | None) -> str | None:
        """Write content to a file of its own, durably, and return its name. A file that a crash left is replaced."""
        if content is None:
            return None
        name = f"new {number}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._own)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o666, dir_fd=self._own), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return name

    def _put(self, name: str, temporary: str | None) -> set[str]:
        """Put a file in place, or remove it. Returns the folders that must be synced."""
        folder, _, last = name.rpartition("/")
        with self._inside(folder, make=temporary is not None) as handle:
            if temporary is not None and handle is not None:
                os.replace(temporary, last, src_dir_fd=self._own, dst_dir_fd=handle)
            elif handle is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(last, dir_fd=handle)
        changed = {folder}
        while folder:  # a folder that was made, or is empty now, changes the one above it
            above, _, last = folder.rpartition("/")
            if temporary is None:
                self._remove_empty(above, last)
            changed.add(above)
            folder = above
        return changed

    def _remove_empty(self, above: str, last: str) -> None:
        with self._inside(above, make=False) as handle:
            if handle is None:
                return
            try:
                os.rmdir(last, dir_fd=handle)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    raise

    @contextmanager
    def _inside(self, folder: str, *, make: bool) -> Iterator[int | None]:
        """A folder below this one, opened; None: there is none. Raises: OSError for a link."""
        handle = os.dup(self._root)
        try:
            for part in folder.split("/") if folder else ():
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=handle)
                try:
                    below = os.open(part, _FOLDER, dir_fd=handle)
                except FileNotFoundError:
                    if make:
                        raise
                    yield None
                    return
                os.close(handle)
                handle = below
            yield handle
        finally:
            os.close(handle)

    # ------------------------------------------------------------ reads

    def known(self, after: bytes | None) -> list[tuple[bytes, str, int]]:
        """(key, name, version) of some rows that are not gone, those after a key, in the order of their keys."""
        where = "SELECT key, name, version FROM rows WHERE NOT gone AND (? IS NULL OR key > ?) ORDER BY key LIMIT 100"
        return self._db.execute(where, [after, after]).fetchall()

    def count(self) -> int:
        found: int = self._db.execute("SELECT count(*) FROM rows WHERE NOT gone").fetchone()[0]
        return found

    def read(self, name: str) -> bytes | None:
        """The content of a file; None: there is none, or something else has its name."""
        folder, _, last = name.rpartition("/")
        try:
            with self._inside(folder, make=False) as handle:
                if handle is None:
                    return None
                file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=handle)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            return None
        with os.fdopen(file, "rb") as opened:
            return opened.read()

    def forget(self, before: int) -> int:
        """Remove rows that were gone before a timestamp."""
        return self._db.execute("DELETE FROM rows WHERE gone AND NOT begun AND version < ?", [before]).rowcount


_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


# ------------------------------------------------------------ names


def _part(codec: Codec[Any], part: Any) -> str:
    """A part of a key in the name of a file."""
    if codec.name == "text":
        return _escaped(part) or _EMPTY
    return str(part) if codec.name == "int64" else bytes(part).hex() or _EMPTY


def _from_part(codec: Codec[Any], name: str) -> Any:
    """The part of a key that a name stands for. Raises: ValueError."""
    if codec.name == "int64":
        return int(name)
    name = "" if name == _EMPTY else name
    return unquote(name, errors="strict") if codec.name == "text" else bytes.fromhex(name)


def _escaped(text: str) -> str:
    """A text as the name of a file that is not hidden, and has no character with a special meaning on some system."""
    kept = (sign if sign.isprintable() and sign not in _ESCAPED else _percent(sign) for sign in text)
    name = "".join(kept)
    return "%2E" + name[1:] if name.startswith(".") else name


def _percent(sign: str) -> str:
    return "".join(f"%{byte:02X}" for byte in sign.encode())
