"""A row's causes, and what else followed from them, as a tree."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
import trio
from rich.console import Console

import perco
from perco.check.check import check
from perco.cli.tracing import drawn, show
from perco.database.inside import inside
from perco.notify import tracing as module
from perco.notify.tracing import Traced, trace
from perco.storage import ScanRequest
from tests.component.notify.kit import OPTIONS, ByHand, Web, client, memory, put, settle, until
from tests.support.places import local_of

Change = perco.Change[Any, Any]


def tree(web: Web) -> None:
    """body -> size and count; size -> note, in another row."""

    @web.observe(web.body, id="measure")
    async def measure(txn: perco.Transaction, change: Change) -> None:
        if change.attempt == 1 and change.key == "b":
            raise ZeroDivisionError
        txn.set(web.size, change.key, len(change.value))
        txn.set(web.count, f"of {change.key}", 1)

    @web.observe(web.size, id="tell")
    async def tell(txn: perco.Transaction, change: Change) -> None:
        txn.set(web.note, "z" + change.key, str(change.value))


def told(traced: Traced) -> Any:
    """Who, what they wrote, what followed."""
    writes = [f"{table}/{key}/{column}" for table, key, column in traced.writes]
    return traced.observer, writes, [told(run) for run in traced.runs]


@pytest.mark.parametrize("one_step", [True, False])
@pytest.mark.parametrize(("table", "key"), [("docs", "a"), ("docs", "za"), ("counts", "of a")])
async def test_wherever_one_asks_the_tree_is_the_same(web: Web, table: str, key: str, one_step: bool) -> None:  # N9
    tree(web)
    async with client(memory(), web.schema, one_step=one_step) as db, db.worker():
        commit_ts = await put(db, web.body, "a", "hello")
        await put(db, web.body, "q", "other")
        await settle(db)
        read: list[int] = []
        [found] = await trace(inside(db).engine, table, key.encode(), read.append)
        assert told(found) == (
            None,
            ["docs/a/body"],
            [("measure", ["docs/a/size", "counts/of a/count"], [("tell", ["docs/za/note"], [])])],
        )
        assert found.commit_ts == commit_ts
        [measured] = found.runs
        assert (measured.on, measured.depth, measured.attempts) == (("docs", "a", "body"), 1, 1)
        assert measured.runs[0].depth == 2
        wrote = {"a": measured, "za": measured.runs[0], "of a": measured}[key]
        assert wrote.asked
        assert read[-1] > 3


async def test_each_cause_of_a_row_has_a_tree(web: Web) -> None:
    tree(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        first = await put(db, web.body, "b", "hello")
        await settle(db)
        second = await put(db, web.note, "b", "by hand")
        assert [found.commit_ts for found in await trace(inside(db).engine, "docs", b"b")] == [second, first]
        assert (await trace(inside(db).engine, "docs", b"b"))[1].runs[0].attempts == 2
        assert await trace(inside(db).engine, "docs", b"nothing") == []


def chain(web: Web) -> Any:
    """body -> a signal -> a signal of another row -> size; size -> note. Returns the two signals."""
    noted, heard = web.docs.signal("noted"), web.counts.signal("heard")

    @web.observe(web.body, id="raise")
    async def raise_(txn: perco.Transaction, change: Change) -> None:
        txn.signal(noted, change.key)

    @web.observe(noted, id="pass")  # type: ignore[arg-type]
    async def pass_(txn: perco.Transaction, change: Change) -> None:
        txn.signal(heard, "of " + change.key)  # and writes nothing

    @web.observe(heard, id="gather")  # type: ignore[arg-type]
    async def gather(txn: perco.Transaction, change: Change) -> None:
        if change.attempt == 1:
            raise ZeroDivisionError
        txn.set(web.size, "sum", 1)
        txn.set(web.count, change.key, 1)  # which nobody observes

    @web.observe(web.size, id="tell")
    async def tell(txn: perco.Transaction, change: Change) -> None:
        txn.set(web.note, change.key, "told")

    return noted, heard


@pytest.mark.parametrize("one_step", [True, False])
@pytest.mark.parametrize(("table", "key"), [("docs", "a"), ("docs", "sum"), ("counts", "of a")])
async def test_a_tree_goes_on_through_signals(web: Web, table: str, key: str, one_step: bool) -> None:  # N9, N5
    chain(web)
    async with client(memory(), web.schema, one_step=one_step) as db, db.worker():
        await put(db, web.body, "q", "other")
        await settle(db)
        commit_ts = await put(db, web.body, "a", "hello")
        await settle(db)
        [found] = await trace(inside(db).engine, table, key.encode())
        assert found.commit_ts == commit_ts
        gathered = ("gather", ["docs/sum/size", "counts/of a/count"], [("tell", ["docs/sum/note"], [])])
        assert told(found) == (None, ["docs/a/body"], [("raise", [], [("pass", [], [gathered])])])
        passed = found.runs[0].runs[0]
        gather = passed.runs[0]
        assert (passed.on, passed.signal, passed.depth) == (("docs", "a", "noted"), True, 2)
        assert (gather.on, gather.signal, gather.attempts) == (("counts", "of a", "heard"), True, 2)
        assert not found.runs[0].signal
        assert not gather.runs[0].signal
        assert not found.unsure


async def test_a_signal_from_outside_is_a_root(web: Web) -> None:  # N5
    noted, _ = chain(web)
    async with client(memory(), web.schema) as db, db.worker():
        async with db.transaction() as txn:
            txn.signal(noted, "k")
        await settle(db)
        [found] = await trace(inside(db).engine, "counts", b"of k")
        assert (found.commit_ts, found.writes, [run.observer for run in found.runs]) == (txn.commit_ts, [], ["pass"])


async def test_one_run_for_many_signals_hangs_below_the_oldest_cause(web: Web) -> None:  # N4, N9
    noted = web.docs.signal("noted")

    @web.observe(noted, id="count")  # type: ignore[arg-type]
    async def count(txn: perco.Transaction, change: Change) -> None:
        await web.add(txn, "all")

    async with client(memory(), web.schema) as db:
        stamps = []
        for _ in range(3):
            async with db.transaction() as txn:
                txn.signal(noted, "k")
                txn.set(web.note, "k", "raised")
            stamps.append(txn.commit_ts)
        async with db.worker():
            await settle(db)
        [found] = await trace(inside(db).engine, "counts", b"all")
        assert found.commit_ts == stamps[0]
        assert [run.observer for run in found.runs] == ["count"]


async def test_runs_for_a_signal_may_overlap_and_the_check_finds_nothing_wrong(web: Web) -> None:  # N5
    noted = web.docs.signal("noted")
    may_end = [trio.Event(), trio.Event()]
    running: list[int] = []

    async def gather(txn: perco.Transaction, change: Change) -> None:
        running.append(txn.start_ts)
        await may_end[len(running) - 1].wait()
        txn.set(web.count, str(txn.start_ts), 1)

    web.observe(noted, id="gather")(gather)  # type: ignore[arg-type]
    local = memory()
    async with client(local, web.schema) as one, client(local, web.schema, beside=one) as two:
        async with one.transaction() as txn:
            txn.signal(noted, "k")
        first, second = ByHand(one), ByHand(two)
        async with trio.open_nursery() as nursery:
            for at, each in enumerate((first, second)):
                nursery.start_soon(each.run, noted, "k")
                await until(lambda: len(running) > at)  # noqa: B023
            for each, event in zip((first, second), may_end, strict=True):
                event.set()
                await until(lambda: each.counted("gather").commits)  # noqa: B023
        await settle(one)
        assert len(running) == 2
        assert not (await check(local_of(one).store, ts=inside(one).oracle.last)).findings
        for start_ts in running:
            [found] = await trace(inside(one).engine, "counts", str(start_ts).encode())
            assert found.commit_ts == txn.commit_ts


async def test_a_root_that_may_have_been_a_run_says_so(web: Web) -> None:  # G4
    web.schema.keep = perco.Keep(seconds=0)
    chain(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        await put(db, web.body, "a", "hello")
        await settle(db)
        await db.vacuum()
        [found] = await trace(inside(db).engine, "counts", b"of a")
        assert found.unsure
        console = Console(file=StringIO(), width=120)
        console.print(drawn(found, ("counts", "of a")))
        assert isinstance(console.file, StringIO)
        assert "a program's transaction, or a run for a signal whose cause is no longer kept" in console.file.getvalue()


async def test_what_came_through_a_run_whose_record_is_gone_says_so(web: Web) -> None:  # N9
    web.schema.keep = perco.Keep(seconds=0)
    chain(web)
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        commit_ts = await put(db, web.body, "a", "hello")
        await settle(db)
        await db.vacuum()
        [found] = [tree for tree in await trace(inside(db).engine, "docs", b"sum") if tree.commit_ts == commit_ts]
        assert [run.observer for run in found.runs] == ["raise", "tell"]
        assert found.runs[1].through == ("raise", "pass", "gather")


@pytest.mark.parametrize("kept", [1 << 20, 0])
async def test_the_store_is_read_once(web: Web, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """And of what is too much to be kept, the pages that belong to the tree once more."""
    tree(web)
    monkeypatch.setattr(module, "_KEPT_CELLS", kept)
    monkeypatch.setattr(module, "ScanRequest", lambda *args: ScanRequest(*args, rows_max=4))
    async with client(memory(), web.schema) as db, db.worker():
        await put(db, web.body, "a", "hello")
        for n in range(60):
            await put(db, web.note, f"n{n}", "nothing observes it")
        await settle(db)
        read: list[int] = []
        [found] = await trace(inside(db).engine, "docs", b"za", read.append)
        assert told(found)[2][0][2] == [("tell", ["docs/za/note"], [])]
        rows = 60 + len({"a", "za", "of a"})
        again = 0 if kept else 3 * 4  # pages of the tree
        assert rows <= read[-1] - 1 <= rows + again


def test_a_tree_is_drawn_with_what_was_asked_for() -> None:
    leaf = Traced(12, "tell", ("docs", "a", "size"), 2, 3, (), [("docs", "za", "note")], asked=True)
    root = Traced(10, writes=[("docs", str(n), "body") for n in range(14)], runs=[leaf])
    console = Console(file=StringIO(), width=80)
    console.print(drawn(root, ("docs", "za")))
    assert isinstance(console.file, StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[:2] == ["10  a program's transaction", "├── docs[0].body"]
    assert lines[-3:] == [
        "├── and 2 more cells",
        "└── 12  > tell on docs[a].size  (attempt 3)  <- wrote the requested row",
        "    └── docs[za].note",
    ]


def test_of_many_runs_and_cells_those_of_the_row_are_shown_first() -> None:
    """A load in one transaction: the row that was asked for is not among the others that are left out."""
    runs = [Traced(20 + n, "tell", ("docs", str(n), "size"), 1, 1) for n in range(40)]
    runs[30].runs = [Traced(70, "gather", ("docs", "x", "note"), 2, 1, (), [("docs", "late", "sum")], asked=True)]
    root = Traced(10, writes=[("docs", str(n), "body") for n in range(40)], runs=runs)
    for row, cells, shown in (
        ("late", ["docs[0].body", "docs[1].body"], ["tell on docs[30]", "tell on docs[0]", "tell on docs[1]"]),
        ("35", ["docs[35].body", "docs[0].body"], ["tell on docs[30]", "tell on docs[35]", "tell on docs[0]"]),
    ):
        console = Console(file=StringIO(), width=80)
        console.print(drawn(root, ("docs", row)))
        assert isinstance(console.file, StringIO)
        lines = console.file.getvalue().splitlines()
        assert [line.split()[-1] for line in lines[1:3]] == cells
        assert [line.split("> ")[1].split(".")[0] for line in lines if "tell" in line][:3] == shown
        assert sum("tell" in line for line in lines) == 12
        assert [line.split(maxsplit=1)[1].rstrip() for line in lines if "and " in line] == [
            "and 28 more cells",
            "and 28 more runs; --json has all",
        ]


def test_no_line_of_a_trace_is_cut_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on a narrow terminal, which folds it."""
    monkeypatch.setenv("COLUMNS", "40")
    key = "k" * 150
    run = Traced(12, "tell", ("docs", key, "body"), 1, 3, (), [("docs", f"z{key}", "note")])
    show([Traced(10, writes=[("docs", key, "body")], runs=[run], asked=True)], ("docs", key))
    assert capsys.readouterr().out.splitlines() == [
        "10  a program's transaction  <- wrote the requested row",
        f"├── docs[{key}].body",
        f"└── 12  > tell on docs[{key}].body  (attempt 3)",
        f"    └── docs[z{key}].note",
    ]
