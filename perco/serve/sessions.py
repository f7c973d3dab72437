"""The sessions of a served store's clients: what they hold, and when they end.

R7  A session begins with a greeting and outlives its connection: a client that reconnects within `lease_s` finds its
    session unchanged. A session ends once and for all: with BYE, or when the server has not heard from its client
    for `lease_s`. Until then, the start timestamps that the session was given hold back the watermark (G1), their
    transactions are alive (L1), and the session's claims are valid (N8). From then on, the server accepts no request of
    the session, but it completes the mutations that are already queued.
    A client that reconnects reports what it still has: its open timestamps in the greeting, then its holds and claims.
    The server releases everything else that the session had, because messages that the client sent while it had no
    connection never arrived.
R10 While a client's event loop is held (blocked by code that does not yield), a thread of the client reports this over
    a second connection, the client's pulse. As long as it does so, the client counts as heard from, and the client's
    other connections are not treated as silent. When the loop runs again, they may be silent for `silence_s` once
    more, so that the client has time to send something.
R8  A new server holds the timestamps that a client's greeting lists, if none of them is below the watermark (L3).
    Otherwise versions that the client needs may be gone, and the server holds none of the timestamps. The server says
    that the session is new until it has heard what its client holds. The answer to a first greeting may be lost; if the
    next answer did not say "new", the client would mistake the session for the one that holds its past snapshots.
"""

from __future__ import annotations

import math
import secrets
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from perco.clock.holds import Holds
from perco.errors import SessionEnded
from perco.notify.concerned import Concerned, Watch
from perco.notify.rowlocks import CLAIMED, DONE, FREE, HELD
from perco.serve.messages import NOTIFIED, RELEASED
from perco.serve.wakes import Wakes
from perco.txn.fates import Fates

if TYPE_CHECKING:
    from perco.rpc.peer import Peer

_ENDED_S: Final = 1.0  # how long a claim that has ended is remembered
_ENDED_MAX: Final = 4096  # how many of these are remembered
_TOLD_MAX: Final = 256  # rows of other sessions, in the answer to a session that was refused a row
_AHEAD_MAX: Final = 16  # rows of other sessions, in the answer to a session that was refused none


class Stuck(NamedTuple):
    """At `told` (the server's time), a client's loop had been held for `seconds`, by code at `where`."""

    pid: int
    seconds: float
    where: str
    told: float


class Session:
    """One client's session. Loop thread only.

    Attributes:
        name: a random string that the client has chosen.
        open: start timestamps that the session was given and whose transactions have not ended.
        held: holds on past timestamps, by the number that the client gave to each.
        loads: ids of the bulk loads that the client has begun.
        claims: rows on which the client runs observers.
        works: ids of the observers that the client has; `runs`: of those that it may run.
        full, asked_at: see `Wakes`.
        peer: the client's connection, if it has one.
        ticket: the client presents it to tablet servers, or to the database; replaced when a greeting makes the session
            release anything (F3).
        last_heard: when the client last had a connection, or its pulse last sent a message.
        new: the client may not know that the session has begun, because the answer to its greeting may be lost.
        applying: how many of the client's calls have mutations queued.
        stuck: the last message of the client's pulse; None: as far as is known, the client's loop runs.
    """

    name: str
    last_heard: float
    ticket: str
    full: bool
    asked_at: float
    ended: bool
    new: bool
    orphans: bool
    applying: int

    __slots__ = (
        "applying",
        "asked_at",
        "claims",
        "ended",
        "full",
        "greeting",
        "held",
        "last_heard",
        "loads",
        "name",
        "new",
        "open",
        "orphans",
        "peer",
        "runs",
        "stuck",
        "ticket",
        "works",
    )

    def __init__(self, name: str, now: float, greeting: int = 0) -> None:
        """`greeting`: the number of the client's last greeting."""
        self.name, self.last_heard = name, now
        self.greeting: int = greeting
        self.ticket = secrets.token_hex(16)
        self.open: set[int] = set()
        self.held: dict[int, int] = {}
        self.loads: set[str] = set()
        self.claims: set[tuple[str, bytes]] = set()
        self.works: frozenset[str] = frozenset()
        self.runs: frozenset[str] = frozenset()
        self.full, self.asked_at = False, math.inf
        self.peer: Peer | None = None
        self.ended = False
        self.new = True
        self.orphans = False  # its client left locks behind
        self.applying = 0
        self.stuck: Stuck | None = None


def must_go_on(session: Session | None) -> Session:
    """Return the session. Raises: SessionEnded, if it has ended, or there is none."""
    if session is None or session.ended:
        raise SessionEnded()
    return session


class _Claim:
    """A row on which a session runs observers, or did until a moment ago.

    Attributes:
        newest: the newest change that the session saw waiting there; the session handles changes up to it.
        root: the oldest cause of the changes that wait there.
        refused: sessions that have meanwhile been refused the row, and have observers that the holder may not run.
        until: the time until which a claim that has ended is remembered.
    """

    __slots__ = ("newest", "refused", "root", "session", "until")

    def __init__(self, session: Session, newest: int, root: int) -> None:
        self.session, self.newest, self.root = session, newest, root
        self.refused: set[Session] = set()
        self.until = 0.0

    def answers_for(self, session: Session, newest: int) -> bool:
        """Whether another session need not look at the row for changes up to `newest`."""
        holder = self.session
        return holder is not session and not holder.ended and newest <= self.newest and session.runs <= holder.runs

    def refuse(self, session: Session) -> None:
        """Record that another session leaves the row alone for now. It is notified when the claim ends, unless the
        holder may run all of that session's observers, and so looks for their work itself."""
        if not session.runs <= self.session.runs:
            self.refused.add(session)


def _concerns(concerned: Concerned, table: str, session: Session) -> bool:
    """Whether a session may have claimed a row of a table for an observer concerned."""
    return table in concerned.tables and not session.works.isdisjoint(concerned.ids)


class Sessions:
    """All sessions of a server."""

    claimed: int

    def __init__(self, holds: Holds, fates: Fates, lease_s: float, orphaned: Callable[[], None]) -> None:
        self._holds, self._fates, self._lease_s, self._orphaned = holds, fates, lease_s, orphaned
        self.all: dict[str, Session] = {}
        # F3: both are called with a ticket; `on_end`, before anything that the ticket's session holds is released.
        self.on_begin: Callable[[str], None] = lambda ticket: None
        self.on_end: Callable[[str], None] = lambda ticket: None
        self.on_load_left: Callable[[str], None] = lambda id: None  # called with a bulk load of a session that ends
        self.on_held: Callable[[str], None] = lambda ticket: None  # R10
        self.on_wake: Callable[[], None] = lambda: None  # N8: called when sessions were woken: some may not answer
        self.claims: dict[tuple[str, bytes], _Claim] = {}
        self._rows: dict[str, list[bytes]] = {}  # claimed rows, by table, in order
        self._ended: dict[tuple[str, bytes], _Claim] = {}  # in the order in which they ended
        self.claimed = 0  # how many claims were granted, in total
        self.wakes: Wakes[Session] = Wakes()
        self._watches: set[Watch] = set()

    def __len__(self) -> int:
        return len(self.all)

    # ------------------------------------------------------------ begin, end

    def greet(self, name: str, held: Iterable[int], now: float, number: int = 0) -> tuple[Session, bool, bool]:
        """Return (the session of that name, whether it is `new`, whether the server holds all that its client needs)
        (R7, R8). `number`: the greeting's; it must not come before the session's last one."""
        session = self.all.get(name)
        if session is not None:
            # Timestamps that the client did not list: it never received them, or their transactions have ended.
            lost = session.open.difference(held)
            if lost:
                self._new_ticket(session)
                self.done(session, lost)
                self._orphaned()
            assert number >= session.greeting, "R7: a late greeting would release what the client has got since"
            session.last_heard, session.greeting = now, number
            kept = session.open.issuperset(held)
            if not kept:
                self._new_ticket(session)
                self.done(session, list(session.open))  # its client abandons its transactions
            return session, session.new, kept
        session = self.all[name] = Session(name, now, number)
        self.on_begin(session.ticket)
        needed = set(held)
        watermark = self._holds.watermark
        if needed and min(needed) < watermark:
            return session, True, False
        for start_ts in needed:
            self.begin(session, start_ts)
        return session, True, True

    def _new_ticket(self, session: Session) -> None:
        """F3: replace a session's ticket. Call this before `done` releases any timestamp at which the client may read
        with the former ticket."""
        self.on_end(session.ticket)
        session.ticket = secrets.token_hex(16)
        self.on_begin(session.ticket)

    def end(self, session: Session) -> None:
        """R7: end a session. All that the session holds is released as soon as its queued mutations are complete."""
        if session.ended:
            return
        session.ended = True
        del self.all[session.name]
        self.on_end(session.ticket)
        if not session.applying:
            self._let_go(session)

    def applied(self, session: Session) -> None:
        """Record that the mutations of one of a session's calls are complete."""
        session.applying -= 1
        if session.ended and not session.applying:
            self._let_go(session)

    def works(self, session: Session, ids: Iterable[str], runs: Iterable[str]) -> None:
        """Note which observers a session's client has, and which of them it may run. If it has none, the session's
        claims end."""
        session.works = frozenset(ids)
        self.wake(self.wakes.works(session, runs, trio.current_time()))
        if not session.works:
            for where in list(session.claims):
                self.unclaim(session, where)

    def wake(self, sessions: Iterable[Session]) -> None:
        """Notify clients that there may be work (N8). A client without a connection looks for work once it has
        reconnected."""
        for session in sessions:
            if session.peer is not None:
                session.peer.push(NOTIFIED, None)
        self.on_wake()

    def _let_go(self, session: Session) -> None:
        orphans = bool(session.open)
        self.done(session, list(session.open))
        for number in list(session.held):
            self.release(session, number)
        for id in session.loads:
            self.on_load_left(id)
        self.works(session, (), ())
        if orphans:
            self._orphaned()

    def beat(self, session: Session, now: float, stuck: Stuck | None) -> None:
        """R10: note a message of a session's pulse. `stuck`: None, if the client's loop runs again."""
        session.last_heard, session.stuck = now, stuck
        if session.peer is not None:
            session.peer.channel.excuse()
        self.on_held(session.ticket)

    def expire(self, now: float) -> list[Session]:
        """End the sessions whose clients have not been heard from for too long; return these sessions."""
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
        """Let a session hold a start timestamp that was drawn for it (G1, L1)."""
        session.open.add(start_ts)
        self._holds.open.add(start_ts)
        self._fates.begin(start_ts)

    def done(self, session: Session, start_ts: Iterable[int]) -> None:
        """Record that transactions and snapshots of a session have ended, and wake those that wait for them."""
        for ts in start_ts:
            if ts in session.open:
                session.open.discard(ts)
                self._holds.open.discard(ts)
                self._fates.end(ts)
        if session.orphans:
            session.orphans = bool(session.open)
            self._orphaned()

    def orphans(self, session: Session) -> None:
        """Record that a session's client left locks behind: they are swept once their transactions have ended."""
        session.orphans = True
        self._orphaned()

    def hold(self, session: Session, number: int, ts: int) -> bool:
        """T15: hold a past timestamp under the number that the client gave it; a repeated call changes nothing. Returns
        False if the timestamp is too old."""
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
        self, session: Session, numbers: Iterable[int], claims: Iterable[tuple[tuple[str, bytes], tuple[int, int]]]
    ) -> None:
        """R7: keep what a session's client reports that it has, and release the rest, because messages that the client
        sent without a connection are lost."""
        session.new = False
        for number in set(session.held).difference(numbers):
            self.release(session, number)
        claimed = dict(claims)
        for where in session.claims.difference(claimed):
            self.unclaim(session, where)
        for where, (newest, root) in claimed.items():
            if where not in self.claims:
                self._give(session, where, newest, root)

    def claim(
        self, session: Session, table: str, wanted: Sequence[tuple[bytes, int, int]], most: int, *, halts: bool
    ) -> tuple[bytes, list[tuple[bytes, int]]]:
        """N8: claim up to `most` rows, in order, on which no other session works.

        Args:
            wanted: rows of the table, each with the newest change and the oldest cause that wait there.
            halts: after a row has been granted, stop at the first one that another session has.

        Returns: for each row, `CLAIMED`: the session has it now; `HELD`: another session has it; `DONE`: another
        session has just handled that change; or `FREE`: no other session has it, but it was not granted. Then, from the
        first wanted row on, rows of the table that other sessions have, each with the newest change that its holder saw
        there.
        """
        self._forget(trio.current_time())
        out = bytearray()
        given, halted = 0, False
        for row, newest, root in wanted:
            where = table, row
            claim, before = self.claims.get(where), self._ended.get(where)
            if claim is None and before is not None and before.answers_for(session, newest):
                out.append(DONE)
            elif claim is not None and claim.session is not session:
                halted |= halts and given > 0
                claim.refuse(session)
                out.append(HELD)
            elif halted or given >= most:  # even if the session already has the row: it has no room for more
                out.append(FREE)
            else:
                self._give(session, where, newest, root)
                given += 1
                out.append(CLAIMED)
        if not wanted:
            return b"", []
        return bytes(out), self._held_by_others(session, table, wanted[0][0], _TOLD_MAX if HELD in out else _AHEAD_MAX)

    def _held_by_others(self, session: Session, table: str, row: bytes, most: int) -> list[tuple[bytes, int]]:
        """The next rows of a table, up to `most`, that other sessions have: from a row on, wrapping around at the
        table's end."""
        rows = self._rows.get(table, [])
        at = bisect_left(rows, row)
        told = []
        for each in islice(chain(islice(rows, at, None), islice(rows, at)), 2 * most):
            claim = self.claims[table, each]
            if claim.session is not session:
                claim.refuse(session)
                told.append((each, claim.newest))
        return told[:most]

    def _give(self, session: Session, where: tuple[str, bytes], newest: int, root: int) -> None:
        self.claimed += 1
        claim = self.claims.get(where)
        if claim is None:
            insort(self._rows.setdefault(where[0], []), where[1])
            self.claims[where] = _Claim(session, newest, root)
        else:  # the session has claimed it before
            claim.newest, claim.root = max(newest, claim.newest), min(root, claim.root)
        self._ended.pop(where, None)
        session.claims.add(where)
        for watch in self._watches:
            if _concerns(watch.concerned, where[0], session):
                watch.saw(root)

    def _forget(self, now: float) -> None:
        """Forget claims that ended a while ago and, if too many are remembered, the oldest of the others."""
        while self._ended:
            where = next(iter(self._ended))
            if self._ended[where].until > now and len(self._ended) <= _ENDED_MAX:
                break
            del self._ended[where]

    def unclaim(self, session: Session, where: tuple[str, bytes]) -> None:
        """End a session's claim on a row; its client has checked whether anything is left to do there. Notify the
        sessions that were refused the row and have observers that this session may not run."""
        if where not in session.claims:
            return
        session.claims.discard(where)
        claim = self.claims.pop(where)
        rows = self._rows[where[0]]
        del rows[bisect_left(rows, where[1])]
        claim.until = trio.current_time() + _ENDED_S
        self._ended[where] = claim
        for other in claim.refused:
            if not other.ended and other.peer is not None:
                other.peer.push(RELEASED, None)

    def watch(self, concerned: Concerned) -> Watch:
        """Begin to note the oldest cause that runs carry (N7). The server does not know for which observers of a row a
        client has claimed it. So all count that the client has, and that observe the row's table."""
        watch = Watch(concerned, self._watches)
        for (table, _), claim in self.claims.items():
            if _concerns(concerned, table, claim.session):
                watch.saw(claim.root)
        return watch

    def workers(self) -> dict[str, int]:
        """How many sessions run each observer, by id."""
        counts: dict[str, int] = {}
        for session in self.all.values():
            for id in session.works:
                counts[id] = counts.get(id, 0) + 1
        return counts
