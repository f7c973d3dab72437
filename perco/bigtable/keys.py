"""Where Bigtable stores a cell: its row key, column family, qualifier and timestamp.

All rows of a store are in one table of Bigtable. A row's key is the name of its perco table, a NUL, and the row. Its
cells are in two families: `p` has the protocol's groups, `d` has the groups with long values. A qualifier is the tag of
the group, followed by the column in four bytes. A cell's timestamp is perco's timestamp times 1 000, because Bigtable
accepts only whole milliseconds.

The order of the tags is the one that `filters.predicate` needs: if a mutation checks that cells of some groups are
absent and that cells of other groups are present, the groups of the absent cells come first.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Final

from perco.errors import Corruption
from perco.storage import (
    DATA,
    FAILED_LIST,
    LOCK,
    NOTIFY,
    PENDING,
    ROLLBACK,
    SHARED,
    TRACE,
    TS_MAX,
    WRITE,
)

PROTOCOL_FAMILY: Final = "p"
DATA_FAMILY: Final = "d"
FAMILIES: Final = (PROTOCOL_FAMILY, DATA_FAMILY)
MICROS: Final = 1000  # units of Bigtable's timestamps (microseconds) for one unit of perco's
OWNER_KEY: Final = b"\x00owner"  # no perco table has an empty name
TICKET_KEY: Final = b"\x00ticket "  # the key of a ticket's row begins with this; the ticket follows
HINT_KEY: Final = b"\x00to "  # a hint row's key begins with this; the key of the row that it is about follows
HINT_NAME: Final = b"hint"  # the qualifiers of hints begin with this
HINTED: Final = frozenset({PENDING, FAILED_LIST, NOTIFY})  # hints lead to the cells of these groups

_TAGS: Final = {
    LOCK: b"a",
    ROLLBACK: b"b",
    SHARED: b"c",
    TRACE: b"d",
    WRITE: b"e",
    PENDING: b"f",
    FAILED_LIST: b"g",
    NOTIFY: b"h",
}
_FIRST_HINTED, _LAST_HINTED = _TAGS[PENDING], _TAGS[NOTIFY]
_COLUMN: Final = struct.Struct(">I")
_LAST: Final = b"\xff\xff\xff\xff"
_FIRST: Final = b"\x00\x00\x00\x00"


def row_key(table: str, row: bytes) -> bytes:
    """The key of a row of a perco table."""
    return table.encode() + b"\x00" + row


def row_of(table: str, key: bytes) -> bytes:
    """The row of a table that has this key. Raises: Corruption."""
    head = table.encode() + b"\x00"
    if not key.startswith(head):
        raise Corruption(f"row key {key[:80]!r}", f"Bigtable has sent a row that is not in table {table}")
    return key[len(head) :]


def table_end(table: str) -> bytes:
    """The first key after all rows of a table."""
    return table.encode() + b"\x01"


@cache
def place_of(group: str) -> tuple[str, bytes]:
    """The family of a group, and the tag that its qualifiers begin with."""
    tag = _TAGS.get(group)
    if tag is not None:
        return PROTOCOL_FAMILY, tag
    return DATA_FAMILY, group.removeprefix(DATA).encode() + b"\x00"


def qualifier(group: str, column: int) -> bytes:
    """The qualifier of a column in a group."""
    return place_of(group)[1] + _COLUMN.pack(column)


def column_of(tag: bytes, name: bytes) -> int:
    """The column that a qualifier names. Raises: Corruption."""
    if len(name) != len(tag) + _COLUMN.size:
        raise Corruption(f"qualifier {name[:80]!r}", "it does not name a column")
    return int(_COLUMN.unpack_from(name, len(tag))[0])


def all_columns(group: str) -> tuple[bytes, bytes]:
    """The first and the last qualifier of a group."""
    tag = place_of(group)[1]
    return tag + _FIRST, tag + _LAST


def all_hinted() -> tuple[bytes, bytes]:
    """The first and the last qualifier of the groups that hints lead to."""
    return _FIRST_HINTED + _FIRST, _LAST_HINTED + _LAST


def micros(ts: int) -> int:
    """Bigtable's timestamp for a timestamp of perco."""
    assert 0 <= ts <= TS_MAX, "O3"
    return ts * MICROS
