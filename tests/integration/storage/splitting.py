"""A process that owns a folder and splits its tablets: `python -m tests.integration.storage.splitting FOLDER WHAT`.

It says on stdout how far it is, a line each; told to, it goes on when a line comes on stdin.
"""

from __future__ import annotations

import random
import sys
import warnings
from pathlib import Path

import trio
import trio.lowlevel

import perco
from perco.database.inside import local_owner
from perco.tablets.splitter import Splitter
from tests.integration.storage.test_splits import KEYS, docs, fill, move, opened

warnings.simplefilter("ignore")


def say(word: object) -> None:
    print(word, flush=True)


async def told() -> None:
    """Until a line comes."""
    if not await trio.to_thread.run_sync(sys.stdin.readline):
        sys.exit(3)


async def step_by_step(folder: Path) -> None:
    clear = Splitter.clear
    may_clear = trio.Event()

    async def later(self: Splitter, *, share: float = 1.0) -> None:
        await may_clear.wait()
        await clear(self, share=share)

    Splitter.clear = later  # type: ignore[method-assign]
    async with opened(folder, shared=False) as db:
        await db.run(fill)
        await local_owner(db).note_now()
        say("filled")
        await told()
        await db.split(docs, 250)
        say("split")
        await told()
        may_clear.set()
        await local_owner(db).splitting.clear()
        say("cleared")
        await told()


async def for_ever(folder: Path) -> None:
    async with opened(folder) as db, db.worker(), trio.open_nursery() as nursery:
        async with db.snapshot() as snap:
            filled = await snap.scan(docs).all()
        if not filled:
            await db.run(fill)

        async def mover(rng: random.Random) -> None:
            while True:
                await db.options(attempts=1000).run(move, rng)
                say("moved")

        for _ in range(6):
            nursery.start_soon(mover, random.Random())
        while True:
            try:
                await db.split(docs, random.choice(KEYS))
                say("split")
            except perco.UsageError:
                pass  # one begins there
            await trio.lowlevel.checkpoint()


if __name__ == "__main__":
    trio.run({"steps": step_by_step, "goes on": for_ever}[sys.argv[2]], Path(sys.argv[1]))
