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

_ANSWERED_S: Final = 1.0  # how long clients may take


class _Asked:
    """A question to all clients."""

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
    """The questions of one server.

    Args:
        serving: its connections.
        silence_s: for how many seconds the last message of a pulse counts.
        waiting: a block that ends after so many seconds, or when the server does.
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
        """Tasks of this process, and of its clients except the one that asks. Clients that do not answer soon are left
        out. Calls that come while clients are being asked share the result."""
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
        """A client answers: (the number of the question, its tasks). Raises: TypeError, ValueError."""
        number, packed = answer
        asked = self.asked
        if asked is not None and asked.number == number:
            asked.answers[session.name] = tasks.read(packed)
            if len(asked.answers) == asked.clients:
                asked.all.set()
