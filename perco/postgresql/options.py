"""The options of a store on PostgreSQL."""

from __future__ import annotations

from dataclasses import dataclass

from perco.settings import check_options


@dataclass(frozen=True, kw_only=True, slots=True)
class PostgresqlOptions:
    """Attributes:
    connections: to the server, at most; besides the one that renews the owner's lease.
    call_s: how long one call may take, in seconds, reconnecting included.
    own: whether to own the store, if no other process does. None: yes, unless it was last served with
        `perco serve --direct`; then wait for such a server, and be its client. False: never; be the client of such a
        server.
    lease_s: how long a process owns the store without renewing its lease, in seconds: after the owner's death, the next
        owner waits for this time.
    """

    connections: int = 4
    call_s: float = 30.0
    own: bool | None = None
    lease_s: float = 3.0

    def __post_init__(self) -> None:
        check_options(self)
