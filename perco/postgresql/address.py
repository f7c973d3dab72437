"""The address of a store on PostgreSQL: `postgresql://USER@HOST:PORT/DATABASE?prefix=NAME`, as libpq reads it.

    Place("postgresql://localhost/shop?prefix=web")    its tables: web_cells, web_groups, web_owner, web_sessions

`prefix` is perco's own parameter; all others are libpq's: several hosts, TLS, a password file, a service.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Final

from perco.errors import UsageError
from perco.postgresql.libpq import error_of_libpq, libpq

SCHEMES: Final = ("postgresql://", "postgres://")
_PREFIX: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
_OWN: Final = re.compile(r"(?<=[?&])prefix=([^&]*)(&|$)")
_EXAMPLE: Final = "postgresql://USER@HOST/DATABASE?prefix=NAME"
# Settings of libpq, unless the address or the environment has others. With them, libpq refuses standbys, gives up on
# hosts that do not answer, and ends the connections that a server left open when it disappeared.
_DEFAULTS: Final = {
    "target_session_attrs": "read-write",
    "connect_timeout": "3",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "application_name": "perco",
}


def is_postgresql(url: str) -> bool:
    """Whether `url` is the address of a store on PostgreSQL."""
    return url.startswith(SCHEMES)


@dataclass(frozen=True, slots=True)
class Place:
    """A parsed address.

    Attributes: `prefix`, with which the names of the store's tables begin; `conninfo`, the connection string for libpq;
    `shown`, the address as messages show it: user, hosts, database and prefix. Raises: UsageError.
    """

    url: str = field(repr=False)
    prefix: str = field(init=False)
    conninfo: str = field(init=False, repr=False)
    shown: str = field(init=False)

    def __post_init__(self) -> None:
        own = _OWN.search(self.url)
        prefix = own[1] if own is not None else "perco"
        if _PREFIX.fullmatch(prefix) is None:
            raise UsageError(
                f"prefix={prefix!r}: the names of the store's tables begin with it. Use a letter, then at most 39 "
                f"small letters, digits and underscores: {_EXAMPLE}"
            )
        rest, pq = _OWN.sub("", self.url).rstrip("?&"), libpq()
        try:
            options = pq.Conninfo.parse(rest.encode())
        except error_of_libpq():  # the error's message may contain the password
            raise UsageError(
                f"PostgreSQL cannot read this address: write {_EXAMPLE}, and %-escapes for special characters in it"
            ) from None
        given = {option.keyword.decode(): option.val.decode() for option in options if option.val is not None}
        named = given.keys() & {"dbname", "service"} or os.environ.keys() & {"PGDATABASE", "PGSERVICE"}
        if not named:
            raise UsageError(f"{_shown(given, prefix)}: which database? Write {_EXAMPLE}")
        in_environment = {
            option.keyword.decode() for option in options if option.envvar and option.envvar.decode() in os.environ
        }
        defaults = {} if "service" in given else _DEFAULTS
        known = {name: value for name, value in defaults.items() if name not in in_environment} | given
        object.__setattr__(self, "prefix", prefix)
        object.__setattr__(self, "shown", _shown(given, prefix))
        object.__setattr__(self, "conninfo", " ".join(f"{name}={_quoted(value)}" for name, value in known.items()))


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _shown(given: dict[str, str], prefix: str) -> str:
    user = f"{given['user']}@" if "user" in given else ""
    host, port = given.get("host", ""), given.get("port", "")
    is_path = host.startswith("/")
    where = (
        ""
        if is_path
        else ",".join(
            f"{each}:{number}" if number else each
            for each, number in zip(host.split(","), _as_many(port, host.count(",") + 1), strict=True)
        )
    )
    folder = f"host={host}&" if is_path else ""
    return f"postgresql://{user}{where}/{given.get('dbname', '')}?{folder}prefix={prefix}"


def _as_many(port: str, hosts: int) -> list[str]:
    ports = port.split(",")
    return ports if len(ports) == hosts else [ports[0]] * hosts
