"""Views of connected components: labels follow links that come and go, whatever overlaps (V13)."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import perco
from perco import views
from perco.views import rebuilding, running
from perco.views.components import labels
from tests.component.notify.kit import OPTIONS, client, memory, put, settle
from tests.component.notify.test_views import change, in_transaction, overlapped, rows
from tests.support.places import local_of


class Nodes:
    """Nodes, and links between them."""

    def __init__(self, *, nodes_max: int = 1000, version: int = 1, into: str = "label", table: str = "nodes") -> None:
        self.nodes = perco.Table(table, key=perco.TEXT)
        self.other = self.nodes.column("other", perco.TEXT)
        self.label = self.nodes.column("label", perco.TEXT)
        self.links = perco.Table("links", key=perco.Tuple(perco.TEXT, perco.TEXT, perco.INT64))
        self.on = self.links.column("on", perco.INT64)
        self.views = views.Views(perco.Schema(self.nodes, self.links))
        column = self.label if into == "label" else self.other
        self.views.components(self.on, id="parts", into=column, nodes_max=nodes_max, version=version)
        self.schema = self.views.schema

    async def link(self, db: perco.Database, *pairs: str, there: bool = True) -> None:
        """Set or delete links, such as "ab" from a to b, and let the worker run."""
        for pair in pairs:
            await put(db, self.on, (pair[0], pair[1], 0), 1 if there else None)
            await settle(db)

    async def labels(self, db: perco.Database) -> str:
        """All nodes and labels, such as "aa ba"."""
        return " ".join(f"{node}{values['label']}" for node, values in (await rows(db, self.nodes)).items())

    def run(self, pair: str) -> Callable[[perco.Transaction], Awaitable[None]]:
        """The run for a link."""
        view: Any = self.views.declared["parts"]

        async def run(txn: perco.Transaction) -> None:
            await running.run_each(view.copier, txn, change((pair[0], pair[1], 0)))

        return run


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


async def check(db: perco.Database, nodes: Nodes) -> None:
    async with db.snapshot() as snap:
        found = await views.check(nodes.views, snap)
    assert found.equal, found.differences


async def test_labels_follow_the_links(nodes: Nodes) -> None:
    async with perco.open("memory:", nodes.schema, options=OPTIONS) as db, db.worker():
        await nodes.link(db, "bc", "ed")
        assert await nodes.labels(db) == "bb cb dd ed"
        await nodes.link(db, "dc")
        assert await nodes.labels(db) == "bb cb db eb"
        await nodes.link(db, "ae")
        assert await nodes.labels(db) == "aa ba ca da ea"
        await nodes.link(db, "bc", there=False)  # the part with the label is the larger one
        assert await nodes.labels(db) == "aa ca da ea"
        await nodes.link(db, "ae", there=False)  # the part with the label is the smaller one
        assert await nodes.labels(db) == "cc dc ec"
        await nodes.link(db, "dc", "ed", there=False)
        assert await nodes.labels(db) == ""


async def test_another_way_keeps_nodes_connected(nodes: Nodes) -> None:
    async with perco.open("memory:", nodes.schema, options=OPTIONS) as db, db.worker():
        await nodes.link(db, "ab", "bc", "cd", "da")
        before = await rows(db, nodes.nodes)
        await nodes.link(db, "bc", there=False)
        assert await rows(db, nodes.nodes) == before
        await nodes.link(db, "da", there=False)
        assert await nodes.labels(db) == "aa ba cc dc"


async def test_links_of_the_same_nodes_count_each(nodes: Nodes) -> None:
    async with perco.open("memory:", nodes.schema, options=OPTIONS) as db, db.worker():
        await nodes.link(db, "ab", "ba")
        await put(db, nodes.on, ("a", "b", 1), 1)
        await nodes.link(db, "ab", "ba", there=False)
        assert await nodes.labels(db) == "aa ba"
        await put(db, nodes.on, ("a", "b", 1), None)
        await settle(db)
        assert await nodes.labels(db) == ""


async def test_a_link_from_a_node_to_itself_makes_it_a_part(nodes: Nodes) -> None:
    async with perco.open("memory:", nodes.schema, options=OPTIONS) as db, db.worker():
        await nodes.link(db, "bb")
        assert await nodes.labels(db) == "bb"
        await nodes.link(db, "ab")
        assert await nodes.labels(db) == "aa ba"
        await nodes.link(db, "ab", there=False)
        assert await nodes.labels(db) == "bb"
        await nodes.link(db, "ab")
        await nodes.link(db, "bb", there=False)
        assert await nodes.labels(db) == "aa ba"


async def test_a_link_that_changes_writes_no_label(nodes: Nodes) -> None:  # V6
    async with perco.open("memory:", nodes.schema, options=OPTIONS) as db, db.worker():
        await nodes.link(db, "ab")
        async with db.snapshot() as snap:
            before = (await snap.row(nodes.nodes, "b", [nodes.label])).commit_ts(nodes.label)
        await put(db, nodes.on, ("a", "b", 0), 2)
        await settle(db)
        async with db.snapshot() as snap:
            assert (await snap.row(nodes.nodes, "b", [nodes.label])).commit_ts(nodes.label) == before


@pytest.mark.parametrize("pair", ["bc", "ac"])
async def test_two_links_of_a_circle_do_not_end_at_once(nodes: Nodes, pair: str) -> None:  # V13
    async with client(memory(), nodes.schema) as db:
        async with db.worker():
            await nodes.link(db, "ab", "bc", "ac")
        for each in ("ab", pair):
            await put(db, nodes.on, (each[0], each[1], 0), None)
        with pytest.raises(perco.WriteConflict):  # each would find the way that the other one ends
            await overlapped(db, nodes.run("ab"), lambda: in_transaction(db, nodes.run(pair)))
        await in_transaction(db, nodes.run("ab"))
        await check(db, nodes)


async def test_the_ends_of_a_link_do_not_get_other_labels_meanwhile(nodes: Nodes) -> None:  # V13
    async with client(memory(), nodes.schema) as db:
        async with db.worker():
            await nodes.link(db, "cd", "bb")
        await put(db, nodes.on, ("d", "e", 0), 1)  # e comes to c and d, while these come to b
        await put(db, nodes.on, ("b", "c", 0), 1)
        with pytest.raises(perco.WriteConflict):
            await overlapped(db, nodes.run("de"), lambda: in_transaction(db, nodes.run("bc")))
        await in_transaction(db, nodes.run("de"))
        assert await nodes.labels(db) == "bb cb db eb"


async def test_a_rebuild_and_a_run_do_not_give_other_labels_at_once(nodes: Nodes) -> None:  # V13
    view: Any = nodes.views.declared["parts"]
    async with client(memory(), nodes.schema) as db:
        async with db.worker():
            await nodes.link(db, "de")
            async with db.snapshot() as snap:
                memory_of_d = await snap.get(view.memory, "e")
            await nodes.link(db, "cd")
        await put(db, view.memory, "e", memory_of_d)  # so the run, which gives it the label d again, need not write
        await put(db, nodes.label, "e", "x")
        await put(db, nodes.on, ("c", "d", 0), None)

        async def mend(txn: perco.Transaction) -> None:
            assert await rebuilding._mend(txn, view, "c")

        with pytest.raises(perco.WriteConflict):
            await overlapped(db, mend, lambda: in_transaction(db, nodes.run("cd")))


async def test_new_links_to_one_node_do_not_conflict(nodes: Nodes) -> None:
    async with client(memory(), nodes.schema) as db:
        async with db.worker():
            await nodes.link(db, "aa")
        for pair in ("ab", "ac"):
            await put(db, nodes.on, (pair[0], pair[1], 0), 1)
        await overlapped(db, nodes.run("ab"), lambda: in_transaction(db, nodes.run("ac")))
        assert await nodes.labels(db) == "aa ba ca"


async def test_too_many_nodes_are_an_error_that_says_what_to_do() -> None:
    nodes = Nodes(nodes_max=3)
    async with client(memory(), nodes.schema) as db:
        async with db.worker():
            await nodes.link(db, "bc", "cd", "xa")
        await put(db, nodes.on, ("d", "e", 0), 1)  # b, c and d keep their label: none of them is read
        await in_transaction(db, nodes.run("de"))
        await put(db, nodes.on, ("a", "b", 0), 1)
        with pytest.raises(perco.UsageError, match=r"more than 3 nodes are connected with 'b'.*raise nodes_max"):
            await in_transaction(db, nodes.run("ab"))


async def test_a_new_version_keeps_the_labels(nodes: Nodes) -> None:
    async with client(memory(), nodes.schema) as db:
        async with db.worker():
            await nodes.link(db, "ab", "cd")
        newer = Nodes(version=2)
        async with client(local_of(db), newer.schema) as second, second.worker():
            await settle(second)
            await check(second, newer)
            await newer.link(second, "cd", there=False)
            assert await newer.labels(second) == "aa ba"


async def test_a_new_version_may_write_another_column(nodes: Nodes) -> None:
    async with client(memory(), nodes.schema) as db:
        async with db.worker():
            await nodes.link(db, "ab", "bc", "de")
        newer = Nodes(version=2, into="other")
        async with client(local_of(db), newer.schema) as second:
            await put(second, newer.on, ("c", "f", 0), 1)  # its run may come before those of the older links
            async with second.worker():
                await settle(second)
                await check(second, newer)
                found = {
                    node: (values.get("label"), values.get("other"))
                    for node, values in (await rows(second, newer.nodes)).items()
                }
    assert found == {node: (None, "a" if node in "abcf" else "d") for node in "abcdef"}


async def test_a_new_version_may_not_write_another_table(nodes: Nodes) -> None:
    async with client(memory(), nodes.schema) as db:
        async with db.worker():
            await nodes.link(db, "ab")
        newer = Nodes(version=2, table="others")
        async with client(local_of(db), newer.schema) as second:
            with pytest.raises(perco.UsageError, match="labelled rows of table 'nodes': keep the labels in that table"):
                await in_transaction(second, newer.run("ab"))


def test_labels_are_the_smallest_nodes(nodes: Nodes) -> None:
    view: Any = nodes.views.declared["parts"]
    assert labels(view, [("b", "a", 0), ("c", "b", 1), ("e", "d", 0), ("f", "f", 0)]) == [
        (node, "a") for node in "abc"
    ] + [("d", "d"), ("e", "d"), ("f", "f")]


@pytest.mark.parametrize("seed", range(8))
async def test_random_links_equal_the_build(seed: int) -> None:  # V7, V13
    nodes, rng = Nodes(), random.Random(seed)
    async with client(memory(), nodes.schema) as db, db.worker(concurrency=8):
        for turn in range(12):
            for _ in range(rng.randrange(1, 12)):
                key = rng.choice("abcdefghi"), rng.choice("abcdefghi"), rng.randrange(2)
                await put(db, nodes.on, key, 1 if rng.random() < (0.5 if turn % 2 else 0.25) else None)
            await settle(db)
            await check(db, nodes)


async def test_why_a_node_has_its_label(nodes: Nodes) -> None:
    async with perco.open("memory:", nodes.schema, options=OPTIONS) as db, db.worker():
        await nodes.link(db, "ab", "bc", "bd")
        async with db.snapshot() as snap:
            [reason] = await views.why(nodes.views, snap, nodes.nodes, "c")
    assert (reason.values, reason.owner, reason.same, reason.function) == ({"label": "a"}, "c", True, "perco")
    assert [each.key for each in reason.inputs] == [("b", "c", 0)]


async def test_a_diff_says_what_is_not_so(nodes: Nodes) -> None:
    async with perco.open("memory:", nodes.schema, options=OPTIONS) as db:
        async with db.worker():
            await nodes.link(db, "ab", "bc")
        await put(db, nodes.label, "c", "x")
        await put(db, nodes.label, "z", "z")
        async with db.snapshot() as snap:
            [diff] = await views.diff(nodes.views, snap)
        assert (diff.owners, diff.same, diff.changed, diff.strays) == (3, 2, 1, 1)
        [done] = await views.rebuild(nodes.views, db)
        assert (done.mended, done.strays) == (1, 1)
        await check(db, nodes)


@pytest.mark.parametrize(
    ("key", "codec", "says"),
    [
        (perco.Tuple(perco.TEXT, perco.INT64), perco.TEXT, "do not begin with two keys of"),
        (perco.TEXT, perco.TEXT, "do not begin with two keys of"),
        (perco.Tuple(perco.TEXT, perco.TEXT), perco.INT64, "so it must have the codec"),
    ],
)
def test_what_is_no_graph_is_refused(key: Any, codec: Any, says: str) -> None:
    nodes, links = perco.Table("nodes", key=perco.TEXT), perco.Table("links", key=key)
    on, label = links.column("on", perco.INT64), nodes.column("label", codec)
    with pytest.raises(perco.UsageError, match=says):
        views.Views(perco.Schema(nodes, links)).components(on, id="parts", into=label)
