"""`load` through a Spark: what comes again, what dies half way, what fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from pyspark import RDD
from pyspark.sql import DataFrame, SparkSession, functions as F

import perco
import perco.spark
from perco.check.check import check
from perco.database.inside import inside
from perco.errors import UsageError
from perco.spark.ledger import LEDGER, jobs
from perco.spark.store import mounts
from tests.spark import app

QUICK = perco.Options(durability="process")


def totals(folder: Path) -> dict[str, int]:
    """How often each name has been counted; nothing is left to repair."""

    async def main() -> dict[str, int]:
        async with perco.open(folder, app.schema) as db, db.snapshot() as snap:
            found = {row.key: row.get(app.count, 0) async for row in snap.scan(app.counts)}
            result = await check(inside(db).driver.store, ts=inside(db).oracle.last)
            assert result.clean, result.findings
            return found

    return trio.run(main)


def open_jobs(folder: Path) -> dict[str, bool]:
    async def main() -> dict[str, bool]:
        async with perco.open(folder, perco.Schema(LEDGER)) as db:
            return await jobs(db)

    return trio.run(main)


def frame(spark: SparkSession, count: int, *, names: int = 5, die: Callable[[int], str] = lambda n: "") -> DataFrame:
    rows = [(n, f"n{n % names}", die(n)) for n in range(count)]
    return spark.createDataFrame(rows, "id long, name string, die string").repartition(4).cache()


def test_a_process_that_sees_the_folder_of_a_store_uses_its_socket(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with perco.spark.serve(tmp_path / "s", spark) as served:
        address = "tls://driver.example:1"
        beside = replace(served, url=address, folder=str(tmp_path / "s"), mounts=mounts())
        assert beside.at() == f"unix:{tmp_path}/s/socket"
        assert trio.run(_asked, beside)
        for other in (
            replace(beside, mounts=""),
            replace(beside, mounts=mounts() + "1"),
            replace(beside, folder=""),
            replace(beside, folder=str(tmp_path)),
        ):
            assert other.at() == address
        assert served.at() == served.url

        def of_another_user(path: Path) -> bool:
            raise PermissionError(path)

        monkeypatch.setattr(Path, "is_socket", of_another_user)
        assert beside.at() == address


async def _asked(store: perco.spark.Store) -> bool:
    async with store.joining() as db:
        return await db.watermark() >= 0


def test_every_row_takes_effect_and_is_counted(spark: SparkSession, tmp_path: Path) -> None:
    loaded = perco.spark.load(frame(spark, 500), tmp_path / "s", app.bump, schema=app.schema, key="id")
    assert (loaded.committed, loaded.skipped, loaded.failed) == (500, 0, 0)
    assert totals(tmp_path / "s") == {f"n{n}": 100 for n in range(5)}
    assert open_jobs(tmp_path / "s") == {}  # it had no name, so nobody can go on with it
    rows = loaded.dataframe.collect()
    assert sum(row.committed for row in rows) == 500
    assert [row.partition for row in rows] == [0, 1, 2, 3]
    assert str(loaded).endswith("500 committed, 0 skipped (loaded before), 0 failed")


def test_a_named_job_goes_on_where_it_ended_until_it_is_acknowledged(spark: SparkSession, tmp_path: Path) -> None:
    store = tmp_path / "s"
    with perco.spark.serve(store, spark) as served:
        for rows, committed, skipped in ((200, 200, 0), (300, 100, 200)):
            loaded = perco.spark.load(
                frame(spark, rows), served, "tests.spark.app:bump", schema=app.schema, key=lambda row: row.id, job="j"
            )
            assert (loaded.committed, loaded.skipped) == (committed, skipped)
        assert perco.spark.acknowledge(served, "j", spark) == 300
        loaded = perco.spark.load(frame(spark, 10), served, app.bump, key="id", job="j")
        assert loaded.committed == 10
    assert sum(totals(store).values()) == 310
    assert open_jobs(store) == {"j": True}


def test_spark_shows_which_job_is_loaded(spark: SparkSession, tmp_path: Path) -> None:
    context = spark.sparkContext
    seen: list[str | None] = []
    rdd = spark.sparkContext.parallelize([{"id": 1, "name": "a"}], 1)
    collect = type(rdd).collect

    def noted(self: Any) -> Any:
        seen.append(context.getLocalProperty("spark.job.description"))
        return collect(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RDD, "collect", noted)
        perco.spark.load(rdd, tmp_path / "s", app.bump, schema=app.schema, key="id", job="monday")
        context.setLocalProperty("spark.job.description", "mine")
        perco.spark.load(rdd, tmp_path / "s", app.bump, key="id", job="tuesday")
    assert seen == ["perco.spark.load: job 'monday'", "mine"]
    assert context.getLocalProperty("spark.job.description") == "mine"
    context.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]
    assert perco.spark.load(rdd, tmp_path / "s", app.bump, key="id", job="friday").committed == 1
    assert context.getLocalProperty("spark.job.description") is None


def test_marks_beside_what_is_loaded(spark: SparkSession, tmp_path: Path) -> None:
    pages = spark.createDataFrame([(f"k{n:06}", f"body {n}") for n in range(300)], "url string, body string")
    given: dict[str, Any] = {"schema": app.schema, "key": "url", "beside": app.pages, "job": "j"}
    for committed in (300, 0):
        assert perco.spark.load(pages, tmp_path / "s", app.load, **given).committed == committed
    assert perco.spark.acknowledge(tmp_path / "s", "j", spark) == 300
    assert perco.spark.load(pages, tmp_path / "s", app.load, **given).committed == 300
    with pytest.raises(UsageError, match="needs key="):
        perco.spark.load(pages, tmp_path / "s", app.load, schema=app.schema, beside=app.pages)
    with pytest.raises(perco.spark.LoadFailed, match="TypeError"):  # no key of that table
        perco.spark.load(pages, tmp_path / "s", app.load, schema=app.schema, key=lambda row: 5, beside=app.pages)


def test_of_equal_rows_each_counts_wherever_they_lie_and_again_none(spark: SparkSession, tmp_path: Path) -> None:
    rows = [("a", 1), ("b", 2), ("a", 1), ("a", 1), ("b", 3)] * 8
    for split in (1, 4):  # other partitions, another order
        data = spark.createDataFrame(rows, "name string, n long").repartition(split)
        loaded = perco.spark.load(data, tmp_path / "s", app.bump, schema=app.schema, job="j")
        assert loaded.committed == (40 if split == 1 else 0)
        rows.reverse()
    assert totals(tmp_path / "s") == {"a": 24, "b": 16}


def test_an_rdd_of_dicts(spark: SparkSession, tmp_path: Path) -> None:
    rdd = spark.sparkContext.parallelize([{"name": "a"}, {"name": "b"}, {"name": "a"}], 2)
    assert perco.spark.load(rdd, tmp_path / "s", app.bump, schema=app.schema).committed == 3
    assert totals(tmp_path / "s") == {"a": 2, "b": 1}


def test_a_python_worker_that_is_killed_half_way(spark: SparkSession, tmp_path: Path) -> None:
    rows = frame(spark, 800, die=lambda n: str(tmp_path / f"died-{n}") if n == 420 else "")
    few = perco.spark.LoadOptions(concurrency=2, group=10)  # most groups before it commit
    loaded = perco.spark.load(rows, tmp_path / "s", app.die_once, schema=app.schema, key="id", options=few)
    assert {path.name for path in tmp_path.glob("died-*")} == {"died-420"}
    assert loaded.committed + loaded.skipped == 800
    assert loaded.skipped  # by the ledger: they had committed before their worker died
    assert max(part.attempt for part in loaded.partitions) >= 1
    assert totals(tmp_path / "s") == {f"n{n}": 160 for n in range(5)}


def test_a_task_that_dies_after_its_transactions_committed(spark: SparkSession, tmp_path: Path) -> None:
    """Spark never knew: all of the partition comes again."""

    def die(partition: int, rows: Any) -> Any:
        yield from rows
        marker = tmp_path / f"died-{partition}"
        if not marker.exists():
            marker.touch()
            raise OSError("the end of the input was bad, once")

    rdd = frame(spark, 1200).rdd.mapPartitionsWithIndex(die)
    few = perco.spark.LoadOptions(concurrency=4, group=10)
    loaded = perco.spark.load(rdd, tmp_path / "s", app.bump, schema=app.schema, key="id", options=few)
    assert len(list(tmp_path.glob("died-*"))) == 4
    assert loaded.committed + loaded.skipped == 1200
    assert loaded.skipped > 400
    assert totals(tmp_path / "s") == {f"n{n}": 240 for n in range(5)}


def test_rows_that_fail_are_told_with_their_reason_and_mended_later(spark: SparkSession, tmp_path: Path) -> None:
    store = tmp_path / "s"
    with pytest.raises(
        perco.spark.LoadFailed, match=r"ValueError: \d+ is not to be had, in row Row\(id=.*job='j'"
    ) as raised:
        perco.spark.load(frame(spark, 100), store, app.refuse, schema=app.schema, key="id", job="j")
    assert raised.value.loaded.failed >= 1
    options = perco.spark.LoadOptions(failures_max=10)
    loaded = perco.spark.load(frame(spark, 100), store, app.refuse, key="id", job="j", options=options)
    assert loaded.failed == 10
    assert {failure.reason for failure in loaded.failures} == {
        f"ValueError: {n} is not to be had" for n in range(3, 100, 10)
    }
    loaded = perco.spark.load(frame(spark, 100), store, app.bump, key="id", job="j")
    assert (loaded.committed, loaded.skipped) == (10, 90)


def test_bad_arguments_are_told_before_anything_runs(spark: SparkSession, tmp_path: Path) -> None:
    data = frame(spark, 1)

    def load(*args: Any, **more: Any) -> None:
        perco.spark.load(*args, **{"schema": app.schema, "key": "id", **more})

    for rows, store, loader, said in (
        ([1], tmp_path / "s", app.bump, "takes a DataFrame or an RDD, not list"),
        (data, tmp_path / "s", app.not_async, "`async def` function"),
        (data, tmp_path / "s", "tests.spark.app:nope", "no attribute 'nope'"),
        (data, tmp_path / "s", "nowhere:x", "no module 'nowhere'"),
        (data, tmp_path / "s", "x", "write MODULE:NAME"),
        (data, "memory:", app.bump, "in memory"),
        (data, 5, app.bump, "takes a folder"),
    ):
        with pytest.raises(UsageError, match=said):
            load(rows, store, loader)
    with pytest.raises(UsageError, match="job= is a name"):
        load(data, tmp_path / "s", app.bump, job="")
    with pytest.raises(perco.Unavailable):
        load(data, f"unix:{tmp_path}/nobody", app.bump)


def test_arguments_of_a_wrong_kind(spark: SparkSession, tmp_path: Path) -> None:
    data = frame(spark, 1)
    own = perco.Codec("own", lambda text: text.encode(), lambda row: bytes(row).decode(), ordered=True)
    for given, said in (
        ({"options": {}}, "takes perco.spark.LoadOptions"),
        ({"schema": "app:schema"}, "takes a perco.Schema"),
        ({"key": 5}, "a column's name or a function"),
        ({"beside": perco.Table("own", key=own)}, "one of perco's own"),
    ):
        with pytest.raises(UsageError, match=said):
            perco.spark.load(data, tmp_path / "s", app.bump, **{"schema": app.schema, "key": "id", **given})


def test_a_job_that_spark_gives_up_says_how_to_go_on(spark: SparkSession, tmp_path: Path) -> None:
    def fail(rows: Any) -> Any:
        yield from rows
        raise OSError("the end of the input is bad")

    rdd = frame(spark, 100).rdd.mapPartitions(fail)
    with pytest.raises(perco.spark.TaskFailed, match=r"^OSError: the end of the input is bad") as raised:
        perco.spark.load(rdd, tmp_path / "s", app.bump, schema=app.schema, key="id")
    [note] = raised.value.__notes__
    [job] = perco.spark.jobs(tmp_path / "s", spark)
    assert job in note


def test_a_key_that_is_missing_fails_its_row(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(perco.spark.LoadFailed, match="no column 'uri'"):
        perco.spark.load(frame(spark, 3), tmp_path / "s", app.bump, schema=app.schema, key="uri")


def test_a_store_that_another_process_has_open_is_loaded_through_it(spark: SparkSession, tmp_path: Path) -> None:
    with perco.spark.serve(tmp_path / "s", spark), perco.spark.serve(tmp_path / "s", spark) as second:
        assert perco.spark.load(frame(spark, 20), second, app.bump, schema=app.schema, key="id").committed == 20
    assert sum(totals(tmp_path / "s").values()) == 20


def test_a_table_that_the_store_does_not_have(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(perco.spark.LoadFailed, match=r"SchemaMismatch: .*not in the schema"):
        perco.spark.load(frame(spark, 3), tmp_path / "s", app.bump, key="id")


@pytest.mark.parametrize("key", ["name", lambda row: row.name])
def test_a_key_that_several_rows_have_is_an_error_that_names_it(
    spark: SparkSession, tmp_path: Path, key: str | Callable[[Any], Any]
) -> None:
    with pytest.raises(
        perco.spark.KeyNotUnique, match=r"10 rows have the key 'n[01]'.*dropDuplicates.*job='j'"
    ) as told:
        perco.spark.load(frame(spark, 20, names=2), tmp_path / "s", app.bump, schema=app.schema, key=key, job="j")
    assert (told.value.loaded.committed, told.value.loaded.skipped) == (2, 18)
    assert totals(tmp_path / "s") == {"n0": 1, "n1": 1}
    one_of_each = frame(spark, 20, names=2).dropDuplicates(["name"])
    again = perco.spark.load(one_of_each, tmp_path / "s", app.bump, schema=app.schema, key=key, job="j")
    assert (again.committed, again.skipped) == (0, 2)


def test_a_key_of_the_table_beside_is_compared_as_it_is_stored(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.createDataFrame([("a", 1), ("a", 2)], "name string, n long")
    with pytest.raises(perco.spark.KeyNotUnique, match="2 rows have the key 'a'"):
        perco.spark.load(rows, tmp_path / "s", app.bump, schema=app.schema, key="name", beside=app.counts)


def test_rows_without_a_key_beside_rows_that_share_one(spark: SparkSession, tmp_path: Path) -> None:
    """Those that have failed are not compared."""
    rows = spark.createDataFrame([(None, "a"), (None, "a"), (1, "b"), (1, "c")], "id long, name string")
    options = perco.spark.LoadOptions(failures_max=2)
    with pytest.raises(perco.spark.KeyNotUnique, match="2 rows have the key 1,"):
        perco.spark.load(rows, tmp_path / "s", app.bump, schema=app.schema, key="id", options=options)


def test_executors_that_do_not_reach_the_store_say_what_to_do(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a path that begins here: Spark's processes have been begun elsewhere."""
    said = (
        r"the executor on .* does not reach the store at unix:s/socket \(.*\)\. If the driver .* serve\(host=\.\.\.\)"
    )
    with perco.spark.serve(tmp_path / "s", spark) as served:
        monkeypatch.chdir(tmp_path)
        there = perco.spark.Store(url="unix:s/socket")
        with pytest.raises(perco.spark.TaskFailed, match=f"^Unavailable: {said}") as raised:
            perco.spark.load(frame(spark, 20).coalesce(1), there, app.bump, schema=app.schema, key="id", job="j")
        assert "load the rest with job='j'" in raised.value.__notes__[0]
        with pytest.raises(perco.spark.TaskFailed, match=f"^Unavailable: {said}"):
            perco.spark.drain(spark, there, "tests.spark.app:schema", workers=1)
        loaded = perco.spark.load(frame(spark, 20), served, app.bump, key="id", job="j")
        assert (loaded.committed, loaded.skipped) == (20, 0)


def files(spark: SparkSession, path: Path, count: int, *, die: Callable[[int], str] = lambda n: "") -> DataFrame:
    """Two files, each of which Spark reads in a partition of its own."""
    frame(spark, count, die=die).repartitionByRange(2, "id").sortWithinPartitions("id").write.parquet(str(path))
    return spark.read.parquet(str(path))


def test_chunks_of_files_are_loaded_once_though_a_worker_and_a_call_die(spark: SparkSession, tmp_path: Path) -> None:
    rows = files(spark, tmp_path / "rows", 2000, die=lambda n: str(tmp_path / f"died-{n}") if n in (540, 1640) else "")
    assert rows.rdd.getNumPartitions() == 2
    few = perco.spark.LoadOptions(concurrency=2, group=30)
    given: dict[str, Any] = {"schema": app.schema, "chunks": True, "job": "j", "options": few}
    with perco.spark.serve(tmp_path / "s", spark) as store:
        with pytest.raises(perco.spark.LoadFailed, match=r"Change the loader, but not the frame .* job='j'") as failed:
            perco.spark.load(rows, store, app.refuse_high, **given)
        before = failed.value.loaded.committed
        assert before > 0
        loaded = perco.spark.load(rows, store, app.die_once, **given)
        assert {path.name for path in tmp_path.glob("died-*")} == {"died-540", "died-1640"}
        assert (loaded.committed + loaded.skipped, loaded.failed) == (2000, 0)
        assert loaded.skipped >= before
        assert max(part.attempt for part in loaded.partitions) >= 1
        again = perco.spark.load(rows, store, app.bump, **given)
        assert (again.committed, again.skipped) == (0, 2000)
        with pytest.raises(
            UsageError, match=r"'j' was begun with .* 30 rows a chunk; this call has .* 100 rows a chunk"
        ):
            perco.spark.load(rows, store, app.bump, schema=app.schema, chunks=True, job="j")
        with pytest.raises(UsageError, match=r"was begun with chunks=True and 2 partitions .* has .* 1 partitions"):
            perco.spark.load(rows.coalesce(1), store, app.bump, **given)
        files(spark, tmp_path / "others", 2000)
        with pytest.raises(UsageError, match=r"2 partitions \(files .* 2 partitions \(files"):  # which are other files
            perco.spark.load(spark.read.parquet(str(tmp_path / "others")), store, app.bump, **given)
        assert perco.spark.acknowledge(store, "j", spark) == 2000
    assert totals(tmp_path / "s") == {f"n{n}": 400 for n in range(5)}


def test_chunks_of_a_frame_that_changes(spark: SparkSession, tmp_path: Path) -> None:
    """Spark takes the function for one that gives the same values."""
    changes = tmp_path / "changes"
    renamed = F.udf(lambda n: f"n{n}" + "x" * (n == 150 and changes.exists()))
    rows = files(spark, tmp_path / "rows", 200).coalesce(1).select("id", renamed("id").alias("name"))
    given: dict[str, Any] = {"schema": app.schema, "chunks": True, "job": "j"}
    assert perco.spark.load(rows, tmp_path / "s", app.bump, **given).committed == 200
    changes.touch()
    with pytest.raises(
        perco.spark.FrameChanged, match=r"^partition 0 has other rows than before, in its first 200"
    ) as told:
        perco.spark.load(rows, tmp_path / "s", app.bump, **given)
    assert not any("load the rest" in note for note in getattr(told.value, "__notes__", ()))
    assert sum(totals(tmp_path / "s").values()) == 200


def test_chunks_of_rows_that_arrow_cannot_carry(spark: SparkSession, tmp_path: Path) -> None:
    rows = files(spark, tmp_path / "rows", 300).selectExpr("id", "name", "make_dt_interval(id) as age")
    for committed in (300, 0):
        loaded = perco.spark.load(rows, tmp_path / "s", app.bump, schema=app.schema, chunks=True, job="j")
        assert (loaded.committed, loaded.skipped) == (committed, 300 - committed)


def test_frames_that_have_no_chunks_are_refused_before_anything_runs(spark: SparkSession, tmp_path: Path) -> None:
    rows = files(spark, tmp_path / "rows", 100)
    context = spark.sparkContext
    context.setJobGroup("refused", "")
    for refused, more, said in (
        (rows.repartition(3), {}, "not hold this of a frame that it shuffles"),
        (rows.groupBy("name").count(), {}, "write the frame to files"),
        (rows.rdd, {}, "an RDD may run any function"),
        (rows, {"key": "id"}, "give one of them"),
        (rows, {"chunks": 100}, "chunks= is True or False"),
    ):
        given: Any = {"schema": app.schema, "chunks": True, **more}
        with pytest.raises(UsageError, match=said):
            perco.spark.load(refused, tmp_path / "s", app.bump, **given)
    assert list(context.statusTracker().getJobIdsForGroup("refused")) == []
    context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give key= instead"):  # the shuffle is not in the plan of this frame
        perco.spark.load(frame(spark, 10), tmp_path / "s", app.bump, schema=app.schema, chunks=True)
    assert not (tmp_path / "s").exists()
