"""The worker of a process: `db.worker()`."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import trio

from perco.errors import SchemaMismatch, UsageError, must_be_number
from perco.notify.options import ObserverCounters, WorkerOptions
from perco.notify.scanner import Scanner, ScannerCounters
from perco.notify.ticking import Ticker
from perco.notify.worker import Worker
from perco.schema import catalogue as catalogues
from perco.schema.schema import Schema
from perco.txn.engine import Engine

log: logging.Logger = logging.getLogger("perco.observer")


async def _nothing() -> None:
    pass


class Workers:
    """Loop thread only.

    Attributes:
        worker: the worker that runs in this process, if any.
        scanner: makes the worker's scanners.
        on_begin, on_end: awaited before the scanners start, and after they have ended. A client uses them to notify its
            owner.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.worker: Worker | None = None
        self.scanner: Callable[[Worker, int, int, Callable[[], list[str]]], Scanner] = Scanner
        self.on_begin: Callable[[], Awaitable[None]] = _nothing
        self.on_end: Callable[[], Awaitable[None]] = _nothing

    def running_here(self) -> Worker | None:
        """The worker that runs in this process, if any."""
        return self.worker

    @asynccontextmanager
    async def running(
        self, concurrency: int, scanners: int | None, options: WorkerOptions | None
    ) -> AsyncIterator[WorkerHandle]:
        """See `Database.worker`."""
        engine = self._engine
        engine.usable(writing=True)
        if self.worker is not None:
            raise UsageError("this store already has a worker; raise its concurrency instead of adding another")
        chosen = _chosen(concurrency, scanners, options)
        ids = _ids(engine.known.schema, chosen)
        self._check_observers(ids)
        if not ids:
            log.warning(
                "this worker has nothing to run: the schema declares no observers. Import the modules that declare "
                "them before the store is opened."
            )
        registered = catalogues.registered(engine.known.schema, engine.known.catalogue)
        registered = {number: observer for number, observer in registered.items() if observer.id in ids}
        worker = Worker(engine, registered, chosen)
        handle = WorkerHandle(worker, [self._scanner(worker, i, chosen) for i in range(chosen.scanners)])
        self.worker = worker
        notified = engine.driver.on_notified
        notified.append(worker.notified)
        stops: list[Callable[[], None]] = []
        ends: list[Callable[[], None]] = []
        try:
            await self.on_begin()
            for scanner in handle.scanners:
                stops.append(engine.background.start(scanner.run, f"scanner-{scanner.number}"))
            schedules = [schedule for id, schedule in engine.known.schema.schedules.items() if id in ids]
            if schedules:
                ends.append(engine.background.start(Ticker(engine, schedules).run, "schedules"))
            yield handle
        finally:
            for stop in (*ends, *stops):
                stop()
            with trio.CancelScope(shield=True):
                for scanner in handle.scanners[: len(stops)]:
                    await scanner.ended.wait()
            notified.remove(worker.notified)
            worker.hints.end()
            self.worker = None
            await self.on_end()

    def _check_observers(self, ids: Collection[str]) -> None:
        """Raises SchemaMismatch, UsageError for an observer that cannot run here, before an attempt is spent on it."""
        schema, catalogue = self._engine.known.schema, self._engine.known.catalogue
        late = set(ids) - set(catalogue.observers)
        if late:
            raise SchemaMismatch(
                f"observers were declared after the store was opened: {', '.join(sorted(late))}. "
                "Declare them all, then open it. (If they were dropped since, open it again to register them.)"
            )
        for observer in map(schema.observers.__getitem__, ids):
            needs: Callable[[Engine], object] | None = getattr(observer.function, "perco_needs", None)
            if needs is not None:
                try:
                    needs(self._engine)
                except UsageError as error:
                    raise UsageError(f"observer {observer.id!r} cannot run here: {error}") from None

    def _scanner(self, worker: Worker, number: int, options: WorkerOptions) -> Scanner:
        slots = options.concurrency // options.scanners + (number < options.concurrency % options.scanners)
        known = self._engine.known
        return self.scanner(worker, number, slots, lambda: known.catalogue.observed_tables())


def _chosen(concurrency: int, scanners: int | None, options: WorkerOptions | None) -> WorkerOptions:
    if options is not None and not isinstance(options, WorkerOptions):
        raise UsageError(f"options= takes perco.WorkerOptions(...), not {options!r}")
    chosen = WorkerOptions(concurrency=concurrency) if options is None else options
    chosen = replace(chosen, scanners=min(chosen.scanners, chosen.concurrency) if scanners is None else scanners)
    if not 1 <= chosen.scanners <= chosen.concurrency:
        raise UsageError("a worker needs at least one scanner, and at least as many runs in flight as scanners")
    return chosen


def _ids(schema: Schema, options: WorkerOptions) -> list[str]:
    """Ids of the observers that a worker runs. Raises: UsageError for an unknown id, or if none is left."""
    for name, given in ("only", options.only), ("without", options.without):
        for id in given or ():
            if id not in schema.observers:
                names = ", ".join(map(repr, schema.observers)) or "none"
                raise UsageError(f"{name}: the schema has no observer {id!r}; there are: {names}")
    ids = [
        id
        for id in schema.observers
        if (options.only is None or id in options.only) and id not in (options.without or ())
    ]
    if schema.observers and not ids:
        raise UsageError("only= and without= leave this worker no observer")
    return ids


class WorkerHandle:
    """A running worker: its statistics."""

    scanners: list[Scanner]

    def __init__(self, worker: Worker, scanners: list[Scanner]) -> None:
        self._worker, self.scanners = worker, scanners

    def statistics(self) -> dict[str, ObserverCounters]:
        """Counters of each observer since the worker began, by id."""
        return self._worker.statistics()

    def scanner_statistics(self) -> list[ScannerCounters]:
        """Counters of each scanner."""
        return [scanner.counters for scanner in self.scanners]

    def on_run(self, function: Callable[[str, Any, float], None]) -> None:
        """Call `function(observer id, key, seconds)` after each committed run. If runs have shared a transaction (N20),
        each is given an equal part of its time."""
        self._worker.on_run = function

    async def drain(self, *, timeout: float | None = None) -> bool:
        """Begin no more runs, and wait for those in flight: before a program ends, so that no run is broken off. The
        worker does nothing more after this.

        Args:
            timeout: seconds; None: any.

        Returns whether all runs have ended. Raises: UsageError for a timeout that is no number.
        """
        if timeout is not None:
            must_be_number("timeout", timeout)
            if not timeout >= 0:
                raise UsageError(f"timeout is {timeout!r}; it is a number of seconds of at least 0")
        with trio.move_on_after(math.inf if timeout is None else timeout) as scope:
            await self._worker.drain()
        return not scope.cancelled_caught
