"""Watches, from a thread, whether a store's event loop runs, and which code holds (blocks) it.

The thread asks the loop to run a function. Until the function has run, the loop counts as held: by an observer that
computes without an await, or by a call that blocks. Subclasses use the thread: the owner of a folder writes its lease
(`perco/clock/heartbeat.py`); a client sends pulses (`perco/serve/beating.py`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from perco.settings import check_options

if TYPE_CHECKING:
    from types import FrameType

_LOOP: Final = "unrolled_run"  # trio's loop itself: the functions that called it do not hold the loop


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatOptions:
    """Attributes:
    refresh_s: the period of the owner's lease, in seconds.
    tick_s: how often to check whether the loop still runs, in seconds.
    held_s: how long the loop may take to answer before it counts as held, in seconds.
    """

    refresh_s: float = 10.0
    tick_s: float = 0.1
    held_s: float = 0.25

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class Held:
    """The loop was held for `seconds`. `where`: the place that was seen most often: "file:line function" of the running
    task, and ", in file:line function" of the innermost call."""

    seconds: float
    where: str


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """`lag_s`: how long the loop took to answer the last time; `lag_max_s`: the longest that it ever took; `held`: the
    last times that it was held, at most 16."""

    lag_s: float
    lag_max_s: float
    held: tuple[Held, ...]


class LoopWatch:
    """Started and stopped with the store. Its statistics are empty if it was never started."""

    join_s: float | None = None  # how long `aclose` waits for the thread

    def __init__(self, options: HeartbeatOptions) -> None:
        self.options = options
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop_thread = 0
        self._trio: trio.lowlevel.TrioToken | None = None
        self._asked = self._answered = 0.0
        self._seen: Counter[str] = Counter()  # a sample may be late, and show the wrong place: the majority counts
        self._lag = self._lag_max = 0.0
        self._longest = Held(0.0, "")  # since `take_longest`; includes times when this thread did not run either
        self._held: deque[Held] = deque(maxlen=16)
        self.on_held: Callable[[Held], None] | None = None  # called in the thread, once the loop runs again

    def start(self) -> None:
        """Start the thread. Called on the loop's thread."""
        self._loop_thread = threading.get_ident()
        self._trio = trio.lowlevel.current_trio_token()
        self._thread = threading.Thread(target=self._run, name="perco-heartbeat", daemon=True)
        self._thread.start()

    async def aclose(self) -> None:
        """End the thread, and wait for it."""
        self._stop.set()
        if self._thread is not None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._thread.join, self.join_s)

    def statistics(self) -> LoopStatistics:
        return LoopStatistics(self._lag, self._lag_max, tuple(self._held))

    def take_longest(self) -> Held:
        """The longest time for which the loop was held since the last call."""
        longest, self._longest = self._longest, Held(0.0, "")
        return longest

    # ------------------------------------------------------------ the thread

    def _longer(self, held: Held) -> None:
        if held.seconds > self._longest.seconds:
            self._longest = held

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                held = self._look(time.monotonic())
                self._meanwhile(time.monotonic(), held)
                turns = self._answered >= self._asked
                pause_s = self.options.tick_s / (1 if turns else 4)
                until = time.monotonic() + pause_s
                self._stop.wait(pause_s)
                self._longer(Held(time.monotonic() - until, "in C code, or the process was suspended"))
        except trio.RunFinishedError:
            pass  # the loop has ended, and with it the store
        finally:
            self._ended()

    def _look(self, now: float) -> Held | None:
        """Ask the loop to answer. Returns what holds the loop, if it has not answered for `held_s`."""
        if self._answered >= self._asked:
            self._note(self._answered - self._asked)
            assert self._trio is not None
            self._asked = now
            self._trio.run_sync_soon(self._answer, now)
            return None
        seconds = now - self._asked
        if seconds < self.options.held_s:
            return None
        self._seen[_where(sys._current_frames().get(self._loop_thread)) or "unknown"] += 1
        return Held(round(seconds, 3), self._most_seen())

    def _answer(self, asked: float) -> None:
        """Record that the loop has answered. Runs on the loop."""
        now = time.monotonic()
        self._lag = now - asked
        self._lag_max = max(self._lag_max, self._lag)
        self._answered = now

    def _note(self, seconds: float) -> None:
        """Record what held the loop, now that it has answered."""
        if self._seen:
            self._held.append(Held(round(seconds, 3), self._most_seen()))
            self._longer(self._held[-1])
            self._seen.clear()
            if self.on_held is not None:
                self.on_held(self._held[-1])

    def _most_seen(self) -> str:
        return self._seen.most_common(1)[0][0]

    def _meanwhile(self, now: float, held: Held | None) -> None:
        """Called every tick. `now`: from `time.monotonic`; `held`: what holds the loop, if anything does."""

    def _ended(self) -> None:
        """Called when the thread ends."""


def _where(frame: FrameType | None) -> str:
    """The running task's function, and its innermost call; perco's and trio's own frames only if there are no others.
    "": no frame."""
    seen = [frame] if frame is not None else []
    ours = True
    while frame is not None and frame.f_code.co_name != _LOOP:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "asyncio":
            break  # the loop itself
        if package not in ("trio", "perco"):
            seen = [*([] if ours else seen), frame]
            ours = False
        frame = frame.f_back
    return ", in ".join(dict.fromkeys(_line(each) for each in (seen[-1], seen[0]))) if seen else ""


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
