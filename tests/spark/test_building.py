"""Spark builds the tables of views, observers keep them, and nobody can tell which of them made a row."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio
from pyspark.sql import SparkSession

import perco
import perco.spark
from perco import views
from perco.check.check import check
from perco.database.inside import inside
from perco.errors import UsageError
from perco.schema.catalogue import load, schema_of
from perco.spark import building, stages
from perco.views.memory import Memory
from tests.spark import view_app as app

SOURCES = perco.Schema(app.docs, app.people, app.cities)  # of a program that does not know of the views
NAME = "tests.spark.view_app:v"
OPTIONS = perco.Options(durability="process")
WORDS = ["alpha", "beta", "gamma", "delta", "rare1", "rare2", "rare3", "rare4"]
Change = tuple[perco.Column[Any, Any], Any, Any]


def changes(seed: int, count: int) -> list[Change]:
    """Random values, and deletes."""
    rng = random.Random(seed)
    out: list[Change] = []
    for _ in range(count):
        key = f"doc {rng.randrange(40)}"
        who = f"person {rng.randrange(6)}"
        text = " ".join(rng.choices(WORDS, k=rng.randrange(6)))
        out.append(
            rng.choice(
                [
                    (app.body, key, text),
                    (app.body, key, text),
                    (app.author, key, who),
                    (app.author, key, None),
                    (app.body, key, None),
                    (app.name, who, f"Name {rng.randrange(9)}"),
                    (app.name, who, None),
                    (app.city, (who, rng.randrange(3)), f"city {rng.randrange(5)}"),
                ]
            )
        )
    return out


async def make(txn: perco.Transaction, made: list[Change]) -> None:
    for column, key, value in made:
        if value is None:
            txn.delete(column, key)
        else:
            txn.set(column, key, value)


def write(folder: Path, made: list[Change], *, schema: perco.Schema = SOURCES, work: bool = False) -> None:
    async def main() -> None:
        async with perco.open(folder, schema, options=OPTIONS) as db:
            await db.run(make, made)
            if work:
                async with db.worker():
                    await db.wait_idle(timeout=120)

    trio.run(main)


def everything(folder: Path) -> dict[str, dict[Any, dict[str, Any]]]:
    """All that the store has, hidden columns too; but not how far runs have seen, nor what is still to be folded."""

    async def main() -> dict[str, dict[Any, dict[str, Any]]]:
        async with perco.open(folder, app.v.schema, options=OPTIONS) as db:
            found: dict[str, dict[Any, dict[str, Any]]] = {}
            whole = schema_of(await load(inside(db).store))
            async with db.snapshot() as snap:
                for name, mine in app.v.schema.tables.items():
                    if name.endswith(".deltas"):
                        continue
                    rows = found[name] = {}
                    for column in [*mine.columns.values(), *mine.hidden.values()]:
                        async for row in snap.scan(mine, columns=[column]):
                            value = row[column]
                            if column.name.startswith("_view"):
                                memory = Memory.unpack(value)
                                if not memory.rows:
                                    continue
                                memory.seen_ts = 0
                                value = sorted(memory.rows.items()), memory.version, memory.columns
                            rows.setdefault(row.key, {})[column.name] = value
            assert set(whole.tables) >= set(found)
            await must_be_right(db)
            return {name: rows for name, rows in found.items() if rows}

    return trio.run(main)


async def must_be_right(db: perco.Database) -> None:
    async with db.snapshot() as snap:
        checked = await views.check(app.v, snap)
        assert checked.equal, checked
    found = await check(inside(db).driver.store, ts=await inside(db).oracle.draw())
    assert not [each for each in found.findings if each.severity != "note"]


def work(folder: Path) -> int:
    """Run the observers until nothing waits; returns how many runs it took."""

    async def main() -> int:
        async with perco.open(folder, app.v.schema, options=OPTIONS) as db, db.worker() as worker:
            await db.wait_idle(timeout=120)
            return sum(each.commits for each in worker.statistics().values())

    return trio.run(main)


def test_what_spark_builds_is_what_observers_make(spark: SparkSession, tmp_path: Path) -> None:  # V1 V7 P7
    made = changes(1, 300)
    write(tmp_path / "s", made)
    built = perco.spark.build(NAME, spark, tmp_path / "s", partitions=3)
    assert built.rows["postings"] > 30
    assert built.written >= 30  # memories of documents
    assert not built.rebuilt
    assert work(tmp_path / "s") == 0
    write(tmp_path / "by observers", made, schema=app.v.schema, work=True)
    by_spark, by_observers = everything(tmp_path / "s"), everything(tmp_path / "by observers")
    assert by_spark.keys() == by_observers.keys()
    for name, rows in by_observers.items():
        assert by_spark[name] == rows, name
    for seed in range(2, 5):  # and changes afterwards are incremental
        more = changes(seed, 30)
        write(tmp_path / "s", more, schema=app.v.schema, work=True)
        write(tmp_path / "by observers", more, schema=app.v.schema, work=True)
        by_spark, by_observers = everything(tmp_path / "s"), everything(tmp_path / "by observers")
        for name, rows in by_observers.items():
            if not name.startswith("totals.groups"):  # the ends of orders that are kept may be longer
                assert by_spark[name] == rows, name
    with pytest.raises(UsageError, match="has derived rows already"):
        perco.spark.build(NAME, spark, tmp_path / "s")
    write(tmp_path / "s", changes(9, 30), schema=app.v.schema, work=True)  # the observers run again
    everything(tmp_path / "s")


# ------------------------------------------------------------ a smaller program

SMALL = "tests.spark.view_app:small"
TEXTS = perco.Schema(app.texts)


def texts(seed: int, count: int = 30) -> dict[str, str | None]:
    rng = random.Random(seed)
    return {
        f"text {rng.randrange(60)}": rng.choice([None, *[" ".join(rng.choices(WORDS, k=5)) for _ in range(4)]])
        for _ in range(count)
    }


async def put_texts(txn: perco.Transaction, made: dict[str, str | None]) -> None:
    await make(txn, [(app.text, key, value) for key, value in made.items()])


def write_texts(folder: Path, made: dict[str, str | None]) -> None:
    async def main() -> None:
        async with perco.open(folder, TEXTS, options=OPTIONS) as db:
            await db.run(put_texts, made)

    trio.run(main)


def small_is_right(folder: Path, *, resume: bool = False) -> tuple[int, int]:
    """After the observers have run: how many texts there are, and how many runs it took."""

    async def main() -> tuple[int, int]:
        async with perco.open(folder, app.small.schema, options=OPTIONS) as db:
            if resume:
                for id in await db.paused():
                    await db.resume(id)
            assert not await db.paused()
            async with db.worker() as worker:
                await db.wait_idle(timeout=120)
                runs = sum(each.commits for each in worker.statistics().values())
            async with db.snapshot() as snap:
                checked = await views.check(app.small, snap)
                assert checked.equal, checked
                rows = await snap.scan(app.texts).all()
            found = await check(inside(db).driver.store, ts=await inside(db).oracle.draw())
            assert not [each for each in found.findings if each.severity != "note"]
            return len(rows), runs

    return trio.run(main)


def test_changes_while_spark_builds(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for the observers, whenever they come (N10)."""
    folder = tmp_path / "s"
    write_texts(folder, texts(1))
    moments = 0

    async def change() -> None:
        nonlocal moments
        moments += 1
        async with perco.open(f"unix:{folder / 'socket'}", TEXTS) as db:
            await db.run(put_texts, texts(10 + moments, 5))

    published, forget = building.published, building._forget_waiting

    async def publish(*args: Any) -> Any:
        await change()  # the sources may have been read, or not
        write = args[2]

        def writing(load: Any) -> Any:
            trio.from_thread.run(change)
            files = write(load)
            trio.from_thread.run(change)
            return files

        done = await published(*args[:2], writing, *args[3:])
        await change()
        return done

    async def forgetting(*args: Any) -> None:
        await change()
        await forget(*args)

    monkeypatch.setattr(building, "published", publish)
    monkeypatch.setattr(building, "_forget_waiting", forgetting)
    built = perco.spark.build(app.small, spark, folder, partitions=2)  # found by its module's name
    assert moments >= 5
    assert built.rows["uses"] > 30
    count, runs = small_is_right(folder)
    assert count > 20
    assert 0 < runs < 5 * 5 * moments


def test_a_build_that_forgets_changes_made_meanwhile_is_found(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant of N10: the changes that wait are removed up to now, not up to the snapshot that the job has read."""
    folder, forget = tmp_path / "s", building._forget_waiting
    write_texts(folder, texts(1))
    changed = False

    async def forgets_all(db: perco.Database, id: str, ts: int) -> None:
        nonlocal changed
        if not changed:
            changed = True
            async with perco.open(f"unix:{folder / 'socket'}", TEXTS) as other:
                await other.run(put_texts, {"text 0": "only here"})
        await forget(db, id, await inside(db).oracle.draw())

    monkeypatch.setattr(building, "_forget_waiting", forgets_all)
    perco.spark.build(app.small, spark, folder, partitions=2)
    with pytest.raises(AssertionError, match="key='only'"):
        small_is_right(folder)


@pytest.mark.parametrize("where", ["before", "after", "given up"])
def test_an_interrupted_build(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:  # N10
    folder = tmp_path / "s"
    write_texts(folder, texts(1))

    async def fails(*args: Any) -> None:
        raise RuntimeError("interrupted")

    monkeypatch.setattr(building, "_forget_waiting" if where == "after" else "published", fails)
    with pytest.raises(RuntimeError, match="interrupted"):
        perco.spark.build(SMALL, spark, folder, partitions=2)
    monkeypatch.undo()
    write_texts(folder, texts(2, 10))
    if where == "after":
        with pytest.raises(UsageError, match=r"call perco\.spark\.build again"):
            small_is_right(folder, resume=True)
    if where != "given up":
        built = perco.spark.build(SMALL, spark, folder, partitions=2)
        assert built.rebuilt == (where == "after")
        assert ("completed" in str(built)) == (where == "after")
    count, runs = small_is_right(folder, resume=where == "given up")
    assert count > 20
    if where != "after":  # a rebuild notifies, as any write does
        assert runs == 0 if where == "before" else runs > 20


def test_what_cannot_be_built(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to build"):
        perco.spark.build(views.Views(perco.Schema(app.texts)), spark, tmp_path / "s")
    with pytest.raises(UsageError, match="views of a program"):
        perco.spark.build("tests.spark.view_app:texts", spark, tmp_path / "s")


def test_two_owners_of_a_row(spark: SparkSession, tmp_path: Path) -> None:  # V5
    """Nothing has been published, and the error says which row it is."""
    write_texts(tmp_path / "s", {"a": "x y", "b": "y z"})
    with pytest.raises(Exception, match="a row has one owner"):
        perco.spark.build("tests.spark.view_app:clashing", spark, tmp_path / "s", partitions=2)

    async def main() -> None:
        async with perco.open(tmp_path / "s", app.clashing.schema) as db, db.snapshot() as snap:
            assert not await snap.scan(app.clashes).all()

    trio.run(main)


def test_near_duplicates_in_the_documents_own_table(spark: SparkSession, tmp_path: Path) -> None:  # V13
    """The labels are written beside the documents, in transactions."""
    folder = tmp_path / "s"
    made = [(app.words_of, f"paper {i}", " ".join(f"w{i % 4}{n}" for n in range(20 + i % 3))) for i in range(24)]
    plain = perco.Schema(app.papers)
    write(folder, made, schema=plain)
    built = perco.spark.build("tests.spark.view_app:alike", spark, folder, partitions=2)
    assert built.written >= 24

    async def labels(changed: list[Change]) -> dict[str, Any]:
        async with perco.open(folder, app.alike.schema, options=OPTIONS) as db, db.worker():
            await db.run(make, changed)
            await db.wait_idle(timeout=120)
            async with db.snapshot() as snap:
                checked = await views.check(app.alike, snap)
                assert checked.equal, checked
                return {row.key: row[app.cluster] async for row in snap.scan(app.papers, columns=[app.cluster])}

    first = trio.run(labels, [])
    assert len(first) == 24
    assert len(set(first.values())) == 4
    later = trio.run(labels, [(app.words_of, "paper 0", None), (app.words_of, "paper 1", "something else")])
    assert "paper 0" not in later.values()
    assert later["paper 1"] == "paper 1"
    assert len(set(later.values())) == 5


def test_what_a_task_of_an_ended_build_sends_has_no_effect(tmp_path: Path) -> None:  # N10
    async def main() -> None:
        async with perco.open(tmp_path / "s", app.small.schema, options=OPTIONS) as db:
            overlay = stages.Overlay(
                stages.Program("", perco.spark.Store(url=""), 1, {}, "gone", ("uses",)), {0: "uses"}
            )
            row = app.uses.row(("a", "b"))
            late = [(0, row, stages.packed([("times", app.times.codec.encode(7))]))]
            with pytest.raises(UsageError, match="this build of views has ended"):
                await db.run(overlay._put, db, late)
            async with db.snapshot() as snap:
                assert await snap.get(app.times, ("a", "b")) is None

    trio.run(main)
