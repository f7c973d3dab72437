"""An administrator's tasks for a store on PostgreSQL: make its tables, grant rights, and examine the server.

`perco postgresql init|check` call this module; nothing in it claims the store.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from perco.errors import Corruption, FormatUnknown, StoreError, Unavailable, UsageError
from perco.postgresql.address import Place
from perco.postgresql.arrays import number
from perco.postgresql.connection import Connection, Lost, Refusal, Rows, Statement
from perco.postgresql.statements import FORMAT, TABLES, Statements

_PRIVILEGE: Final = "42501"
_RIGHTS: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")
_ROLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*")
_OLDEST: Final = 120000  # the lowest server version, as in `server_version_num`


@dataclass(frozen=True, slots=True)
class Facts:
    """The findings of `inspect`.

    Attributes: `version` of the server; `owner`, the command of the process that owns the store, "" for none;
    `address`, at which the owner serves direct clients, "" for none; `cells` and `dead`, the numbers of rows that the
    server's statistics estimate; `used_bytes`, the size of tables and indexes; `findings`, sentences about what is
    wrong, each with its remedy.
    """

    version: str
    owner: str = ""
    address: str = ""
    cells: int = 0
    dead: int = 0
    used_bytes: int = 0
    findings: tuple[str, ...] = ()


async def make_tables(connection: Connection, place: Place) -> bool:
    """Make the store's tables, unless they are there. Returns whether it made the tables.

    Raises: FormatUnknown, if another version made them; Corruption; StoreError, if this role may not make them;
    Refusal.
    """
    statements = Statements(place.prefix)
    made = False
    if not await _are_there(connection, statements):
        try:
            await connection.execute(statements.tables())
            made = True
        except Refusal as refusal:
            if refusal.sqlstate == _PRIVILEGE:
                raise StoreError(
                    f"{place.shown}: its tables cannot be made: {refusal.said}. Let a role that may make them run: "
                    f"perco postgresql init URL --grant ROLE"
                ) from refusal
            if not await _are_there(connection, statements):  # if they are there now, another process has made them
                raise
    [row] = await connection.run([(statements.format, [])])
    if not row:
        raise Corruption(place.shown, f"{place.prefix}_owner has lost its row: restore the store from a backup")
    if number(row[0][0]) != FORMAT:
        raise FormatUnknown(place.shown, f"format {number(row[0][0])}", f"format {FORMAT}")
    return made


async def _are_there(connection: Connection, statements: Statements) -> bool:
    [found] = await connection.run([(statements.there, [])])
    return found == [(b"\x01",)]


@asynccontextmanager
async def _connected(place: Place) -> AsyncIterator[Connection]:
    """Open a connection for the block. Raises: Unavailable, StoreError."""
    try:
        connection = await Connection.open(place)
        try:
            yield connection
        finally:
            connection.close()
    except Lost as lost:
        raise Unavailable(f"{place.shown} cannot be reached: {lost.said}") from lost
    except Refusal as refusal:
        raise StoreError(f"{place.shown} refuses: {refusal}") from refusal


async def init(url: str, grant: Sequence[str] = ()) -> bool:
    """Make the tables of a store unless they are there, and grant the roles in `grant` the rights that processes need.
    Returns whether the tables were made. Raises: UsageError, StoreError."""
    place = Place(url)
    for role in grant:
        if _ROLE.fullmatch(role) is None:
            raise UsageError(f"--grant {role!r}: that is not the name of a role")
    async with _connected(place) as connection:
        made = await make_tables(connection, place)
        for role in grant:
            tables = ", ".join(f"{place.prefix}_{name}" for name in TABLES)
            await connection.execute(f'GRANT {", ".join(_RIGHTS)} ON {tables} TO "{role}"')
    return made


async def has_tables(url: str) -> bool:
    """Whether a store's tables are there. Raises: UsageError, StoreError."""
    place = Place(url)
    async with _connected(place) as connection:
        return await _are_there(connection, Statements(place.prefix))


async def inspect(url: str) -> Facts:
    """Examine the server and the tables. Raises: UsageError, StoreError."""
    place = Place(url)
    async with _connected(place) as connection:
        statements = Statements(place.prefix)
        [[(version, number_, recovering, fsync, pages, autovacuum)]] = await connection.run([(_SERVER, [])])
        findings = []
        if number(number_) < _OLDEST:
            findings.append(f"PostgreSQL {version.decode()} is too old: perco needs 12 or newer")
        if recovering == b"\x01":
            findings.append("this server is a standby: name the primary in the address, or all hosts")
        for setting, value in (("fsync", fsync), ("full_page_writes", pages), ("autovacuum", autovacuum)):
            if value != b"on":
                findings.append(f"{setting} is {value.decode()}: {_WHY[setting]}; set it to on")
        if not await _are_there(connection, statements):
            findings.append("there are no tables of a store with this prefix: perco postgresql init makes them")
            return Facts(version.decode(), findings=tuple(findings))
        if said := await _format_wrong(connection, place):
            return Facts(version.decode(), findings=(*findings, said))
        if missing := await _missing(connection, place):
            remedy = "perco postgresql init URL --grant ROLE"
            findings += [f"this role may not {right} in {table}: {remedy}" for table, right in missing]
            return Facts(version.decode(), findings=tuple(findings))
        [[(_, _, owner)], [(address,)]] = await connection.run([(statements.look, []), (statements.address, [])])
        [[(cells, dead, used)]] = await connection.run([(_sizes(place), [])])
        sizes = number(cells), number(dead), number(used)
        return Facts(version.decode(), owner.decode(), address.decode(), *sizes, tuple(findings))


async def _format_wrong(connection: Connection, place: Place) -> str:
    """The finding about the store's format; "": the format is right, or this role may not read it."""
    try:
        [row] = await connection.run([(Statements(place.prefix).format, [])])
    except Refusal as refusal:
        if refusal.sqlstate == _PRIVILEGE:
            return ""
        raise
    if not row:
        return f"{place.prefix}_owner has lost its row: restore the store from a backup"
    if number(row[0][0]) != FORMAT:
        return f"the tables have format {number(row[0][0])}; this version of perco reads {FORMAT}"
    return ""


async def _missing(connection: Connection, place: Place) -> list[tuple[str, str]]:
    """The rights that this role lacks: (table, right)."""
    pairs = [(f"{place.prefix}_{name}", right) for name in TABLES for right in _RIGHTS]
    columns = ", ".join(f"has_table_privilege('{table}', '{right}')" for table, right in pairs)
    found: list[Rows] = await connection.run([(Statement("rights", f"SELECT {columns}"), [])])
    return [pair for pair, has in zip(pairs, found[0][0], strict=True) if has != b"\x01"]


def _sizes(place: Place) -> Statement:
    tables = ", ".join(f"('{place.prefix}_{name}')" for name in TABLES)
    return Statement(
        "sizes",
        f"SELECT (SELECT greatest(reltuples, pg_stat_get_live_tuples(oid))::bigint FROM pg_class "
        f"WHERE oid = '{place.prefix}_cells'::regclass), "
        f"coalesce(pg_stat_get_dead_tuples('{place.prefix}_cells'::regclass), 0), "
        f"(SELECT sum(pg_total_relation_size(t::regclass))::bigint FROM (VALUES {tables}) AS names(t))",
    )


_SERVER: Final = Statement(
    "server",
    "SELECT current_setting('server_version'), current_setting('server_version_num')::bigint, pg_is_in_recovery(), "
    "current_setting('fsync'), current_setting('full_page_writes'), current_setting('autovacuum')",
)
_WHY: Final = {
    "fsync": "acknowledged commits are lost when the machine stops",
    "full_page_writes": "pages may be torn when the machine stops",
    "autovacuum": "rows that were removed are never cleaned up, and the tables grow",
}
