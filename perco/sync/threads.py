"""How other threads call into the loop.

T10 A KeyboardInterrupt cancels the call that it interrupts, and is raised when the call has ended.
"""

from __future__ import annotations

import functools
import os
import threading
from _thread import LockType
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import trio

from perco.errors import TransactionClosed, UsageError
from perco.fronts.portal import Call, Portal, Server

T = TypeVar("T")


class _Call(Call):
    """A call that a thread waits for."""

    waking: _Waking
    lock: LockType

    __slots__ = ("lock", "waking")

    def __init__(self, waking: _Waking, *what: Any) -> None:
        super().__init__(*what)
        self.waking = waking
        self.lock = threading.Lock()
        self.lock.acquire()

    def wake(self) -> None:
        self.waking.answered(self)


class _Waking(trio.abc.Instrument):
    """Wakes all answered callers together, when the loop has nothing else to do.

    Each time the loop reads, it releases the GIL. A thread that is awake then takes the GIL, and the loop has to wait
    for that thread. With many callers, this costs more than the calls themselves.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._answered: list[_Call] = []
        self._over = False

    def answered(self, call: _Call) -> None:
        """Wake the caller when the loop next waits; if called from another thread or after the loop's end, at once."""
        if self._over or threading.get_ident() != self._thread:
            call.lock.release()
        else:
            self._answered.append(call)

    def before_io_wait(self, timeout: float) -> None:
        answered, self._answered = self._answered, []
        for call in answered:
            call.lock.release()

    def end(self) -> None:
        """The loop has ended: wake all callers, and from now on wake each caller at once."""
        self._over = True
        self.before_io_wait(0)


class Threads(Portal):
    """The portal of a loop in a thread of its own.

    Callers wake the loop through an eventfd on which only the leading server waits. This costs half as much as trio's
    own mechanism, and one wake-up is enough for all calls that arrive before the leader looks at the queue.
    """

    token: trio.lowlevel.TrioToken
    thread: int
    waking: _Waking

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.token = trio.lowlevel.current_trio_token()
        self.thread = threading.get_ident()
        self.waking = _Waking()
        trio.lowlevel.add_instrument(self.waking)
        self._woken = False  # whether the loop has been woken and will look at the queue
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._fd)  # only now is no thread left that may write to it

    async def wait_woken(self, server: Server) -> None:
        self._woken = False  # before the look, so that no later call is missed (F2)
        if not self.queue:
            await trio.lowlevel.wait_readable(self._fd)
            os.eventfd_read(self._fd)

    def ask(
        self,
        function: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        waits: bool = False,
    ) -> T:
        """Make a call, and wait for its answer. For any thread but the loop's."""
        if threading.get_ident() == self.thread:
            raise UsageError(
                "a blocking call from the store's own thread would wait for itself. In an `async def` observer, await "
                "only calls of the transaction that it is given; if an observer must block, decorate it with "
                "`@perco.sync.observer`"
            )
        call = _Call(self.waking, function, args, kwargs, waits)
        if self.spans is not None:
            call.context = self.spans.capture()
        if self.closed is not None:
            raise self.closed()
        try:
            self.queue.append(call)
            if not self._woken:
                self._woken = True
                os.eventfd_write(self._fd, 1)
            if self.closed is not None:  # closed meanwhile
                self.refuse()
            call.lock.acquire()
        except BaseException:
            self._interrupted(call)
            raise
        if call.cut:
            call.error = self._why_cut()
        if call.error is not None:
            error, call = call.error, None  # type: ignore[assignment]
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        result: T = call.value
        return result

    def _interrupted(self, call: _Call) -> None:
        """T10, F3: cancel the call of an interrupted caller, and wait until it has ended."""
        try:
            self.token.run_sync_soon(self.cut, call)
            os.eventfd_write(self._fd, 1)  # the interrupt may have come between the flag's change and the write
        except trio.RunFinishedError:
            return
        while not call.done:
            call.lock.acquire()

    def _why_cut(self) -> BaseException:
        return self.closed() if self.closed is not None else AssertionError("F3: only its caller cancels a call")


class FromThread:
    """Passes calls from an observer's thread to the task that waits for the thread."""

    def ask(
        self,
        function: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        waits: bool = False,
    ) -> T:
        try:
            return trio.from_thread.run(functools.partial(function, *args, **kwargs))
        except RuntimeError as error:
            if "this thread wasn't created by Trio" not in str(error):
                raise
            raise UsageError("use an observer's transaction only in the observer's own thread") from None


Port = Threads | FromThread


def closed() -> BaseException:
    return TransactionClosed("this store has been closed; use it only inside `with perco.sync.open(...)`")
