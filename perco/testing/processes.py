"""Processes that can be stopped (SIGSTOP), continued (SIGCONT) and killed (SIGKILL), all in one event loop.

Every task belongs to the process whose task started it. While a process is stopped, none of its tasks takes a step.
Their wake-ups are kept until the process continues, as the kernel keeps them for a real process. A killed process never
takes another step. So none of its `finally` blocks run while other processes are alive, it notifies no other process,
and its memory has no further effect. The simulation unwinds a killed process's tasks when the run is over
(`Processes.bury`).

This module replaces the queue in which trio keeps its runnable tasks, so the code under test needs no change. Calls
that are scheduled on the loop (`TrioToken.run_sync_soon`) are made by a task of the process that scheduled them.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import trio
from trio._core import _run as scheduler
from trio._core._run import CancelStatus

from perco.outcome import Awaited

_ALL_S: Final = 1500.0  # virtual time; a run ends by itself long before
_CLOSES_MAX: Final = 50  # a task that is closed may wait in its `finally`, again and again
_UNWIND_S: Final = 20.0  # virtual time; a wait for a server that is gone ends long before


class EndlessError(Exception):
    """A run does not end: it loops, or all its tasks wait for each other."""


class Process:
    """Some tasks that live and die together. `died` is set when the process is killed; `ended` when its main task has
    ended, or has been unwound after a kill."""

    died: trio.Event
    ended: trio.Event
    scope: trio.CancelScope

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = self.stopped = False
        self.died, self.ended = trio.Event(), trio.Event()
        self.scope = trio.CancelScope()
        self.nursery: trio.Nursery | None = None
        self.on_death: list[Callable[[], None]] = []  # what the kernel does when the process dies
        self.error: Exception | None = None
        self._kept: list[trio.lowlevel.Task] = []
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._called = trio.Event()
        self._stop_until = -math.inf

    def __repr__(self) -> str:
        return f"<process {self.name}>"

    async def gone(self) -> None:
        """Wait until the process is dead or has ended."""
        async with trio.open_nursery() as nursery:

            async def until(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until, self.died)
            nursery.start_soon(until, self.ended)

    def stood_still_since(self, seconds: float) -> bool:
        """Whether the process is stopped, or was stopped within the last `seconds`."""
        return self.stopped or trio.current_time() - self._stop_until < seconds

    def keep(self, task: trio.lowlevel.Task) -> None:
        self._kept.append(task)

    def kept(self) -> list[trio.lowlevel.Task]:
        """Take the tasks that could have continued while the process was stopped."""
        kept, self._kept = self._kept, []
        return kept

    def call_soon(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._calls.append((function, args))
        self._called.set()

    async def make_calls(self) -> None:
        """Make the calls of `call_soon`, until cancelled."""
        while True:
            await self._called.wait()
            self._called = trio.Event()
            for _ in range(len(self._calls)):
                function, args = self._calls.popleft()
                function(*args)


_current: ContextVar[Process | None] = ContextVar("process", default=None)


def current() -> Process:
    """The process whose task is running."""
    process = _current.get()
    assert process is not None, "a task of no process"
    return process


class _Runnable(deque[trio.lowlevel.Task]):
    """trio's runnable tasks, without those of stopped processes."""

    def append(self, task: trio.lowlevel.Task) -> None:
        process = task.context.get(_current)
        if process is None:  # the task is new, or one of trio's own
            process = _current.get()
            if process is not None:
                task.context.run(_current.set, process)
        if process is not None and process.stopped:
            process.keep(task)
        else:
            super().append(task)


class _NoEvents:
    """Replaces trio's I/O manager. There are no I/O events, so the kernel need not be asked for them at each step."""

    def __init__(self, manager: object) -> None:
        self._manager = manager

    def get_events(self, timeout: float) -> list[Any]:
        return []

    def process_events(self, events: list[Any]) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class _Token:
    """Replaces trio's token: no calls come from other threads."""

    def run_sync_soon(self, function: Callable[..., object], *args: Any, idempotent: bool = False) -> None:
        current().call_soon(function, args)


def _end_shielded(task: trio.lowlevel.Task) -> None:
    """Cancel a task of a dead process even if the task is shielded: it may be waiting for another task of a dead
    process."""
    status: CancelStatus | None = task._cancel_status
    while status is not None:
        if status._scope.shield:
            status._scope.shield = False
            status._scope.cancel()
        status = status._parent


class _Unanswered:
    """An `outcome.Outcome`, for a task of a dead process."""

    def unwrap(self) -> None:
        raise EndlessError("its process is dead")


def _waits_in_vain(task: trio.lowlevel.Task) -> bool:
    """Whether a cancelled task still waits for the reply to a mutation that it has sent (T10)."""
    waits = task._next_send_fn is None and task._abort_func is None
    return waits and not any(nursery._parent_waiting_in_aexit for nursery in task.child_nurseries)


def _forget_answers(task: trio.lowlevel.Task) -> None:
    """Detach a task from its calls. While the process is unwound, another task may still answer them, and would wake
    a task that already runs, or has ended."""
    for frame, _ in task.iter_await_frames():
        call = frame.f_locals.get("call")
        if isinstance(call, Awaited):
            call.task = None


class Processes:
    """All processes of a run. `world`: the tasks of the run itself, which belong to none of these processes."""

    world: Process

    def __init__(self) -> None:
        self.all: list[Process] = []
        self.world = Process("the world")
        self._nursery: trio.Nursery | None = None
        self._tasks: set[trio.lowlevel.Task] = set()

    @contextmanager
    def _installed(self) -> Iterator[None]:
        runner = scheduler.GLOBAL_RUN_CONTEXT.runner
        _current.set(self.world)
        for task in runner.tasks:
            if task is not trio.lowlevel.current_task():
                task.context.run(_current.set, self.world)
        self._tasks = runner.tasks
        queue, token, events = runner.runq, runner.trio_token, runner.io_manager
        self._queue = runner.runq = _Runnable(queue)
        runner.trio_token = _Token()  # type: ignore[assignment]
        runner.io_manager = _NoEvents(events)  # type: ignore[assignment]
        try:
            yield
        finally:
            runner.runq, runner.trio_token, runner.io_manager = deque(self._queue), token, events

    async def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run `main` in the world; `main` must bury the processes at its end."""
        with self._installed():
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self.world.make_calls)
                nursery.start_soon(self._watch)
                try:
                    await main()
                except Exception as error:
                    self._abort(error)
                    await trio.sleep_forever()
                nursery.cancel_scope.cancel()

    async def _watch(self) -> None:
        """If tasks wait forever, even shielded ones, end the run with an error that says where they wait."""
        await trio.sleep(_ALL_S)
        living = [process for process in (self.world, *self.all) if not process.dead and not process.ended.is_set()]
        self._abort(EndlessError(f"after {_ALL_S:g} s the run has not ended: {self._where(living)}"))

    def _abort(self, error: Exception) -> None:
        """End the run with an error, even if tasks are shielded."""

        def current_time() -> float:
            raise error

        setattr(trio.lowlevel.current_clock(), "current_time", current_time)  # noqa: B010

    def discard(self) -> None:
        """Close the tasks of an aborted run, so that they do not disturb the next one."""
        for task in list(self._tasks):
            for _ in range(_CLOSES_MAX):
                with contextlib.suppress(BaseException):  # errors that tasks raise at their end do not matter
                    task.coro.close()
                    break

    def start(self, process: Process, main: Callable[[], Awaitable[None]]) -> None:
        """Start a process with `main` as its first task. When this task ends, so does the process."""
        assert self._nursery is not None
        self.all.append(process)
        before = _current.set(process)
        try:
            self._nursery.start_soon(self._live, process, main, name=process.name)
        finally:
            _current.reset(before)

    async def _live(self, process: Process, main: Callable[[], Awaitable[None]]) -> None:
        try:
            async with trio.open_nursery() as calls:
                calls.start_soon(process.make_calls)  # until the end: closing a store needs such calls
                with process.scope:
                    async with trio.open_nursery() as nursery:
                        process.nursery = nursery
                        await main()
                        process.nursery = None
                        nursery.cancel_scope.cancel()
                calls.cancel_scope.cancel()
        except Exception as error:  # for the task that waits until the process has ended
            process.error = error
        finally:
            process.nursery = None
            process.ended.set()

    # ------------------------------------------------------------ signals

    def stop(self, process: Process) -> None:
        """Stop a process: from now on, none of its tasks takes a step."""
        process.stopped = True
        rest = [task for task in self._queue if task.context.get(_current) is not process]
        for task in self._queue:
            if task.context.get(_current) is process:
                process.keep(task)
        self._queue.clear()
        self._queue.extend(rest)

    def stop_for(self, process: Process, seconds: float) -> None:
        """Stop a process for a number of seconds."""
        if process.dead or process.ended.is_set():
            return
        until = trio.current_time() + seconds
        if process.stopped and until <= process._stop_until:
            return
        process._stop_until = until
        self.stop(process)

        async def wake() -> None:
            await trio.sleep_until(until)
            if until >= process._stop_until:
                self.go_on(process)

        self.in_the_world(wake)

    def in_the_world(self, act: Callable[[], Awaitable[None]]) -> None:
        """Start a task that belongs to no process; it ends with the run at the latest."""
        assert self._nursery is not None
        before = _current.set(self.world)
        try:
            self._nursery.start_soon(act)
        finally:
            _current.reset(before)

    def spawn_in(self, process: Process, act: Callable[[], Awaitable[None]]) -> None:
        """Start a task in a process; an exception in it ends the process."""
        if process.nursery is None:
            return
        before = _current.set(process)
        try:
            process.nursery.start_soon(act)
        finally:
            _current.reset(before)

    def go_on(self, process: Process) -> None:
        """Continue a stopped process, with all wake-ups that it got meanwhile. A dead process does not continue."""
        if process.stopped and not process.dead:
            process.stopped = False
            self._queue.extend(process.kept())

    def kill(self, process: Process) -> None:
        """Kill a process: it never takes another step, and the kernel closes what the process had open."""
        if process.dead or process.ended.is_set():
            return
        process.dead = True
        self.stop(process)
        process.died.set()
        for act in process.on_death:
            act()

    async def bury(self) -> None:
        """Unwind the dead processes, which can no longer reach any other process. Their exceptions are ignored."""
        dead = [process for process in self.all if process.dead]
        for process in dead:
            process.stopped = False
            self._queue.extend(process.kept())
            process.scope.cancel()
        with trio.move_on_after(_UNWIND_S):
            for process in dead:
                await process.ended.wait()
        # A shielded task may wait for something that another dead process will never do.
        for _ in range(_CLOSES_MAX):
            tasks = [task for task in self._tasks if (of := task.context.get(_current)) is not None and of.dead]
            if not tasks:
                break
            for task in tasks:
                _end_shielded(task)
            await trio.sleep(0.0)
            for task in tasks:
                if task in self._tasks and _waits_in_vain(task):
                    _forget_answers(task)
                    trio.lowlevel.reschedule(task, _Unanswered())  # type: ignore[arg-type]
        left = [process for process in dead if not process.ended.is_set()]
        assert not left, f"not unwound: {left}, at {self._where(left)}"

    def _where(self, left: list[Process]) -> list[str]:
        """Where the tasks of these processes wait."""
        runner = scheduler.GLOBAL_RUN_CONTEXT.runner
        tasks = [task for task in runner.tasks if (of := task.context.get(_current)) is not None and of in left]
        frames = [[f"{frame.f_code.co_qualname}:{line}" for frame, line in task.iter_await_frames()] for task in tasks]
        return [f"{task.name} {' > '.join(at[-6:])}" for task, at in zip(tasks, frames, strict=True)]
