"""The address of a store on PostgreSQL: `postgresql://USER@HOST:PORT/DATABASE?prefix=NAME`, as libpq reads it.

    Place("postgresql://localhost/shop?prefix=web")    its tables are web_cells, web_groups and web_owner

`prefix` is perco's own parameter; all others are passed on to libpq: several hosts, TLS, a password file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from perco.errors import UsageError

SCHEMES: Final = ("postgresql://", "postgres://")
_PREFIX: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
_EXAMPLE: Final = "postgresql://USER@HOST/DATABASE?prefix=NAME"
# What libpq is told unless the address says otherwise: a connection to a standby, or to a host that does not answer, is
# of no use; and a peer that has gone without a word is noticed.
_DEFAULTS: Final = {
    "target_session_attrs": "read-write",
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "application_name": "perco",
}


def is_postgresql(url: str) -> bool:
    """Whether it is the address of a store on PostgreSQL."""
    return url.startswith(SCHEMES)


@dataclass(frozen=True, slots=True)
class Place:
    """A parsed address.

    Attributes: `prefix` of the names of its tables; `conninfo`, what libpq connects with; `shown`, the address without
    a password. Raises: UsageError.
    """

    url: str
    prefix: str = field(init=False)
    conninfo: str = field(init=False)
    shown: str = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        prefix = given.pop("prefix", "perco")
        if _PREFIX.fullmatch(prefix) is None:
            raise UsageError(
                f"prefix={prefix!r}: the names of the store's tables begin with it. Use a letter, then at most 39 "
                f"small letters, digits and underscores: {_EXAMPLE}"
            )
        if not parts.path.strip("/") and "dbname" not in given:
            raise UsageError(f"{self._without_password()}: which database? Write {_EXAMPLE}")
        object.__setattr__(self, "prefix", prefix)
        object.__setattr__(self, "shown", self._without_password())
        # libpq takes %20 for a space in a parameter, and not "+".
        query = urlencode({**_DEFAULTS, **given}, quote_via=quote)
        object.__setattr__(self, "conninfo", urlunsplit(parts._replace(query=query)))

    def _without_password(self) -> str:
        parts = urlsplit(self.url)
        user, at, hosts = parts.netloc.rpartition("@")
        query = [(name, value) for name, value in parse_qsl(parts.query) if name != "password"]
        shown = f"{user.partition(':')[0]}{at}{hosts}"
        return urlunsplit(parts._replace(netloc=shown, query=urlencode(query, quote_via=quote)))
