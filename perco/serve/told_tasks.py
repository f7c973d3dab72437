"""Asks clients what their tasks wait for, and collects the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import trio

from perco.rpc.peer import Peer
from perco.serve import tasks
from perco.serve.messages import TASKS_ASKED
from perco.serve.sessions import Session, Sessions
from perco.serve.tasks import ProcessTasks

_ANSWERED_S: Final = 1.0  # how long clients may take to answer


class _Asked:
    """A question to all clients, and their answers."""

    number: int
    clients: int
    all: trio.Event
    over: trio.Event

    def __init__(self, number: int, clients: int) -> None:
        self.number, self.clients = number, clients
        self.answers: dict[str, ProcessTasks] = {}  # by session
        self.all, self.over = trio.Event(), trio.Event()
        self.found: list[ProcessTasks] = []


class ToldTasks:
    """The questions that one server asks its clients.

    Args:
        serving: the server's connections, with the session of each.
        silence_s: how long the last message of a pulse counts, in seconds.
        waiting: makes a block that is cancelled after so many seconds, or when the server ends.
    """

    def __init__(
        self,
        sessions: Sessions,
        serving: Mapping[Peer, Session],
        silence_s: float,
        waiting: Callable[[float], AbstractContextManager[None]],
    ) -> None:
        self._sessions, self._serving, self._silence_s, self._waiting = sessions, serving, silence_s, waiting
        self.asked: _Asked | None = None  # while clients are being asked
        self._count = 0

    async def ask(self, session: Session) -> list[ProcessTasks]:
        """Return the tasks of this process, and of its clients except the caller. Clients that do not answer soon are
        left out. Calls that arrive while clients are being asked share one result."""
        if self.asked is not None:
            asked = self.asked
            await asked.over.wait()
            return asked.found
        self._count += 1
        since = trio.current_time() - self._silence_s
        stuck = [other.stuck for other in self._sessions.all.values() if other.stuck and other.stuck.told >= since]
        peers = [peer for peer, other in self._serving.items() if other is not session and other.stuck not in stuck]
        asked = self.asked = _Asked(self._count, len(peers))
        try:
            for peer in peers:
                peer.push(TASKS_ASKED, asked.number)
            if peers:
                with self._waiting(_ANSWERED_S):
                    await asked.all.wait()
        finally:
            self.asked = None
            held = [tasks.held(each.pid, each.seconds, each.where) for each in stuck]
            asked.found = [tasks.here("owner"), *asked.answers.values(), *held]
            asked.over.set()
        return asked.found

    def told(self, session: Session, answer: Any) -> None:
        """Note a client's answer: (the number of the question, the client's tasks). Raises: TypeError, ValueError,
        WireError."""
        number, packed = answer
        asked = self.asked
        if asked is not None and asked.number == number:
            asked.answers[session.name] = tasks.read(packed)
            if len(asked.answers) == asked.clients:
                asked.all.set()
