"""A process that owns a store on PostgreSQL: `python -m tests.integration.postgresql.owner URL`.

It says "open" when it is, then commits the number of each line that it reads, and says what came of it.
"""

from __future__ import annotations

import sys

import trio

import perco
from perco.errors import PercoError

numbers = perco.Table("numbers", key=perco.TEXT)
last = numbers.column("last", perco.INT64)
SCHEMA = perco.Schema(numbers)


async def main(url: str) -> None:
    async with perco.open(url, SCHEMA) as db:
        print("open", flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            try:
                async with db.transaction() as txn:
                    txn.set(last, "n", int(line))
                print("committed", flush=True)
            except PercoError as error:
                print(type(error).__name__, error, flush=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
