"""A web service for links by name: FastAPI, a store that the app's lifespan opens, an index that an observer maintains.

    python examples/fastapi_app.py [FOLDER]          # http://127.0.0.1:8000/docs; needs fastapi and uvicorn

Kill it at any moment and start it again: every write that was answered is there, and the index catches up with the
writes that it has not seen yet.

What to look at:

- `lifespan` opens the store once, with `perco.aio`, and runs the observers beside the requests, in the server's own
  loop. Requests that arrive together share a write and an fsync.
- `visit` reads and writes one cell that many requests want. If two of them conflict, `db.run` runs one again, so no
  count is lost. If the store cannot do something in time, or has no space left, the response is a 503 that says why,
  and whether the write was made nevertheless.
- `/tags` answers from an index. With `fresh=true`, it first waits until the index has caught up with all writes that
  were answered before.
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import perco
import perco.aio

links = perco.Table("links", key=perco.TEXT)
url = links.column("url", perco.TEXT)
tags = links.column("tags", perco.JSON)
visits = links.column("visits", perco.INT64)
indexed = links.column("indexed", perco.JSON)  # the tags under which the index has this link

by_tag = perco.Table("by_tag", key=perco.Tuple(perco.TEXT, perco.TEXT))  # (tag, name)
target = by_tag.column("url", perco.TEXT)

schema = perco.Schema(links, by_tag)


@schema.observe(tags, id="index tags")
async def index(txn: perco.Transaction, change: perco.Change[str, list[str]]) -> None:
    name = change.key
    now, before = set(change.value or ()), set(await txn.get(indexed, name) or ())
    for tag in before - now:
        txn.delete(target, (tag, name))
    for tag in now:
        txn.set(target, (tag, name), await txn.get(url, name) or "")
    txn.set(indexed, name, sorted(now))


class Link(BaseModel):
    url: str
    tags: list[str] = []


# ------------------------------------------------------------------ transactions


async def put(txn: perco.aio.Transaction, name: str, link: Link) -> bool:
    new = await txn.get(url, name) is None
    txn.set(url, name, link.url)
    txn.set(tags, name, link.tags)
    return new


async def visit(txn: perco.aio.Transaction, name: str) -> tuple[str, int] | None:
    found = await txn.row(links, name, [url, visits])
    there = found[url]
    if there is None:
        return None
    count = found.get(visits, 0) + 1
    txn.set(visits, name, count)
    return there, count


async def remove(txn: perco.aio.Transaction, name: str) -> bool:
    if await txn.get(url, name) is None:
        return False
    for column in url, tags, visits:
        txn.delete(column, name)
    return True


# ------------------------------------------------------------------ the service


def opened(request: Request) -> perco.aio.Database:
    db: perco.aio.Database = request.app.state.db
    return db


Store = Annotated[perco.aio.Database, Depends(opened)]


def make_app(folder: str | Path) -> FastAPI:
    """The service over a folder, or over "memory:"."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with perco.aio.open(folder, schema) as db, db.worker(concurrency=16):
            app.state.db = db
            yield

    app = FastAPI(title="links", lifespan=lifespan)

    @app.exception_handler(perco.StoreError)
    async def unavailable(_: Request, error: Exception) -> JSONResponse:
        written = isinstance(error, perco.Unavailable) and error.commit_ts != 0  # it was late, and has committed
        return JSONResponse({"detail": str(error), "written": written}, 503)

    @app.exception_handler(perco.CommitUnknown)
    async def unknown(_: Request, error: perco.CommitUnknown) -> JSONResponse:
        # Whether it was written is not known yet: `await db.outcome(token)` says so later.
        return JSONResponse({"detail": str(error), "written": None, "token": error.token}, 503)

    @app.put("/links/{name}")
    async def put_link(name: str, link: Link, db: Store) -> dict[str, bool]:
        return {"new": await db.options(timeout=5.0).run(put, name, link)}

    @app.get("/links/{name}")
    async def get_link(name: str, db: Store) -> dict[str, object]:
        async with db.snapshot() as snap:
            row = await snap.row(links, name, [url, tags, visits])
        if row[url] is None:
            raise HTTPException(404, f"there is no link {name!r}")
        return {"url": row[url], "tags": row[tags], "visits": row.get(visits, 0)}

    @app.post("/links/{name}/visits")
    async def post_visit(name: str, db: Store) -> dict[str, object]:
        found = await db.run(visit, name)
        if found is None:
            raise HTTPException(404, f"there is no link {name!r}")
        return {"url": found[0], "visits": found[1]}

    @app.delete("/links/{name}")
    async def delete_link(name: str, db: Store) -> dict[str, bool]:
        return {"removed": await db.run(remove, name)}

    @app.get("/tags/{tag}")
    async def get_tag(tag: str, db: Store, fresh: bool = False) -> dict[str, str]:
        if fresh:
            await db.wait_idle(timeout=5.0)  # NotIdle is a StoreError
        async with db.snapshot() as snap:
            return {row.key[1]: row[target] or "" async for row in snap.scan(by_tag, prefix=(tag,))}

    return app


if __name__ == "__main__":
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("example-fastapi"), metavar="FOLDER")
    uvicorn.run(make_app(parser.parse_args().folder))
