"""Assembles a database over a store that this process has open."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import trio

from perco.clock.oracle import Oracle
from perco.database.beside import BesideDriver, BesideOracle
from perco.database.database import Database
from perco.database.inside import inside
from perco.database.local import LocalOwner
from perco.database.options import Options
from perco.errors import SchemaMismatch
from perco.notify.sweeper import Sweeper
from perco.notify.waiting import Waiting
from perco.notify.workers import Workers
from perco.schema import catalogue as catalogues
from perco.schema.known import Known
from perco.schema.schema import Schema
from perco.storage import Batching, BatchOptions, RowStore
from perco.tablets.backend import Backend
from perco.tablets.local import LocalStore
from perco.txn.background import Background
from perco.txn.driver import Driver
from perco.txn.engine import Engine
from perco.txn.fates import Fates
from perco.txn.keeping import Keeper
from perco.txn.prefetch import Predictor

_WINDOW_S: Final = 0.05  # the longest window, for a store whose calls take a round trip


def make(backend: Backend, schema: Schema, options: Options) -> Database:
    """The owner's database. None of its tasks is running yet."""
    background = Background()
    oracle = Oracle(backend.store, options.oracle, options.wall)
    fates = Fates()
    store = _windowed(backend, options, background)
    driver = Driver(store, oracle, fates, options.commit, background, options.on_event)
    return _around(backend, Known(schema), oracle, fates, driver, background, options)


def gathered(batch: BatchOptions) -> BatchOptions:
    """The batch options for a store whose calls take a round trip: if no window is set, calls gather while an earlier
    call is in flight."""
    return batch if batch.window_s else replace(batch, window_s=_WINDOW_S, adaptive=True)


def _windowed(backend: Backend, options: Options, background: Background) -> RowStore:
    """The store, as transactions see it: with a batching window, if the options have one (D3). An adaptive window is
    of no use for tablets of this process: reads do not wait, and mutations gather in queues anyway. Over a network,
    calls always gather while an earlier call is in flight."""
    batch = gathered(options.batch) if backend.remote else options.batch
    if batch.window_s and (backend.remote or not batch.adaptive):
        return Batching(backend.store, batch, background.spawn)
    return backend.store


def _around(
    backend: Backend,
    known: Known,
    oracle: Oracle,
    fates: Fates,
    driver: Driver,
    background: Background,
    options: Options,
) -> Database:
    rng = random.Random(options.seed)
    engine = Engine(
        *(backend, known, oracle, fates, driver, background, Predictor(options.prefetch, served=False)),
        *(options.transaction, options.retry, rng, f"{rng.getrandbits(64):016x}", options.on_event),
    )
    driver.name = known.name_of
    keeper = Keeper(engine, backend.adapt, is_told=True)
    workers = Workers(engine)
    sweeper = Sweeper(backend.store, driver)
    waiting = Waiting(engine, keeper, workers.running_here, lambda: sweeper.stuck)
    owner = LocalOwner(engine, keeper, waiting, workers, sweeper, backend, options)
    return Database(engine, keeper, workers, waiting, owner, options)


async def make_beside(local: LocalStore, schema: Schema | None, options: Options) -> Database:
    """A read-only database beside the owner; it uses the owner's catalogue and notes of the clock.

    Raises: SchemaMismatch.
    """
    catalogue = await catalogues.load(local.store)
    known = Known(Schema() if schema is None else schema)
    catalogue = catalogue.seen_by(known.schema)
    if schema is None:
        known.borrow(catalogues.schema_of(catalogue))
    elif catalogue.declare(schema) is not catalogue:
        raise SchemaMismatch(
            "the store does not have all that the schema declares (`perco schema STORE app:schema` shows what is "
            "missing); open it once for writing"
        )
    await local.adapt(catalogue)
    background, fates = Background(), Fates()
    oracle = BesideOracle(local, options.oracle, options.wall)
    driver = BesideDriver(local, oracle, fates, options.commit, background, None)
    known.catalogue = catalogue
    db = _around(local, known, oracle, fates, driver, background, options)
    await inside(db).keeper.announce()
    return db


@asynccontextmanager
async def offline(url: str | os.PathLike[str], *, accept_loss: bool = False) -> AsyncIterator[Database]:
    """The owner's database, for repairs: with the store's catalogue, without background tasks. Raises: as `open`."""
    options = Options()
    local = LocalStore(
        url, durable=True, readonly=False, accept_loss=accept_loss, lmdb=options.lmdb, batch=options.batch
    )
    try:
        catalogue = await catalogues.load(local.store)
        await local.adapt(catalogue)
        db = make(local, catalogues.schema_of(catalogue), options)
        within = inside(db)
        within.known.catalogue = catalogue
        await within.keeper.announce()
        await within.oracle.start()
        yield db
    finally:
        with trio.CancelScope(shield=True):
            await local.aclose()
