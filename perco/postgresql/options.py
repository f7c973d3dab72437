"""The options of a store on PostgreSQL."""

from __future__ import annotations

from dataclasses import dataclass

from perco.settings import check_options


@dataclass(frozen=True, kw_only=True, slots=True)
class PostgresqlOptions:
    """Attributes:
    connections: to the server, at most; besides the one that renews the owner's lease.
    call_s: how long one call may take, in seconds, reconnecting included.
    own: own the store, if no other process does. None: not if it was served with `perco serve --direct` the last time:
        then wait for such a server, and be its client. False: never.
    lease_s: how long a process owns the store without renewing its lease, in seconds: after its death the next owner
        waits for as long.
    """

    connections: int = 4
    call_s: float = 30.0
    own: bool | None = None
    lease_s: float = 3.0

    def __post_init__(self) -> None:
        check_options(self)
