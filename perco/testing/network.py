"""Connections between the processes of a simulation, with faults that hit one message each.

A connection carries the bytes that perco sends. The network decodes them to find out which call, answer or greeting
each message is, and asks the run of the simulation (`Befalls`) which fault hits the message. The run counts the
faults for each kind of message.

    SLOW             the message arrives later, and so does everything after it
    LOSE             the connection breaks, and the message never arrives
    CUT              the connection breaks in the middle of the message: some of its bytes arrive
    LATE             the sender finds the connection broken, but the message arrives, as the last one
    DEAF             nothing arrives in this direction any more, without an error (a half-open connection)
    SENDER_DIES      the sender dies before the message leaves
    RECEIVER_DIES    the receiver dies when the message has arrived, but before it has read the message
    SENDER_STOPS     the sender is stopped for a while before the message leaves

Two processes on one host may hold the ends of a socket pair. Between them, nothing is lost while both are alive. There,
CUT means that the sender died in the middle of the message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final, NamedTuple, Protocol

import msgpack
import trio

from perco.rpc.framing import HEAD_BYTES
from perco.rpc.link import PUSH
from perco.serve.messages import ANNOUNCED, DROPPED, MOVED, NOTIFIED, QUIET, RELEASED, TASKS_ASKED, Method, Order
from perco.testing.processes import Process, Processes, current

SLOW, LOSE, CUT, LATE, DEAF = "SLOW", "LOSE", "CUT", "LATE", "DEAF"
SENDER_DIES, RECEIVER_DIES, SENDER_STOPS = "SENDER_DIES", "RECEIVER_DIES", "SENDER_STOPS"
LOCAL_FAULTS: Final = (SLOW, CUT, SENDER_DIES, RECEIVER_DIES, SENDER_STOPS)
FAULTS: Final = (SLOW, LOSE, CUT, LATE, DEAF, SENDER_DIES, RECEIVER_DIES, SENDER_STOPS)
NAMES: Final[dict[int, str]] = {int(each): each.name for each in (*Method, *Order)}
PUSHES: Final = {
    NOTIFIED: "NOTIFIED",
    ANNOUNCED: "ANNOUNCED",
    MOVED: "MOVED",
    QUIET: "QUIET",
    RELEASED: "RELEASED",
    DROPPED: "DROPPED",
    TASKS_ASKED: "TASKS_ASKED",
}
_HEARTBEAT: Final = "heartbeat"
_PIECE_MAX: Final = 200  # bytes of a piece, if data arrives in pieces


class Message(NamedTuple):
    """A message that is being sent. `step`: the name of a call, the name of a call and "answer", or the name of a push;
    `arguments`: those of a call that changes rows, else None."""

    sender: Process
    receiver: Process
    step: str
    arguments: Any
    faults: tuple[str, ...]  # the faults that can hit the message


class Befalls(Protocol):
    """Decides which faults hit messages and connections."""

    rng: Random  # for noise only

    def message(self, message: Message) -> str:
        """Choose "", or a fault with its argument, if any: seconds, or for CUT the share of bytes that arrives."""
        ...

    def connection(self, process: Process, to: str) -> str:
        """Choose "", "REFUSED", or "HANGS" (forever)."""
        ...

    def delay_s(self, *processes: Process) -> float:
        """How long bytes take between these processes, in seconds."""
        ...


class _Way:
    """One direction of a connection."""

    def __init__(self) -> None:
        self.coming: deque[tuple[float, bytes, bool]] = deque()  # (arrival, data, whether it may come in pieces)
        self.not_before = 0.0  # when the next data may arrive: bytes stay in order
        self.ended = self.broken = False  # `ended`: no more bytes follow `coming`; `broken`: an error follows it
        self.deaf = False
        self.wake = trio.Event()
        self.rest = b""  # the rest of a piece that was longer than the caller asked for
        self.in_pieces = False  # whether `rest` may arrive in pieces

    def woken(self) -> None:
        self.wake.set()
        self.wake = trio.Event()


class _Connection:
    """A connection. End 0 belongs to the process that connected."""

    network: Network
    processes: tuple[Process, Process]
    local: bool
    ways: tuple[_Way, _Way]
    greeted: list[bool]
    ends: tuple[Stream, Stream]
    cut_off: list[bool]

    def __init__(self, network: Network, processes: tuple[Process, Process], *, local: bool) -> None:
        self.network, self.processes, self.local = network, processes, local
        self.ways = (_Way(), _Way())  # ways[i]: to end i
        self.cut_off = [False, False]  # whether an end finds the connection broken when it sends
        self.methods: dict[int, str] = {}  # names of calls in flight, by number
        self.greeted = [False, False]
        self.ends = (Stream(self, 0), Stream(self, 1))

    def end(self, *, broken: bool) -> None:
        """End the connection for both sides, once the bytes in flight have arrived."""
        for way in self.ways:
            way.ended, way.broken = True, way.broken or broken
            way.woken()
        self.cut_off = [True, True]

    def process_died(self, end: int, *, told: bool) -> None:
        """Record that the process at an end died. Its kernel notifies the other side (`told`), unless the whole machine
        is gone."""
        if told:
            self.ways[1 - end].ended = True
            self.ways[1 - end].woken()
            self.cut_off[1 - end] = True
        else:
            self.ways[end].deaf = True

    def steps(self, end: int, data: bytes) -> list[tuple[str, Any]]:
        """The messages in a frame that an end sends, each with its step and arguments."""
        if not self.greeted[end]:
            self.greeted[end] = True
            return [("WELCOME" if end else "HELLO", None)]
        found: list[tuple[str, Any]] = []
        unpacker = msgpack.Unpacker(use_list=False, strict_map_key=False)
        unpacker.feed(memoryview(data)[4:])
        for _ in range(unpacker.read_array_header()):
            unpacker.read_array_header()
            first, second = unpacker.unpack(), unpacker.unpack()
            if end == 0:
                name = NAMES.get(second, str(second))
                if first:
                    self.methods[first] = name
                if name in ("APPLY", "COMMIT"):
                    found.append((name, unpacker.unpack()))
                    continue
                found.append((name, None))
            elif second == PUSH:
                found.append((PUSHES.get(first, str(first)), None))
            else:
                found.append((f"{self.methods.pop(first, '?')} answer", None))
            unpacker.skip()
        return found


class Stream(trio.abc.Stream):
    """An end of a connection."""

    def __init__(self, connection: _Connection, end: int) -> None:
        self._connection, self._end, self._closed = connection, end, False
        self._out, self._in = connection.ways[1 - end], connection.ways[end]
        self._sent = False

    async def send_all(self, data: Any) -> None:
        await trio.lowlevel.checkpoint()
        self._check()
        connection, end, network = self._connection, self._end, self._connection.network
        sender, receiver = connection.processes[end], connection.processes[1 - end]
        data = bytes(data)
        fault, more, in_pieces = "", "", True
        if len(data) > HEAD_BYTES:
            faults = LOCAL_FAULTS if connection.local else FAULTS
            for step, arguments in connection.steps(end, data):
                in_pieces &= not step.startswith("TASKS")  # the message's length depends on real process ids
                fault, _, more = network.befalls.message(Message(sender, receiver, step, arguments, faults)).partition(
                    " "
                )
                if fault:
                    break
        if fault == SENDER_DIES:
            network.processes.kill(sender)
        elif fault == SENDER_STOPS:
            network.processes.stop_for(sender, float(more))
        if fault in (SENDER_DIES, SENDER_STOPS):
            await trio.lowlevel.checkpoint()  # a dead sender never continues from here
            self._check()
        if fault == DEAF:
            self._out.deaf = True
        if self._out.deaf or fault == LOSE:
            if fault == LOSE:
                connection.end(broken=True)
            return
        after_s = network.befalls.delay_s(sender, receiver) + (float(more) if fault == SLOW else 0.0)
        if fault == CUT:
            data = data[: max(1, int(len(data) * float(more)))]
        at = self._out.not_before = max(self._out.not_before, trio.current_time() + after_s)
        self._out.coming.append((at, data, in_pieces))
        if len(self._out.coming) == 1:  # else the receiver waits for an earlier message
            self._out.woken()
        if fault == CUT and connection.local:
            network.processes.kill(sender)
            await trio.lowlevel.checkpoint()
        elif fault == CUT:
            connection.end(broken=True)
        elif fault == LATE:
            self._in.coming.clear()
            connection.cut_off[end] = self._in.ended = self._in.broken = self._out.ended = True
            self._out.not_before = at + float(more)
            self._out.coming[-1] = (self._out.not_before, data, in_pieces)
            self._in.woken()
        elif fault == RECEIVER_DIES:
            network.die_at(receiver, at)

    def _check(self) -> None:
        if self._closed or self._connection.processes[self._end].dead:
            raise trio.ClosedResourceError("this end is closed")
        if self._connection.cut_off[self._end]:
            raise trio.BrokenResourceError("the connection broke")

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        way, rng = self._in, self._connection.network.befalls.rng
        waited = False  # if there is nothing to await, make one checkpoint only: half of a run's task switches are here
        while True:
            arrived = way.rest or (way.coming and not way.deaf and way.coming[0][0] <= trio.current_time())
            over = way.ended and not way.coming
            if not waited and (arrived or over or self._closed or self._connection.processes[self._end].dead):
                waited = True
                await trio.lowlevel.checkpoint()
                continue
            if self._closed or self._connection.processes[self._end].dead:
                raise trio.ClosedResourceError("this end is closed")
            if arrived:
                data = way.rest
                if not data:
                    _, data, way.in_pieces = way.coming.popleft()
                limit = max_bytes or len(data)
                if way.in_pieces and len(data) > 8 and rng.random() < self._connection.network.in_pieces:
                    limit = min(limit, rng.randint(1, _PIECE_MAX))
                way.rest = data[limit:]
                return data[:limit]
            if over:
                if way.broken:
                    raise trio.BrokenResourceError("the connection broke")
                return b""
            waited = True
            if way.coming and not way.deaf:
                with trio.move_on_at(way.coming[0][0]):
                    await way.wake.wait()
            else:
                await way.wake.wait()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._in.woken()
            connection = self._connection
            connection.process_died(self._end, told=connection.local or not connection.processes[self._end].dead)
        await trio.lowlevel.checkpoint()


class Network:
    """All connections. `in_pieces`: the share of data that arrives in pieces."""

    processes: Processes
    befalls: Befalls
    in_pieces: float

    def __init__(self, processes: Processes, befalls: Befalls, in_pieces: float) -> None:
        self.processes, self.befalls, self.in_pieces = processes, befalls, in_pieces
        self._listening: dict[str, tuple[Process, Callable[[trio.abc.Stream], Awaitable[None]]]] = {}
        self._connections: dict[Process, list[tuple[_Connection, int]]] = {}
        self._away: dict[Process, tuple[str, float]] = {}  # the name that a process cannot reach, until when

    def listen(self, name: str, serve: Callable[[trio.abc.Stream], Awaitable[None]]) -> Callable[[], None]:
        """Let the current process serve at a name, each connection in a task. Returns a function that ends this."""
        process = current()
        self._listening[name] = process, serve

        def end() -> None:
            if self._listening.get(name, (None,))[0] is process:
                del self._listening[name]

        process.on_death.append(end)
        return end

    async def connect(self, name: str) -> Stream:
        """Connect the current process to a name. Returns its end of the connection. Raises: OSError."""
        process = current()
        what = "" if process.dead else self.befalls.connection(process, name)
        await trio.sleep(1e9 if what == "HANGS" else self.befalls.delay_s(process))
        away, until = self._away.get(process, ("", 0.0))
        if away == name and trio.current_time() < until:
            what = "REFUSED"
        if what == "REFUSED" or name not in self._listening or process.dead:
            raise ConnectionRefusedError(f"no process serves at {name}")
        server, serve = self._listening[name]
        ours, theirs = self.pair(process, server)
        self.processes.spawn_in(server, lambda: serve(theirs))
        return ours

    def cut_off(self, process: Process, name: str, seconds: float) -> None:
        """Break a process's connections to a name, and refuse new ones for a number of seconds."""
        self._away[process] = name, trio.current_time() + seconds
        there = self._listening.get(name, (None,))[0]
        for connection, end in self._connections.get(process, ()):
            if connection.processes[1 - end] is there:
                connection.end(broken=True)

    def pair(self, one: Process, other: Process, *, local: bool = False) -> tuple[Stream, Stream]:
        """The ends of a new connection between two processes; `local`: on one host."""
        connection = _Connection(self, (one, other), local=local)
        for end, process in enumerate((one, other)):
            if process not in self._connections:
                self._connections[process] = []
                process.on_death.append(lambda process=process: self._died(process))  # type: ignore[misc]
            self._connections[process].append((connection, end))
        return connection.ends

    def _died(self, process: Process) -> None:
        told = self.befalls.rng.random() < 0.8
        for connection, end in self._connections.pop(process, ()):
            connection.process_died(end, told=told or connection.local)

    def die_at(self, process: Process, at: float) -> None:
        async def die() -> None:
            await trio.sleep_until(at)
            self.processes.kill(process)

        self.processes.in_the_world(die)
