"""Calls from outside into a trio loop: from other threads, or from the loop that trio is a guest of.

Callers put their calls into one queue, and wake the loop once for all calls that are in the queue by then. *Servers*,
which are tasks on the loop, make the calls. One server at a time is the leader: it takes the calls off the queue and
makes them, one after another. A call that does not have to wait, like most reads, involves no other task. If a call has
to wait, its server waits with it, and another server becomes the leader. So no call waits for another call.

F1  A call is answered exactly once: with its value, with its error, or with `cut` if it was cancelled before it was
    complete. (T10: a commit that was sent is answered with its outcome, whether it was cancelled or not.)
F2  No call is left in the queue: a caller wakes the loop after it has queued a call; closing the portal answers the
    queued calls; later calls are refused.
F3  If a call is interrupted before a server has taken it, it is removed from the queue and never made.
"""

from __future__ import annotations

import functools
import os
import types
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from typing import Any, Final

import trio

from perco.errors import UsedAfterFork
from perco.outcome import Pending
from perco.txn.spans import Spans

_IDLE_MAX: Final = 256  # servers without a call; further ones end
_TAKEN_MAX: Final = 256  # calls that a server makes before other tasks on the loop run

Function = Callable[..., Awaitable[Any]]


class Call(Pending):
    """One call. `waits`: True if the call is known to wait, as commits do; `done`: True once it has been answered;
    `cut`: True if it was cancelled, and so has no result; `context`: the caller's trace context, if calls are traced.
    """

    waits: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    cut: bool
    done: bool
    context: Any

    function: Function

    __slots__ = ("args", "context", "cut", "done", "function", "kwargs", "server", "waits")

    def __init__(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], waits: bool) -> None:
        super().__init__()
        self.waits = waits
        self.function, self.args, self.kwargs = function, args, kwargs
        self.done = self.cut = False
        self.server: Server | None = None
        self.context = None

    def answer(self) -> None:
        """Answer the call (F1). Loop thread only, except for refused calls."""
        assert not self.done, "F1: answered once"
        self.server = None
        self.done = True
        self.wake()

    def wake(self) -> None:
        """Wake the caller."""
        raise NotImplementedError


class Server:
    """A task that makes calls. `scope`: the cancel scope of the call that it is making."""

    scope: trio.CancelScope
    ended: trio.Event

    __slots__ = ("ended", "given", "scope", "task")

    def __init__(self) -> None:
        self.task: trio.lowlevel.Task | None = None
        self.scope = trio.CancelScope()
        self.given: Call | None = None  # a call to make before looking at the queue
        self.ended = trio.Event()


class Portal:
    """The queue and its servers. Loop thread only, except `refuse`.

    Attributes: `closed`: None until the portal is closed, then a function that makes the error for refused calls;
    `forked`: True in a forked child's copy; `made`: how many calls have been made; `spans`: traces them (`perco.otel`).
    """

    made: int
    spans: Spans | None

    def __init__(self, path: str) -> None:
        self.path = path
        self.forked = False
        self.queue: deque[Call] = deque()
        self.closed: Callable[[], BaseException] | None = None
        self._leader: Server | None = None
        self._idle: list[Server] = []
        self._servers: set[Server] = set()
        self.made = 0
        self.spans = None
        _portals.add(self)

    # ------------------------------------------------------------ what a front implements

    async def wait_woken(self, server: Server) -> None:
        """Wait for a call in the queue, or until the server's scope is cancelled. Called by the leader."""
        raise NotImplementedError

    # ------------------------------------------------------------ servers

    def lead(self) -> None:
        """Make a server the leader, when there is none."""
        assert self._leader is None
        self._leader = self._rouse(None)

    def _rouse(self, call: Call | None) -> Server:
        """Let an idle server, or a new one, make a call; None: let it lead."""
        if self._idle:
            server = self._idle.pop()
            server.given = call
            assert server.task is not None
            trio.lowlevel.reschedule(server.task)
            return server
        server = Server()
        server.given = call
        self._servers.add(server)
        trio.lowlevel.spawn_system_task(self._serve, server, name="perco-call")
        return server

    async def _serve(self, server: Server) -> None:
        server.task = trio.lowlevel.current_task()
        try:
            while self.closed is None:
                with server.scope:
                    await self._make_calls(server)
                    return
                self._give_back(server)
                server.scope = trio.CancelScope()  # its call was cancelled
        finally:
            self._give_back(server)
            self._servers.discard(server)
            if self._leader is server:
                self._leader = None
            server.ended.set()

    def _give_back(self, server: Server) -> None:
        """Answer a call that was given to the server, but cancelled before it began (F3)."""
        if server.given is not None:
            call, server.given = server.given, None
            call.cut = True
            call.answer()

    async def _make_calls(self, server: Server) -> None:
        """Make calls until the server is cancelled, or not needed because there are enough idle servers."""
        taken = 0
        while not server.scope.cancel_called:
            if server.given is not None:
                call, server.given = server.given, None
                await self._make(server, call)
            elif self._leader is server:
                if not self.queue:
                    taken = 0
                    await self.wait_woken(server)
                    continue
                taken += 1
                if taken % _TAKEN_MAX == 0:
                    await trio.lowlevel.checkpoint()
                    continue
                call = self.queue.popleft()
                if call.waits and self.queue:
                    call.server = self._rouse(call)  # so that many calls begin together, each of which has to wait
                    continue
                await self._make(server, call)
            elif len(self._idle) >= _IDLE_MAX:
                return
            else:
                await self._rest(server)
        await trio.lowlevel.checkpoint()  # the server was cancelled after its call was complete

    async def _rest(self, server: Server) -> None:
        self._idle.append(server)

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            self._idle.remove(server)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _make(self, server: Server, call: Call) -> None:
        call.server = server
        self.made += 1
        if self.spans is not None and call.context is not None:
            await self._make_in_context(self.spans, server, call)
            return
        await self._answer(server, call)

    async def _make_in_context(self, spans: Spans, server: Server, call: Call) -> None:
        """Make a call in its caller's trace context."""
        token = spans.attach(call.context)
        try:
            await self._answer(server, call)
        finally:
            spans.detach(token)

    async def _answer(self, server: Server, call: Call) -> None:
        try:
            running = call.function(*call.args, **call.kwargs)
            call.value = await (_noticed(running, self._waits, server) if self._leader is server else running)
        except trio.Cancelled:
            call.cut = True
            call.answer()
            raise
        except BaseException as error:
            call.error = error
        call.answer()

    def _waits(self, server: Server) -> None:
        """The leader's call has to wait: make another server the leader."""
        if self._leader is server:
            self._leader = None
            self.lead()

    # ------------------------------------------------------------ cancelling and closing

    @trio.lowlevel.enable_ki_protection
    def cut(self, call: Call) -> None:
        """F3: cancel a call. If it is in progress, it is answered when it has ended."""
        if call.done:
            return
        if call.server is not None:
            call.server.scope.cancel()
            return
        if call in self.queue:
            self.queue.remove(call)
        call.cut = True
        call.answer()

    def refuse(self) -> None:
        """F2: answer the calls that are in the queue after the portal was closed. Any thread."""
        assert self.closed is not None
        while True:
            try:
                call = self.queue.popleft()
            except IndexError:
                return
            call.error = self.closed()
            call.answer()

    async def aclose(self, why: Callable[[], BaseException]) -> None:
        """Refuse further calls, cancel those in flight, and wait until they have ended."""
        if self.closed is None:
            self.closed = why
        self.refuse()
        with trio.CancelScope(shield=True):
            while self._servers:
                for server in self._servers:
                    server.scope.cancel()
                await next(iter(self._servers)).ended.wait()
        self.refuse()


@types.coroutine
def _noticed(running: Awaitable[Any], waits: Callable[[Server], None], server: Server) -> Generator[Any, Any, Any]:
    """Like `await running`, but calls `waits` when `running` first has to wait."""
    assert isinstance(running, Coroutine)
    try:
        trap = running.send(None)
    except StopIteration as stop:
        return stop.value
    waits(server)
    while True:
        try:
            sent = yield trap
        except BaseException as error:
            step: Callable[[Any], Any] = running.throw
            sent = error
        else:
            step = running.send
        try:
            trap = step(sent)
        except StopIteration as stop:
            return stop.value


_portals: weakref.WeakSet[Portal] = weakref.WeakSet()


def _after_fork() -> None:
    """Close all portals in a forked child, which has no loop that could answer calls (S5)."""
    for portal in _portals:
        portal.forked = True
        portal.closed = functools.partial(UsedAfterFork, portal.path)


os.register_at_fork(after_in_child=_after_fork)
