"""The way of other threads to the loop.

T10 A call that KeyboardInterrupt comes into is cancelled, and has ended when the exception comes out.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import trio

from perco.errors import TransactionClosed, UsageError
from perco.fronts.lookup import by_name
from perco.fronts.portal import Call, Portal, Server

P = ParamSpec("P")
T = TypeVar("T")


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The same method of the object at hand (R9), waited for by the calling thread."""
    call = by_name(method)

    @functools.wraps(method)
    def ask(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._ask(call, args, kwargs)
        return result

    return ask


def asking(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The same method of the object at hand (R9), which waits for nothing, called on the loop."""
    call = by_name(method)

    async def on_loop(*args: Any, **kwargs: Any) -> T:
        return call(*args, **kwargs)

    @functools.wraps(method)
    def ask(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._ask(on_loop, args, kwargs)
        return result

    return ask


# ------------------------------------------------------------------ the way to the loop


class _Call(Call):
    """A thread waits for it."""

    __slots__ = ("lock", "waking")

    def __init__(self, waking: _Waking, *what: Any) -> None:
        super().__init__(*what)
        self.waking = waking
        self.lock = threading.Lock()
        self.lock.acquire()

    def wake(self) -> None:
        self.waking.answered(self)


class _Waking(trio.abc.Instrument):
    """Wakes callers when the loop has nothing to do for now, all at once.

    Each time that the loop reads, it releases the interpreter's lock. A thread that is awake by then takes it, and the
    loop has to wait for it: for many callers that costs more than their calls.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._answered: list[_Call] = []
        self._over = False

    def answered(self, call: _Call) -> None:
        """Loop thread, but for what is refused."""
        if self._over or threading.get_ident() != self._thread:
            call.lock.release()
        else:
            self._answered.append(call)

    def before_io_wait(self, timeout: float) -> None:
        answered, self._answered = self._answered, []
        for call in answered:
            call.lock.release()

    def end(self) -> None:
        """The loop has ended: nobody else is going to wake them."""
        self._over = True
        self.before_io_wait(0)


class Threads(Portal):
    """The portal of a loop in a thread of its own.

    Callers wake it by an eventfd that only its leader waits for: half of what trio's own way costs, and one for all
    callers that come before it looks.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.token = trio.lowlevel.current_trio_token()
        self.thread = threading.get_ident()
        self.waking = _Waking()
        trio.lowlevel.add_instrument(self.waking)
        self._woken = False  # the loop will look at the queue
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._fd)  # not before the last thread that may write to it has gone

    async def wait_woken(self, server: Server) -> None:
        self._woken = False  # before the look, lest what comes after it be missed (F2)
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
        """Make a call, and wait for its answer. Any thread but the loop's."""
        if threading.get_ident() == self.thread:
            raise UsageError(
                "a blocking call from the store's own thread would wait for itself. In an `async def` observer use "
                "what it is given, with await; let a function that blocks be an observer by `@perco.sync.observer`"
            )
        call = _Call(self.waking, function, args, kwargs, waits)
        if self.closed is not None:
            raise self.closed()
        try:
            self.queue.append(call)
            if not self._woken:
                self._woken = True
                os.eventfd_write(self._fd, 1)
            if self.closed is not None:  # meanwhile
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
                del error  # its traceback has this frame
        result: T = call.value
        return result

    def _interrupted(self, call: _Call) -> None:
        """T10, F3: the caller has something else to do; the call is cancelled, and has ended when this returns."""
        try:
            self.token.run_sync_soon(self.cut, call)
            os.eventfd_write(self._fd, 1)  # the interrupt may have come between the flag and the write
        except trio.RunFinishedError:
            return
        while not call.done:
            call.lock.acquire()

    def _why_cut(self) -> BaseException:
        return self.closed() if self.closed is not None else AssertionError("F3: nobody but its caller cancels a call")


class FromThread:
    """The way of an observer's thread: its calls are made in the task that waits for it."""

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
            raise UsageError("an observer's transaction is used in the observer's own thread only") from None


Port = Threads | FromThread


def closed() -> BaseException:
    return TransactionClosed("this store has been closed; use it inside `with perco.sync.open(...)` only")
