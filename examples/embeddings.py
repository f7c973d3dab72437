"""An embedding pipeline: an observer that awaits a slow HTTP service, one document after the other or 256 at a time.

    python examples/embeddings.py [FOLDER] [--service HOST:PORT]

Without --service, it starts a service of its own, which takes 0.1 s for an answer.

Kill it at any moment and start it again: it embeds the documents that do not have their vector yet, and no others.

What to look at:

- The observer is straight-line code. Its transaction stays open while it waits, and holds no lock, so other
  transactions write the same table meanwhile (they are counted). A document that is written while it is being embedded
  is embedded again.
- The vector and the acknowledgement of the run are committed together. So no document is left out, and none keeps the
  vector of an older text. But the *service* gets a request twice if the program died while the request was in flight.
- `concurrency=` limits how many requests are in flight. If the service fails, the observer raises, and its change waits
  to be tried again, after a longer pause each time. With `attempts=0`, this goes on for ever, because it is not the
  document's fault if the service is away.
- If an observer needs something besides the store, pass that to the function that declares the observer:
  `schema_with(at)`.
"""

import argparse
import json
import math
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio

import perco

DOCUMENTS, IN_FLIGHT = 1024, 256

docs = perco.Table("docs", key=perco.INT64)
text = docs.column("text", perco.TEXT)
vector = docs.column("vector", perco.JSON)
views = docs.column("views", perco.INT64)  # what other transactions write meanwhile


def schema_with(at: str) -> perco.Schema:
    schema = perco.Schema(docs)

    @schema.observe(text, id="embed")
    async def embed(txn: perco.Transaction, change: perco.Change[int, str]) -> None:
        if change.value is None:
            txn.delete(vector, change.key)
            return
        txn.set(vector, change.key, await ask(at, {"text": change.value}))

    return schema


async def load(txn: perco.Transaction, version: int) -> None:
    for number in range(DOCUMENTS):
        txn.set(text, number, f"document {number}, version {version}")


async def view(txn: perco.Transaction, number: int) -> None:
    txn.set(views, number, (await txn.get(views, number) or 0) + 1)


async def embed_all(db: perco.Database, in_flight: int, seconds: float = math.inf) -> None:
    """Embed for `seconds`, or until all documents are embedded; other transactions write the same table meanwhile."""
    viewed, began = 0, time.perf_counter()
    options = perco.WorkerOptions(concurrency=in_flight, attempts=0)
    async with trio.open_nursery() as nursery, db.worker(options=options) as worker:

        async def viewer() -> None:
            nonlocal viewed
            while True:
                await db.run(view, viewed % DOCUMENTS)
                viewed += 1

        nursery.start_soon(viewer)
        with trio.move_on_after(seconds):
            await db.wait_idle()
        nursery.cancel_scope.cancel()
    speed = worker.statistics()["embed"].commits / (time.perf_counter() - began)
    print(f"{in_flight:3} in flight: {speed:5.0f} documents/s, and {viewed:4} other transactions meanwhile")


async def main(folder: Path, at: str | None = None) -> None:
    async with trio.open_nursery() as nursery:
        if at is None:
            [listener] = await nursery.start(partial(trio.serve_tcp, partial(serve, slowly), 0, host="127.0.0.1"))
            at = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        async with perco.open(folder, schema_with(at)) as db:
            if not (await db.waiting())["embed"]:
                await db.run(load, db.statistics().last_ts)  # a new text for every document
            print(f"{DOCUMENTS} documents, {(await db.waiting())['embed']} of them wait to be embedded")
            await embed_all(db, 1, 0.5)
            await embed_all(db, IN_FLIGHT)
        nursery.cancel_scope.cancel()


async def ask(at: str, value: object) -> Any:
    """POST a value as JSON to "host:port"; just enough of HTTP for this example (httpx has the rest)."""
    host, _, port = at.rpartition(":")
    body = json.dumps(value).encode()
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(b"POST /embed HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        head, _, answer = b"".join([data async for data in stream]).partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise OSError(f"the service at {at} answered {head[:100]!r}")
    return json.loads(answer)


async def slowly(text: str) -> list[int]:
    """The vector that the service computes: the length of the text, and how often the text has an 'e'."""
    await trio.sleep(0.1)
    return [len(text), text.count("e")]


async def serve(answer: Callable[[str], Awaitable[object]], stream: trio.SocketStream) -> None:
    """Answer one request to the service."""
    request = b""
    with suppress(trio.BrokenResourceError):  # the client has gone
        async for data in stream:
            request += data
            head, _, body = request.partition(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            if length is not None and len(body) == int(length[1]):
                vector = json.dumps(await answer(json.loads(body)["text"]))
                await stream.send_all(b"HTTP/1.0 200 OK\r\n\r\n" + vector.encode())
                break
    await stream.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("example-embeddings"), metavar="FOLDER")
    parser.add_argument("--service", metavar="HOST:PORT")
    arguments = parser.parse_args()
    try:
        trio.run(main, arguments.folder, arguments.service)
    except* KeyboardInterrupt:
        print("stopped; start it again to continue")
