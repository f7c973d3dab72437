"""Which mutation meets which fault, and gates to stop one at; the faults themselves are in perco.testing.faults."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import trio
import trio.testing

from perco.database.database import Database
from perco.database.inside import inside
from perco.database.options import Options
from perco.protocol import mutations
from perco.protocol.mutations import Intent
from perco.rpc.link import Link, LostError
from perco.serve.client import is_client, remote_owner
from perco.serve.messages import TOLD, Method, pack_verdict
from perco.storage import APPLIED, Mutation, NoReply, Verdict
from perco.testing.faults import (
    Fault as Fault,
    FaultyRowStore as FaultyRowStore,
    Plan,
    kind_of as kind_of,
    use as _use,
)
from perco.txn.driver import CommitOptions

TWO_PHASES = Options(commit=CommitOptions(one_step=False))


def use(db: Database, store: FaultyRowStore) -> FaultyRowStore:
    """From now on the client's transactions go through this store: also commits in one step, which a client asks the
    owner for."""
    if is_client(db):
        faulty = isinstance(store, FaultyRowStore)  # else it is what was there before
        link = (
            _FaultyLink(remote_owner(db).link, store, inside(db).oracle.draw_commit)
            if faulty
            else remote_owner(db).link
        )
        inside(db).driver._link = link  # type: ignore[attr-defined, assignment]
    return _use(db, store)


class _FaultyLink:
    """Calls for a commit in one step meet what the mutations of a faulty row store meet."""

    def __init__(self, link: Link, store: FaultyRowStore, draw: Callable[[], Awaitable[int]]) -> None:
        self._link, self._store, self._draw = link, store, draw
        self._calls: dict[int, tuple[Mutation, Callable[[], Awaitable[Any]]]] = {}  # still to be made, by identity
        self._answers: dict[int, Any] = {}
        self._make, store._make = FaultyRowStore._make.__get__(store), self._made  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    async def call(self, method: int, arguments: Any, **how: Any) -> Any:
        if method != Method.COMMIT:
            return await self._link.call(method, arguments, **how)
        header, packed, _ = arguments
        part = [Intent(*intent) for intent in packed]
        mutation = mutations.one_step(header, part, header.start_ts + 1)  # the owner draws the timestamp
        self._calls[id(mutation)] = mutation, lambda: self._link.call(method, arguments, **how)
        await trio.lowlevel.checkpoint_if_cancelled()
        verdict = await self._store._apply(mutation)
        answer = self._answers.pop(id(mutation), None)
        if isinstance(verdict, NoReply):
            raise LostError(verdict.reason)
        if answer is not None:
            return answer
        return TOLD, pack_verdict(verdict), await self._draw()  # the owner tried, and could not

    async def _made(self, mutation: Mutation) -> Verdict:
        if id(mutation) not in self._calls:
            return await self._make(mutation)
        _, call = self._calls.pop(id(mutation))
        with trio.CancelScope(shield=True):
            self._answers[id(mutation)] = await call()
            if self._store.after is not None:
                await self._store.after(mutation)
        return APPLIED


def on(kinds: str | Iterable[str], fault: Fault, *, times: int = 1) -> Plan:
    """The first mutations of these kinds meet the fault."""
    wanted = {kinds} if isinstance(kinds, str) else set(kinds)
    left = [times]

    def plan(mutation: Mutation, number: int) -> Fault | None:
        if kind_of(mutation) in wanted and left[0]:
            left[0] -= 1
            return fault
        return None

    return plan


def at(number: int, fault: Fault) -> Plan:
    """The mutation of that number meets the fault."""
    return lambda mutation, n: fault if n == number else None


def faulty(db: Database, plan: Plan = lambda mutation, number: None) -> FaultyRowStore:
    return use(db, FaultyRowStore(inside(db).driver.store, plan))


class Gate:
    """As `before` or `after`: stops the first mutation of a kind until it is opened."""

    def __init__(self, kind: str, *, skip: int = 0) -> None:
        self._kind, self._skip = kind, skip
        self._reached, self._opened = trio.Event(), trio.Event()

    async def __call__(self, mutation: Mutation) -> None:
        if kind_of(mutation) != self._kind or self._reached.is_set():
            return
        if self._skip:
            self._skip -= 1
            return
        self._reached.set()
        await self._opened.wait()

    async def reached(self) -> None:
        await self._reached.wait()

    def open(self) -> None:
        self._opened.set()


async def gated(db: Database, kind: str, *, skip: int = 0, made: bool = False) -> Gate:
    """The client's next mutation of that kind waits at a gate; mutations under way end first.

    `made`: the gate keeps its reply. A client that waits for a step of two phases gets two phases.
    """
    if kind in ("prewrite", "commit"):
        inside(db).driver.options = replace(inside(db).driver.options, one_step=False)
    await trio.testing.wait_all_tasks_blocked()
    gate = Gate(kind, skip=skip)
    use(db, FaultyRowStore(inside(db).driver.store, **{"after" if made else "before": gate}))  # type: ignore[arg-type]
    return gate
