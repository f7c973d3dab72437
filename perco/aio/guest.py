"""A trio run as the guest of an asyncio loop, and how the loop's tasks call into it.

One guest run serves all stores of a loop; it ends with the last of them. Everything happens in the loop's own thread.
So a call costs no thread switch while other calls are under way, or have just ended. Otherwise it costs two, because an
idle guest waits for its I/O in a thread.

T10 If a task is cancelled during a call, the call is cancelled; the task goes on when the call has ended.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import trio

from perco.errors import TransactionClosed, UsageError
from perco.fronts.portal import Call, Portal, Server
from perco.protocol.reads import Isolation
from perco.txn.beginning import begin_nowait
from perco.txn.engine import Engine
from perco.txn.transaction import Transaction

T = TypeVar("T")


@trio.lowlevel.enable_ki_protection
def begin_here(port: Guests, engine: Engine, isolation: Isolation | None) -> Transaction | None:
    """Begin a transaction without a call, which is possible because both loops share a thread. Returns None if the
    store has been closed, or if the transaction would have to wait."""
    if port.closed is not None:
        return None
    port.must_be_here()
    return begin_nowait(engine, isolation)


# For how many rounds of the loop the portal's leader, the task that takes the calls, stays awake without anything to
# do. A caller that has just been answered often calls again at once, and it costs two thread switches to put the guest
# to sleep and to wake it.
_LINGERS: Final = 3

_WRONG_THREAD: Final = (
    "use a store of perco.aio only in tasks of the loop that opened it; from other threads call "
    "asyncio.run_coroutine_threadsafe(..., loop), or open it with perco.sync"
)


class _Call(Call):
    """A call that an asyncio task waits for."""

    __slots__ = ("future",)

    def __init__(self, loop: asyncio.AbstractEventLoop, *what: Any) -> None:
        super().__init__(*what)
        self.future: asyncio.Future[None] = loop.create_future()

    def wake(self) -> None:
        if not self.future.done() and not self.future.get_loop().is_closed():
            self.future.set_result(None)


class Guests(Portal):
    """The portal of a guest run. Its callers are in the same thread, so they wake its leader directly."""

    thread: int

    def __init__(self, path: str, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        super().__init__(path)
        _portals[engine] = self
        engine.on_asyncio = True
        self.loop = loop
        self.thread = threading.get_ident()
        self._parked: trio.lowlevel.Task | None = None

    def must_be_here(self) -> None:
        """Raise UsageError if this is not the loop's thread."""
        if threading.get_ident() != self.thread:
            raise UsageError(_WRONG_THREAD)

    async def wait_woken(self, server: Server) -> None:
        for _ in range(_LINGERS):
            await trio.lowlevel.checkpoint()
            if self.queue:
                return
        self._parked = server.task

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            self._parked = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def ask(
        self,
        function: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        waits: bool = False,
    ) -> T:
        """Make a call, and wait for its answer. Called by a task of the loop."""
        must_be_on(self.loop)
        if self.closed is not None:
            raise self.closed()
        call = _Call(self.loop, function, args, kwargs, waits)
        if self.spans is not None:
            call.context = self.spans.capture()
        self._submit(call)
        try:
            await call.future
        except asyncio.CancelledError:
            await self._ended(call)
            raise
        if call.cut:
            call.error = self.closed() if self.closed is not None else asyncio.CancelledError()
        if call.error is not None:
            error, call = call.error, None  # type: ignore[assignment]
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        result: T = call.value
        return result

    @trio.lowlevel.enable_ki_protection
    def _submit(self, call: _Call) -> None:
        self.queue.append(call)
        parked = self._parked
        if parked is not None:
            self._parked = None
            trio.lowlevel.reschedule(parked)

    async def _ended(self, call: _Call) -> None:
        """T10, F3: cancel the call, and wait until it has ended, however often the task is cancelled meanwhile."""
        self.cut(call)
        while not call.done:
            call.future = self.loop.create_future()
            try:
                await call.future
            except asyncio.CancelledError:
                continue  # the first cancellation is raised once the call has ended


_portals: weakref.WeakKeyDictionary[Engine, Guests] = weakref.WeakKeyDictionary()


def portal_of(engine: Engine) -> Guests:
    """The portal of an open store. Raises: UsageError if the store was not opened for asyncio."""
    portal = _portals.get(engine)
    if portal is None:
        raise UsageError(
            "it is made for asyncio (@perco.aio.observer), and the store was not opened with perco.aio.open: run it "
            "inside `async with perco.aio.open(...) as db, db.worker():`, or with `perco worker --asyncio`"
        )
    return portal


def must_be_on(loop: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop:
    """The running loop. Raises: UsageError if there is none, if it is not `loop` (unless that is None), or if the
    caller is a task of trio."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "perco.aio runs on asyncio: call asyncio.run(main); on trio use perco.open, without a loop use perco.sync"
        ) from None
    if trio.lowlevel.in_trio_task():
        raise UsageError(
            "this task runs on the store's own trio loop: in an observer, await only calls of the transaction that it "
            "is given; if it must await asyncio, decorate it with `@perco.aio.observer`"
        )
    if loop is not None and running is not loop:
        raise UsageError(_WRONG_THREAD)
    return running


def closed() -> BaseException:
    return TransactionClosed("this store has been closed; use it only inside `async with perco.aio.open(...)`")


# ------------------------------------------------------------------ the guest run


_hosts: dict[asyncio.AbstractEventLoop, Host] = {}


class Host:
    """The guest run of a loop.

    A KeyboardInterrupt is raised between trio's callbacks, never inside one: unless the loop handles interrupts itself,
    the exception leaves the loop.

    trio's callbacks go through a queue of their own. So if the loop was closed with a store open, the run can still be
    brought to its end: by the next run in the thread, or when the program ends.
    """

    loop: asyncio.events.AbstractEventLoop
    thread: int

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.thread = loop, threading.get_ident()
        self.stores: dict[object, trio.Event] = {}  # the open stores, and the events that close them
        self.ended: asyncio.Future[None] = loop.create_future()
        self._over = False
        self._end = trio.Event()
        self._due: deque[Callable[[], object]] = deque()
        self._came = threading.Semaphore(0)
        trio.lowlevel.start_guest_run(
            self._main,
            run_sync_soon_threadsafe=self._soon_from_thread,
            run_sync_soon_not_threadsafe=self._soon,
            done_callback=self._done,
            host_uses_signal_set_wakeup_fd=True,
        )
        _hosts[loop] = self
        atexit.register(self.rescue)

    @staticmethod
    async def of(loop: asyncio.AbstractEventLoop) -> Host:
        """The loop's guest run, which is started if there is none."""
        for host in list(_hosts.values()):
            if host.loop.is_closed():
                host.rescue()
        while (host := _hosts.get(loop)) is not None and host._end.is_set():  # type: ignore[assignment]
            await asyncio.shield(host.ended)
        if host is not None:
            return host
        if trio.lowlevel.in_trio_run():
            raise UsageError("this loop's thread already runs trio: open the store there, with perco.open")
        return Host(loop)

    async def leave(self, store: object) -> None:
        """Record that a store has been closed, and end the run after the last one."""
        self.stores.pop(store, None)
        if not self.stores:
            self._end.set()
            await asyncio.shield(self.ended)

    async def _main(self) -> None:
        while True:
            try:
                await self._end.wait()
                return
            except KeyboardInterrupt:  # raised while trio was running: pass it to the loop
                self.loop.call_soon(_interrupt)

    def _done(self, _: object) -> None:
        self._over = True
        atexit.unregister(self.rescue)
        _hosts.pop(self.loop, None)
        if not self.ended.done() and not self.loop.is_closed():
            self.ended.set_result(None)

    # ------------------------------------------------------------ callbacks

    @trio.lowlevel.enable_ki_protection
    def _soon(self, function: Callable[[], object]) -> None:
        self._due.append(function)
        if not self.loop.is_closed():
            self.loop.call_soon(self._tick)

    def _soon_from_thread(self, function: Callable[[], object]) -> None:
        self._due.append(function)
        self._came.release()
        try:
            self.loop.call_soon_threadsafe(self._tick)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    @trio.lowlevel.enable_ki_protection
    def _tick(self) -> None:
        if self._due:
            self._due.popleft()()

    def rescue(self) -> None:
        """End the run of a loop that has been closed, if the loop ran in this thread."""
        if threading.get_ident() != self.thread or self._over:
            return
        told = "an asyncio loop was closed with a perco store open; the store is closed now"
        warnings.warn(told, ResourceWarning, stacklevel=3)
        for stop in self.stores.values():
            stop.set()
        self._end.set()
        while not self._over:
            if self._due:
                self._due.popleft()()
            else:
                self._came.acquire()


def _interrupt() -> None:
    raise KeyboardInterrupt
