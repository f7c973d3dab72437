"""Rows made from Arrow batches: equal to those of `DataFrame.rdd`, and so are the keys made from them."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

from perco.spark.arrow import Batches, can_be_arrow, over_arrow
from perco.spark.keys import key_of

ROWS = """
select * from values
  (1, 'ä', timestamp'2024-03-31 01:30:00.123456', date'1969-12-31', timestamp_ntz'2024-10-27 02:30:00', 1.5f, 2.25d,
   cast(12.340 as decimal(12, 3)), x'00ff', true, 5Y, 6S, 7L, map('a', 1, 'b', null), array(1, null),
   named_struct('x', 1, 'at', timestamp'1950-01-01 00:00:00', 'y', array(named_struct('z', 'q')))),
  (null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null),
  (3, '', timestamp'2024-10-27 01:30:00', date'2500-01-01', timestamp_ntz'0500-01-01 00:00:00', float('nan'),
   double('-infinity'), cast(0 as decimal(12, 3)), x'', false, -5Y, -6S, -7L, map(), array(),
   named_struct('x', null, 'at', null, 'y', array(null)))
  as t(i, s, t, d, n, f, g, e, b, o, y, h, l, m, a, r)
"""


def collected(frame: Any) -> list[Any]:
    def task(partition: int, batches: Batches) -> list[Any]:
        return [row for group in batches.groups(2, 1 << 20) for row in group]

    run = over_arrow(frame, task)
    assert run is not None
    return run()


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/St_Johns"])
def test_rows_are_those_of_an_rdd(spark: SparkSession, zone: str) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        frame = spark.sql(ROWS).coalesce(1)
        wanted, found = frame.rdd.collect(), collected(frame)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert repr(found) == repr(wanted)  # NaN, too
    assert [key_of(row) for row in found] == [key_of(row) for row in wanted]
    assert [row.asDict(recursive=True).keys() for row in found] == [row.asDict(recursive=True).keys() for row in wanted]
    assert found[0].r.y[0].z == "q"
    assert found[0]["s"] == "ä"


@pytest.mark.parametrize(
    "sql",
    [
        "select 1 as a, 2 as a",
        "select named_struct('a', 1, 'a', 2) as s",
        "select interval 1 day as i",
        "select parse_json('1') as v",
        "select null as n",
    ],
)
def test_what_arrow_cannot_carry_is_read_as_rows(spark: SparkSession, sql: str) -> None:
    frame = spark.sql(sql)
    assert not can_be_arrow(frame.schema)
    assert over_arrow(frame, lambda partition, batches: []) is None
    assert over_arrow(frame.rdd, lambda partition, batches: []) is None


def test_groups_are_small_and_sorted(spark: SparkSession) -> None:
    """Long rows: Spark makes several batches of them, and each has several groups. The session's setting stays."""
    setting = "spark.sql.execution.arrow.maxBytesPerBatch"

    def task(partition: int, batches: Batches) -> list[list[int]]:
        groups = batches.groups(100, 1 << 20, "key")
        return [[len(group), sum(len(row.body) for row in group), group[0].key, group[-1].key] for group in groups]

    frame = spark.range(200, numPartitions=1).selectExpr("(id * 77) % 200 as key", "repeat('x', 200000) as body")
    run = over_arrow(frame, task)
    assert run is not None
    groups = run()
    assert sum(count for count, *_ in groups) == 200
    assert max(size for _, size, *_ in groups) <= 1 << 20
    assert all(first <= last for *_, first, last in groups)
    falls = [one for one, other in itertools.pairwise(groups) if one[3] > other[2]]
    assert 0 < len(falls) < 5  # where a batch ends
    assert spark.conf.get(setting, None) is None


@pytest.mark.parametrize(("rows", "size", "counts"), [(1, 1 << 20, {1}), (7, 1 << 20, {7, 5, 3}), (7, 40, {2, 1})])
def test_groups_of_several_batches(rows: int, size: int, counts: set[int]) -> None:
    schema = StructType([StructField("body", StringType()), StructField("key", LongType())])
    made = [
        pa.record_batch({"body": [f"b{key}" for key in keys], "key": keys})
        for keys in ([(id * 77) % 250 for id in range(250)], [2, 3, 1], [*range(10, 0, -1)])
    ]
    groups = [*Batches(schema, iter(made)).groups(rows, size, "key")]
    keys = [row.key for group in groups for row in group]
    assert keys == [*range(250), 1, 2, 3, *range(1, 11)]
    assert all(row.body == f"b{row.key}" for group in groups for row in group)
    assert {len(group) for group in groups} == counts


def test_a_column_without_an_order_is_not_sorted_by(spark: SparkSession) -> None:
    frame = spark.range(5, numPartitions=1).selectExpr("array(5 - id) as key")
    run = over_arrow(
        frame, lambda partition, batches: [row.key for g in batches.groups(9, 1 << 20, "key") for row in g]
    )
    assert run is not None
    assert run() == [[5 - n] for n in range(5)]
