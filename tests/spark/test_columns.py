"""Columns made of a tablet's files, beside the owner: the same rows as a snapshot's scan, over random data."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import perco
from perco.database.inside import inside
from perco.errors import SnapshotTooOld
from perco.serve.opening import open
from perco.spark import direct, types
from perco.spark.direct import Beside, Elsewhere, Host, Walk
from perco.spark.ranges import Range
from perco.spark.source import Batch
from perco.spark.store import Store
from perco.txn.snapshot import scan_between

OPTIONS = perco.Options(durability="process")
KEYS: dict[str, Any] = {
    "text": perco.Table("text", key=perco.TEXT, splits=["k3", "k6"]),
    "bytes": perco.Table("bytes", key=perco.BYTES, splits=[b"\x00" * 40]),
    "int64": perco.Table("int64", key=perco.INT64, splits=[0]),
    "tuple": perco.Table("tuple", key=perco.Tuple(perco.TEXT, perco.INT64)),
}
OWN: perco.Codec[str] = perco.Codec("own", str.encode, bytes.decode)
CODECS = (perco.TEXT, perco.BYTES, perco.INT64, perco.FLOAT64, perco.BOOL, perco.JSON, perco.MSGPACK, OWN)
for table in KEYS.values():
    for codec in CODECS:
        table.column(codec.name, codec)
    table.column("apart", perco.TEXT, group="apart")
SCHEMA = perco.Schema(*KEYS.values())


def key_of(rng: random.Random, name: str) -> Any:
    n = rng.randrange(40)
    match name:
        case "text":
            return f"k{n}" + "\0" * (n % 4)
        case "bytes":
            return bytes(rng.choice([b"\0" * n, b"x\0" * n, bytes([n]) * 3]))
        case "int64":
            return (n - 20) * 10 ** (n % 15)
    return f"t{n % 3}\0", n


def value_of(rng: random.Random, codec: str) -> Any:
    text = rng.choice(["", "ä\0b", "x" * 255, "y" * 300, "z" * 5000])
    match codec:
        case "bytes":
            return text.encode()
        case "int64":
            return rng.choice([0, -(1 << 63), (1 << 63) - 1, rng.randrange(-99, 99)])
        case "float64":
            return rng.choice([0.0, -0.0, float("inf"), rng.random()])
        case "bool":
            return rng.random() < 0.5
        case "json":
            return rng.choice([{"ä": [1, 2.5, None]}, [], text, 7])
        case "msgpack":
            return rng.choice([{1: b"\xff"}, (1, "a"), text.encode(), 7])
    return text


async def filled(db: perco.Database, seed: int) -> list[int]:
    """Write and delete cells at random; returns timestamps between the transactions."""
    rng = random.Random(seed)
    moments = []
    for _ in range(40):
        async with db.transaction() as txn:
            for _ in range(rng.randrange(1, 25)):
                name = rng.choice(list(KEYS))
                column = rng.choice(list(KEYS[name].columns.values()))
                if rng.random() < 0.25:
                    txn.delete(column, key_of(rng, name))
                else:
                    txn.set(column, key_of(rng, name), value_of(rng, column.codec.name))
        moments.append(txn.commit_ts)
    return moments


async def by_rows(db: perco.Database, name: str, columns: list[str], range: Range, ts: int) -> pa.Table:
    table = db.schema.tables[name]
    chosen = [table.columns[each] for each in columns]
    schema = types.schema_of(table, "key", chosen)
    batch = Batch(table, chosen, "key", schema)
    async with db.snapshot(ts=ts) as snap:
        async for row in scan_between(snap, table, *range, columns=chosen):
            batch.add(row)
    return pa.Table.from_batches([batch.taken()])


async def by_files(
    db: perco.Database, name: str, columns: list[str], range: Range, ts: int, cells: int = 2000
) -> tuple[pa.Table, int]:
    """The table, and how many pages had to be read row by row."""
    table = db.schema.tables[name]
    chosen = [table.columns[each] for each in columns]
    schema = types.schema_of(table, "key", chosen)
    batches: list[pa.RecordBatch] = []
    pages = 0

    async def rows(snap: perco.Snapshot, here: Range, send: Any) -> None:
        nonlocal pages
        pages += 1
        batch = Batch(table, chosen, "key", schema)
        async for row in scan_between(snap, table, *here, columns=chosen):
            batch.add(row)
        await send(batch.taken())

    async def send(batch: pa.RecordBatch) -> None:
        batches.append(batch)

    walk = Walk(db, table, chosen, "key", schema, range, ts, rows)
    walk._cells = cells
    await walk.run(send)
    assert walk.left is None
    return pa.Table.from_batches(batches, schema=walk._columns.schema), pages


def here() -> Host:
    host = Host.here()
    assert host is not None
    return host


@asynccontextmanager
async def beside(owner: perco.Database, folder: Path, ts: int | None = None) -> AsyncIterator[tuple[Any, int]]:
    """The folder, opened as a task opens it, and the timestamp of a pin; the owner is this process's parent."""
    async with owner.pin("p", ts=ts) as pin, direct.opened(Beside(str(folder), here()), "p", pin.start_ts) as db:
        yield db, pin.start_ts


@pytest.mark.parametrize("seed", range(6))
async def test_columns_have_the_rows_of_a_scan(tmp_path: Path, seed: int) -> None:
    """Nulls, deleted cells, old and new versions, long values, every codec and key, ranges of keys."""
    async with perco.open(tmp_path, SCHEMA, options=OPTIONS) as owner:
        moments = await filled(owner, seed)
        await inside(owner).owner.note_now()
    rng = random.Random(seed)
    compared = 0
    async with open(tmp_path, readonly=True) as db:
        for name in KEYS:
            for _ in range(12):
                table = db.schema.tables[name]
                columns = rng.sample(list(table.columns), rng.randrange(1, len(table.columns) + 1))
                ends = sorted(table.row(key_of(rng, name)) for _ in range(2))
                range_ = rng.choice([Range(), Range(ends[0], ends[1] + b"\0"), Range(ends[0], None)])
                ts = rng.choice(moments)
                wanted = await by_rows(db, name, columns, range_, ts)
                found, _ = await by_files(db, name, columns, range_, ts, rng.choice([1, 7, 60, 2000]))
                assert found.schema == wanted.schema
                assert found.to_pylist() == wanted.to_pylist()
                compared += wanted.num_rows
    assert compared > 300
