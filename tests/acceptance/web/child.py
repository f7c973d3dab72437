"""The web index as a process that can be killed at any store event.

    python -m tests.acceptance.web.child STORE CHANGES EVENTS GO

After each event, and after each run of an observer, it writes the name to EVENTS and waits for a byte from GO: so the
test knows exactly where the child stands when it kills it. CHANGES is a msgpack list, in order, of pages, deleted URLs
and ranks (URL, rank).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgpack
import trio

import perco
from perco.webindex.index import WebIndex
from perco.webindex.pages import unpack
from perco.webindex.service import serve

Change = bytes | str | tuple[str, float]


async def set_rank(txn: perco.Transaction, index: WebIndex, url: str, rank: float) -> None:
    if await txn.get(index.contents, url) is not None:
        txn.set(index.rank, url, rank)


def url_of(change: Change) -> str:
    return change if isinstance(change, str) else change[0] if isinstance(change, tuple) else unpack(change).url


async def main(store: Path, changes: list[Change], events: int, go: int) -> None:
    def event(name: str) -> None:
        os.write(events, name.encode() + b"\n")
        os.read(go, 1)

    options = perco.Options(on_event=event)
    async with serve(store, options=options, on_export=lambda _: event("export")) as service:
        lock = trio.CapacityLimiter(8)
        service.worker.on_run(lambda id, key, seconds: event(id))

        async def apply(change: Change) -> None:
            async with lock:
                if isinstance(change, str):
                    await service.db.run(service.index.remove, change)
                elif isinstance(change, tuple):
                    await service.db.run(set_rank, service.index, *change)
                else:
                    await service.db.run(service.index.load, unpack(change))

        # Changes of one URL keep their order; others go side by side.
        by_url: dict[str, list[Change]] = {}
        for change in changes:
            by_url.setdefault(url_of(change), []).append(change)

        async def one_url(ordered: list[Change]) -> None:
            for change in ordered:
                await apply(change)

        async with trio.open_nursery() as nursery:
            for ordered in by_url.values():
                nursery.start_soon(one_url, ordered)
        await service.db.wait_idle()
    os.write(events, b"done\n")


if __name__ == "__main__":
    planned = msgpack.unpackb(Path(sys.argv[2]).read_bytes(), use_list=False)
    trio.run(main, Path(sys.argv[1]), planned, int(sys.argv[3]), int(sys.argv[4]))
