"""Tasks that belong to an opened store, and end with it.

They are trio system tasks, each in its own cancel scope. So they survive the cancellation of the task that started
them, the store waits for their end when it closes, and their errors never leave the user's `async with` wrapped in an
ExceptionGroup. If a task dies of a bug, the store becomes unusable: every use raises a PercoError that says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from perco.errors import BackgroundFailure, PercoError, StoreLocked, TransactionClosed

T = TypeVar("T")


class Background:
    """Loop thread only."""

    ended: bool

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token() if trio.lowlevel.in_trio_run() else None
        self._scope: list[trio.CancelScope] = []
        self._short = 0
        self._long = 0
        self._changed: trio.Event | None = None  # set when a task ends; None: no task waits for that
        self._failure: BaseException | None = None
        self.stopped: BaseException | None = None  # SystemExit or the like, raised by a user's function
        self._closed = False
        self.ended = False  # closed, or failed: `check` raises
        self.on_failure: list[Callable[[], None]] = []

    def spawn(self, action: Callable[[], Awaitable[None]]) -> None:
        """Start a short task that must finish before the store closes: phase two, a rollback."""
        self._short += 1
        trio.lowlevel.spawn_system_task(self._run_short, action, name="perco-background")

    async def _run_short(self, action: Callable[[], Awaitable[None]]) -> None:
        try:
            with trio.CancelScope(shield=True):
                await action()
        except Exception as error:
            self._fail(error)
        finally:
            self._short -= 1
            self._notify()

    def hold(self) -> None:
        """Count short work that has no task of its own, until `let_go` is called."""
        self._short += 1

    def let_go(self, error: Exception | None = None) -> None:
        if error is not None:
            self._fail(error)
        self._short -= 1
        self._notify()

    def start(self, loop: Callable[[], Awaitable[None]], name: str) -> Callable[[], None]:
        """Start a task that runs until the store closes; returns a function that ends it earlier."""
        scope = trio.CancelScope()
        self._scope.append(scope)
        if self._closed:  # short work that `aclose` waits for may still start a task
            scope.cancel()
        self._long += 1
        trio.lowlevel.spawn_system_task(self._run_long, scope, loop, name=f"perco-{name}")
        return scope.cancel

    def soon(self, function: Callable[[], object]) -> None:
        """Call a function on the loop soon, unless the store has been closed by then. Any thread, and also asyncio."""
        assert self._token is not None, "the store was opened on a loop"

        def call() -> None:
            if not self._closed:
                function()

        self._token.run_sync_soon(call)

    async def apart(self, action: Callable[[], Awaitable[T]], name: str) -> T:
        """Run an action in a task of its own, and return its result. If the caller is cancelled or interrupted,
        cancel the action and wait for its end. Raises: the action's errors."""
        done = trio.Event()
        made: list[T] = []
        failed: list[PercoError] = []

        async def act() -> None:
            try:
                made.append(await action())
            except PercoError as error:
                failed.append(error)
            finally:
                done.set()

        cancel = self.start(act, name)
        try:
            await done.wait()
        except BaseException:
            cancel()
            with trio.CancelScope(shield=True):
                await done.wait()
            raise
        if failed:
            raise failed[0]
        if not made:
            self.check()
        return made[0]

    async def _run_long(self, scope: trio.CancelScope, loop: Callable[[], Awaitable[None]]) -> None:
        try:
            with scope:
                await loop()
        except Exception as error:
            self._fail(error)
        finally:
            self._scope.remove(scope)
            self._long -= 1
            self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = _cause(error)
            self.ended = True
            for act in self.on_failure:
                act()

    def stop(self, error: BaseException) -> None:
        """Cancel the store's block, which then raises `error`, because a user's function wants the program to end."""
        if self.stopped is None:
            self.stopped = error
            for act in self.on_failure:
                act()

    def failure(self) -> BackgroundFailure | None:
        """The error that killed a background task, if any."""
        if self._failure is None:
            return None
        if isinstance(self._failure, StoreLocked):
            said = f"this process has lost the store: {self._failure} All commits are safe."
        else:
            said = (
                f"a background task of the store died of {type(self._failure).__name__}: {self._failure}. "
                "This is a bug in perco; all commits are safe. Close the store and open it again."
            )
        failure = BackgroundFailure(said)
        failure.__cause__ = self._failure
        return failure

    def check(self) -> None:
        if self._closed:
            raise TransactionClosed("this store has been closed; use it only inside `async with perco.open(...)`")
        if self._failure is not None:
            failure = self.failure()
            assert failure is not None
            raise failure

    async def change(self) -> None:
        """Wait until a task ends."""
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    @property
    def crowd(self) -> int:
        """How many short tasks are under way."""
        return self._short

    async def aclose(self) -> None:
        """Wait for the short tasks, and cancel the long ones. The caller's cancel scope has no effect here."""
        self._closed = self.ended = True
        with trio.CancelScope(shield=True):
            for scope in self._scope:
                scope.cancel()
            while self._short or self._long:
                await self.change()


def _cause(error: BaseException) -> BaseException:
    """The error of a task that had tasks of its own: if one of them has lost the store, that is why others failed."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    lost = error.subgroup(StoreLocked) or error
    return _cause(lost.exceptions[0]) if len(lost.exceptions) == 1 or lost is not error else error
