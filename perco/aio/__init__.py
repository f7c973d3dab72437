"""perco for asyncio: the same names and types as in `perco`.

    async with perco.aio.open("folder/", schema) as db:

        async def transfer(txn, source, target, amount): ...    # awaits whatever asyncio can

        await db.run(transfer, "alice", "bob", 10)
        async with db.snapshot() as snap:
            async for row in snap.scan(accounts): ...

The store runs on trio, as the guest of the loop that opens it: in the same thread, between the loop's own callbacks.
This works with any asyncio loop, including uvloop's. All stores of a loop share one guest run.

T10 If a task is cancelled during a call, the call is cancelled: a commit that has not been sent by then does not
    happen. CancelledError is raised when the call has ended. If the transaction has committed, or its outcome is
    unknown, a note on the exception (`__notes__`) and `txn.outcome` say so.

Observers run on trio, as for every store; declare those that await asyncio with `perco.aio.observer`.
"""

from perco.aio.attempts import Attempt as Attempt, Attempts as Attempts, Retrying as Retrying
from perco.aio.blocks import WorkerHandle as WorkerHandle
from perco.aio.database import Database as Database
from perco.aio.following import ChangeStream as ChangeStream
from perco.aio.held import (
    PinnedSnapshot as PinnedSnapshot,
    Snapshot as Snapshot,
    Transaction as Transaction,
)
from perco.aio.observing import observer as observer
from perco.aio.opening import open as open
from perco.aio.scanning import Scan as Scan
