"""The options of a store on PostgreSQL."""

from __future__ import annotations

from dataclasses import dataclass

from perco.settings import check_options


@dataclass(frozen=True, kw_only=True, slots=True)
class PostgresqlOptions:
    """Attributes:
    connections: how many for reads, at most; and as many again for writes. The owner has one more, for its lease.
    call_s: how long one call may take, in seconds, including the time to reconnect.
    own: whether to own the store if no other process does. None: yes, unless the store was last served with
        `perco serve --direct`; in that case, wait for such a server and be its client. False: never; be the client of
        such a server.
    lease_s: how long a process owns the store without renewing its lease, in seconds. After the owner has died, the
        next owner waits for this time.
    """

    connections: int = 4
    call_s: float = 30.0
    own: bool | None = None
    lease_s: float = 3.0

    def __post_init__(self) -> None:
        check_options(self)
