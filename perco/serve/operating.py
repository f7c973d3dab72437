"""Operations on single cells that the owner carries out for its clients, each in one call.

C9  The owner reads the cell's newest version, decides the new value, and enters the commit, without an await in
    between. The client has chosen start_ts, so it can ask for the outcome if the answer is lost (T4). If the newest
    version is above start_ts, the tablet refuses the commit (T7), and the client tries a newer start_ts.

In all other unusual cases, the owner does nothing, and the client runs the operation as an ordinary transaction.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from perco.database.parts import Parts
from perco.errors import Corruption
from perco.protocol.mutations import Header, write_of
from perco.protocol.records import Cellref
from perco.protocol.snapshot import InData, Missing, Value, data_query, look
from perco.rpc.peer import Peer
from perco.schema.codecs import BYTES, TEXT, own_codec
from perco.serve.draws import Draws
from perco.serve.messages import read_operation
from perco.serve.one_step import OneStep
from perco.serve.sessions import Session
from perco.storage import LOCK, TS_MAX, VALUE_BYTES_MAX, WRITE, Query, RowCells
from perco.storage.rowstore import Prompt
from perco.txn.operations import BLIND, UNCHANGED, Operation
from perco.txn.shipping import Shipped

_UNKNOWN = object()  # in place of a value: a transaction has to read the cell
_LARGE = 1 << 16  # bytes: the loop decodes no longer value, unless that takes no time


class Operating:
    """Loop thread only. `prompt`: the store, if it answers without an await; None: nothing is done here."""

    def __init__(self, parts: Parts, one_step: OneStep, draws: Draws, prompt: Prompt | None) -> None:
        self._parts, self._one_step, self._draws, self._prompt = parts, one_step, draws, prompt

    def operate(self, session: Session, peer: Peer, id: int, packed: Any) -> None:
        """Answer with None (nothing was done), (0, None, None: the value stays), or (commit_ts, the verdict, the new
        value if it was added to); and with a start timestamp for the next try, or 0: it would do nothing, either."""
        header, asked = read_operation(packed, self._parts.oracle.last)
        cell = header.primary

        def reply(done: tuple[int, Any, bytes | None] | None) -> None:
            spare = self._draws.one(session, peer)
            if not peer.reply(id, (done, spare)) and spare:
                self._draws.take_back(session, spare)

        try:
            new = self._decide(header, asked)
        except (TypeError, ValueError, ArithmeticError, RecursionError, struct.error, Corruption):
            new = _UNKNOWN  # the client meets this error, too
        if new is _UNKNOWN:
            peer.reply(id, (None, 0))
        elif new is UNCHANGED:
            reply((0, None, None))
        elif not self._one_step.lane(
            session,
            header,
            [write_of(*cell, new, asked.group, asked.observers)],
            asked.version,
            lambda commit_ts, verdict: reply((commit_ts, verdict, new if asked.what == "add" else None)),
        ):
            peer.reply(id, (None, 0))

    def _decide(self, header: Header, asked: Shipped) -> Any:
        """The new value, encoded, or UNCHANGED, or _UNKNOWN. Raises: TypeError, ValueError, ArithmeticError,
        RecursionError, struct.error, Corruption."""
        old = self._newest(header.primary)
        if old is _UNKNOWN:
            return _UNKNOWN
        if asked.what in BLIND:
            return asked.argument
        codec = own_codec(asked.codec)
        if codec is None or (codec not in (BYTES, TEXT) and len(old or b"") > _LARGE):
            return _UNKNOWN
        decode = codec.decode
        argument = None if asked.argument is None else decode(asked.argument)
        expected = None if asked.expected is None else decode(asked.expected)
        new = Operation(asked.what, argument, expected).of(None if old is None else decode(old))
        if new is UNCHANGED or new is None:
            return new
        data = codec.encode(new)
        return data if len(data) <= VALUE_BYTES_MAX else _UNKNOWN

    def _newest(self, cell: Cellref) -> Any:
        """The cell's value, encoded; None: it has none; _UNKNOWN: it is locked. Raises: Corruption."""
        table, row, column = cell
        if self._prompt is None:
            return _UNKNOWN
        locks, writes = self._read(table, row, ((LOCK, column, 0, TS_MAX, 1), (WRITE, column, 0, TS_MAX, 1)))
        if locks:
            return _UNKNOWN
        seen = look(locks, writes)
        if type(seen) is InData:
            [data] = self._read(table, row, (data_query(seen, column),))
            return data[0][1] if data else _UNKNOWN
        assert isinstance(seen, Value | Missing), "there is no lock"
        return seen.value if type(seen) is Value else None

    def _read(self, table: str, row: bytes, queries: Sequence[Query]) -> RowCells:
        assert self._prompt is not None
        return self._prompt.find_row(table, row, queries)
