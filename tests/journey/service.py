"""The next version of the program of `examples/fastapi_app.py`: a table, a column and the observer have other names.
Another observer asks a service that fails now and then. `test_journey.py` runs it, with the example beside it."""

import os
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from fastapi import FastAPI

import perco
import perco.aio

links = perco.Table("bookmarks", key=perco.TEXT, was="links")
address = links.column("address", perco.TEXT, was="url")
tags = links.column("tags", perco.JSON)
visits = links.column("visits", perco.INT64)
indexed = links.column("indexed", perco.JSON)
summary = links.column("summary", perco.TEXT)
by_tag = perco.Table("by_tag", key=perco.Tuple(perco.TEXT, perco.TEXT))
target = by_tag.column("url", perco.TEXT)
schema = perco.Schema(links, by_tag)
options = perco.WorkerOptions(concurrency=16, breaker=perco.options.BreakerOptions(trial_s=5))


@schema.observe(tags, id="tags", was="index tags")
async def index(txn: perco.Transaction, change: perco.Change[str, list[str]]) -> None:
    now, before = set(change.value or ()), set(await txn.get(indexed, change.key) or ())
    for tag in before - now:
        txn.delete(target, (tag, change.key))
    for tag in now:
        txn.set(target, (tag, change.key), await txn.get(address, change.key) or "")
    txn.set(indexed, change.key, sorted(now))


@schema.observe(address, id="summary", rate=200, concurrency=8, attempts=0, backoff_s=(0.1, 1.0))
async def summarise(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
    url = f"{os.environ['SUMMARIES']}/{change.key}"
    txn.set(summary, change.key, await trio.to_thread.run_sync(lambda: urllib.request.urlopen(url).read().decode()))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with perco.aio.open(os.environ["STORE"], schema) as db, db.worker(options=options):
        app.state.db = db
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/bookmarks/{name}")
async def get(name: str) -> dict[str, Any]:
    async with app.state.db.snapshot() as snap:
        row = await snap.row(links, name, [address, tags, summary])
        return {"address": row[address], "tags": row[tags], "summary": row[summary]}
