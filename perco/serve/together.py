"""A client's calls to one tablet of a served store, gathered in the client's window (`storage/batching.py`).

Several callers' reads, one-step commits and claims on rows are combined, each with others of its kind, into calls of
special methods (`Method.READS`, `COMMITS`, `CLAIMS`). Mutations need no such method: `Method.APPLY` takes any number of
them.

D8  If a part would have to wait at the server, or would make the answer too long for a message, the server does nothing
    for that part and answers None. The part's caller then asks again, in a call of its own. If a combined call did
    wait, its reply could depend on something that the same client has yet to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from perco.notify.rowlocks import CLAIMED
from perco.protocol.mutations import Header, Intent, bytes_of
from perco.rpc.channel import WireOptions
from perco.rpc.framing import WireError
from perco.rpc.link import Link, LostError
from perco.serve.messages import Method, pack_commit
from perco.storage import Batching, BatchOptions, Gathering, ReadRequest, RowCells, RowStore
from perco.storage.batching import Spawn

_CLAIM_BYTES = 64  # of a claim, besides its row

Where = tuple[str, bytes]


class _Remote(RowStore, Protocol):
    spread: bool


class Together:
    """One client's gathered calls. Loop thread only.

    Attributes:
        store: for reads and mutations.
        dropped: called with a row that was claimed for a task that has been cancelled since.
    """

    store: Batching

    def __init__(self, link: Link, store: _Remote, options: BatchOptions, wire: WireOptions, spawn: Spawn) -> None:
        self._link, self._remote = link, store
        options = replace(options, bytes_max=min(options.bytes_max, wire.part_bytes))
        self.store = Batching(store, options, spawn, self._read)
        self._commits = Gathering(options, spawn, self._commit, lambda asked: self._tablet(asked[0]), again=False)
        self._claims = Gathering(
            options,
            spawn,
            self._claim,
            lambda asked: store.locate(asked[0], asked[1][0][0]),
            again=True,
            dropped=self._dropped,
        )
        self.dropped: Callable[[Where], None] = lambda where: None

    def _tablet(self, header: Header) -> int:
        return self._remote.locate(header.primary.table, header.primary.row)

    async def _read(self, asked: list[Sequence[ReadRequest]]) -> Sequence[list[RowCells] | None]:
        if len(asked) > 1 and not self._remote.spread:
            return _answers(await self._link.call(Method.READS, asked, again=True, held=True), asked)
        # A tablet server has nothing that a read could wait for.
        rows = iter(await self._remote.read([request for requests in asked for request in requests]))
        return [[next(rows) for _ in requests] for requests in asked]

    async def commit(self, header: Header, part: Sequence[Intent], version: int) -> Any:
        """The answer to `Method.COMMIT`. Raises: LostError (C6); the server's error."""
        key = self._tablet(header)
        sent = pack_commit(header, part, version)
        answers = await self._commits.ask([(key, sent, bytes_of(part))])
        if answers is not None and answers[0] is not None:
            return answers[0]
        try:
            return await self._link.call(Method.COMMIT, sent, again=False)
        finally:
            if answers is None:
                self._commits.answered(key)

    async def _commit(self, asked: list[Any]) -> Sequence[Any]:
        answers = await self._link.call(Method.COMMITS, asked, again=False)
        try:
            return _answers(answers, asked)
        except WireError as error:
            raise LostError(str(error)) from error  # T4: the commits may have been made

    async def claim(self, table: str, wanted: Sequence[tuple[bytes, int, int]], most: int, *, halts: bool) -> Any:
        """The answer to `Method.CLAIM`. `wanted` must have at least one row."""
        key = self._remote.locate(table, wanted[0][0])
        asked = table, wanted, most, halts
        answers = await self._claims.ask([(key, asked, sum(len(row) + _CLAIM_BYTES for row, _, _ in wanted))])
        if answers is not None and answers[0] is not None:
            return answers[0]
        try:
            return await self._link.call(Method.CLAIM, asked, again=True)
        finally:
            if answers is None:
                self._claims.answered(key)

    async def _claim(self, asked: list[Any]) -> Sequence[Any]:
        return _answers(await self._link.call(Method.CLAIMS, asked, again=True), asked)

    def _dropped(self, asked: Any, answer: Any) -> None:
        table, wanted, _, _ = asked
        states = [CLAIMED] * len(wanted) if answer is None else answer[0]  # None: it is not known what the server did
        for (row, _, _), state in zip(wanted, states, strict=True):
            if state == CLAIMED:
                self.dropped((table, row))


def _answers(answers: Any, asked: Sequence[object]) -> Sequence[Any]:
    """Check that there is an answer to each call. Raises: WireError."""
    if type(answers) not in (list, tuple) or len(answers) != len(asked):
        raise WireError(f"no answer for each of {len(asked)} calls that went together")
    return answers  # type: ignore[no-any-return]
