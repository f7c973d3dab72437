"""Calls from outside into a trio loop: from other threads, or from the loop that trio is a guest of.

Callers leave their calls in one queue and wake the loop once for all that have come by then. *Servers*, tasks on the
loop, make them. One server at a time leads: it takes one call after the other, and makes those that need not wait, like
most reads, without any other task. If one has to wait, its server waits with it and another server leads: no call waits
for another.

F1  A call is answered exactly once: with its value, its error, or `cut` if it was cancelled before it was through (T10:
    a commit that was on its way is answered with its outcome, cancelled or not).
F2  Nothing is left in the queue: a caller wakes the loop after it has queued a call; closing answers the queued calls;
    later ones are refused.
F3  A call that is interrupted before a server took it is removed and never made.
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

_IDLE_MAX: Final = 256  # servers that wait for calls; more of them end when they have nothing to do
_TAKEN_MAX: Final = 256  # calls that a server makes before all others on the loop have their turn

Function = Callable[..., Awaitable[Any]]


class Call:
    """One call. `waits`: it is known to have to wait, as commits do; `done`: it was answered; `cut`: with nothing, for
    it was cancelled."""

    __slots__ = ("args", "cut", "done", "error", "function", "kwargs", "server", "value", "waits")

    def __init__(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], waits: bool) -> None:
        self.waits = waits
        self.function, self.args, self.kwargs = function, args, kwargs
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = self.cut = False
        self.server: Server | None = None

    def answer(self) -> None:
        """F1: loop thread only, but for what is refused."""
        assert not self.done, "F1: answered once"
        self.server = None
        self.done = True
        self.wake()

    def wake(self) -> None:
        """Wake the caller."""
        raise NotImplementedError


class Server:
    """A task that makes calls. `scope`: around the call that it makes."""

    __slots__ = ("ended", "given", "scope", "task")

    def __init__(self) -> None:
        self.task: trio.lowlevel.Task | None = None
        self.scope = trio.CancelScope()
        self.given: Call | None = None  # to be made before it looks at the queue
        self.ended = trio.Event()


class Portal:
    """The queue and its servers. Loop thread only, but for `refuse`.

    Attributes: `closed`: why no call is made any more, once that is so; `forked`: it is a child's copy; `made`: calls.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.forked = False
        self.queue: deque[Call] = deque()
        self.closed: Callable[[], BaseException] | None = None
        self._leader: Server | None = None
        self._idle: list[Server] = []
        self._servers: set[Server] = set()
        self.made = 0
        _portals.add(self)

    # ------------------------------------------------------------ what a front says

    async def wait_woken(self, server: Server) -> None:
        """Until somebody has put a call into the queue, or the server's scope is cancelled. The leader's."""
        raise NotImplementedError

    # ------------------------------------------------------------ servers

    def lead(self) -> None:
        """Let somebody lead, now that nobody does."""
        assert self._leader is None
        self._leader = self._rouse(None)

    def _rouse(self, call: Call | None) -> Server:
        """A server that has nothing to do, or a new one, goes on with a call, or leads."""
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
                server.scope = trio.CancelScope()  # a call of it was cancelled
        finally:
            self._give_back(server)
            self._servers.discard(server)
            if self._leader is server:
                self._leader = None
            server.ended.set()

    def _give_back(self, server: Server) -> None:
        """F3: a call that it was given, and that was cancelled before it began."""
        if server.given is not None:
            call, server.given = server.given, None
            call.cut = True
            call.answer()

    async def _make_calls(self, server: Server) -> None:
        """Returns when there are enough others."""
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
                    call.server = self._rouse(call)  # many that wait set out together
                    continue
                await self._make(server, call)
            elif len(self._idle) >= _IDLE_MAX:
                return
            else:
                await self._rest(server)
        await trio.lowlevel.checkpoint()  # cancelled when its call was through already

    async def _rest(self, server: Server) -> None:
        self._idle.append(server)

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            self._idle.remove(server)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _make(self, server: Server, call: Call) -> None:
        call.server = server
        self.made += 1
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
        """The leader's call has to wait: another one leads."""
        if self._leader is server:
            self._leader = None
            self.lead()

    # ------------------------------------------------------------ cancelling and closing

    @trio.lowlevel.enable_ki_protection
    def cut(self, call: Call) -> None:
        """F3: cancel a call; it is answered when it has ended."""
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
        """F2: answer what is in the queue after the end. Any thread."""
        assert self.closed is not None
        while True:
            try:
                call = self.queue.popleft()
            except IndexError:
                return
            call.error = self.closed()
            call.answer()

    async def aclose(self, why: Callable[[], BaseException]) -> None:
        """Refuse what comes, cancel what is under way, wait until that has ended."""
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
    """As `await running`, and `waits` is told when it first has to wait."""
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
    """In the child there is no loop that could answer (S5)."""
    for portal in _portals:
        portal.forked = True
        portal.closed = functools.partial(UsedAfterFork, portal.path)


os.register_at_fork(after_in_child=_after_fork)
