"""A client's side: many calls in flight over one connection, which is made again when it breaks.

    call(method, arguments)  ->  (id, method, arguments)  ->  server  ->  (id, OK, value) or (id, ERROR, error)

R4  A call is answered once, on the connection on which it was sent. If that connection breaks, calls that may be
    repeated (`again=True`: reads, draws, queries) are sent on the next connection. Other calls may or may not have
    arrived, so they get `LostError`, which for a mutation means `NoReply` (T4). If a call was in flight when several
    connections in a row ended early, without any answer, it is not sent again, because it may be what ends them. If a
    call cannot be sent (it is too large, or holds values that the wire format cannot carry), only that call fails.
R5  If the server no longer holds the session's versions (R7), calls that need them (`held=True`) get SessionEnded. A
    client that gets this answer ends the connection as soon as all calls in flight that may not be repeated have been
    answered. It sends the other calls in its next session, but each only a limited number of times.
R6  If a server is away, or has no room for another connection, one task tries again at growing, random intervals. Calls
    that wait longer than `patience_s` get Unavailable. If a server refuses for good (a wrong token, another version),
    the task tries again only at the next call.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import trio

from perco.errors import (
    NOTHING_WRITTEN,
    PercoError,
    SessionEnded,
    StoreError,
    TransactionClosed,
    Unavailable,
    WriteUnknown,
)
from perco.outcome import Awaited
from perco.rpc.channel import Channel, Silent, WireOptions
from perco.rpc.crossing import unpack_error
from perco.rpc.framing import Message, WireError

OK: Final = 0
ERROR: Final = 1
PUSH: Final = 2  # a message that the server sends without a call: (what, PUSH, value)
log: logging.Logger = logging.getLogger("perco.serve")

_PAUSE_S, _PAUSE_MAX_S = 0.02, 0.5
_ENDS_MAX: Final = 8  # connections in a row that end early, without any answer, before a call is given up
_MERGED_MAX: Final = 1 << 16  # items in one message of `tell_merged`
BACK_S: Final = 4 * _PAUSE_MAX_S  # by then all clients of a server that was away have reconnected


class LostError(Exception):
    """The connection broke: the call may or may not have arrived."""


class _Call(Awaited):
    """A call that waits for its reply."""

    __slots__ = (
        "again",
        "arguments",
        "arrived",
        "ended",
        "ends",
        "held",
        "here",
        "id",
        "link",
        "method",
        "sent",
        "writes",
    )

    def __init__(self, link: Link, id: int, method: int, arguments: Any, again: bool, held: bool, here: bool) -> None:
        # All fields at once, without calls of `super()`: every call makes such an object.
        self.value: Any = None
        self.error: BaseException | None = None
        self.task = trio.lowlevel.current_task()
        self.link, self.id, self.method, self.arguments, self.again = link, id, method, arguments, again
        self.held, self.here = held, here
        self.arrived: Callable[[Any], Any] | None = None
        self.sent = self.writes = False
        self.ends = 0  # connections in a row that ended early while it was in flight, without any answer
        self.ended = 0  # how often the answer was that the session had ended

    def abort(self, _: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        if self.sent and not self.again:
            return trio.lowlevel.Abort.FAILED  # T10: a call that was sent completes
        if self.sent and self.arrived is not None:
            self.task = None
        else:
            self.link._forget(self)
        return trio.lowlevel.Abort.SUCCEEDED


class Link:
    """A client's connection to a server. Loop thread only. `run` is a task of its own; other tasks use `call`.

    Args:
        name: the server's name, for error messages.
        connect: makes a stream. Raises: OSError.
        hello: makes the greeting.
        welcomed: called with the server's greeting; returns whether the server still holds all of the session's
            versions (R5). Raises: Unavailable if the server has no room now, another PercoError if it refuses.
        pushed: called with each message that the server pushes.
        unmet: added to the error of a connection that ends before the server has ever greeted.
    """

    name: str
    closed: bool
    connections: int
    back_since: float
    connected: trio.Event

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[trio.abc.Stream]],
        hello: Callable[[], Message],
        welcomed: Callable[[Message], bool],
        pushed: Callable[[int, Any], None],
        options: WireOptions,
        rng: random.Random,
        unmet: str = "",
    ) -> None:
        self.name, self._unmet = name, unmet
        self._thread, self._loop = threading.get_ident(), trio.lowlevel.current_trio_token()
        self._connect, self._hello, self._welcomed, self._pushed = connect, hello, welcomed, pushed
        self._options, self._rng = options, rng
        self._channel: Channel | None = None
        self._calls: dict[int, _Call] = {}
        self._next = 0
        self._told: list[Message] | None = None  # messages since the greeting, which covers all earlier ones
        self._merged: dict[int, list[Any]] = {}  # items of `tell_merged` that have not been sent yet
        self._away_since = trio.current_time()
        self._refused: PercoError | None = None  # the server has refused this client
        self._last = "no connection yet"  # why there is no connection
        self._asked = trio.Event()
        self.connected = trio.Event()
        self.connections = 0
        self._began = -math.inf  # when the current connection began
        self._answered = False  # whether the current connection has answered any call
        self._ending = False  # the session has ended; the connection ends after the calls that may not be repeated
        self.back_since = -math.inf  # when the server was last reached again
        self.remedy = ""  # for errors that say that the server is away
        self._losses = 0  # how often the server had ended the session
        self._scope = trio.CancelScope()  # of the current connection
        self.closed = self._once_only = False
        self.end: Callable[[], None] = lambda: None  # ends `run`; set by the code that starts `run`

    # ------------------------------------------------------------ calls

    # A KeyboardInterrupt after a call has been registered, but before its task waits, would leave a call whose task is
    # gone.
    @trio.lowlevel.enable_ki_protection
    async def call(
        self,
        method: int,
        arguments: Any,
        *,
        again: bool,
        held: bool = False,
        here: bool = False,
        writes: bool = False,
        arrived: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Call the server. `again`: the call may be repeated; `held`: only while the server holds the session's
        versions; `here`: over this connection only, because another server can be called instead; `writes`: the call
        changes something, so a caller that gives up does not know whether the change was made; `arrived`: called with
        the answer when it arrives, even if the caller has been cancelled meanwhile; what it returns is the result.

        Raises: the server's error; LostError, if not `again`, or if `here`; Unavailable, SessionEnded; WriteUnknown,
        instead of Unavailable, if `writes` and the call was sent; TooLarge, and what packing raises, if it cannot be
        sent.
        """
        self._must_be_open()
        self._next = id = self._next + 1
        call = _Call(self, id, method, arguments, again, held, here)
        call.writes, call.arrived = writes, arrived
        if self._channel is None:
            losses = self._losses
            await self._wait_for_server(writes)
            self._must_be_open()
            if held and losses != self._losses:
                raise self._gone()
        if self._channel is not None:
            self._channel.send((id, method, arguments))
            call.sent = True
        self._calls[id] = call  # only now: for a call that cannot be sent, no task waits
        return await trio.lowlevel.wait_task_rescheduled(call.abort)

    @property
    def refused(self) -> PercoError | None:
        """Why the server refuses this client for good, if it does."""
        return self._refused

    def tell(self, method: int, arguments: Any) -> None:
        """Send a message that needs no answer; on any thread. If there is no connection, the message is dropped: the
        greeting of the next connection (`hello`, `welcomed`) covers it."""
        if threading.get_ident() != self._thread:  # for an object that was abandoned without `end`
            self._from_elsewhere(self.tell, method, arguments)
        elif self._channel is not None:
            self._channel.send((0, method, arguments))
        elif self._told is not None:
            self._told.append((0, method, arguments))

    def tell_merged(self, method: int, item: Any) -> None:
        """Like `tell`, but for one of many items: when a frame leaves, one message takes all items that wait."""
        if threading.get_ident() != self._thread:
            self._from_elsewhere(self.tell_merged, method, item)
        elif self._channel is None:
            self.tell(method, (item,))
        else:
            # In one step: the finalizer of an abandoned object may call this in the middle of any other call.
            self._merged.setdefault(method, []).append(item)
            self._channel.wake()

    def _from_elsewhere(self, tell: Callable[[int, Any], None], method: int, arguments: Any) -> None:
        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(tell, method, arguments)

    def _leaving(self) -> None:
        """Called before a frame leaves: put the merged items first in it, before later calls."""
        merged, self._merged = self._merged, {}
        assert self._channel is not None
        for method, items in merged.items():
            for at in range(0, len(items), _MERGED_MAX):
                self._channel.send_first((0, method, items[at : at + _MERGED_MAX]))

    def stalled_s(self) -> float:
        """How long the server has sent nothing while calls wait for it, in seconds; 0: no call waits."""
        if self._channel is None or not any(call.sent for call in self._calls.values()):
            return 0.0
        return trio.current_time() - self._channel.heard

    def leave(self) -> None:
        """End the current connection: the server is elsewhere by now. Calls that may be repeated go to the next one."""
        self._scope.cancel()

    def _must_be_open(self) -> None:
        if not self.closed:
            return
        if self._once_only:
            raise LostError(f"the connection to {self.name} broke")
        raise TransactionClosed("this store has been closed; use it inside `async with perco.open(...)` only")

    async def _wait_for_server(self, writes: bool) -> None:
        if self._refused is not None:
            self._refused = None
            self._asked.set()
            self._away_since = trio.current_time()
        left_s = self._away_since + self._options.patience_s - trio.current_time()
        with trio.move_on_after(max(left_s, 0)):
            await self.connected.wait()
            if self._refused is None:
                return
        raise self._refused or self._unavailable(self._away(), nothing_written=writes)

    def _give_up(self) -> None:
        """R6: the server has been away for too long."""
        for call in list(self._calls.values()):
            self._give_up_on(call, self._away())

    def _give_up_on(self, call: _Call, why: str) -> None:
        self._forget(call)
        if call.writes and call.sent:
            self._end(call, WriteUnknown(f"a call to {self.name}", why))
        else:
            self._end(call, self._unavailable(why, nothing_written=call.writes))

    def _away(self) -> str:
        away_s = trio.current_time() - self._away_since
        return f"the server at {self.name} was not reached for {away_s:.0f} s ({self._last})"

    def _unavailable(self, what: str, *, nothing_written: bool) -> Unavailable:
        """`nothing_written`: only this call would have written what the caller wanted, and it was not sent."""
        if not nothing_written:
            return Unavailable(what, remedy=self.remedy)
        return Unavailable(what, remedy=f"Nothing was written. {self.remedy}" if self.remedy else NOTHING_WRITTEN)

    def _gone(self) -> SessionEnded:
        return SessionEnded(f"the server at {self.name} has ended this client's session")

    def _forget(self, call: _Call) -> None:
        self._calls.pop(call.id, None)

    def _end(self, call: _Call, error: BaseException) -> None:
        call.error = error
        call.wake()

    def fail_all(self, error: Callable[[], BaseException]) -> None:
        """End all calls with an error, because they will get no answer."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            self._end(call, error())

    # ------------------------------------------------------------ the connection

    async def run(self) -> None:
        """Keep a connection until cancelled."""
        pause_s = _PAUSE_S
        try:
            while True:
                began = trio.current_time()
                try:
                    await self._once()
                    self._last = "it ended the connection"
                    if self._answered:
                        pause_s = _PAUSE_S
                except Unavailable as error:
                    self._last = error.what
                    log.info("no connection to %s: %s", self.name, self._last)
                except PercoError as error:
                    self._refused = error
                except (OSError, WireError, Silent, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    self._last = str(error) or type(error).__name__
                    log.info("no connection to %s: %s", self.name, self._last)
                self._broken()
                if self._refused is not None:
                    refused = self._refused
                    self.fail_all(lambda refused=refused: refused)  # type: ignore[misc]
                    self.connected.set()  # waiting tasks find `_refused`
                    self.connected = trio.Event()
                    self._asked = trio.Event()
                    await self._asked.wait()
                    continue
                if trio.current_time() - self._away_since > self._options.patience_s:
                    self._give_up()
                if trio.current_time() - began > _PAUSE_MAX_S:
                    pause_s = _PAUSE_S
                await trio.sleep(pause_s * self._rng.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        finally:
            self.closed = True
            self.fail_all(lambda: LostError("the store was closed"))

    async def once(self) -> None:
        """Run one connection, from its beginning to its end. Calls that are unanswered by then get LostError.

        Raises: as `Channel.run`; the error with which the server refuses.
        """
        self._once_only = True
        try:
            await self._once()
        finally:
            self.closed = True
            self.connected.set()  # waiting tasks find `closed`
            self.fail_all(lambda: LostError(f"the connection to {self.name} broke"))

    async def _once(self) -> None:
        """Run one connection, from its beginning to its end."""
        with trio.move_on_after(self._options.connect_s) as scope:
            stream = await self._connect()
        if scope.cancelled_caught:
            raise OSError(f"no connection within {self._options.connect_s:g} s")
        try:
            channel, self._scope = Channel(stream, self._options), trio.CancelScope()
            with trio.move_on_after(self._options.connect_s) as scope:
                self._told = []
                await channel.greet(self._hello())
                try:
                    welcome = await channel.greeting(alone=False)
                except WireError as error:
                    raise StoreError(f"the program at {self.name} is not a perco server: {error}") from error
                except trio.BrokenResourceError as error:
                    if self.connections or not self._unmet:
                        raise
                    raise trio.BrokenResourceError(f"{error}; {self._unmet}") from error
            if scope.cancelled_caught:
                raise Silent("no greeting")
            try:
                kept = self._welcomed(welcome)
            except (KeyError, ValueError, TypeError) as error:
                raise StoreError(f"the program at {self.name} is not a perco server: {error!r}") from error
            self._begun(channel, kept)
            with self._scope:
                await channel.run(self._received, lambda: None)
        finally:
            self._channel = self._told = None
            self._merged.clear()
            self._broken()  # first, so that it does not seem connected while it closes
            await trio.aclose_forcefully(stream)

    def _begun(self, channel: Channel, kept: bool) -> None:
        self._channel, self._refused = channel, None
        self._began, self._answered, self._ending = trio.current_time(), False, False
        self.connections += 1
        if self.connections > 1:
            self.back_since = trio.current_time()
        self._losses += not kept
        told, self._told = self._told, None
        channel.leaving = self._leaving
        for message in told or ():
            channel.send(message)
        for call in list(self._calls.values()):
            try:
                if call.held and not kept:
                    raise self._gone()
                channel.send((call.id, call.method, call.arguments))
                call.sent = True
            except Exception as error:  # of this call alone: it is too large, or cannot be packed
                self._forget(call)
                self._end(call, error)
        self.connected.set()

    def _broken(self) -> None:
        if self.connected.is_set():
            self.connected = trio.Event()
            self._away_since = trio.current_time()
            at_once = not self._answered and self._away_since - self._began <= self._options.silence_s
            for call in self._calls.values():
                call.ends = call.ends + 1 if at_once and call.sent else 0
        for call in [call for call in self._calls.values() if call.sent]:
            if call.task is None:  # its caller was cancelled
                self._forget(call)
            elif call.here or not call.again:
                self._forget(call)
                self._end(call, LostError(f"the connection to {self.name} broke"))
            elif call.ends >= _ENDS_MAX:
                what = f"{call.ends} connections in a row to {self.name} ended before this call was answered"
                self._give_up_on(call, what)

    def _received(self, messages: list[Message]) -> None:
        calls = self._calls
        try:
            for id, status, value in messages:
                if status == PUSH:
                    self._pushed(id, value)
                    continue
                call = calls.get(id)
                if call is None:
                    self._answered = True
                    continue  # its caller was cancelled
                if status == OK:
                    self._answered = True
                    call.value = value if call.arrived is None else call.arrived(value)
                else:
                    error = unpack_error(value)
                    self._answered = True
                    if isinstance(error, SessionEnded) and call.again and not call.here:
                        self._ending = True
                        call.ended += 1
                        if not call.held and call.ended < _ENDS_MAX:
                            continue  # R5
                    call.error = error
                del calls[id]
                call.wake()
        except (ValueError, TypeError) as error:
            raise WireError(f"a reply that cannot be decoded: {error}") from error
        if self._ending and not any(call.sent and not call.again for call in calls.values()):
            raise trio.ClosedResourceError("the server has ended the session")
