"""The SQL of a store on PostgreSQL: its tables, and the statements that read and write cells.

    PREFIX_cells    one row per cell: (space, row, col, ts) -> value, the newest version of a column first
    PREFIX_groups   the number ("space") of each table and locality group
    PREFIX_owner    one row: the format; the owner's token, term and floor; how often the owner has renewed its lease;
                    the address at which it serves
    PREFIX_sessions one row per direct client: its ticket, and its term

One statement checks and writes a mutation. Earlier in the same transaction, advisory locks of the mutation's rows are
taken. So when PostgreSQL takes the snapshot for that statement, no other transaction can change these rows, and the
isolation level "read committed" is enough.

S1  All checks of a mutation, and all its writes, are in one statement and one transaction.
O1  Each transaction that writes takes a lock in shared mode; a change of the term takes the same lock exclusively. If
    the store has another term when the transaction has the lock, the transaction writes nothing. It takes this lock
    after the locks of its rows, so no two transactions can wait for each other.
F3  The same holds for a client and its ticket: each ticket has a lock of its own. After a read, a process asks in the
    same round trip whether its ticket (a client) or its claim (the owner) is still there. If so, the cells were read
    before the ticket or the claim ended.
T13 The statement refuses a client's mutation below the floor; the owner refuses its own mutations before it sends them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from perco.postgresql.arrays import BOOL, BOOLS, BYTEA, BYTEAS, INT4, INT4S, INT8, INT8S, TEXT, TEXTS
from perco.postgresql.connection import Statement

FORMAT: Final = 2
TABLES: Final[tuple[str, ...]] = ("cells", "groups", "owner", "sessions")

# PostgreSQL plans each statement once, with an index lookup for each of the statement's keys. Other plans, such as hash
# joins and scans of the whole table, are switched off, because they look cheap only while the table is small.
SETTINGS: Final = (
    "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_hashjoin = off; "
    "SET enable_mergejoin = off; SET enable_bitmapscan = off; SET jit = off; "
    "SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3; "
    "SET tcp_user_timeout = 15000; "  # otherwise, a backend whose client is gone could hold locks for hours
    "SET default_transaction_isolation = 'read committed'; SET client_encoding = 'UTF8'"
)

# If the server is configured with remote_apply, which waits for more than `on` does, it keeps this setting.
DURABLE: Final = (
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') <> 'remote_apply'"
)
NOT_DURABLE: Final = "SET synchronous_commit = off"

_TABLES: Final = """
CREATE TABLE {p}_groups (
    space integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tbl text NOT NULL, grp text NOT NULL, UNIQUE (tbl, grp));
CREATE TABLE {p}_cells (
    space integer NOT NULL, row bytea NOT NULL, col bigint NOT NULL, ts bigint NOT NULL CHECK (ts > 0),
    value bytea NOT NULL)
    WITH (autovacuum_vacuum_scale_factor = 0.02);
CREATE UNIQUE INDEX {p}_cells_key ON {p}_cells (space, row, col, ts DESC);
ALTER TABLE {p}_cells REPLICA IDENTITY USING INDEX {p}_cells_key;
CREATE TABLE {p}_owner (
    id boolean PRIMARY KEY CHECK (id), format integer NOT NULL, term bigint NOT NULL, token text NOT NULL,
    renewals bigint NOT NULL, command text NOT NULL, floor bigint NOT NULL, address text NOT NULL);
INSERT INTO {p}_owner VALUES (true, {format}, 0, '', 0, '', 0, '');
CREATE TABLE {p}_sessions (token text PRIMARY KEY, term bigint NOT NULL)
"""

_APPLY: Final = """
WITH fence AS (SELECT coalesce((SELECT term = $14 FROM {holder}), false) AS ok),
refused AS (
    SELECT k.m, min(k.n) AS n
    FROM unnest($1, $2, $3, $4, $5, $6, $7, $8) AS k(m, n, present, space, row, col, low, high)
    WHERE k.present <> EXISTS (SELECT FROM {p}_cells c
        WHERE c.space = k.space AND c.row = k.row AND c.col = k.col AND c.ts BETWEEN k.low AND k.high)
    GROUP BY k.m{below}),
made AS (
    SELECT w.* FROM unnest($9, $10, $11, $12, $13, $15) AS w(m, space, row, col, ts, value)
    WHERE (SELECT ok FROM fence) AND NOT EXISTS (SELECT FROM refused r WHERE r.m = w.m)),
put AS (
    INSERT INTO {p}_cells SELECT space, row, col, ts, value FROM made WHERE value IS NOT NULL
    ON CONFLICT (space, row, col, ts) DO UPDATE SET value = excluded.value),
removed AS (
    DELETE FROM {p}_cells c USING made w
    WHERE w.value IS NULL AND c.space = w.space AND c.row = w.row AND c.col = w.col AND c.ts = w.ts)
SELECT m, n FROM refused UNION ALL SELECT -1, 0 FROM fence WHERE NOT ok
"""

_BELOW: Final = """
    UNION ALL SELECT f.m, -1 FROM unnest($17, $18) AS f(m, ts) WHERE f.ts < (SELECT floor FROM {p}_owner WHERE id)"""

_READ_NEWEST: Final = """
SELECT q.i, c.ts, c.value FROM unnest($1, $2, $3, $4, $5, $6) WITH ORDINALITY AS q(space, row, col, low, high, n, i)
CROSS JOIN LATERAL (
    SELECT ts, value FROM {p}_cells
    WHERE space = q.space AND row = q.row AND col = q.col AND ts BETWEEN q.low AND q.high
    ORDER BY ts DESC LIMIT q.n) c
"""

_READ_ANY: Final = """
SELECT q.i, c.ts, c.value FROM unnest($1, $2, $3, $4, $5, $6) WITH ORDINALITY AS q(space, row, col, low, high, n, i)
CROSS JOIN LATERAL (
    (SELECT ts, value FROM {p}_cells
     WHERE q.n > 0 AND space = q.space AND row = q.row AND col = q.col AND ts BETWEEN q.low AND q.high
     ORDER BY ts DESC LIMIT greatest(q.n, 0))
    UNION ALL
    (SELECT ts, value FROM {p}_cells
     WHERE q.n < 0 AND space = q.space AND row = q.row AND col = q.col AND ts BETWEEN q.low AND q.high
     ORDER BY ts LIMIT greatest(-q.n, 0))) c
"""

# Finds the rows of the page and the row after the page, then their cells. To find each next row, the statement searches
# every space for the nearest row, and takes the first of these.
_SCAN: Final = """
WITH RECURSIVE rows(k, row) AS (
    SELECT 1, ({first})
    UNION ALL
    SELECT k + 1, ({next}) FROM rows WHERE row IS NOT NULL AND k <= $4),
cells AS (
    SELECT r.k, r.row, q.j, c.* FROM rows r
    CROSS JOIN unnest($6, $7, $8, $9, $10, $11, $12) WITH ORDINALITY AS q(j, space, col, low, high, n, with_values, i)
    CROSS JOIN LATERAL (
        (SELECT col, ts, CASE WHEN q.with_values THEN value ELSE '' END AS value FROM {p}_cells
         WHERE q.col >= 0 AND space = q.space AND row = r.row AND col = q.col AND ts BETWEEN q.low AND q.high
         ORDER BY ts DESC LIMIT CASE WHEN q.col >= 0 THEN q.n ELSE 0 END)
        UNION ALL
        (SELECT col, ts, CASE WHEN q.with_values THEN value ELSE '' END AS value FROM {p}_cells
         WHERE q.col < 0 AND space = q.space AND row = r.row AND ts BETWEEN q.low AND q.high
         ORDER BY col, ts DESC LIMIT CASE WHEN q.col < 0 THEN q.n ELSE 0 END)) c
    WHERE r.row IS NOT NULL AND r.k <= $4),
sizes AS MATERIALIZED (
    SELECT k, sum(size) OVER (ORDER BY k ROWS UNBOUNDED PRECEDING) AS upto
    FROM (SELECT k, sum(octet_length(value)) AS size FROM cells GROUP BY k) AS each),
full_at AS MATERIALIZED (
    SELECT least((SELECT min(k) FROM rows WHERE k > $4), (SELECT min(k) + 1 FROM sizes WHERE upto >= $5)) AS k)
SELECT k, row, -1, NULL::bigint, NULL::bigint, NULL::bytea FROM rows
WHERE k = (SELECT k FROM full_at) AND row IS NOT NULL
UNION ALL
SELECT k, row, j, col, ts, value FROM cells WHERE k < coalesce((SELECT k FROM full_at), 2147483647)
"""
_NEAREST: Final = """
SELECT found.row FROM unnest($3) AS s(space) CROSS JOIN LATERAL (
    SELECT row FROM {{p}}_cells WHERE space = s.space AND row {low} AND row {high} ORDER BY row {order} LIMIT 1) found
ORDER BY found.row {order} LIMIT 1
"""
_FORWARD: Final = {
    "first": _NEAREST.format(low=">= $1", high="< $2", order=""),
    "next": _NEAREST.format(low="> rows.row", high="< $2", order=""),
}
_BACKWARD: Final = {
    "first": _NEAREST.format(low=">= $1", high="< $2", order="DESC"),
    "next": _NEAREST.format(low=">= $1", high="< rows.row", order="DESC"),
}
_CHECKS: Final = (INT4S, INT4S, BOOLS, INT4S, BYTEAS, INT8S, INT8S, INT8S)
_WRITES: Final = (INT4S, INT4S, BYTEAS, INT8S, INT8S)
_QUERIES: Final = (INT4S, BYTEAS, INT8S, INT8S, INT8S, INT4S)
_SCANNED: Final = (INT4S, INT4S, INT8S, INT8S, INT8S, INT4S, BOOLS)


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements for a store. `prefix`: the names of the store's tables begin with it; `client`: whether the
    statements are for a direct client, and not for the owner."""

    prefix: str
    client: bool = False
    lock: Statement = field(init=False)
    hold: Statement = field(init=False)
    apply: Statement = field(init=False)
    read: Statement = field(init=False)
    read_any: Statement = field(init=False)
    scan: Statement = field(init=False)
    scan_back: Statement = field(init=False)
    groups: Statement = field(init=False)
    add_groups: Statement = field(init=False)
    there: Statement = field(init=False)
    syncs: Statement = field(init=False)
    format: Statement = field(init=False)
    look: Statement = field(init=False)
    address: Statement = field(init=False)
    claim: Statement = field(init=False)
    briefly: Statement = field(init=False)
    durably: Statement = field(init=False)
    end_holders: Statement = field(init=False)
    wait_for_others: Statement = field(init=False)
    next_term: Statement = field(init=False)
    still: Statement = field(init=False)
    counts: Statement = field(init=False)
    admit: Statement = field(init=False)
    dismiss: Statement = field(init=False)
    is_there: Statement = field(init=False)
    tickets: Statement = field(init=False)
    raise_floor: Statement = field(init=False)
    serve_at: Statement = field(init=False)

    def __post_init__(self) -> None:
        def is_(name: str, sql: str, *types: int) -> None:
            filled = sql.replace("{holder}", holder).replace("{below}", below).replace("{p}", self.prefix)
            object.__setattr__(self, name, Statement(name, filled, types))

        holder = "{p}_sessions WHERE token = $16" if self.client else "{p}_owner WHERE id AND token = $16"
        below, floors = (_BELOW, (INT4S, INT8S)) if self.client else ("", ())

        is_("lock", "SELECT count(pg_advisory_xact_lock(k)) FROM unnest($1) AS k", INT8S)
        is_("hold", "SELECT pg_advisory_xact_lock_shared($1)", INT8)
        is_("apply", _APPLY, *_CHECKS, *_WRITES, INT8, BYTEAS, TEXT, *floors)
        is_("read", _READ_NEWEST, *_QUERIES)
        is_("read_any", _READ_ANY, *_QUERIES)
        is_("scan", _SCAN.format(p="{p}", **_FORWARD), BYTEA, BYTEA, INT4S, INT4, INT8, *_SCANNED)
        is_("scan_back", _SCAN.format(p="{p}", **_BACKWARD), BYTEA, BYTEA, INT4S, INT4, INT8, *_SCANNED)
        is_("groups", "SELECT space, tbl, grp FROM {p}_groups")
        is_(
            "add_groups",
            "INSERT INTO {p}_groups (tbl, grp) SELECT * FROM unnest($1, $2) ON CONFLICT (tbl, grp) DO NOTHING",
            *(TEXTS, TEXTS),
        )
        if self.client:
            self._of_terms(is_, "{p}_sessions", " WHERE token = $1")
        else:
            self._of_terms(is_, "{p}_owner", " WHERE id AND token = $1")

    def _of_terms(self, is_: Callable[..., None], holders: str, mine: str) -> None:
        """The statements about owners, clients and their terms."""
        is_("there", "SELECT to_regclass('{p}_owner') IS NOT NULL")
        is_("syncs", "SELECT current_setting('fsync') = 'on'")
        is_("format", "SELECT format FROM {p}_owner WHERE id")
        is_("look", "SELECT token, renewals, command FROM {p}_owner WHERE id")
        is_("address", "SELECT address FROM {p}_owner WHERE id")
        is_(
            "briefly",
            "SELECT set_config('synchronous_commit', 'on', true), set_config('lock_timeout', $1, true)",
            TEXT,
        )
        is_("durably", "SELECT set_config('synchronous_commit', 'on', true)")
        is_(
            "end_holders",
            "SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory' AND granted "
            "AND objsubid = 1 AND (classid::bigint << 32 | objid::bigint) = $1 AND pid <> pg_backend_pid() "
            # If a backend is terminated while it waits for its standby, others see a commit that the standby lacks.
            "AND pid NOT IN (SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep') "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            INT8,
        )
        # Waits for every transaction that holds the lock in shared mode (O1).
        is_("wait_for_others", "SELECT pg_advisory_xact_lock($1)", INT8)
        is_(
            "claim",
            "UPDATE {p}_owner SET term = term + 1, token = $1, renewals = 0, command = $2, "
            "address = CASE WHEN $5 THEN address ELSE '' END WHERE id AND token = $3 AND renewals = $4 RETURNING term",
            *(TEXT, TEXT, TEXT, INT8, BOOL),
        )
        is_("next_term", f"UPDATE {holders} SET term = term + 1{mine} RETURNING term", TEXT)
        is_("still", f"SELECT EXISTS (SELECT FROM {holders}{mine})", TEXT)
        is_(
            "counts",
            "SELECT s.space, (SELECT count(*) FROM "
            "(SELECT FROM {p}_cells c WHERE c.space = s.space LIMIT 65536) AS counted) FROM unnest($1) AS s(space)",
            INT4S,
        )
        is_(
            "admit",
            "INSERT INTO {p}_sessions SELECT $1, 1 FROM {p}_owner WHERE id AND token = $2 AND term = $3 "
            "ON CONFLICT DO NOTHING",
            *(TEXT, TEXT, INT8),
        )
        is_("dismiss", "DELETE FROM {p}_sessions WHERE token = $1", TEXT)
        is_("is_there", "SELECT EXISTS (SELECT FROM {p}_sessions WHERE token = $1)", TEXT)
        is_("tickets", "SELECT token FROM {p}_sessions")
        is_(
            "raise_floor",
            "UPDATE {p}_owner SET floor = greatest(floor, $1) WHERE id AND token = $2 RETURNING floor",
            *(INT8, TEXT),
        )
        is_("serve_at", "UPDATE {p}_owner SET address = $1 WHERE id AND token = $2 RETURNING term", TEXT, TEXT)

    @property
    def renew(self) -> str:
        return f"UPDATE {self.prefix}_owner SET renewals = renewals + 1 WHERE id AND token = $1"

    @property
    def release(self) -> str:
        return f"UPDATE {self.prefix}_owner SET token = '', renewals = 0, command = '' WHERE id AND token = $1"

    def tables(self) -> str:
        """The commands that make the store's tables."""
        return _TABLES.format(p=self.prefix, format=FORMAT)
