"""A row's causes, and what else followed from them, as a tree."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

import perco
from perco.cli.tracing import drawn, show
from perco.notify.tracing import Traced, trace
from tests.component.notify.kit import OPTIONS, Web, client, memory, put, settle

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
        [found] = await trace(db, table, key.encode(), read.append)
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
        assert [found.commit_ts for found in await trace(db, "docs", b"b")] == [second, first]
        assert (await trace(db, "docs", b"b"))[1].runs[0].attempts == 2
        assert await trace(db, "docs", b"nothing") == []


async def test_what_came_through_runs_that_left_no_trace_says_so(web: Web) -> None:  # N5
    noted = web.docs.signal("noted")

    @web.observe(web.body, id="raise")
    async def raise_(txn: perco.Transaction, change: Change) -> None:
        txn.signal(noted, change.key)

    @web.observe(noted, id="gather")  # type: ignore[arg-type]
    async def gather(txn: perco.Transaction, change: Change) -> None:
        txn.set(web.size, change.key, 1)

    @web.observe(web.size, id="tell")
    async def tell(txn: perco.Transaction, change: Change) -> None:
        txn.set(web.note, change.key, "told")

    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker():
        commit_ts = await put(db, web.body, "a", "hello")
        await settle(db)
        found = {traced.commit_ts: traced for traced in await trace(db, "docs", b"a")}
        runs = {run.observer: run for run in found[commit_ts].runs}
        assert set(runs) == {"raise", "tell"}
        assert runs["tell"].through == ("raise", "gather")


def test_a_tree_is_drawn_with_what_was_asked_for() -> None:
    leaf = Traced(12, "tell", ("docs", "a", "size"), 2, 3, (), [("docs", "za", "note")], asked=True)
    root = Traced(10, writes=[("docs", str(n), "body") for n in range(14)], runs=[leaf])
    console = Console(file=StringIO(), width=80)
    console.print(drawn(root, ("docs", "za")))
    assert isinstance(console.file, StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[:2] == ["10  from outside", "├── docs[0].body"]
    assert lines[-3:] == [
        "├── and 2 more cells",
        "└── 12  > tell on docs[a].size  (attempt 3)  <- wrote what was asked for",
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
        "10  from outside  <- wrote what was asked for",
        f"├── docs[{key}].body",
        f"└── 12  > tell on docs[{key}].body  (attempt 3)",
        f"    └── docs[z{key}].note",
    ]
