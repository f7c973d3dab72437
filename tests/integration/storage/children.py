"""What the tests let another process do; run as `python -m tests.integration.storage.children NAME ARGUMENTS...`.

A child says where it is on its standard output, a line at a time, and takes commands on its standard input.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from perco.errors import StoreError, StoreFull
from perco.storage import APPLIED, TS_MAX, Failed, Folder, LmdbEngine, LmdbOptions, LocalRowStore, Mutation, NoReply
from perco.storage.folder import tablet_path
from tests.component.storage.stores import TABLE, delete, lmdb_engine, newest, open_lmdb, put, put_all, value_of

ROOT = Path(__file__).parents[3]
SMALL_MAP = LmdbOptions(sync=False, map_bytes=256 << 10)


# ------------------------------------------------------------ the parent's side


class Child:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid

    def line(self) -> str:
        """Waits for what the child says next; "" if it has ended."""
        assert self.process.stdout
        return self.process.stdout.readline().rstrip("\n")

    def lines(self) -> list[str]:
        """Waits for its end."""
        assert self.process.stdout
        return self.process.stdout.read().splitlines()

    def ask(self, command: str) -> str:
        assert self.process.stdin
        print(command, file=self.process.stdin, flush=True)
        return self.line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def child(name: str, *arguments: object) -> Iterator[Child]:
    command = [sys.executable, "-m", __name__, name, *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


# ------------------------------------------------------------ the child's side


def say(*words: object) -> None:
    print(*words, flush=True)


def until_told() -> None:
    sys.stdin.readline()


def write_forever(path: str, sync: str) -> None:
    """Puts the rows x-N and y-N as one group, N from 0, and says N once it is acknowledged."""

    async def task(store: LocalRowStore, first: int) -> None:
        for n in range(first, 1_000_000, 3):
            cells = [("data", 1, 1, b"%d" % n * 100)]
            assert await store.apply([Mutation(TABLE, [(b"x-%d" % n, [], cells), (b"y-%d" % n, [], cells)])]) == [
                APPLIED
            ]
            say(n)

    async def main() -> None:
        async with (
            open_lmdb(Path(path), LmdbOptions(sync=sync == "sync")) as (store, _),
            trio.open_nursery() as nursery,
        ):
            for first in range(3):
                nursery.start_soon(task, store, first)

    trio.run(main)


def read_beside(path: str) -> None:
    """Answers `GROUP ROW` with "none" or length and checksum of the newest value; `map` with the size of its map."""
    engine = lmdb_engine(Path(path), SMALL_MAP, readonly=True, groups=["data", "data:late"])
    say("open")
    for line in sys.stdin:
        if line == "map\n":
            say(engine.map_bytes)
            continue
        group, row = line.split()
        [cells] = engine.read(row.encode(), [(group, 1, 0, TS_MAX, 1)])
        say("none" if not cells else f"{len(cells[0][1])} {zlib.crc32(cells[0][1])}")


def hold_view(path: str) -> None:
    """Keeps a reader's slot of LMDB."""
    engine = lmdb_engine(Path(path), SMALL_MAP, readonly=True)
    with engine._env.begin():
        say("reading")
        until_told()


def claim(path: str, durable: str) -> None:
    folder = Folder.claim(Path(path), durable=durable == "durable", accept_loss=False)
    say("claimed")
    until_told()
    folder.release(clean=True)
    say("released")


def read_without_permission(path: str, row: str) -> None:
    """As one who may read the folder and not write to it: what becomes of claiming, then of reading."""
    if os.geteuid() == 0:  # to whom permissions do not apply; everything needed has been imported
        os.setuid(65534)
    for attempt in (
        lambda: Folder.claim(Path(path), durable=True, accept_loss=False),
        lambda: Folder.beside(Path(path)),
    ):
        try:
            folder = attempt()
        except StoreError as error:
            say(type(error).__name__, error)
            continue
        tablet = lmdb_engine(tablet_path(folder.path, TABLE, 0), SMALL_MAP, readonly=True, lock=not folder.without_lock)
        [cells] = tablet.read(row.encode(), newest(b"")[2])
        say("read", cells[0][1].decode(), "without lock" if folder.without_lock else "with lock")
    until_told()


class _NoRoomAhead(LmdbEngine):
    """On a file system that cannot allocate ahead."""

    def make_room(self, need_bytes: int, *, reserve: bool) -> StoreFull | None:
        return None


def _limit(size: int | None) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def fill_disk(path: str, ahead: str) -> None:
    """Writes until nothing fits, and prints the acknowledged rows as {row: length of its value}."""
    trio.run(_fill_disk, Path(path), ahead == "ahead")


async def _fill_disk(path: Path, ahead: bool) -> None:
    engine = LmdbEngine if ahead else _NoRoomAhead
    acknowledged: dict[str, int] = {}

    async def intact(store: LocalRowStore) -> None:
        for row, size in acknowledged.items():
            assert await value_of(store, row.encode()) == row.encode()[:1] * size, row

    async with open_lmdb(path, LmdbOptions(), engine=engine) as (store, tablet):
        for n in range(100):
            await put_all(store, put(b"small-%d" % n, b"s" * 100))
            acknowledged[f"small-{n}"] = 100
        _limit(os.stat(path / "data.mdb").st_size + (1 << 20))
        for n in range(1000):
            [verdict] = await store.apply([put(b"large-%d" % n, b"l" * 50_000)])
            if verdict is not APPLIED:
                break
            acknowledged[f"large-{n}"] = 50_000
        if ahead:
            assert isinstance(verdict, Failed), verdict
            assert isinstance(verdict.error, StoreFull), verdict
        else:  # LMDB calls a write that was cut short an error of the disk
            assert isinstance(verdict, Failed | NoReply), verdict
        assert await value_of(store, b"large-%d" % n) is None
        await intact(store)
        if ahead:
            mutations = [
                put(b"ordinary", b"l" * 50_000),
                delete(b"small-0", reserve=True),
                put(b"reserve", b"r" * 50_000, reserve=True),
            ]
            first, *others = await store.apply(mutations)
            assert isinstance(first, Failed), first
            assert others == [APPLIED, APPLIED], others
            del acknowledged["small-0"]
            acknowledged["reserve"] = 50_000
            # More of them at once than the reserve has pages for.
            await put_all(store, *[delete(b"small-%d" % n, reserve=True) for n in range(1, 100)] * 3)
            for n in range(1, 100):
                del acknowledged[f"small-{n}"]
            assert isinstance((await store.apply([put(b"ordinary", b"l" * 50_000)]))[0], Failed)
            assert tablet.statistics().failed == 3
            await intact(store)
    if ahead:
        async with open_lmdb(path, LmdbOptions()) as (store, _):  # opening takes no space
            await intact(store)
            assert isinstance((await store.apply([put(b"ordinary", b"l" * 50_000)]))[0], Failed)
            await put_all(store, put(b"reserve", b"r" * 11, ts=2, reserve=True))
            acknowledged["reserve"] = 11
            _limit(None)
            await put_all(store, put(b"after", b"a" * 100_000))
            acknowledged["after"] = 100_000
            await intact(store)
    say(json.dumps(acknowledged))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
