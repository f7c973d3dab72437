"""The systems that `bench derive` compares: how to install, run, edit and read each.

A peer's packages go into an environment of its own, `build/peers/NAME`, because they exclude each other's.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import perco
import perco.sync
from bench.deriving import child
from bench.deriving.child import Counted, Job
from bench.deriving.corpus import Chunk
from bench.deriving.with_perco import Tables

ROOT: Final = Path(__file__).parents[2]
ENVIRONMENTS: Final = ROOT / "build" / "peers"

PEERS: Final = {"cocoindex": "cocoindex>=1.0.26,<1.1", "pathway": "pathway>=0.33,<0.34", "dbos": "dbos>=3.4,<3.5"}


class LeftOutError(Exception):
    """A system cannot be measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class System:
    """A system.

    Attributes:
        key, name: in figures and in tables; module, mode: of its program;
        source: "files": it follows a folder; "rows": it stores the documents itself;
        peer: its package, if it is not perco;
        reads: its program reads the derived table, too, when it is told what to look for;
        told: only an order makes it look at its source;
        announces: it can tell when it is up to date;
        environment: variables of its process.
    """

    key: str
    name: str
    module: str
    source: Literal["files", "rows"]
    mode: tuple[str, ...] = ()
    peer: str = ""
    reads: bool = False
    told: bool = False
    announces: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        """The command that runs its program, without the job. Raises: LeftOutError."""
        python = str(installed(self.peer)) if self.peer else sys.executable
        return [python, "-m", f"bench.deriving.{self.module}", *self.mode]

    def reader(self, job: Job) -> AbstractContextManager[Reader]:
        return _sqlite_reader(job.derived) if self.peer else _perco_reader(job)


_QUIET: Final = {"COCOINDEX_DISABLE_USAGE_TRACKING": "1", "DO_NOT_TRACK": "1"}

PERCO_ROWS = System("perco_rows", "perco, rows", "with_perco", "rows", ("rows",), reads=True)
PERCO_FILES = System("perco_files", "perco, files", "with_perco", "files", ("files",), reads=True)
COCOINDEX = System(
    "cocoindex", "CocoIndex, live", "with_cocoindex", "files", ("live",), "cocoindex", environment=_QUIET
)
COCOINDEX_CATCH_UP = System(
    "cocoindex_catch_up",
    "CocoIndex, catch-up",
    "with_cocoindex",
    "files",
    ("catch-up",),
    "cocoindex",
    told=True,
    environment=_QUIET,
)
PATHWAY = System("pathway", "Pathway", "with_pathway", "files", (), "pathway", announces=False, environment=_QUIET)
DBOS = System("dbos", "DBOS", "with_dbos", "rows", (), "dbos", environment=_QUIET)

SYSTEMS: Final = (PERCO_ROWS, DBOS, PERCO_FILES, COCOINDEX, COCOINDEX_CATCH_UP, PATHWAY)


def installed(peer: str) -> Path:
    """The Python of a peer's environment, which is made if there is none. Raises: LeftOutError."""
    folder, wanted = ENVIRONMENTS / peer, PEERS[peer]
    python, mark = folder / "bin" / "python", folder / "installed"
    if not mark.exists() or mark.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            *_, last = done.stderr.strip().splitlines() or ["pip failed"]
            raise LeftOutError(f"{wanted} cannot be installed: {last}")
        mark.write_text(wanted)
    return python


def version_of_peer(peer: str) -> str:
    code = f"from importlib.metadata import version; print(version({peer!r}))"
    done = subprocess.run([str(installed(peer)), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


# ------------------------------------------------------------------ readers


class Reader(Protocol):
    """Reads a derived table, in the benchmark's own process."""

    def chunks(self, key: str) -> list[Chunk]: ...

    def all(self) -> Iterator[tuple[str, Chunk]]: ...

    def text(self, key: str) -> str | None: ...


class _Sqlite:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def chunks(self, key: str) -> list[Chunk]:
        try:
            found = self._connection.execute(
                f"SELECT n, words, vector FROM {child.TABLE} WHERE doc = ? ORDER BY n", (key,)
            )
            return [Chunk(*row) for row in found]
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise

    def all(self) -> Iterator[tuple[str, Chunk]]:
        for doc, n, words, vector in self._connection.execute(
            f"SELECT doc, n, words, vector FROM {child.TABLE} ORDER BY doc, n"
        ):
            yield doc, Chunk(n, words, vector)

    def text(self, key: str) -> str | None:
        row = self._connection.execute("SELECT text FROM docs WHERE doc = ?", (key,)).fetchone()
        return None if row is None else str(row[0])


@contextmanager
def _sqlite_reader(path: Path) -> Iterator[Reader]:
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    try:
        yield _Sqlite(connection)
    finally:
        connection.close()


class _Perco:
    """A client of the program, which owns the store."""

    def __init__(self, db: perco.sync.Database, tables: Tables) -> None:
        self._db, self._tables = db, tables

    def _rows(self, **where: Any) -> Iterator[tuple[str, Chunk]]:
        tables = self._tables
        with self._db.snapshot() as snap:
            for row in snap.scan(tables.table, columns=[tables.words, tables.vector], **where):
                yield tables.chunk(row)

    def chunks(self, key: str) -> list[Chunk]:
        return [chunk for _, chunk in self._rows(prefix=f"{key}#")]

    def all(self) -> Iterator[tuple[str, Chunk]]:
        return self._rows()

    def text(self, key: str) -> str | None:
        with self._db.snapshot() as snap:
            return snap.get(self._tables.text, key)


@contextmanager
def _perco_reader(job: Job) -> Iterator[Reader]:
    tables = Tables(Counted(job.version))
    with perco.sync.open(f"unix:{job.state / 'socket'}", tables.views.schema) as db:
        yield _Perco(db, tables)


def disk_mib(state: Path) -> float:
    """The space that a folder takes on the disk."""
    blocks = 0
    for folder, _, names in os.walk(state):
        for name in names:
            try:
                blocks += os.stat(os.path.join(folder, name), follow_symlinks=False).st_blocks
            except FileNotFoundError:
                continue  # a temporary one
    return blocks * 512 / (1 << 20)
