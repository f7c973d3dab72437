"""Tells clients on which rows there may be work, while their scanners pass many others (N8)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from perco.notify.hints import MOST
from perco.serve.messages import HINTED
from perco.serve.sessions import Session
from perco.txn.driver import Driver
from perco.txn.resolver import Hint

_WAITING_BYTES: Final = 1 << 18


class Hinting:
    """Loop thread only. `driver`: the owner's, which learns of all notify cells that this process makes visible."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._wanting: set[Session] = set()

    def wants(self, session: Session, on: object) -> None:
        """Begin, or end, to tell a session."""
        if on is True and not self._wanting:
            self._driver.hints.append(self._hear)
        (self._wanting.add if on is True else self._wanting.discard)(session)
        self._end_if_unwanted()

    def _end_if_unwanted(self) -> None:
        if not self._wanting and self._hear in self._driver.hints:
            self._driver.hints.remove(self._hear)

    def _hear(self, hints: Iterable[Hint]) -> None:
        told = tuple(islice(hints, MOST))
        for session in list(self._wanting):
            if session.ended:
                self._wanting.discard(session)
            elif session.peer is not None and session.peer.channel.waiting_bytes < _WAITING_BYTES:
                session.peer.push_each(HINTED, told)  # otherwise they are lost: the client is slow
        self._end_if_unwanted()
