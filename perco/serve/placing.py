"""Options for tablet servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perco.errors import UsageError
from perco.serve.children import Mould
from perco.settings import check_options

_SERVERS_MAX: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessOptions:
    """Attributes:
    servers: how many tablet servers, each a process.
    silence_s: seconds of silence after which a server is killed, and its tablets are given to other servers.
    starts_s: how long, in seconds, a new server may take to greet; then another one is started. If it dies, that is
        noticed at once.
    timeout_s: how long, in seconds, a write waits until a server has opened its tablet.
    mould: makes each process as a copy of this one; None: each is a new Python process.
    """

    servers: int = 2
    silence_s: float = 2.0
    starts_s: float = 60.0
    timeout_s: float = 30.0
    mould: Mould | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.servers > _SERVERS_MAX:
            raise UsageError(f"ProcessOptions: servers is {self.servers}; it must be at most {_SERVERS_MAX}")
