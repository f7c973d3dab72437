"""The row that names the owner of a store, and the rows of the tickets that it gives to clients: requests and answers.

The owner's row has three columns, each with a few cells; the newest cell of a column counts. The first column has a
cell for each change of owner and each renewal of the lease. The cell's timestamp rises by 1 each time. Its value is the
owner's token (empty once the owner has released the store), how long a permit lasts, how late a mutation may take
effect, how long the lease lasts, and the owner's command. The second column has the address at which clients find the
owner; the timestamp is the number of the cell with which the owner claimed the store. The third column has the floor
(T13), as the timestamp.

A ticket has a row with the token of the owner that issued the ticket. A second, newer cell says that the ticket's
session has ended. So an ended ticket stays ended, even if the mutation that admitted it arrives last (F3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from perco.bigtable import filters
from perco.bigtable.address import Place
from perco.bigtable.chunks import Chunks, ReadRow
from perco.bigtable.keys import MICROS, OWNER_KEY, PROTOCOL_FAMILY, TICKET_KEY, micros, qualifier
from perco.bigtable.wire import types
from perco.errors import Corruption
from perco.storage import ABSENT, TS_MAX, WRITE

_HOLDER: Final = 0  # the columns
_ADDRESS: Final = 1
_FLOOR: Final = 2
_GIVEN: Final = 1  # the timestamps of a ticket's cells
_ENDED: Final = 2
_ALL: Final = [(WRITE, column, 0, TS_MAX, 1) for column in (_HOLDER, _ADDRESS, _FLOOR)]


class Holder(NamedTuple):
    """The newest cell of the first column of the owner's row.

    Attributes: `number`, the cell's number, 0 if there is none; `token`, the owner's, "" if there is no owner;
    `call_s`, how long its clients' permits last; `late_s`, how late a mutation may take effect; `lease_s`, how long the
    lease lasts (the next owner waits at least that long); `told`, the command of the owner's process. Times are in
    seconds.
    """

    number: int
    token: str
    call_s: float
    late_s: float
    lease_s: float
    told: str

    @property
    def lasts_s(self) -> float:
        """The longest time, in seconds, from the issue of a permit until a mutation sent under it takes effect."""
        return self.call_s + self.late_s


NOBODY: Final = Holder(0, "", 0.0, 0.0, 0.0, "")


class Notice(NamedTuple):
    """The contents of the owner's row and of a ticket's.

    Attributes: `address`, at which the owner serves direct clients, or last served them, "" for none; `floor`, 0 for
    none; `admitted`, whether the ticket that was asked about is valid.
    """

    holder: Holder
    address: str
    floor: int
    admitted: bool


def _reading(place: Place, row_filter: Any) -> Any:
    return types().ReadRows(table_name=place.table, app_profile_id=place.app_profile, filter=row_filter)


def question(place: Place, ticket: str = "") -> Any:
    """The request for the owner's row and, if a ticket is named, for the ticket's row."""
    request = _reading(place, filters.reading(_ALL))
    request.rows.row_keys.append(OWNER_KEY)
    if ticket:
        request.rows.row_keys.append(_key(ticket))
    return request


def notice(rows: Iterable[ReadRow], ticket: str = "") -> Notice:
    """The answer to `question`. Raises: Corruption."""
    holder, address, floor, given = NOBODY, "", 0, ""
    for row in rows:
        for cell in row.cells:
            number = cell.micros // MICROS
            try:
                value = cell.value.decode()
                if row.key == OWNER_KEY and cell.name == qualifier(WRITE, _HOLDER):
                    token, call_s, late_s, rest = value.split(" ", 3)
                    lease_s, _, told = rest.partition(" ")
                    if not lease_s.replace(".", "", 1).isdigit():  # an earlier version of perco did not write it
                        lease_s, told = "0", rest
                    holder = Holder(number, token, float(call_s), float(late_s), float(lease_s), told)
                    continue
            except ValueError as error:
                raise Corruption("the owner's row", f"it cannot be decoded: {error}") from error
            if row.key != OWNER_KEY:
                given = value
            elif cell.name == qualifier(WRITE, _ADDRESS):
                address = value
            else:
                floor = number
    return Notice(holder, address, floor, bool(ticket) and bool(given) and given == holder.token)


def notice_in(responses: Iterable[Any]) -> Notice:
    """Like `notice`, but from the response stream of a blocking call. Raises: Corruption."""
    chunks = Chunks()
    return notice(row for response in responses for row in chunks.take(response))


def _set(column: int, ts: int, value: bytes) -> list[Any]:
    """The mutations that put a cell of a column, and remove the column's older cells."""
    name = {"family_name": PROTOCOL_FAMILY, "column_qualifier": qualifier(WRITE, column)}
    mutation = types().Mutation
    return [
        mutation(set_cell={**name, "timestamp_micros": micros(ts), "value": value}),
        mutation(delete_from_column={**name, "time_range": {"end_timestamp_micros": micros(ts)}}),
    ]


def _mutate(place: Place, key: bytes, mutations: Sequence[Any]) -> Any:
    return types().MutateRow(table_name=place.table, app_profile_id=place.app_profile, row_key=key, mutations=mutations)


def change(place: Place, holder: Holder) -> Any:
    """The request that puts `holder` as the newest cell, unless there is a cell with its number or a higher one."""
    predicate = filters.predicate([(ABSENT, WRITE, _HOLDER, holder.number, TS_MAX)])
    assert predicate is not None
    value = f"{holder.token} {holder.call_s} {holder.late_s} {holder.lease_s} {holder.told}".encode()
    return types().CheckAndMutateRow(
        table_name=place.table,
        app_profile_id=place.app_profile,
        row_key=OWNER_KEY,
        predicate_filter=predicate.filter,
        false_mutations=_set(_HOLDER, holder.number, value),
    )


def serve_at(place: Place, claim: int, address: str) -> Any:
    """The request that publishes an address for clients. `claim`: the number of the owner's claim; because of it, an
    address that a former owner publishes late does not count."""
    return _mutate(place, OWNER_KEY, _set(_ADDRESS, claim, address.encode()))


def raise_floor(place: Place, ts: int) -> Any:
    """The request that publishes a floor for clients. A floor that arrives late is below the present floor, so it does
    not count."""
    return _mutate(place, OWNER_KEY, _set(_FLOOR, ts, b""))


def _key(ticket: str) -> bytes:
    return TICKET_KEY + ticket.encode()


def admit(place: Place, ticket: str, token: str) -> Any:
    """The request that makes a ticket valid while `token` is the owner's. A ticket that has ended stays ended."""
    name = {"family_name": PROTOCOL_FAMILY, "column_qualifier": qualifier(WRITE, _HOLDER)}
    cell = types().Mutation(set_cell={**name, "timestamp_micros": micros(_GIVEN), "value": token.encode()})
    return _mutate(place, _key(ticket), [cell])


def dismiss(place: Place, ticket: str) -> Any:
    """The request that ends a ticket."""
    return _mutate(place, _key(ticket), _set(_HOLDER, _ENDED, b""))


def forget(place: Place, ticket: str) -> Any:
    """The request that removes a ticket's row. Send it only when no `admit` for that ticket can still take effect."""
    return _mutate(place, _key(ticket), [types().Mutation(delete_from_row={})])


def tickets(place: Place) -> Any:
    """The request for the rows of all tickets."""
    request = _reading(place, filters.reading([(WRITE, _HOLDER, 0, TS_MAX, 1)]))
    request.rows.row_ranges.add(start_key_closed=TICKET_KEY, end_key_open=TICKET_KEY[:-1] + b"\x21")
    return request


def ticket_of(row: ReadRow) -> str:
    """The ticket that a row is about."""
    return row.key.removeprefix(TICKET_KEY).decode()
