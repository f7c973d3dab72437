"""Changes, followed from asyncio and from threads (R9)."""

from __future__ import annotations

import asyncio
import threading

import pytest

import perco
import perco.aio
import perco.sync
from perco.errors import UsageError

docs = perco.Table("docs", key=perco.TEXT, changes=True)
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)


def test_from_threads() -> None:
    with perco.sync.open("memory:", SCHEMA) as db:
        commits = []
        for i in range(3):
            with db.transaction() as txn:
                txn.set(n, "a", i)
            commits.append(txn.commit_ts)
        stream = db.changes(docs, since=0)
        assert isinstance(stream, perco.sync.ChangeStream)
        first = next(stream)
        assert first == (commits[0], (perco.RowChange("docs", "a", {"n": None}, {"n": 0}),))
        assert commits[0] <= stream.frontier < commits[1]
        assert [changes.commit_ts for changes in stream] == commits[1:]
        assert stream.frontier > commits[-1]
        with pytest.raises(UsageError, match="for changes in"):
            stream.__aiter__()  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="takes the tables"):
            db.changes()


def test_a_thread_waits_for_what_another_commits() -> None:
    with perco.sync.open("memory:", SCHEMA) as db:
        stream, seen = db.changes(docs, since=0, follow=True), []
        reader = threading.Thread(target=lambda: seen.append(next(stream)))
        reader.start()
        with db.transaction() as txn:
            txn.set(n, "a", 1)
        reader.join()
        assert [changes.commit_ts for changes in seen] == [txn.commit_ts]


def test_from_asyncio() -> None:
    async def main() -> None:
        async with perco.aio.open("memory:", SCHEMA) as db:
            stream, seen = db.changes(docs, since=0, follow=True), []
            assert isinstance(stream, perco.aio.ChangeStream)

            async def read() -> None:
                async for changes in stream:
                    seen.append(changes.commit_ts)
                    if len(seen) == 2:
                        return

            reader = asyncio.create_task(read())
            commits = []
            for i in range(2):
                async with db.transaction() as txn:
                    txn.set(n, "a", i)
                commits.append(txn.commit_ts)
            await reader
            assert seen == commits
            assert stream.frontier >= commits[-1]
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            async with db.transaction() as txn:
                txn.set(n, "b", 1)
            assert (await anext(stream)).commit_ts == txn.commit_ts

    asyncio.run(main())
