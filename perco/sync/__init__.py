"""perco for blocking code: the same names and types as in `perco`, without `await`.

    with perco.sync.open("folder/", schema) as db:

        def transfer(txn, source, target, amount): ...      # a plain function; `txn.get(...)` blocks

        db.run(transfer, "alice", "bob", 10)                # from any thread, any number of them at once
        with db.snapshot() as snap:
            for row in snap.scan(accounts): ...

The store runs on a trio loop in a thread of its own. A caller hands its call over to the loop, and sleeps until the
answer. Commits of many threads that arrive together share a write and an fsync, as those of many tasks do. Any number
of threads may use a database or a snapshot, but only one thread at a time may use a transaction. `set` only notes a
write in the caller's thread; the next call passes it to the loop. In `db.run`, a transaction begins with its first
read; in `db.transaction()`, at once.

T10 A KeyboardInterrupt first cancels the call that it interrupts: a commit that has not been sent by then does not
    happen. Then the exception propagates. If the transaction has committed, or its outcome is unknown, a note on the
    exception (`__notes__`) and `txn.outcome` say so.

Calls from the loop's own thread (from `on_event`, `progress=`, an `async def` observer) raise UsageError, because they
would wait for themselves.
"""

from perco.sync.attempts import Attempt as Attempt, Attempts as Attempts, Retrying as Retrying
from perco.sync.blocks import WorkerHandle as WorkerHandle
from perco.sync.database import Database as Database
from perco.sync.following import ChangeStream as ChangeStream
from perco.sync.held import (
    PinnedSnapshot as PinnedSnapshot,
    Snapshot as Snapshot,
    Transaction as Transaction,
)
from perco.sync.observing import OBSERVER_THREADS as OBSERVER_THREADS, observer as observer
from perco.sync.opening import open as open
from perco.sync.scanning import Scan as Scan
