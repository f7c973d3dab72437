"""Runs the observers of the rows that a scanner has claimed: tasks that take one row, or one batch, after the other."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import trio

from perco.notify.batches import Batches
from perco.notify.worker import Worker

_LOOK: Final = 4  # so many times a batch's rows are looked at for those that can share it


class Ready(NamedTuple):
    """A claimed row, whose lock and slot are released at the end of its runs. `acks`: the acknowledgement columns of
    the observers that run; `failing`: whether the row counts among those that have failed before (N6); `apart`: those
    of `acks` whose runs are left, and need transactions of their own (N20); None: none has run."""

    table: str
    row: bytes
    acks: list[int]
    failing: bool
    apart: list[int] | None = None


class Runners:
    """The runners of one scanner.

    Args: `slots`: for runs in flight; the scanner takes one for each row.
    """

    def __init__(self, worker: Worker, slots: trio.Semaphore) -> None:
        self._worker: Final = worker
        self._slots: Final = slots
        self._batches = Batches(worker)
        self._ready: deque[Ready] = deque()
        self._idle = trio.lowlevel.ParkingLot()
        self._left: int = slots.value  # tasks that may still be started
        self._coming: deque[int] = deque()  # of the tasks that have been woken: how many rows each may take
        self._expected = 0  # their sum

    def hand(self, nursery: trio.Nursery, ready: Ready) -> None:
        """Give a row to the next task."""
        self._ready.append(ready)
        if len(self._ready) > self._expected:
            self._wake(nursery, ready)

    def _wake(self, nursery: trio.Nursery, ready: Ready) -> None:
        """Let another task begin that can take this row, if there is one."""
        if self._idle:
            self._idle.unpark()
        elif self._left:
            self._left -= 1
            nursery.start_soon(self._serve, nursery)
        else:
            return
        size = self._size(ready) if self._batches else 1
        self._coming.append(size)
        self._expected += size

    def _size(self, ready: Ready) -> int:
        """How many rows a task may take with this one."""
        return 1 if ready.failing or ready.apart is not None else max(map(self._batches.size, ready.acks))

    @trio.lowlevel.enable_ki_protection  # trio protects only its system tasks; Ctrl-C must reach the main task
    async def _serve(self, nursery: trio.Nursery) -> None:
        self._expected -= self._coming.popleft()
        while True:
            while not self._ready:
                await self._idle.park()
                self._expected -= self._coming.popleft()
            batch = self._next()
            if len(self._ready) > self._expected:
                self._wake(nursery, self._ready[0])  # it took fewer rows than it might have taken
            try:
                if len(batch) == 1:
                    await self._run_row(batch[0])
                else:
                    await self._run_batch(nursery, batch)
            except trio.Cancelled:
                raise
            except BaseException as error:
                if isinstance(error, Exception):
                    raise  # a bug in perco: errors of observers have been handled by now (N6)
                self._stop(error)

    def _stop(self, error: BaseException) -> None:
        """Stop the store with an observer's SystemExit, KeyboardInterrupt or the like, which may have come in a group
        with a cancellation; raise the cancellation."""
        cancelled = None
        if isinstance(error, BaseExceptionGroup):
            cancelled, rest = error.split(trio.Cancelled)
            if rest is not None:
                self._worker.engine.background.stop(rest)
        else:
            self._worker.engine.background.stop(error)
        if cancelled is not None:
            raise cancelled

    def _next(self) -> list[Ready]:
        """The next row, with those whose runs may share its transactions (N20)."""
        first = self._ready.popleft()
        batch = [first]
        if self._ready and self._batches and (most := self._size(first)) > 1:
            others: list[Ready] = []
            locate = self._worker.engine.driver.store.locate
            tablet = locate(first.table, first.row)
            for _ in range(min(len(self._ready), _LOOK * most)):
                ready = self._ready.popleft()
                shares = ready.acks == first.acks and ready.apart is None and not ready.failing
                shares = shares and ready.table == first.table and locate(ready.table, ready.row) == tablet
                (batch if shares else others).append(ready)
                if len(batch) == most:
                    break
            self._ready.extendleft(reversed(others))
        return batch

    async def _run_row(self, ready: Ready) -> None:
        """Run the observers that wait on a row, one after the other."""
        worker = self._worker
        try:
            claimed_at = trio.current_time()
            for at, ack in enumerate(ready.acks if ready.apart is None else ready.apart):
                if wait_s := worker.wait_s(ack):
                    await trio.sleep(wait_s)
                if not (at or wait_s or ready.apart) or worker.may_go_on(ack, claimed_at):
                    await worker.run(ready.table, ready.row, ack)
                    if self._batches and not worker.backoff.waits((ready.table, ready.row, ack), trio.current_time()):
                        self._batches.succeeded(ack)
        finally:
            self._end(ready)

    async def _run_batch(self, nursery: trio.Nursery, batch: list[Ready]) -> None:
        """Run the observers that wait on some rows, one after the other, each for all rows."""
        worker, table = self._worker, batch[0].table
        left: dict[bytes, list[int]] = {}
        try:
            claimed_at = trio.current_time()
            for at, ack in enumerate(batch[0].acks):
                if wait_s := worker.wait_s(ack):
                    await trio.sleep(wait_s)
                if not (at or wait_s) or worker.may_go_on(ack, claimed_at):
                    for row in await self._batches.run_all(table, [ready.row for ready in batch], ack):
                        left.setdefault(row, []).append(ack)
        except BaseException:
            left.clear()
            raise
        finally:
            for ready in batch:
                if ready.row in left:
                    self.hand(nursery, ready._replace(apart=left[ready.row]))
                else:
                    self._end(ready)

    def _end(self, ready: Ready) -> None:
        """Release a row whose runs have ended."""
        worker = self._worker
        if worker.elsewhere is not None:
            worker.elsewhere.release((ready.table, ready.row))
        room = worker.end_row(ready.acks, failing=ready.failing)
        passed = worker.options.row_locks and worker.rows.release(ready.table, ready.row)
        self._slots.release()
        # A scanner may have skipped another row, for want of room, or this one.
        if room or not worker.is_plain:
            worker.wake_up()
        elif passed:
            worker.notified([(ready.table, ready.row, ())])
