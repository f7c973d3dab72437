"""A process that owns folders and serves them: `python -m tests.integration.fronts.owners FOLDER...`.

A folder whose name ends with `-tablets` has two tablet servers. A line is printed for each folder
once it is open: where it is reached over TCP. The process ends when stdin does.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import AsyncExitStack

import trio

import perco
from perco.rpc import addresses
from perco.serve.placing import ProcessOptions

warnings.simplefilter("ignore")
TOKEN = "a word that clients over TCP have to say"
OPTIONS = perco.Options(
    durability="process",
    vacuum=perco.options.VacuumOptions(on=False),  # it happens when it is asked for, everywhere
    transaction=perco.options.TransactionOptions(cells_max=100),
    seed=1,
)


async def own(folders: list[str]) -> None:
    async with AsyncExitStack() as stack:
        for folder in folders:
            opening = perco.open(folder, perco.Schema(), options=OPTIONS)
            if folder.endswith("-tablets"):
                opening.processes = ProcessOptions(servers=2)
            await stack.enter_async_context(opening)
            assert opening.server is not None
            listening = opening.server.listening(addresses.parse("tcp://127.0.0.1:0"), TOKEN.encode())
            print(await stack.enter_async_context(listening), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    trio.run(own, sys.argv[1:])
