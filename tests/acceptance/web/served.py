"""The web index over a served store, each part of it a process that can be killed.

    python -m tests.acceptance.web.served ROLE STORE EVENTS START [CHANGES]

ROLE is owner, worker, loader or searcher. A loader and a searcher are always clients: they never become the owner.
The process writes a line to EVENTS for each event: START (the number of the process), its role, and the event.
With PERCO_TEST_URL in the environment, the store's rows are there, and STORE has the owner's socket.
CHANGES, for the loader, is as in `child.py`. When the observers have run for all changes, the loader says so and ends.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgpack
import trio

import perco
from perco.cli.serving import serve as serve_store
from perco.webindex.exporter import Exporter
from perco.webindex.index import WebIndex
from perco.webindex.pages import unpack
from perco.webindex.places import search_path
from perco.webindex.search import SearchIndex
from perco.webindex.service import serve
from tests.acceptance.web.child import Change, set_rank, url_of
from tests.acceptance.web.site import WORDS

WIRE = perco.options.WireOptions(heartbeat_s=0.3, silence_s=2.0, lease_s=2.0, patience_s=30.0)
OPTIONS = perco.Options(durability="process", wire=WIRE)


def say(what: str) -> None:
    os.write(int(sys.argv[3]), f"{sys.argv[4]} {sys.argv[1]} {what}\n".encode())


URL = os.environ.get("PERCO_TEST_URL", "")


async def own(store: Path) -> None:
    if URL:
        await trio.Path(store).mkdir(exist_ok=True)
        socket = f"unix:{store / 'socket'}"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_store, URL, [socket], "process", 64, None, None, 1, None)
            async with reached(store, perco.Schema()):
                say("ready")
            await trio.sleep_forever()
    async with perco.open(store, perco.Schema(), options=OPTIONS):
        say("ready")
        await trio.sleep_forever()


async def work(store: Path) -> None:
    url = f"unix:{store / 'socket'}" if URL else ""
    if URL:
        async with reached(store, perco.Schema()):
            pass  # there is somebody who serves it
    async with serve(store, rows=url, options=OPTIONS, on_export=lambda _: say("export")) as service:
        service.worker.on_run(lambda id, key, seconds: say(id.replace(" ", "-")))
        say("ready")
        await trio.sleep_forever()


@asynccontextmanager
async def reached(store: Path, schema: perco.Schema) -> AsyncIterator[perco.Database]:
    """A client of the store's owner, as soon as there is one: opening a store without an owner fails at once."""
    async with AsyncExitStack() as stack:
        while True:
            try:
                url = f"unix:{store / 'socket'}"
                db = await stack.enter_async_context(perco.open(url, schema, options=OPTIONS))
                break
            except perco.Unavailable:
                await trio.sleep(0.1)
        yield db


async def load(store: Path, changes: list[Change]) -> None:
    index = WebIndex(Exporter())
    by_url: dict[str, list[Change]] = {}
    for change in changes:
        by_url.setdefault(url_of(change), []).append(change)

    async def one_url(ordered: list[Change]) -> None:
        for change in ordered:
            if isinstance(change, str):
                await db.run(index.remove, change)
            elif isinstance(change, tuple):
                await db.run(set_rank, index, *change)
            else:
                await db.run(index.load, unpack(change))
            say("loaded")

    async with reached(store, index.schema) as db:
        async with trio.open_nursery() as nursery:
            for ordered in by_url.values():
                nursery.start_soon(one_url, ordered)
        await db.wait_idle()
    say("done")


async def look(store: Path) -> None:
    index, rng = WebIndex(Exporter()), random.Random(1)
    with SearchIndex(search_path(store)) as search:
        async with reached(store, index.schema) as db:
            while True:
                hits = search.search(rng.choice(WORDS))
                try:
                    async with db.snapshot() as snap:
                        for hit in hits[:3]:
                            document = await index.document(snap, hit.url)
                            assert document is None or document.text is not None
                except perco.errors.SessionEnded:
                    say("session ended")
                say("searched")
                await trio.sleep(0.01)


if __name__ == "__main__":
    role, where = sys.argv[1], Path(sys.argv[2])
    if role == "loader":
        trio.run(load, where, msgpack.unpackb(Path(sys.argv[5]).read_bytes(), use_list=False))
    else:
        trio.run({"owner": own, "worker": work, "searcher": look}[role], where)
