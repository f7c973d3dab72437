"""The network in front of a simulated Bigtable table: calls that are lost, late, or carried out without an answer.

`Calls` and `Channel` replace the classes through which perco calls Bigtable. A call consists of a message to the table
and an answer; the calling process may die before the answer arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, NamedTuple, Protocol

import trio

from perco.bigtable.calls import Answer, CallFailed, Scan
from perco.bigtable.keys import HINT_KEY, MICROS, OWNER_KEY, TICKET_KEY
from perco.bigtable.wire import grpc, types
from perco.testing.bigtable import Response, Table
from perco.testing.processes import Process, Processes, current

# Faults of a call that changes a row. If the calling process gets an error, it gets the error soon, or at the deadline.
LOSE: Final = "LOSE"  # the call never arrives
LOSE_ANSWER: Final = "LOSE_ANSWER"  # the call is carried out, but its process gets an error
LATER: Final = "LATER"  # its process gets an error, and only then is the call carried out
# Faults of reads and scans, and of any call.
FAIL: Final = "FAIL"  # a read gets an error
PART: Final = "PART"  # a scan fails after some rows
DELAY: Final = "DELAY"
DIES_BEFORE: Final = "DIES_BEFORE"
DIES_AFTER: Final = "DIES_AFTER"  # the process dies once the call has been carried out
STOPS_BEFORE: Final = "STOPS_BEFORE"
CHANGING: Final = (LOSE, LOSE_ANSWER, LATER, DELAY, DIES_BEFORE, DIES_AFTER, STOPS_BEFORE)
READING: Final = (FAIL, DELAY, DIES_BEFORE, STOPS_BEFORE)
SCANNING: Final = (*READING, PART)
_AT_ONCE: Final = (LOSE, LOSE_ANSWER, LATER)  # the faults of a call that takes no time

_LATE: Final = 0.95  # a share of `late_s`: a late message arrives before `late_s` is over


class Befalls(Protocol):
    """Decides what happens to calls."""

    kernel: Processes

    def call(self, process: Process, step: str, about: str, faults: Sequence[str]) -> str:
        """Choose "", or a fault with its argument, if any: "soon" or "hangs" (when the process gets the error), a
        number of rows, or seconds."""
        ...

    def takes_s(self, process: Process) -> float:
        """How long a message takes, in seconds."""
        ...


class Step(NamedTuple):
    """A call, as the table of steps and faults names it. `about`: its subject, for the name under which its
    fault is chosen; `faults`: those that can hit it."""

    name: str
    about: str
    faults: tuple[str, ...]


def rpc_error(code: str) -> Exception:
    """An error that gRPC raises from a call that blocks."""

    class _Error(grpc().RpcError):  # type: ignore[misc]
        def code(self) -> Any:
            return getattr(grpc().StatusCode, code)

        def details(self) -> str:
            return "the network"

    return _Error()


class Service:
    """A table, and the network in front of it.

    Args:
        befalls: decides what happens to each call.
        late_s: for how long a call may still be carried out after it has ended, in seconds.
    """

    table: Table
    befalls: Befalls
    late: int

    def __init__(self, befalls: Befalls, rng: Random, late_s: float) -> None:
        self.table, self.befalls, self._rng, self._late_s = Table(rng), befalls, rng, late_s
        self.late = 0  # how many calls were carried out after they had ended

    async def _pause(self) -> None:
        """Pause now and then between two rows of a read."""
        if self._rng.random() < 0.05:
            await trio.sleep(self._rng.choice((0.0, 0.001, 0.02)))

    def send(
        self, process: Process, step: Step, request: Any, deadline: float, answer: Callable[[Answer], None]
    ) -> None:
        """Send a call from a process. The call goes on even if the process dies. Another task calls `answer`, at most
        once."""
        if process.dead:
            return
        fault, _, more = self.befalls.call(process, step.name, step.about, step.faults).partition(" ")
        kernel = self.befalls.kernel
        if fault == DIES_BEFORE:
            kernel.kill(process)
            return
        if fault == STOPS_BEFORE:
            kernel.stop_for(process, float(more))
        slow_s = float(more) if fault == DELAY else 0.0
        late_answer = slow_s and self._rng.random() < 0.5
        there_s = self.befalls.takes_s(process) + (0.0 if late_answer else slow_s)
        reads = isinstance(request, Scan)

        async def carry() -> None:
            if fault == STOPS_BEFORE:  # the call is sent when the process continues, unless it is too late
                await trio.sleep(float(more))
                if trio.current_time() >= deadline:
                    return answer(CallFailed("DEADLINE_EXCEEDED", "it was too late to send it", sent=False))
            arrives = trio.current_time() + there_s
            if not reads:
                arrives = min(arrives, deadline + _LATE * self._late_s)
            await trio.sleep_until(arrives)
            if fault in (LOSE, FAIL):
                return self._fail(answer, more, deadline)
            if fault == LATER:
                ends = trio.current_time() if more == "soon" else deadline
                self._fail(answer, more, deadline)
                await trio.sleep_until(ends + self._rng.random() * _LATE * self._late_s)
                self.late += 1
                self.table.change(request)
                return None
            if reads:
                part = int(more) if fault == PART else 1 << 30
                found = await self.table.read(request, self._pause, part)
                if fault == PART and not (request.partly and found.passed):
                    return self._fail(answer, "soon", deadline)
                made: Answer = found
            else:
                self.late += trio.current_time() > deadline
                made = self.table.change(request)
            if fault == LOSE_ANSWER:
                return self._fail(answer, more, deadline)
            if fault == DIES_AFTER:
                return kernel.kill(process)
            await trio.sleep(self.befalls.takes_s(process) + (slow_s if late_answer else 0.0))
            return answer(made)

        kernel.in_the_world(carry)

    def _fail(self, answer: Callable[[Answer], None], how: str, deadline: float) -> None:
        if how == "soon":
            answer(CallFailed(self._rng.choice(("UNAVAILABLE", "INTERNAL")), "the network"))

    async def ask(self, process: Process, step: Step, request: Any, limit_s: float) -> Any:
        """Make, in a task, a call that blocks in production. Returns the answer, or gRPC's error."""
        answers: list[Answer] = []
        done = trio.Event()

        def take(answer: Answer) -> None:
            answers.append(answer)
            done.set()

        reads = isinstance(request, types().ReadRows)
        deadline = trio.current_time() + limit_s
        self.send(process, step, Scan(request) if reads else request, deadline, take)
        with trio.move_on_at(deadline):
            await done.wait()
        if not answers:
            return rpc_error("DEADLINE_EXCEEDED")
        if isinstance(answers[0], CallFailed):
            return rpc_error(answers[0].code)
        return [Response(answers[0].rows)] if reads else answers[0]

    def ask_now(self, process: Process, step: Step, request: Any) -> Any:
        """Make a call that blocks in production; here it takes no time. Raises: gRPC's error."""
        if process.dead:
            raise rpc_error("CANCELLED")
        fault, _, more = self.befalls.call(process, step.name, step.about, step.faults).partition(" ")
        if fault == LATER:

            async def carry() -> None:
                await trio.sleep(self._rng.random() * _LATE * self._late_s)
                self.late += 1
                self.table.change(request)

            self.befalls.kernel.in_the_world(carry)
        if fault == LOSE_ANSWER:
            self.table.change(request)
        if fault:
            raise rpc_error("DEADLINE_EXCEEDED" if more == "hangs" else "UNAVAILABLE")
        if isinstance(request, types().ReadRows):
            return self.table.read_now(request)
        return self.table.change(request)


def step_of(request: Any, kinds: dict[int, tuple[Any, str, str]]) -> Step:
    """The step that a call performs. `kinds`: for calls that carry mutations, by the call's identity (`id`): the call,
    the name of its step, and its subject."""
    if isinstance(request, Scan):
        wanted = request.request.rows
        if wanted.row_keys:
            owner = OWNER_KEY in wanted.row_keys
            return Step("look at the owner" if owner else "read", "", READING)
        start = wanted.row_ranges[0].start_key_closed
        if start.startswith(HINT_KEY):
            return Step("scan hints", "", READING)
        if start.startswith(TICKET_KEY):
            return Step("scan tickets", "", READING)
        return Step("scan", "", SCANNING)
    kind = kinds.get(id(request))
    if kind is not None and kind[0] is request:
        return Step(*kind[1:], CHANGING)
    key = request.row_key
    if key == OWNER_KEY:
        if isinstance(request, types().CheckAndMutateRow):
            return Step("claim", "", CHANGING)
        empty = not request.mutations[0].set_cell.value
        return Step("tell the floor" if empty else "tell the address", "", CHANGING)
    if key.startswith(TICKET_KEY):
        first = request.mutations[0]
        if first.WhichOneof("mutation") == "delete_from_row":
            return Step("remove a ticket", "", CHANGING)
        given = first.set_cell.timestamp_micros == MICROS
        return Step("give a ticket" if given else "end a ticket", "", CHANGING)
    if key.startswith(HINT_KEY):
        put = request.mutations[0].WhichOneof("mutation") == "set_cell"
        return Step("hint" if put else "remove hints", repr(key), CHANGING)
    return Step("other", "", CHANGING)


class Calls:
    """Replaces `bigtable.calls.Calls`, for one store of the process that makes this object."""

    made: int

    def __init__(self, service: Service) -> None:
        self._service, self._process = service, current()
        self.made = 0
        self._closed = False
        self._kinds: dict[int, tuple[Any, str, str]] = {}
        self._asking: set[_Asked] = set()

    def name(self, call: Any, kind: str, about: str) -> None:
        """Note which step of the protocol a call performs."""
        self._kinds[id(call)] = call, kind, about

    def close(self, closed: Callable[[], object] = lambda: None) -> None:
        """See `bigtable.calls.Calls`."""
        self._closed = True
        for asked in list(self._asking):
            asked.fail("CANCELLED", "the store was closed")
        closed()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    async def ask(self, requests: Sequence[Any], deadline: float) -> list[Answer]:
        """See `bigtable.calls.Calls`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        too_late = trio.current_time() >= deadline
        if self._closed or self._process.dead or not requests or too_late:
            await trio.lowlevel.cancel_shielded_checkpoint()
            code = "DEADLINE_EXCEEDED" if too_late else "CANCELLED"
            self._forget(requests)
            return [CallFailed(code, "it was not sent", sent=False) for _ in requests]
        self.made += len(requests)
        asked = _Asked(len(requests))
        self._asking.add(asked)
        try:
            for index, request in enumerate(requests):
                step = step_of(request, self._kinds)
                self._service.send(self._process, step, request, deadline, asked.answer(index))
            self._forget(requests)
            with trio.move_on_at(deadline):
                await asked.done.wait()
        finally:
            self._asking.discard(asked)
        asked.fail("DEADLINE_EXCEEDED", "there was no answer")
        return asked.answers

    def _forget(self, requests: Sequence[Any]) -> None:
        for request in requests:
            self._kinds.pop(id(request), None)


class _Asked:
    """Calls that were made together."""

    def __init__(self, count: int) -> None:
        self.answers: list[Answer] = [None] * count
        self._missing = count
        self.done = trio.Event()

    def answer(self, index: int) -> Callable[[Answer], None]:
        def take(answer: Answer) -> None:
            if self.answers[index] is None:
                self.answers[index] = answer
                self._missing -= 1
                if not self._missing:
                    self.done.set()

        return take

    def fail(self, code: str, said: str) -> None:
        """Answer, with an error, the calls that have no answer yet."""
        for index, answer in enumerate(self.answers):
            if answer is None:
                self.answer(index)(CallFailed(code, said))


class CallPending(Exception):
    """Raised by a call that blocks and has no answer yet. See `Channel`."""

    step: Step
    request: Any

    def __init__(self, step: Step, request: Any) -> None:
        super().__init__(step.name)
        self.step, self.request = step, request


class Channel:
    """Replaces the gRPC channel for the calls of a lease, which block. A task cannot block, so the code that makes such
    calls runs several times: the first call without an answer raises `CallPending`. Once that call has been answered,
    the code runs again from its beginning, with all answers so far.

    Attributes: `answers`, the answers to the calls of this run of the code, in order; None: each call is made at once.
    """

    answers: list[Any] | None

    def __init__(self, service: Service) -> None:
        self._service, self._process = service, current()
        self.answers = None
        self._answered = 0

    def run_with(self, answers: list[Any]) -> None:
        """Begin a run of the code from its beginning, with these answers."""
        self.answers, self._answered = answers, 0

    def _call(self, step: Step, request: Any) -> Any:
        if self.answers is None:
            reads = isinstance(request, types().ReadRows)
            found = self._service.ask_now(self._process, step._replace(faults=(FAIL,) if reads else _AT_ONCE), request)
            return [Response(found)] if reads else found
        if self._answered == len(self.answers):
            raise CallPending(step, request)
        answer = self.answers[self._answered]
        self._answered += 1
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def unary_unary(self, name: str, **_: Any) -> Callable[..., Any]:
        return lambda request, **_: self._call(Step("renew the lease", "", CHANGING), request)

    def unary_stream(self, name: str, **_: Any) -> Callable[..., Any]:
        return lambda request, **_: self._call(Step("read the lease", "", READING), request)

    def close(self) -> None: ...
