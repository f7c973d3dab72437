"""What the clients of a served store hold, and when that ends.

R7  A session begins with a greeting and outlives its connection: who comes back within `lease_s` finds all as it was.
    It ends once: with BYE, or when its client has not been heard of for so long. Until then every start timestamp that
    was given to it holds the watermark (G1) and lives (L1), and its claims hold (N8). From then on nothing that it asks
    for is done: its mutations that are queued by then are still made, and no others.
    Who comes back says what it still has: its open timestamps in the greeting, then its holds and claims. All else that
    the session had is let go of, for what was said while there was no connection never arrived.
R8  When a server has begun anew, the timestamps that a client greets with are held again, if they still can be (L3):
    nothing is collected for `lease_s`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from perco.notify.worker import Watch
from perco.serve.messages import NOTIFIED
from perco.txn.fates import Fates
from perco.txn.holds import Holds

if TYPE_CHECKING:
    from perco.rpc.peer import Peer


class Session:
    """One client's. Loop thread only.

    Attributes:
        name: as the client calls it, a random word.
        open: start timestamps that were given to it and are not over.
        held: holds on past timestamps, by the client's number.
        claims: rows on which it runs observers.
        works: ids of the observers that it runs.
        peer: its connection, if it has one.
        ticket: what its client shows to tablet servers; a new one as soon as it holds no more what it held (F3).
        last_heard: when it had one last.
        applying: its mutations that are queued.
    """

    __slots__ = (
        "applying",
        "claims",
        "ended",
        "held",
        "last_heard",
        "name",
        "open",
        "orphans",
        "peer",
        "refused_claims",
        "ticket",
        "works",
    )

    def __init__(self, name: str, now: float) -> None:
        self.name, self.last_heard = name, now
        self.ticket = secrets.token_hex(16)
        self.open: set[int] = set()
        self.held: dict[int, int] = {}
        self.claims: set[tuple[str, bytes]] = set()
        self.works: frozenset[str] = frozenset()
        self.refused_claims = False  # it waits for a row that another one works on
        self.peer: Peer | None = None
        self.ended = False
        self.orphans = False  # its client left locks behind
        self.applying = 0


class Sessions:
    """All of a server."""

    def __init__(self, holds: Holds, fates: Fates, lease_s: float, orphaned: Callable[[], None]) -> None:
        self._holds, self._fates, self._lease_s, self._orphaned = holds, fates, lease_s, orphaned
        self.all: dict[str, Session] = {}
        # F3: called with a ticket, before what its session holds is let go of.
        self.on_begin: Callable[[str], None] = lambda ticket: None
        self.on_end: Callable[[str], None] = lambda ticket: None
        self.claims: dict[tuple[str, bytes], tuple[Session, int]] = {}  # and the oldest cause of what waits there
        self._watches: set[Watch] = set()

    def __len__(self) -> int:
        return len(self.all)

    # ------------------------------------------------------------ begin, end

    def greet(self, name: str, held: Iterable[int], now: float) -> tuple[Session, bool, bool]:
        """(the session of that name, whether it is a new one, whether all is held that its client needs) (R7, R8)."""
        session = self.all.get(name)
        if session is not None:
            # What was drawn for it and never arrived is nobody's.
            lost = session.open.difference(held)
            if lost:
                self._new_ticket(session)
                self.done(session, lost)
                self._orphaned()
            session.last_heard = now
            kept = session.open.issuperset(held)
            if not kept:
                self._new_ticket(session)
                self.done(session, list(session.open))  # its client begins anew
            return session, False, kept
        session = self.all[name] = Session(name, now)
        self.on_begin(session.ticket)
        needed = set(held)
        watermark = self._holds.watermark
        if needed and min(needed) < watermark:
            return session, True, False
        for start_ts in needed:
            self.begin(session, start_ts)
        return session, True, True

    def _new_ticket(self, session: Session) -> None:
        """F3: before something is let go of that may have been read with the former one."""
        self.on_end(session.ticket)
        session.ticket = secrets.token_hex(16)
        self.on_begin(session.ticket)

    def end(self, session: Session) -> None:
        """R7: as soon as what is queued has been made."""
        if session.ended:
            return
        session.ended = True
        del self.all[session.name]
        self.on_end(session.ticket)
        if not session.applying:
            self._let_go(session)

    def applied(self, session: Session) -> None:
        """One of its calls has been made."""
        session.applying -= 1
        if session.ended and not session.applying:
            self._let_go(session)

    def _let_go(self, session: Session) -> None:
        orphans = bool(session.open)
        self.done(session, list(session.open))
        for number in list(session.held):
            self.release(session, number)
        for claim in list(session.claims):
            self.unclaim(session, claim)
        if orphans:
            self._orphaned()

    def expire(self, now: float) -> list[Session]:
        """End those that were not heard of for too long; returns them."""
        gone = [
            session
            for session in self.all.values()
            if session.peer is None and now - session.last_heard > self._lease_s
        ]
        for session in gone:
            self.end(session)
        return gone

    # ------------------------------------------------------------ what they hold

    def begin(self, session: Session, start_ts: int) -> None:
        """A timestamp was drawn for it, to read at (G1, L1)."""
        session.open.add(start_ts)
        self._holds.open.add(start_ts)
        self._fates.begin(start_ts)

    def done(self, session: Session, start_ts: Iterable[int]) -> None:
        """Transactions and snapshots are over; those who wait for them go on."""
        for ts in start_ts:
            if ts in session.open:
                session.open.discard(ts)
                self._holds.open.discard(ts)
                self._fates.end(ts)
        if session.orphans:
            session.orphans = bool(session.open)
            self._orphaned()

    def orphans(self, session: Session) -> None:
        """Its client left locks behind: they are swept once their transactions are over."""
        session.orphans = True
        self._orphaned()

    def hold(self, session: Session, number: int, ts: int) -> bool:
        """T15: hold a past timestamp, under the client's number; asked twice, once. False: it is too old."""
        if number not in session.held:
            held = self._holds.hold(ts)
            if not held:
                return False
            session.held[number] = held
        return True

    def release(self, session: Session, number: int) -> None:
        held = session.held.pop(number, None)
        if held is not None:
            self._holds.release(held)

    def holding(
        self, session: Session, numbers: Iterable[int], claims: Iterable[tuple[tuple[str, bytes], int]]
    ) -> None:
        """R7: that is all that its client has; what was said while there was no connection never arrived."""
        for number in set(session.held).difference(numbers):
            self.release(session, number)
        claimed = dict(claims)
        for where in session.claims.difference(claimed):
            self.unclaim(session, where)
        for where, root in claimed.items():
            self.claim(session, where, root)

    def claim(self, session: Session, where: tuple[str, bytes], root: int) -> bool:
        """N8: whether nobody else works on the row."""
        holder = self.claims.get(where)
        if holder is None:
            self.claims[where] = session, root
            session.claims.add(where)
            for watch in self._watches:
                watch.moved |= root <= watch.ts
            return True
        if holder[0] is session:
            return True
        session.refused_claims = True
        return False

    def unclaim(self, session: Session, where: tuple[str, bytes]) -> None:
        if where in session.claims:
            session.claims.discard(where)
            del self.claims[where]
            for other in self.all.values():
                if other.refused_claims and other is not session:
                    other.refused_claims = False
                    if other.peer is not None:
                        other.peer.push(NOTIFIED, None)

    def watch(self, ts: int) -> Watch:
        """Notes whether a run that carries a cause at or before `ts` was under way (N7)."""
        return Watch(ts, any(root <= ts for _, root in self.claims.values()), self._watches)

    def workers(self) -> dict[str, int]:
        """How many sessions run each observer, by id."""
        counts: dict[str, int] = {}
        for session in self.all.values():
            for id in session.works:
                counts[id] = counts.get(id, 0) + 1
        return counts
