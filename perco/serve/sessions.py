"""The sessions of a served store's clients: what they hold, and when they end.

R7  A session begins with a greeting and outlives its connection: a client that comes back within `lease_s` finds it
    unchanged. It ends once: with BYE, or when its client has not been heard from for that long. Until then every start
    timestamp that was given to it holds the watermark (G1) and is alive (L1), and its claims hold (N8). From then on
    the server does nothing that its client asks for, except mutations that are queued by then.
    A client that comes back lists what it still has: its open timestamps in the greeting, then its holds and claims.
    Everything else of the session is released, because messages that were sent without a connection never arrived.
R10 While a client's pulse says that its loop is held, the client counts as heard from, and its connections are not
    treated as silent. When the loop turns again they are excused once more, so that the client has time to speak.
R8  A new server holds the timestamps that a client's greeting lists, if it still can (L3): for the first `lease_s`,
    nothing is garbage-collected. It says that the session is new until it has heard what its client holds: the answer
    to a first greeting may be lost, and the client would mistake the session for the one that holds its past snapshots.
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
from perco.notify.rowlocks import CLAIMED, DONE, FREE, HELD
from perco.notify.worker import Watch
from perco.serve.messages import NOTIFIED, RELEASED
from perco.serve.wakes import Wakes
from perco.txn.fates import Fates

if TYPE_CHECKING:
    from perco.rpc.peer import Peer

_ENDED_S: Final = 1.0  # how long a claim that has ended is remembered
_ENDED_MAX: Final = 4096  # of these
_TOLD_MAX: Final = 256  # rows of others, in an answer to a session that was refused one of them
_AHEAD_MAX: Final = 16  # rows of others, in an answer to a session that was refused none


class Stuck(NamedTuple):
    """At `told` (the server's time), a client's loop had not turned for `seconds`; it was seen at `where`."""

    pid: int
    seconds: float
    where: str
    told: float


class Session:
    """One client's session. Loop thread only.

    Attributes:
        name: a random string that the client has chosen.
        open: start timestamps that were given to it, and whose transactions have not ended.
        held: holds on past timestamps, by the number that the client gave each.
        claims: rows on which it runs observers.
        works: ids of the observers that it has; `runs`: of those that it may run.
        full, asked_at: see `Wakes`.
        peer: its connection, if it has one.
        ticket: its client shows it to tablet servers; renewed when the session releases anything (F3).
        last_heard: when it last had a connection, or its pulse spoke.
        new: its client may not know that it has begun: the answer to a greeting may be lost.
        applying: how many of its calls have mutations queued.
        stuck: the last message of its pulse; None: its loop turns, as far as is known.
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
        "held",
        "last_heard",
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

    def __init__(self, name: str, now: float) -> None:
        self.name, self.last_heard = name, now
        self.ticket = secrets.token_hex(16)
        self.open: set[int] = set()
        self.held: dict[int, int] = {}
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
    """Raises: SessionEnded."""
    if session is None or session.ended:
        raise SessionEnded()
    return session


class _Claim:
    """A row on which a session runs observers, or did until a moment ago.

    Attributes:
        newest: the newest change that the session saw waiting there; the session handles changes up to it.
        root: the oldest cause of the changes that wait there.
        refused: sessions that wanted it meanwhile for other observers.
        until: how long a claim that has ended is remembered, as a time.
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
        """Another session leaves the row alone for now. It is notified of the end, unless the holder runs all of the
        other's observers, and so looks for that work itself."""
        if not session.runs <= self.session.runs:
            self.refused.add(session)


class Sessions:
    """All sessions of a server."""

    claimed: int

    def __init__(self, holds: Holds, fates: Fates, lease_s: float, orphaned: Callable[[], None]) -> None:
        self._holds, self._fates, self._lease_s, self._orphaned = holds, fates, lease_s, orphaned
        self.all: dict[str, Session] = {}
        # F3: called with a ticket; `on_end` before what its session holds is released.
        self.on_begin: Callable[[str], None] = lambda ticket: None
        self.on_end: Callable[[str], None] = lambda ticket: None
        self.on_held: Callable[[str], None] = lambda ticket: None  # R10
        self.on_wake: Callable[[], None] = lambda: None  # N8: woken sessions may have to answer now
        self.claims: dict[tuple[str, bytes], _Claim] = {}
        self._rows: dict[str, list[bytes]] = {}  # of claims, by table, in order
        self._ended: dict[tuple[str, bytes], _Claim] = {}  # in the order in which they ended
        self.claimed = 0  # rows, in total
        self.wakes: Wakes[Session] = Wakes()
        self._watches: set[Watch] = set()

    def __len__(self) -> int:
        return len(self.all)

    # ------------------------------------------------------------ begin, end

    def greet(self, name: str, held: Iterable[int], now: float) -> tuple[Session, bool, bool]:
        """(the session of that name, whether it is `new`, whether all is held that its client needs) (R7, R8)."""
        session = self.all.get(name)
        if session is not None:
            # No transaction has the timestamps that were drawn for it and never arrived.
            lost = session.open.difference(held)
            if lost:
                self._new_ticket(session)
                self.done(session, lost)
                self._orphaned()
            session.last_heard = now
            kept = session.open.issuperset(held)
            if not kept:
                self._new_ticket(session)
                self.done(session, list(session.open))  # its client starts over
            return session, session.new, kept
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
        """F3: replace the ticket, before anything is released that may have been read with the former one."""
        self.on_end(session.ticket)
        session.ticket = secrets.token_hex(16)
        self.on_begin(session.ticket)

    def end(self, session: Session) -> None:
        """R7: end a session. It releases what it holds as soon as its queued mutations have been made."""
        if session.ended:
            return
        session.ended = True
        del self.all[session.name]
        self.on_end(session.ticket)
        if not session.applying:
            self._let_go(session)

    def applied(self, session: Session) -> None:
        """The mutations of one of the session's calls have been made."""
        session.applying -= 1
        if session.ended and not session.applying:
            self._let_go(session)

    def works(self, session: Session, ids: Iterable[str], runs: Iterable[str]) -> None:
        """Note which observers its client has, and which of them it may run; if none, its claims end."""
        session.works = frozenset(ids)
        self.wake(self.wakes.works(session, runs, trio.current_time()))
        if not session.works:
            for where in list(session.claims):
                self.unclaim(session, where)

    def wake(self, sessions: Iterable[Session]) -> None:
        """Notify clients that there may be work (N8). A client without a connection looks when it has one again."""
        for session in sessions:
            if session.peer is not None:
                session.peer.push(NOTIFIED, None)
        self.on_wake()

    def _let_go(self, session: Session) -> None:
        orphans = bool(session.open)
        self.done(session, list(session.open))
        for number in list(session.held):
            self.release(session, number)
        self.works(session, (), ())
        if orphans:
            self._orphaned()

    def beat(self, session: Session, now: float, stuck: Stuck | None) -> None:
        """R10: a session's pulse has spoken. `stuck`: None if the client's loop turns again."""
        session.last_heard, session.stuck = now, stuck
        if session.peer is not None:
            session.peer.channel.excuse()
        self.on_held(session.ticket)

    def expire(self, now: float) -> list[Session]:
        """End the sessions that were not heard from for too long; returns them."""
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
        """Transactions and snapshots have ended; tasks that wait for them go on."""
        for ts in start_ts:
            if ts in session.open:
                session.open.discard(ts)
                self._holds.open.discard(ts)
                self._fates.end(ts)
        if session.orphans:
            session.orphans = bool(session.open)
            self._orphaned()

    def orphans(self, session: Session) -> None:
        """Its client left locks behind: they are swept once their transactions have ended."""
        session.orphans = True
        self._orphaned()

    def hold(self, session: Session, number: int, ts: int) -> bool:
        """T15: hold a past timestamp, under the number that the client gave it, once even if asked twice. False: it is
        too old."""
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
        """R7: keep what its client says it has, and release the rest: messages sent without a connection are lost."""
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
            wanted: rows of the table, with the newest change and the oldest cause that wait there.
            halts: after a row has been granted, stop at the first one that another session has.

        Returns: for each row, whether it is `CLAIMED` by the session; `HELD` by another; `DONE`, because another has
        just been there for that change; or `FREE`, but not granted. Then rows of the table that others have, from the
        first wanted one on, each with the newest change that its holder saw there.
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
            elif halted or given >= most:  # even a row that another task of the session has: there is no room for more
                out.append(FREE)
            else:
                self._give(session, where, newest, root)
                given += 1
                out.append(CLAIMED)
        if not wanted:
            return b"", []
        return bytes(out), self._held_by_others(session, table, wanted[0][0], _TOLD_MAX if HELD in out else _AHEAD_MAX)

    def _held_by_others(self, session: Session, table: str, row: bytes, most: int) -> list[tuple[bytes, int]]:
        """The next rows of a table that others have, from a row on, wrapping around at the end."""
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
            watch.moved |= root <= watch.ts

    def _forget(self, now: float) -> None:
        """Forget claims that ended a while ago, or before many others."""
        while self._ended:
            where = next(iter(self._ended))
            if self._ended[where].until > now and len(self._ended) <= _ENDED_MAX:
                break
            del self._ended[where]

    def unclaim(self, session: Session, where: tuple[str, bytes]) -> None:
        """A session's work on a row has ended, and it has checked whether anything is left to do there. Sessions that
        were refused the row for observers that this one does not run are notified."""
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

    def watch(self, ts: int) -> Watch:
        """Begin to note whether a run that carries a cause at or before `ts` is under way (N7)."""
        return Watch(ts, any(claim.root <= ts for claim in self.claims.values()), self._watches)

    def workers(self) -> dict[str, int]:
        """How many sessions run each observer, by id."""
        counts: dict[str, int] = {}
        for session in self.all.values():
            for id in session.works:
                counts[id] = counts.get(id, 0) + 1
        return counts
