"""A store for the command to look at, and a process that owns one.

Run as a program it opens the store and does what it reads from stdin, a word to a line, answering each with a line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

import perco
from perco.database.inside import inside, local_owner
from tests.acceptance.cli import prefork

ROOT = Path(perco.__file__).parents[1]

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
contents = docs.column("contents", perco.BYTES, group="raw")
rank = docs.column("rank", perco.FLOAT64)
size = docs.column("size", perco.INT64)
title = docs.column("title", perco.TEXT)
tags = docs.column("tags", perco.JSON)
links = perco.Table("links", key=perco.Tuple(perco.TEXT, perco.INT64))
seen = links.column("seen", perco.BOOL)
blobs = perco.Table("blobs")
blob = blobs.column("blob", perco.MSGPACK)
numbers = perco.Table("numbers", key=perco.INT64)
square = numbers.column("square", perco.INT64)

schema = perco.Schema(docs, links, blobs, numbers)


@schema.observe(contents, id="measure")
async def measure(txn: perco.Transaction, change: perco.Change[str, bytes]) -> None:
    txn.set(size, change.key, len(change.value or b""))


async def fill(db: perco.Database) -> int:
    """Returns the timestamp of the first version of a's title."""
    async with db.transaction() as first:
        first.set(title, "a", "first")
        first.set(rank, "a", 0.25)
        first.set(tags, "a", {"k": [1, None]})
    async with db.transaction() as txn:
        txn.set(title, "a", "second")
        txn.set(title, "b", "two\nlines")
        txn.set(title, "x", "long " * 100)
        txn.set(contents, "a", b"\x00\xff")
        txn.set(contents, "x", b"page " * 1000)
        for number in (-3, 0, 7):
            txn.set(square, number, number * number)
        for part in (1, 2):
            txn.set(seen, ("http://a/", part), part == 1)
        txn.set(seen, ("http://b/", 1), True)
        txn.set(blob, b"\x00k", {1: b"\xff"})
    async with db.worker(concurrency=2, scanners=1):
        await db.wait_idle()
    async with db.transaction() as txn:
        txn.delete(title, "b")
    return first.commit_ts


async def make(path: Path) -> int:
    async with perco.open(path, schema) as db:
        return await fill(db)


# ------------------------------------------------------------------ the command


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: str
    err: str


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "perco", *map(str, args)]


async def run(*args: object, input: bytes = b"") -> Done:
    """Run the command as a user would, but for its imports."""
    words = [str(arg) for arg in args]
    code, out, err = await trio.to_thread.run_sync(prefork.call, words, _environment(), input)
    assert b"Traceback" not in err, err.decode()
    return Done(code, out.decode(), err.decode())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONWARNINGS": "error", "PYTHONIOENCODING": "utf-8", "COLUMNS": "200"}


@asynccontextmanager
async def started(argv: Sequence[str]) -> AsyncIterator[trio.Process]:
    """A child process with pipes; killed if it outlives the block."""
    async with trio.open_nursery() as nursery:
        pipe = subprocess.PIPE
        process = await trio.lowlevel.open_process(
            list(argv), stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT, env=_environment()
        )
        try:
            yield process
        finally:
            with trio.CancelScope(shield=True):
                if process.poll() is None:
                    process.kill()
                await process.wait()
                for stream in (process.stdin, process.stdout, process.stderr):
                    assert stream is not None
                    await stream.aclose()
            nursery.cancel_scope.cancel()


class Lines:
    """A stream by the line."""

    def __init__(self, stream: trio.abc.ReceiveStream | None) -> None:
        assert stream is not None
        self._stream, self._rest = stream, b""

    async def next(self) -> str:
        while b"\n" not in self._rest:
            more = await self._stream.receive_some()
            assert more, "the process has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


class Owner:
    """A process that owns a store and does as it is told."""

    def __init__(self, process: trio.Process) -> None:
        self.pid = process.pid
        self._process, self._answers = process, Lines(process.stdout)

    async def tell(self, word: str) -> str:
        assert self._process.stdin is not None
        await self._process.stdin.send_all(word.encode() + b"\n")
        return await self._answers.next()


@asynccontextmanager
async def owned(path: Path, durability: str = "power") -> AsyncIterator[Owner]:
    argv = [sys.executable, "-m", "tests.acceptance.cli.stores", str(path), durability]
    async with started(argv) as process:
        owner = Owner(process)
        assert await owner.tell("hello") == "hello"
        yield owner
        assert await owner.tell("quit") == "bye"


# ------------------------------------------------------------------ the owning process


async def _own(path: str, durability: str) -> None:
    lines = Lines(trio.lowlevel.FdStream(os.dup(0)))
    options = perco.Options(durability=durability)
    async with perco.open(path, schema, options=options) as db, trio.open_nursery() as nursery:
        stop = trio.Event()
        while (word := await lines.next()) != "quit":
            match word.split():
                case ["hello"]:
                    print("hello", flush=True)
                case ["put", key]:
                    async with db.transaction() as txn:
                        txn.set(contents, key, b"new")
                    await inside(db).oracle.note()
                    print(txn.commit_ts, flush=True)
                case ["work"]:
                    nursery.start_soon(_work, db, stop)
                    print("working", flush=True)
                case ["write"]:
                    for number in range(4):
                        nursery.start_soon(_write, db, number, stop)
                    print("writing", flush=True)
                case ["vacuum"]:
                    nursery.start_soon(_vacuum, db, stop)
                    print("removing", flush=True)
                case ["removed"]:
                    print(local_owner(db).vacuuming.removed.cells, flush=True)
                case ["commits"]:
                    print(db.statistics().counters.commits, flush=True)
                case _:
                    raise AssertionError(word)
        stop.set()
    print("bye", flush=True)


async def _work(db: perco.Database, stop: trio.Event) -> None:
    async with db.worker(concurrency=4, scanners=1):
        await stop.wait()


async def _vacuum(db: perco.Database, stop: trio.Event) -> None:
    while not stop.is_set():
        await db.vacuum()


async def _write(db: perco.Database, number: int, stop: trio.Event) -> None:
    round = 0
    while not stop.is_set():
        round += 1
        async with db.transaction() as txn:
            for key in ("a", "z"):
                txn.set(contents, f"{key}{number}", b"x" * (round % 3 * 1000))
                txn.set(title, f"{key}{number}", str(round))


if __name__ == "__main__":
    trio.run(_own, sys.argv[1], sys.argv[2])
