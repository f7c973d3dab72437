"""Asks all clients a question, such as what their tasks wait for, and collects the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, TypeVar

import trio

from perco.database.parts import Parts
from perco.rpc.peer import Peer
from perco.serve import tasks, uses
from perco.serve.messages import TASKS_ASKED, USES_ASKED
from perco.serve.sessions import Session, Sessions, Stuck
from perco.serve.shared_ids import SharedIds
from perco.serve.tasks import ProcessTasks
from perco.serve.uses import ProcessUse

T = TypeVar("T")

_ANSWERED_S: Final = 1.0  # how long clients may take to answer


class Question(Generic[T]):
    """A question to all processes that have a store open.

    Args:
        message: its kind; clients get it with the question's number.
        here: the answer of this process.
        read: decodes a client's answer, and adds what is known here of its session. Raises: TypeError, ValueError,
            WireError.
        held: the answer for a client that cannot answer, because its loop is held (R10).
        bounded: puts a bound on all answers together.
    """

    message: int
    here: Callable[[], T]
    read: Callable[[Session, Any], T]
    held: Callable[[Session, Stuck], T]
    bounded: Callable[[list[T]], list[T]]

    def __init__(
        self,
        message: int,
        here: Callable[[], T],
        read: Callable[[Session, Any], T],
        held: Callable[[Session, Stuck], T],
        bounded: Callable[[list[T]], list[T]] = list,
    ) -> None:
        self.message, self.here, self.read, self.held, self.bounded = message, here, read, held, bounded


def about_tasks() -> Question[ProcessTasks]:
    """Asks which tasks of processes wait, and for what."""
    return Question(
        TASKS_ASKED,
        lambda: tasks.here("owner"),
        lambda session, packed: tasks.read(packed),
        lambda session, stuck: tasks.held(stuck.pid, stuck.seconds, stuck.where),
    )


def about_uses(parts: Parts, ids: SharedIds, sessions: Sessions) -> Question[ProcessUse]:
    """Asks how processes use the store. `parts`, `ids`, `sessions`: the owner's."""
    holds = parts.oracle.holds
    return Question(
        USES_ASKED,
        lambda: uses.here("owner", parts.engine, parts.workers, ids, sessions.all.values()),
        lambda session, packed: uses.joined(session, uses.read(packed), holds),
        lambda session, stuck: uses.joined(session, uses.held(stuck.pid), holds),
        uses.merged,
    )


class _Asked(Generic[T]):
    """A question to all clients, and their answers."""

    number: int
    clients: int
    all: trio.Event
    over: trio.Event

    def __init__(self, number: int, clients: int) -> None:
        self.number, self.clients = number, clients
        self.answers: dict[str, T] = {}  # by session
        self.all, self.over = trio.Event(), trio.Event()
        self.found: list[T] = []


class Told(Generic[T]):
    """Asks one question of one server's clients, again and again.

    Args:
        serving: the server's connections, with the session of each.
        silence_s: how long the last message of a pulse counts, in seconds.
        waiting: makes a block that is cancelled after so many seconds, or when the server ends.
    """

    def __init__(
        self,
        question: Question[T],
        sessions: Sessions,
        serving: Mapping[Peer, Session],
        silence_s: float,
        waiting: Callable[[float], AbstractContextManager[None]],
    ) -> None:
        self._question = question
        self._sessions, self._serving, self._silence_s, self._waiting = sessions, serving, silence_s, waiting
        self.asked: _Asked[T] | None = None  # while clients are being asked
        self._count = 0

    async def ask(self, session: Session, _: Any = None) -> list[T]:
        """Return the answers of this process, and of its clients except the caller. Clients that do not answer soon are
        left out. Calls that arrive while clients are being asked share one result."""
        if self.asked is not None:
            asked = self.asked
            await asked.over.wait()
            return asked.found
        self._count += 1
        question, since = self._question, trio.current_time() - self._silence_s
        stuck = [other for other in self._sessions.all.values() if other.stuck and other.stuck.told >= since]
        peers = [peer for peer, other in self._serving.items() if other is not session and other not in stuck]
        asked = self.asked = _Asked(self._count, len(peers))
        try:
            for peer in peers:
                peer.push(question.message, asked.number)
            if peers:
                with self._waiting(_ANSWERED_S):
                    await asked.all.wait()
        finally:
            self.asked = None
            held = [question.held(each, each.stuck) for each in stuck if each.stuck is not None]
            asked.found = question.bounded([question.here(), *asked.answers.values(), *held])
            asked.over.set()
        return asked.found

    def told(self, session: Session, answer: Any) -> None:
        """Note a client's answer: (the number of the question, what it says). Raises: as `Question.read`."""
        number, packed = answer
        asked = self.asked
        if asked is not None and asked.number == number:
            asked.answers[session.name] = self._question.read(session, packed)
            if len(asked.answers) == asked.clients:
                asked.all.set()
