"""Which mutation meets which fault, and gates to stop one at; the faults themselves are in perco.testing.faults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import trio
import trio.testing

from perco.storage import Mutation
from perco.testing.faults import Fault as Fault, FaultyRowStore as FaultyRowStore, Plan, kind_of as kind_of, use as use
from perco.txn.client import Client, Options
from perco.txn.driver import CommitOptions

TWO_PHASES = Options(commit=CommitOptions(one_step=False))


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


def faulty(client: Client, plan: Plan = lambda mutation, number: None) -> FaultyRowStore:
    return use(client, FaultyRowStore(client.driver.store, plan))


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


async def gated(client: Client, kind: str, *, skip: int = 0, made: bool = False) -> Gate:
    """The client's next mutation of that kind waits at a gate; what is under way ends first.

    `made`: the gate keeps its reply. Who waits for a step of two phases gets two phases.
    """
    if kind in ("prewrite", "commit"):
        client.driver.options = replace(client.driver.options, one_step=False)
    await trio.testing.wait_all_tasks_blocked()
    gate = Gate(kind, skip=skip)
    use(client, FaultyRowStore(client.driver.store, **{"after" if made else "before": gate}))  # type: ignore[arg-type]
    return gate
