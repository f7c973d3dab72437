"""A process that owns a folder and compacts it: `python -m tests.integration.storage.compacting FOLDER WHAT ...`.

It says on stdout what is acknowledged, a word to a line.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

import perco
from perco.database.inside import local_owner
from perco.storage import Folder, LmdbTablet
from tests.integration.storage.splitting import say
from tests.integration.storage.test_splits import KEYS, docs, fill, n, opened
from tests.support.places import local_of

warnings.simplefilter("ignore")


async def add(txn: perco.Transaction) -> None:
    for key in KEYS:
        txn.set(n, key, (await txn.get(n, key) or 0) + 1)


async def when_told(folder: Path) -> None:
    async with opened(folder) as db:
        while True:
            word = (await trio.to_thread.run_sync(sys.stdin.readline)).strip()
            match word:
                case "fill":
                    await db.run(fill)
                case "add":
                    await db.run(add)
                case "compact":
                    await db.compact(docs)
            if local_of(db).path is not None:
                await local_owner(db).note_now()
            say(word)
            if word in ("quit", ""):
                return


def deadly(call: Callable[..., Any], when: str) -> Callable[..., Any]:
    """A step at which the process ends, before it or after it."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def awaited(*args: Any) -> Any:
        if when == "before":
            die()
        await call(*args)
        die()

    def called(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            die()
        call(*args, **kwargs)
        die()

    return awaited if call.__code__.co_flags & 0x80 else called


async def killed(folder: Path, step: str, when: str) -> None:
    owner: Any = shutil if step == "rmtree" else Folder if step.endswith("_next") else LmdbTablet
    async with opened(folder, split=perco.options.SplitOptions(on=False)) as db:
        await db.run(fill)
        say("filled")
        going = trio.Event()

        async def adder() -> None:
            while True:
                await db.options(attempts=1000).run(add)
                say("added")
                going.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(adder)
            await going.wait()
            if (
                step == "rmtree"
            ):  # the one that removes the old files: the first one removes what was left in the making
                settle = Folder.settle_next

                def settling(self: Folder, table: str, number: int) -> Path:
                    shutil.rmtree = deadly(shutil.rmtree, when)
                    return settle(self, table, number)

                Folder.settle_next = settling  # type: ignore[method-assign]
            else:
                setattr(owner, step, deadly(getattr(owner, step), when))
            await db.compact()


if __name__ == "__main__":
    kind, *rest = sys.argv[2:]
    trio.run({"when told": when_told, "killed": killed}[kind], Path(sys.argv[1]), *rest)
