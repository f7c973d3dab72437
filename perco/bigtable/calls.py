"""Calls to Bigtable. One thread of the process makes all calls, on an asyncio loop; trio tasks wait for the answers.

gRPC does not support trio. A thread per call costs some 1.3 ms of CPU time, gRPC's own futures cost 0.34 ms, and its
asyncio interface costs 0.23 ms. So perco uses the asyncio interface, in one thread, which accepts calls in batches and
returns their answers together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote

import trio

from perco.bigtable.address import Place
from perco.bigtable.chunks import Chunks, ReadRow
from perco.bigtable.options import BigtableOptions
from perco.bigtable.wire import google_auth, grpc, types
from perco.errors import PercoError, Unavailable
from perco.storage.lease import now

_DATA_HOST: Final = "bigtable.googleapis.com:443"
ADMIN_HOST: Final = "bigtableadmin.googleapis.com:443"
SERVICE: Final = "/google.bigtable.v2.Bigtable/"
_SCOPES: Final = ("https://www.googleapis.com/auth/bigtable.data", "https://www.googleapis.com/auth/bigtable.admin")
# Each channel has connections of its own. They notice if the server disappears without closing them.
_SETTINGS: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.initial_reconnect_backoff_ms", 100),  # soon after an outage: these channels renew the lease, too
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),  # perco decides which calls are sent again
)


# Bounds for the time, in seconds, for which data sent on a connection may stay unacknowledged.
_SILENCE_S: Final = (2.0, 10.0)


def settings(late_s: float) -> tuple[tuple[str, int], ...]:
    """The options of a channel. If data on a connection stays unacknowledged for four fifths of `late_s` (but at least
    2 s and at most 10 s), the kernel drops the connection and the undelivered data. So unless `late_s` is below 2 s,
    no call is delivered later than `late_s` after it has ended (`BigtableOptions.late_s`)."""
    silence_s = min(max(0.8 * late_s, _SILENCE_S[0]), _SILENCE_S[1])
    return (*_SETTINGS, ("grpc.keepalive_timeout_ms", int(1000 * silence_s)))


class CallFailed(Exception):
    """A call that Bigtable did not answer, or refused.

    Attributes: `code`, the name of gRPC's status; `said`, its message; `sent`, whether the call may have been carried
    out.
    """

    code: str
    said: str
    sent: bool

    def __init__(self, code: str, said: str, *, sent: bool = True) -> None:
        super().__init__(f"{code}: {said}" if said else code)
        self.code, self.said, self.sent = code, said, sent


class Scan(NamedTuple):
    """A call of ReadRows. `bytes_max`: the call ends once its rows have this many bytes; 0: there is no limit.
    `partly`: if the call fails after the server has sent or left out some rows, the rows that have arrived are the
    answer."""

    request: Any
    bytes_max: int = 0
    partly: bool = False


class Scanned(NamedTuple):
    """The answer to a `Scan`: its rows; the last key that the server has read; and whether the answer is complete."""

    rows: list[ReadRow]
    passed: bytes
    ended: bool


Answer: TypeAlias = Any  # a message, a `Scanned`, or a `CallFailed`


def metadata_of(place: Place) -> tuple[tuple[str, str], ...]:
    """The metadata that the service needs to route a call."""
    wanted = f"table_name={quote(place.table, safe='')}&app_profile_id={quote(place.app_profile, safe='')}"
    return (("x-goog-request-params", wanted),)


def credentials() -> Any:
    """Google's application default credentials, for a channel. Raises: Unavailable, if there are none."""
    auth, transport = google_auth()
    try:
        found, _ = auth.default(scopes=_SCOPES)
    except auth.exceptions.GoogleAuthError as error:
        raise Unavailable(
            f"there are no credentials for Google's services: {error}",
            remedy="Set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`.",
        ) from error
    plugin = transport.grpc.AuthMetadataPlugin(found, transport.requests.Request())
    return grpc().composite_channel_credentials(
        grpc().ssl_channel_credentials(), grpc().metadata_call_credentials(plugin)
    )


def channel(place: Place, host: str = _DATA_HOST, late_s: float = 5.0) -> Any:
    """A channel for blocking calls."""
    if place.emulator:
        return grpc().insecure_channel(place.emulator, options=settings(late_s))
    return grpc().secure_channel(host, credentials(), options=settings(late_s))


_starting: Final = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: gRPC does not survive a fork


def _loop() -> asyncio.AbstractEventLoop:
    """The loop of this process's thread. The thread starts with the first store and never ends. gRPC's asyncio
    interface works on one loop only: on several loops, calls hang."""
    with _starting:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(loop,), name="perco-bigtable", daemon=True).start()
        return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


class Calls:
    """The calls of one store. The first call opens the channels. For use on the trio loop."""

    made: int

    def __init__(self, place: Place, options: BigtableOptions) -> None:
        self._place, self._options = place, options
        self.made = 0  # calls so far
        self._turn = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stubs: list[dict[type, Any]] = []
        self._channels: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit: asyncio.Semaphore
        self._metadata = metadata_of(place)

    def _begin(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            types()  # here, so that the caller gets the error if the import fails
            trusted = None if self._place.emulator else credentials()
            self._loop = _loop()
            self._loop.call_soon_threadsafe(self._open, trusted)
        return self._loop

    def _open(self, trusted: Any) -> None:
        self._limit = asyncio.Semaphore(self._options.in_flight)
        aio = grpc().aio
        t = types()
        wanted = settings(self._options.late_s)
        for _ in range(self._options.channels):
            if trusted is None:
                made = aio.insecure_channel(self._place.emulator, options=wanted)
            else:
                made = aio.secure_channel(_DATA_HOST, trusted, options=wanted)
            self._channels.append(made)
            stubs: dict[type, Any] = {}
            for name, streams, request, response in (
                ("ReadRows", True, t.ReadRows, t.ReadRowsResponse),
                ("SampleRowKeys", True, t.SampleRowKeys, t.SampleRowKeysResponse),
                ("MutateRow", False, t.MutateRow, t.MutateRowResponse),
                ("CheckAndMutateRow", False, t.CheckAndMutateRow, t.CheckAndMutateRowResponse),
            ):
                make = made.unary_stream if streams else made.unary_unary
                stubs[request] = make(
                    SERVICE + name,
                    request_serializer=request.SerializeToString,
                    response_deserializer=response.FromString,
                )
            self._stubs.append(stubs)

    def close(self, closed: Callable[[], object] = lambda: None) -> None:
        """Begin to close the channels. Calls in flight fail, and so do later calls. When the channels are closed,
        `closed` is called, from another thread."""
        self._closed = True
        if self._loop is None:
            closed()
            return

        async def close() -> None:
            try:
                for each in list(self._tasks):
                    each.cancel()
                for made in self._channels:
                    await made.close()
            finally:
                closing.clear()
                closed()

        closing: list[asyncio.Task[None]] = []  # an asyncio loop keeps only weak references to tasks
        loop = self._loop
        loop.call_soon_threadsafe(lambda: closing.append(loop.create_task(close())))

    async def aclose(self) -> None:
        """Like `close`, but wait until the channels are closed."""
        token, closed = trio.lowlevel.current_trio_token(), trio.Event()

        def end() -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(closed.set)

        self.close(end)
        await closed.wait()

    # If a KeyboardInterrupt came after the calls had begun, but before the wait for them, the calls would wake a task
    # that no longer waits.
    @trio.lowlevel.enable_ki_protection
    async def ask(self, requests: Sequence[Any], deadline: float) -> list[Answer]:
        """Make calls side by side. Returns the answer to each call, or its error. Ends at `deadline`, in trio's time.
        If this method is cancelled, so are the calls. No call is begun after the deadline, even if this process was
        stopped and resumed. gRPC may still send calls that it accepted before the deadline; `late_s` allows for that.

        Args:
            requests: messages, or `Scan`s.

        Raises: Unavailable, if there are no credentials.
        """
        if self._closed or not requests:
            await trio.lowlevel.checkpoint()
            return [_too_late(True) for _ in requests]
        loop, until = self._begin(), now() + deadline - trio.current_time()
        self.made += len(requests)
        token, task = trio.lowlevel.current_trio_token(), trio.lowlevel.current_task()
        answers: list[Answer] = [None] * len(requests)
        tasks: list[asyncio.Task[None]] = []
        missing = len(requests)
        done = False

        def wake() -> None:
            if not done:
                trio.lowlevel.reschedule(task)

        async def one(index: int, request: Any) -> None:
            nonlocal missing
            try:
                answers[index] = await self._call(request, until)
            except BaseException as error:
                answers[index] = _failed(error)
            missing -= 1
            if not missing:
                with contextlib.suppress(trio.RunFinishedError):
                    token.run_sync_soon(wake)

        def begin() -> None:
            for index, request in enumerate(requests):
                made = loop.create_task(one(index, request))
                tasks.append(made)
                self._tasks.add(made)  # an asyncio loop keeps only weak references to tasks
                made.add_done_callback(self._tasks.discard)

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            nonlocal done
            done = True
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(lambda: [each.cancel() for each in tasks])
            return trio.lowlevel.Abort.SUCCEEDED

        loop.call_soon_threadsafe(begin)
        await trio.lowlevel.wait_task_rescheduled(abort)
        done = True
        return answers

    async def _call(self, request: Any, until: float) -> Answer:
        if not self._limit.locked():
            await self._limit.acquire()
        else:
            try:
                await asyncio.wait_for(self._limit.acquire(), max(until - now(), 0.0))
            except TimeoutError:
                raise CallFailed("DEADLINE_EXCEEDED", "too many calls are in flight", sent=False) from None
        try:
            left_s = until - now()
            if self._closed or left_s <= 0:
                raise _too_late(self._closed)
            self._turn += 1
            stubs = self._stubs[self._turn % len(self._stubs)]
            if isinstance(request, Scan):
                return await self._scan(stubs[type(request.request)], request, left_s)
            call = stubs[type(request)](request, timeout=left_s, metadata=self._metadata)
            if isinstance(request, types().SampleRowKeys):
                return [response async for response in call]
            return await call
        finally:
            self._limit.release()

    async def _scan(self, stub: Callable[..., Any], scan: Scan, limit_s: float) -> Scanned:
        call = stub(scan.request, timeout=limit_s, metadata=self._metadata)
        chunks, rows, size = Chunks(), list[ReadRow](), 0
        try:
            async for response in call:
                for row in chunks.take(response):
                    rows.append(row)
                    size += sum(len(cell.value) for cell in row.cells)
                if scan.bytes_max and size >= scan.bytes_max:
                    call.cancel()
                    return Scanned(rows, chunks.passed, False)
        except grpc().RpcError:
            if not scan.partly or not chunks.passed:
                raise
            return Scanned(rows, chunks.passed, False)
        return Scanned(rows, chunks.passed, True)


def _too_late(closed: bool) -> CallFailed:
    if closed:
        return CallFailed("CANCELLED", "the store has been closed", sent=False)
    return CallFailed("DEADLINE_EXCEEDED", "it was too late to send the call", sent=False)


def _failed(error: BaseException) -> CallFailed | BaseException:
    if isinstance(error, CallFailed):
        return error
    if isinstance(error, asyncio.CancelledError):
        return CallFailed("CANCELLED", "the store was closed")
    if isinstance(error, grpc().RpcError):
        return CallFailed(error.code().name, " ".join((error.details() or "").split())[:500])
    if isinstance(error, PercoError) or not isinstance(error, Exception):
        return error
    return CallFailed("UNKNOWN", f"{type(error).__name__}: {error}")
