"""Row stores over either engine, for the tests of this folder and of tests/integration/storage."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from perco.bigtable.store import BigtableStore
from perco.postgresql.options import PostgresqlOptions
from perco.postgresql.store import PostgresqlStore
from perco.storage import (
    APPLIED,
    PROTOCOL_GROUPS,
    BatchOptions,
    LmdbEngine,
    LmdbOptions,
    LmdbTablet,
    LocalRowStore,
    MemoryTablet,
    Mutation,
    ReadRequest,
)
from perco.storage.bare import Bare
from perco.testing.bare import SingleRows
from tests.support import bigtable, postgresql

TABLE = "t"
GROUPS = (*PROTOCOL_GROUPS, "data:raw")
_HAS_TABLE = SimpleNamespace(tables=(TABLE,), groups=lambda table: ["data:raw"])  # stands in for a catalogue
UNSYNCED = LmdbOptions(sync=False)


def lmdb_tablet(
    store: LocalRowStore,
    engine: LmdbEngine,
    *,
    start: bytes = b"",
    batch: BatchOptions | None = None,
    table: str = TABLE,
) -> LmdbTablet:
    return LmdbTablet(table, start, engine, batch or BatchOptions(), store.submit, store.handover)


def lmdb_engine(
    path: Path,
    options: LmdbOptions = UNSYNCED,
    *,
    engine: type[LmdbEngine] = LmdbEngine,
    groups: Sequence[str] = GROUPS,
    readonly: bool = False,
    lock: bool = True,
) -> LmdbEngine:
    if not readonly:
        path.mkdir(parents=True, exist_ok=True)
    return engine(path, groups, options, readonly=readonly, lock=lock)


@asynccontextmanager
async def open_store(
    kind: str, path: Path, splits: Sequence[bytes] = (), options: LmdbOptions = UNSYNCED
) -> AsyncIterator[LocalRowStore]:
    """One table, `TABLE`, in as many tablets as `splits` ask for."""
    if kind == "postgresql":
        owned = await PostgresqlStore.open(postgresql.fresh(), PostgresqlOptions(), durable=False)
        try:
            await owned.adapt(_HAS_TABLE)  # type: ignore[arg-type]
            yield owned.store  # type: ignore[misc]
        finally:
            await owned.aclose()
        return
    if kind in ("bigtable", "bigtable model"):
        simulated = kind == "bigtable model"
        with bigtable.modelled() if simulated else nullcontext():
            kept = await BigtableStore.open(bigtable.fresh(), replace(bigtable.QUICK, call_s=0.5 if simulated else 5.0))
            try:
                await kept.adapt(_HAS_TABLE)  # type: ignore[arg-type]
                yield kept.store  # type: ignore[misc]
            finally:
                await kept.aclose()
        return
    store = LocalRowStore()
    starts = [b"", *splits]
    if kind != "lmdb":
        store.add_table(TABLE, [MemoryTablet(TABLE, start) for start in starts])
    else:
        engines = [lmdb_engine(path / str(number), options) for number in range(len(starts))]
        store.add_table(
            TABLE, [lmdb_tablet(store, engine, start=start) for start, engine in zip(starts, engines, strict=True)]
        )
    try:
        yield Bare(SingleRows(store), store.tables, 0.0) if kind == "bare" else store  # type: ignore[misc]
    finally:
        await store.aclose()


@asynccontextmanager
async def open_lmdb(
    path: Path,
    options: LmdbOptions = UNSYNCED,
    batch: BatchOptions | None = None,
    engine: type[LmdbEngine] = LmdbEngine,
) -> AsyncIterator[tuple[LocalRowStore, LmdbTablet]]:
    """One table in one tablet, with an engine of the test's choice."""
    store = LocalRowStore()
    tablet = lmdb_tablet(store, lmdb_engine(path, options, engine=engine), batch=batch)
    store.add_table(TABLE, [tablet])
    try:
        yield store, tablet
    finally:
        await store.aclose()


def put(row: bytes, value: bytes = b"", ts: int = 1, column: int = 1, *, reserve: bool = False) -> Mutation:
    return Mutation(TABLE, [(row, [], [("data", column, ts, value)])], None, reserve)


def delete(row: bytes, ts: int = 1, column: int = 1, *, reserve: bool = False) -> Mutation:
    return Mutation(TABLE, [(row, [], [("data", column, ts, None)])], None, reserve)


def newest(row: bytes, column: int = 1) -> ReadRequest:
    return (TABLE, row, [("data", column, 0, 1 << 50, 1)])


async def value_of(store: LocalRowStore, row: bytes) -> bytes | None:
    [[cells]] = await store.read([newest(row)])
    return cells[0][1] if cells else None


async def put_all(store: LocalRowStore, *mutations: Mutation) -> None:
    assert await store.apply(mutations) == [APPLIED] * len(mutations)
