"""A process that owns a folder and does one thing in it: `python -m tests.support.owner FOLDER WHAT`.

It says on stdout how far it is, one word a line, and goes on when a line comes on stdin.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import trio

import perco
from perco.database.inside import inside
from tests.support import bank

warnings.simplefilter("ignore")
MOVED = 55  # from the first account, in equal shares to all others
PATIENT = perco.Options(durability="process")


def say(word: str) -> None:
    print(word, flush=True)


def wait() -> None:
    sys.stdin.readline()


async def opened(db: perco.Database) -> None:
    await db.run(bank.opening)
    await inside(db).oracle.note()


async def hold(folder: Path) -> None:
    """Own the folder with an open bank; on a line, move; on another, leave."""
    async with perco.open(folder, bank.SCHEMA, options=PATIENT) as db:
        await opened(db)
        say("open")
        await trio.to_thread.run_sync(wait)
        await db.run(bank.scatter, bank.ACCOUNTS[0], MOVED)
        await inside(db).oracle.note()
        say("moved")
        await trio.to_thread.run_sync(wait)


async def vacuum(folder: Path) -> None:
    """Own the folder with an open bank that keeps no history; on a line, move and vacuum; on another, leave."""
    schema = perco.Schema(bank.north, bank.south, keep=perco.Keep(seconds=0))
    async with perco.open(folder, schema, options=PATIENT) as db:
        await opened(db)
        say("open")
        await trio.to_thread.run_sync(wait)
        await db.run(bank.scatter, bank.ACCOUNTS[0], MOVED)
        await inside(db).oracle.note()
        say(str((await db.vacuum()).watermark))
        await trio.to_thread.run_sync(wait)


async def stop(folder: Path, at: str, *, killed: bool) -> None:
    """Stop in the middle of a transfer, at an event: killed, or standing still with the locks in place."""
    armed = False

    def event(name: str) -> None:
        if armed and name == at:
            say(txn.token)
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            wait()

    options = perco.Options(durability="process", on_event=event)
    async with perco.open(folder, bank.SCHEMA, options=options) as db:
        await opened(db)
        for _ in range(3):
            async with db.snapshot():
                pass
        armed = True
        txn = await db.begin()
        await bank.scatter(txn, bank.ACCOUNTS[0], MOVED)
        await inside(db).oracle.note()  # a reader beside reads at a timestamp above that of the transfer
        await txn.commit()


async def fork(folder: Path) -> None:
    """Use everything in a child of the process that opened it."""
    async with perco.open(folder, bank.SCHEMA, options=PATIENT) as db:
        await opened(db)
        async with db.snapshot() as snap, db.transaction() as txn:
            txn.set(*bank.ACCOUNTS[0], 0)
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)  # a process that hangs dies
                uses = {
                    "begin": db.begin,
                    "snapshot": db.snapshot_at,
                    "run": lambda: db.run(bank.opening),
                    "outcome": lambda: db.outcome("1/1/north/61"),
                    "get": lambda: snap.get(*bank.ACCOUNTS[0]),
                    "scan": lambda: snap.scan(bank.north).all(),
                    "commit": txn.commit,
                }
                use = uses[sys.argv[3]]
                try:
                    with trio.CancelScope(shield=True):  # a background task may meet the fork first, and end the block
                        await use()
                except BaseException as error:
                    say(type(error).__name__)
                else:
                    say("nothing")
                os._exit(0)
            os.waitpid(pid, 0)  # noqa: ASYNC222
            txn.discard()
            assert await snap.get(*bank.ACCOUNTS[0]) == bank.OPENING
        say("whole")


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    match what:
        case "hold":
            trio.run(hold, folder)
        case "vacuum":
            trio.run(vacuum, folder)
        case "fork":
            trio.run(fork, folder)
        case _:
            killed, _, at = what.partition("@")
            trio.run(lambda: stop(folder, at, killed=killed == "killed"))


if __name__ == "__main__":
    main()
