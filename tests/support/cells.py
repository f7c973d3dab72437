"""Tables of every kind of key with columns of every codec, and random cells in them."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import perco
from perco.database.inside import inside
from perco.protocol.mutations import Header, Intent, commit, prewrite
from perco.protocol.records import PUT, Cellref
from perco.storage import APPLIED

KEYS: dict[str, Any] = {
    "text": perco.Table("text", key=perco.TEXT, splits=["k3", "k6"]),
    "bytes": perco.Table("bytes", key=perco.BYTES, splits=[b"\x00" * 40]),
    "int64": perco.Table("int64", key=perco.INT64, splits=[0]),
    "tuple": perco.Table("tuple", key=perco.Tuple(perco.TEXT, perco.INT64)),
    "date": perco.Table("date", key=perco.DATE),
    "moments": perco.Table("moments", key=perco.Tuple(perco.TIMESTAMP, perco.DECIMAL(20, 3))),
}
OWN: perco.Codec[str] = perco.Codec("own", str.encode, bytes.decode)
DECIMALS = {"decimal(18,2)": perco.DECIMAL(18, 2), "decimal(38,5)": perco.DECIMAL(38, 5)}
CODECS: tuple[perco.Codec[Any], ...] = (
    *(perco.TEXT, perco.BYTES, perco.INT64, perco.FLOAT64, perco.BOOL, perco.JSON, perco.MSGPACK, OWN),
    *(perco.DATE, perco.TIMESTAMP, *DECIMALS.values()),
)
DATES = (date.min, date.max, date(1969, 12, 31), date(2026, 3, 1))
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
        case "date":
            return date(1970, 1, 1) + timedelta(days=(n - 20) * 1000)
        case "moments":
            return datetime(2026, 3, 1, n % 3, tzinfo=UTC), Decimal(n - 20) / 8
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
        case "date":
            return rng.choice(DATES)
        case "timestamp":
            return datetime.combine(rng.choice(DATES), rng.choice([time.min, time.max]), UTC)
        case "decimal(18,2)" | "decimal(38,5)":
            most = 10 ** DECIMALS[codec].precision - 1
            return Decimal(f"{rng.choice([0, 1, -1, most, -most])}E-{DECIMALS[codec].scale}")
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


async def locked(db: perco.Database, name: str, keys: list[Any], *, committed: bool = False) -> int:
    """Lock cells, as a transaction that died after its prewrite does; returns its start_ts. `committed`: it had written
    the commit of the first cell."""
    parts = inside(db)
    column = KEYS[name].columns["text"]
    bound = parts.known.bind(column)
    intents = [Intent(name, KEYS[name].row(key), bound.column, PUT, b"undecided") for key in keys]
    start_ts = await parts.oracle.draw()
    for intent in intents:
        header = Header(start_ts, Cellref(*intents[0][:3]), 0, 0, parts.engine.lease_token, b"")
        verdicts = await parts.store.apply([prewrite(header, [intent], again=False)])
        assert verdicts == [APPLIED]
    if committed:
        header = Header(start_ts, Cellref(*intents[0][:3]), 0, 0, parts.engine.lease_token, b"")
        [verdict] = await parts.store.apply([commit(header, intents[:1], await parts.oracle.draw())])
        assert verdict == APPLIED
    return start_ts
