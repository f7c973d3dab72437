"""The types of Spark's columns: dates, times and decimals; structs, arrays and maps as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
import trio
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    CalendarIntervalType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

import perco
import perco.spark
from perco.errors import SchemaMismatch
from perco.spark import trees, types

days = perco.Table("days", key=perco.Tuple(perco.DATE, perco.DECIMAL(6, 2)))
at = days.column("at", perco.TIMESTAMP)
price = days.column("price", perco.DECIMAL(24, 4))
tree = days.column("tree", perco.JSON)
pack = days.column("pack", perco.MSGPACK)
dated = perco.Table("dated", key=perco.DATE)
note = dated.column("note", perco.TEXT)
seen = dated.column("seen", perco.JSON)
moments = perco.Table("moments", key=perco.TIMESTAMP)
count = moments.column("count", perco.INT64)
numbers = perco.Table("numbers", key=perco.INT64)
for name in ("a", "b"):
    numbers.column(name, perco.INT64)
SCHEMA = perco.Schema(days, dated, moments, numbers)
COLUMNS = (
    "key struct<_1: date not null, _2: decimal(6,2) not null>, at timestamp, price decimal(20,3), "
    "tree struct<on: date, at: timestamp, local: timestamp_ntz, cost: decimal(5,2), raw: binary, some: array<double>>, "
    "pack map<string, binary>"
)
NOON = datetime(2026, 3, 1, 12, 0, 0, 1, UTC)


@pytest.fixture(scope="module")
def store(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[perco.spark.Store]:
    with perco.spark.serve(tmp_path_factory.mktemp("types") / "store", spark) as served:

        async def declare() -> None:
            async with served.open(SCHEMA):
                pass

        trio.run(declare)
        perco.spark.register(spark, served)
        yield served


def look(store: perco.spark.Store, *cells: tuple[Any, Any]) -> list[Any]:
    async def main() -> list[Any]:
        async with store.open(SCHEMA) as db, db.snapshot() as snap:
            return [await snap.get(*cell) for cell in cells]

    return trio.run(main)


def read(spark: SparkSession, table: str, schema: str | None = None, **options: Any) -> list[Any]:
    reader = spark.read.format("perco").options(table=table, **options)
    return (reader if schema is None else reader.schema(schema)).load().orderBy("key").collect()


def test_dates_times_decimals_and_nested_values_go_there_and_back(
    spark: SparkSession, store: perco.spark.Store
) -> None:
    key = (date(1969, 7, 20), Decimal("-1.50"))
    inner = (date(2026, 3, 1), NOON, datetime(2026, 3, 1, 12), Decimal("1.5"), b"\xff", [0.5, None])
    full = (key, NOON, Decimal("-1.250"), inner, {"b": b"\x00", "a": None})
    other: Any = ((date(1969, 7, 20), Decimal("2")), None, None, None, {})
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")  # stored values depend on no zone
    try:
        frame = spark.createDataFrame([other, full], COLUMNS)
        frame.write.format("perco").option("table", "days").mode("append").save()
        found = look(store, (at, key), (price, key), (tree, key), (pack, key), (pack, other[0]), (at, other[0]))
        assert found[:2] == [NOON, Decimal("-1.2500")]
        assert list(found[2].items()) == [
            ("on", "2026-03-01"),
            ("at", "2026-03-01T12:00:00.000001Z"),
            ("local", "2026-03-01T12:00:00"),
            ("cost", "1.50"),
            ("raw", "/w=="),
            ("some", [0.5, None]),
        ]
        assert list(found[3].items()) == [("a", None), ("b", b"\x00")]  # sorted
        assert found[4:] == [{}, None]

        by_files, by_pages, by_rows = (read(spark, "days", read=how) for how in ("files", "pages", "rows"))
        assert by_files == by_pages == by_rows
        (first, second), schema = by_files, spark.read.format("perco").option("table", "days").load().schema
        assert [field.dataType.simpleString() for field in schema] == [
            *("struct<_1:date,_2:decimal(6,2)>", "timestamp", "decimal(24,4)", "string", "string"),
        ]
        assert first[0] == Row(_1=key[0], _2=key[1])
        assert first[1].astimezone(UTC) == NOON
        assert (first[2], second[0][1], second[1]) == (Decimal("-1.2500"), Decimal("2.00"), None)
        moment = str(trio.run(now, store))
        wanted = COLUMNS.replace("decimal(20,3)", "decimal(24,4)")
        for how in ("files", "pages", "rows"):
            assert read(spark, "days", wanted, ts=moment, read=how) == frame.orderBy("key").collect()
        assert [row.tree for row in read(spark, "days", ts=moment)] == [json.dumps(found[2]), None]
        with pytest.raises(PySparkException, match=r"days\.tree of key .* does not fit .*'2026-03-01' is no int"):
            read(spark, "days", COLUMNS.split(", at")[0] + ", tree struct<on: int>", ts=moment)
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


async def now(store: perco.spark.Store) -> int:
    async with store.joining() as db, db.snapshot() as snap:
        return snap.start_ts


def test_a_large_table_of_one_tablet_is_read_by_all_cores(spark: SparkSession, store: perco.spark.Store) -> None:
    rows = spark.range(55_000).selectExpr("id as key", "id as a", "-id as b")
    perco.spark.bulk_load({"numbers": rows}, store, partitions=1)
    frame = spark.read.format("perco").option("table", "numbers").load()
    parts = frame.rdd.glom().map(len).collect()
    assert sum(parts) == 55_000
    assert min(sorted(parts)[-2:]) > 25_000  # the tablet before that of the bulk load is empty


def test_days_and_moments_are_keys_and_a_bulk_load_takes_them(spark: SparkSession, store: perco.spark.Store) -> None:
    rows = [(date(2026, 3, n), f"day {n}", [{"n": n}]) for n in (3, 1, 2)]
    frame = spark.createDataFrame(rows, "key date, note string, seen array<map<string, int>>")
    counts = [(datetime(2026, 3, n, tzinfo=UTC), n) for n in (3, 1, 2)]
    times = spark.createDataFrame(counts, "key timestamp, count int")
    perco.spark.bulk_load({"dated": frame, "moments": times}, store)
    assert look(store, (seen, date(2026, 3, 2))) == [[{"n": 2}]]
    assert [row.note for row in read(spark, "dated", start="2026-03-02", stop="2026-03-03")] == ["day 2"]
    assert [row["count"] for row in read(spark, "moments", start="2026-03-02T01:00+01:00")] == [2, 3]
    with pytest.raises(PySparkException, match=r"start='today' is not a key of table 'dated': its keys are dates"):
        read(spark, "dated", start="today")
    for wrong, said in (
        ("cast('12026-03-01' as date) key", "outside the years 1 to 9999"),
        ("date'2026-03-01' key, array(map('a', cast('nan' as double))) seen", "not JSON compliant"),
    ):
        with pytest.raises(PySparkException, match=f"a row of table 'dated' cannot be written, .*{said}"):
            spark.sql(f"select {wrong}").write.format("perco").option("table", "dated").mode("append").save()


INSIDE = [
    (StringType(), "ä"),
    (BooleanType(), True),
    (IntegerType(), -(1 << 31)),
    (LongType(), (1 << 63) - 1),
    (DoubleType(), 0.5),
    (DecimalType(5, 2), Decimal("-123.45")),
    (DateType(), date(1, 1, 1)),
    (TimestampType(), NOON),
    (TimestampNTZType(), datetime(2026, 3, 1, 12)),
    (BinaryType(), b"\x00\xff"),
]


@pytest.mark.parametrize("binary", [True, False])
def test_what_is_written_as_json_is_read_as_it_was(binary: bool) -> None:
    flat = StructType([StructField(f"f{n}", type) for n, (type, _) in enumerate(INSIDE)])
    whole = StructType([StructField("flat", flat), StructField("m", MapType(StringType(), ArrayType(flat)))])
    row = {f"f{n}": value for n, (_, value) in enumerate(INSIDE)}
    value = {"flat": row, "m": [("b", [row, None]), ("a", None)]}
    there = trees.writing(whole, binary=binary)(value)
    assert list(there["m"]) == ["a", "b"]
    codec = perco.MSGPACK if binary else perco.JSON
    assert trees.reading(whole)(codec.decode(codec.encode(there))) == value | {"m": [("a", None), ("b", [row, None])]}
    assert trees.problem(whole) is None


@pytest.mark.parametrize(
    ("type", "value"),
    [
        (BooleanType(), 1),
        (IntegerType(), 1 << 31),
        (IntegerType(), 1.0),
        (IntegerType(), True),
        (DoubleType(), "1"),
        (DecimalType(5, 2), "1.234"),
        (DecimalType(5, 2), "much"),
        (DecimalType(5, 2), None),
        (DateType(), "today"),
        (TimestampType(), "2026-03-01T12:00"),
        (TimestampNTZType(), "2026-03-01T12:00Z"),
        (BinaryType(), "?"),
        (StructType(), []),
        (MapType(StringType(), LongType()), []),
        (ArrayType(LongType()), "12"),
    ],
)
def test_json_of_another_kind_is_refused(type: DataType, value: Any) -> None:
    with pytest.raises(ValueError, match=r"is no|Invalid|more than|base64|digit"):
        trees.reading(ArrayType(type, containsNull=False))([value])


def test_a_type_that_does_not_fit_is_refused_with_what_to_do() -> None:
    array, two = ArrayType(StringType()), StructType([StructField("a", LongType()), StructField("a", LongType())])
    for codec, given, said in (
        (perco.TEXT, array, r"takes string, and the frame has array<string>; use to_json, or a column of perco.JSON"),
        (perco.TEXT, DateType(), r"has date; cast it before writing, or declare the column as perco.DATE"),
        (perco.INT64, DecimalType(9, 2), r"or declare the column as perco.DECIMAL\(9, 2\)"),
        (perco.TIMESTAMP, TimestampNTZType(), r"takes timestamp, and the frame has timestamp_ntz; cast it"),
        (perco.DECIMAL(9, 2), DecimalType(9, 3), r"takes decimal\(9,2\), and the frame has decimal\(9,3\); cast it"),
        (perco.DECIMAL(9, 2), DecimalType(9, 1), r"takes decimal\(9,2\)"),
        (perco.JSON, LongType(), r"has bigint; it takes a string of JSON, a struct, an array or a map"),
        (perco.JSON, two, r"two fields of one name"),
        (perco.MSGPACK, ArrayType(MapType(LongType(), LongType())), r"keys that are not strings; cast them"),
        (perco.JSON, ArrayType(CalendarIntervalType()), r"interval is not known"),
    ):
        with pytest.raises(SchemaMismatch, match=said):
            types.must_write("t.c", codec, given)
    for wanted, said in ((LongType(), "it has JSON: string, struct, array or map"), (two, "two fields of one name")):
        with pytest.raises(SchemaMismatch, match=said):
            types.must_read("t.c", perco.JSON, wanted)
    types.must_write("t.c", perco.DECIMAL(9, 2), DecimalType(8, 1))
    nullable = StructType([StructField("_1", StringType()), StructField("_2", LongType())])
    with pytest.raises(
        SchemaMismatch, match=r"t\.key is struct<_1:string,_2:bigint>, .*declare its fields as NOT NULL"
    ):
        types.must_read("t.key", perco.Tuple(perco.TEXT, perco.INT64), nullable)
