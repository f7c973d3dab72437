"""The fence of a store on PostgreSQL: every transaction shows it, so that a former owner or session changes nothing."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple

from perco.errors import PercoError
from perco.postgresql.arrays import int8, number

LOCKS: Final[int] = 1 << 11  # numbers of locks of rows


class Shown(NamedTuple):
    """A copy of a `Fence`, which one transaction shows."""

    session: int
    token: bytes
    lock: bytes
    term: int


class Fence:
    """The term and the token of this owner, or those of a client, whose token is its ticket: each transaction that
    writes names them, and writes nothing if the store has others. A server may forget a term, after a failover to a
    standby that lacks it; it invents no token.

    Attributes: `term`, 0: what was sent under the last one may still take effect, and there is no new one yet;
    `deposed`, the reason why this process no longer owns the store; `lock`, the number of the lock that guards the
    term; `session`, how many sessions of this client have ended: what one has begun, another does not send (R7).
    """

    term: int
    token: str
    deposed: PercoError | None
    lock: bytes
    session: int

    def __init__(self, prefix: str, token: str, term: int = 0) -> None:
        self.term, self.token, self.deposed = term, token, None
        self.lock = int8(number(hashed(salt_of(prefix))) | LOCKS)
        self.session = 0

    def shown(self) -> Shown:
        """The fence at this moment, as one value."""
        return Shown(self.session, self.token.encode(), self.lock, self.term)

    def lapse(self, shown: Shown) -> None:
        """That term is over; if this fence has another term by now, nothing changes."""
        if (self.token.encode(), self.term) == shown[1::2]:
            self.term = 0

    def take(self, prefix: str, ticket: str) -> None:
        """Become the fence of a client, under a ticket; it has no term yet."""
        self.token, self.term, self.lock = ticket, 0, lock_of(prefix, ticket)


def lock_of(prefix: str, ticket: str) -> bytes:
    """The number of the lock that guards the term of a ticket."""
    return int8(number(hashed(salt_of(prefix) + b"ticket" + ticket.encode())))


def salt_of(prefix: str) -> bytes:
    return blake2b(prefix.encode(), digest_size=16).digest()


def hashed(of: bytes) -> bytes:
    """The number of an advisory lock, as PostgreSQL takes it."""
    return blake2b(of, digest_size=8).digest()
