"""The fence of a store on PostgreSQL: a transaction writes only if it names the current token and term, so a
former owner, or a session that has ended, can change nothing."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple

from perco.errors import PercoError
from perco.postgresql.arrays import int8, number

LOCKS: Final[int] = 1 << 11  # the locks of all rows share this many numbers


class Shown(NamedTuple):
    """A copy of a `Fence`, for one transaction."""

    session: int
    token: bytes
    lock: bytes
    term: int


class Fence:
    """The term and the token of this owner, or of a client; a client's token is its ticket. Each transaction that
    writes names both, and writes nothing if the store has another term or token. A term alone is not enough: if
    PostgreSQL fails over to a standby that lacks the last term, the same number may be used again. Tokens are random,
    and never used again.

    Attributes: `term`, or 0 if no new term has begun and mutations sent under the last term may still take effect;
    `deposed`, the reason why this process no longer owns the store; `lock`, the number of the lock that guards the
    term; `session`, how many sessions of this client have ended: a mutation that was begun in one session is not sent
    in a later one (R7).
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
        """End the term of `shown`, if it is still the present term."""
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
