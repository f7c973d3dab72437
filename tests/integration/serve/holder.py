"""A client whose observer holds its loop: `python -m tests.integration.serve.holder FRONT WHERE FLAG [CA]`.

The observer says "computes", computes in pure Python until the file FLAG is there, and writes. When a line comes on
stdin the process says how many runs and conflicts it has had, and ends. FRONT is "trio", "aio" or "sync".
"""

from __future__ import annotations

import asyncio
import sys
import time
import warnings
from pathlib import Path

import trio

import perco
import perco.aio
import perco.sync
from perco.serve.client import is_client

warnings.simplefilter("ignore")
docs = perco.Table("docs", key=perco.TEXT)
body, size = docs.column("body", perco.TEXT), docs.column("size", perco.INT64)
SCHEMA = perco.Schema(docs)


def options(ca: str = "") -> perco.Options:
    wire = perco.options.WireOptions(heartbeat_s=0.2, silence_s=2.0, lease_s=4.0, patience_s=30.0, ca_file=ca)
    return perco.Options(durability="process", wire=wire)


@SCHEMA.observe(body, id="compute")
async def compute(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
    print("computes", flush=True)
    flag = Path(sys.argv[3])
    while not flag.exists():  # noqa: ASYNC240 - holding the loop is what this is for
        sum(range(200_000))
        time.sleep(0.01)  # noqa: ASYNC251 - holds the loop as well, and leaves a core to others
    txn.set(size, change.key, len(change.value or ""))


def done(counters: object) -> None:
    print(f"{counters.runs} runs, {counters.conflicts} conflicts", flush=True)  # type: ignore[attr-defined]


async def on_trio(where: str, how: perco.Options) -> None:
    async with perco.open(where, SCHEMA, options=how) as db, db.worker() as worker:
        print("client" if is_client(db) else "owner", flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
        done(worker.statistics()["compute"])


async def on_asyncio(where: str, how: perco.Options) -> None:
    async with perco.aio.open(where, SCHEMA, options=how) as db, db.worker() as worker:
        print("client", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        done(worker.statistics()["compute"])


def blocking(where: str, how: perco.Options) -> None:
    with perco.sync.open(where, SCHEMA, options=how) as db, db.worker() as worker:
        print("client", flush=True)
        sys.stdin.readline()
        done(worker.statistics()["compute"])


def main(front: str, where: str, ca: str = "") -> None:
    how = options(ca)
    if front == "trio":
        trio.run(on_trio, where, how)
    elif front == "aio":
        asyncio.run(on_asyncio(where, how))
    else:
        blocking(where, how)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *sys.argv[4:5])
