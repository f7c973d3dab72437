"""The options of a store on Bigtable."""

from __future__ import annotations

from dataclasses import dataclass

from perco.settings import check_options


@dataclass(frozen=True, kw_only=True, slots=True)
class BigtableOptions:
    """Attributes:
    channels: the number of connections; each carries some 100 calls at a time.
    in_flight: calls at a time, at most; further calls wait.
    call_s: how long one call may take, in seconds, with all its attempts; and for how long a direct client may go on
        without asking whether its session has ended. A client uses the server's `call_s`, or its own if that is
        shorter.
    late_s: for at most how many seconds after the end of a call Bigtable may still apply a mutation that it has not
        answered. Below 2 s, this holds only if the network delivers or drops each call within `late_s`.
    lease_s: how long a process owns the store without renewing its lease, in seconds. After the owner has died, the
        next owner waits for this time.
    own: whether to own the store if no other process does. None: yes, unless the store was last served with
        `perco serve --direct`; in that case, wait for such a server and be its client. False: never; be the client of
        such a server.
    """

    channels: int = 4
    in_flight: int = 400
    call_s: float = 20.0
    late_s: float = 5.0
    lease_s: float = 3.0
    own: bool | None = None

    def __post_init__(self) -> None:
        check_options(self)
