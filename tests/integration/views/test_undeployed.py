"""Views that a store does not know yet, or knows in another version, as `perco views diff` meets them."""

from __future__ import annotations

from pathlib import Path

import pytest

import perco
from perco import views
from tests.component.notify.test_views import Library, changed
from tests.support.graphs import write

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs


async def test_a_diff_says_what_a_new_definition_would_change(tmp_path: Path) -> None:
    old, new = changed(1), changed(2, by=2)
    async with perco.open(tmp_path / "s", old.schema) as db, db.worker():
        for key, (author, text) in {"a": ("ann", "x y"), "b": ("bob", "y"), "c": ("bea", "z")}.items():
            await write(db, [(old.author, key, author), (old.body, key, text)])
        await db.wait_idle(timeout=60)
        async with db.snapshot() as snap:
            found = await views.diff(old.views, snap)
        assert [(each.view, each.equal, each.owners, each.same) for each in found] == [
            ("index", True, 3, 4),
            ("by author", True, 2, 2),
            ("credit", True, 3, 3),
        ]
    async with perco.open(tmp_path / "s", readonly=True) as db, db.snapshot() as snap:
        index, authors, credit = await views.diff(new.views, snap)
        assert (index.same, index.added, index.changed, index.removed) == (0, 0, 4, 0)
        assert index.differences[0] == views.Difference("index", "postings", ("x", "a"), {"n": 3}, {"n": 2}, "a")
        assert (authors.owners, authors.added, authors.changed, authors.removed) == (5, 3, 0, 2)
        assert [each.expected or each.found for each in authors.differences] == [
            {"wrote": ["a"]},
            {"wrote": ["c"]},
            {"wrote": ["b"]},
            {"wrote": ["a"]},
            {"wrote": ["b", "c"]},
        ]
        # Each view is compared by itself: the join reads the authors that are there.
        assert (credit.same, credit.changed) == (0, 3)
        [one] = await views.diff(new.views, snap, "index", differences_max=0)
        assert (one.changed, one.differences) == (4, [])


async def test_a_diff_of_a_view_that_the_store_does_not_know(tmp_path: Path) -> None:
    library = Library()
    async with perco.open(tmp_path / "s", library.schema) as db:
        await write(db, [(library.body, "a", "x y"), (library.author, "a", "ann")])
    new = changed(1)
    async with perco.open(tmp_path / "s", readonly=True) as db, db.snapshot() as snap:
        index, authors, credit = await views.diff(new.views, snap)
        assert (index.owners, index.added, index.equal) == (1, 2, False)
        assert (authors.owners, authors.added) == (1, 1)
        assert (credit.owners, credit.added) == (1, 0)  # there are no rows of authors yet


def coded(factor: int, version: int = 1) -> Library:
    """A view whose code differs with the factor: by a value that the function's closure has."""
    made = Library()

    @made.views.each(made.body, id="size", into=made.words, version=version)
    def size(doc: perco.Row[str]) -> list[views.Put[str]]:
        return [views.Put(made.words, doc.key, {made.total: len(doc[made.body] or "") * factor})]

    return made


async def test_changed_code_is_told_until_it_is_accepted_or_has_a_new_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "s"

    async def told(library: Library) -> list[str]:
        caplog.clear()
        async with perco.open(store, library.schema):
            pass
        return [record.getMessage() for record in caplog.records if record.name == "perco.code"]

    assert await told(coded(1)) == []
    assert await told(coded(1)) == []
    [message] = await told(coded(2))
    assert message.startswith("the code of view 'size' has changed since its version 1 was registered")
    assert len(await told(coded(2))) == 1  # and again, until somebody decides
    async with perco.open(store, coded(2).schema) as db:
        assert await views.accept(coded(2).views, db) == ["size"]
        assert await views.accept(coded(2).views, db, "size") == []
    assert await told(coded(2)) == []
    assert len(await told(coded(1))) == 1
    assert await told(coded(1, version=2)) == []
    assert await told(coded(2)) == []  # a program with an earlier version is another matter
    assert len(await told(coded(3, version=2))) == 1


async def test_the_reason_of_a_row_names_code_version_and_inputs(tmp_path: Path) -> None:
    old, new = coded(1), coded(2)
    async with perco.open(tmp_path / "s", old.schema) as db, db.worker():
        await write(db, [(old.body, "a", "four")])
        await db.wait_idle(timeout=60)
        async with db.snapshot() as snap:
            at = snap.start_ts
            [first] = await views.why(old.views, snap, old.words, "a")
            changed_at = (await snap.row(old.docs, "a")).commit_ts(old.body)
        await write(db, [(old.body, "a", "sixsix")])
        await db.wait_idle(timeout=60)
    assert (first.view, first.owner, first.version, first.newest, first.values) == ("size", "a", 1, 1, {"total": 4})
    assert first.inputs == [views.Input("docs", "a", {"body": "four"}, {"body": changed_at})]
    assert (first.again, first.same, first.more, first.error) == ({"total": 4}, True, 0, None)
    assert "test_undeployed.py:" in first.function
    assert first.code == first.registered != ""
    async with perco.open(tmp_path / "s", new.schema, readonly=True) as db:
        async with db.snapshot(ts=at) as snap:
            [then] = await views.why(new.views, snap, new.words, "a")
        async with db.snapshot() as snap:
            [now] = await views.why(new.views, snap, new.words, "a")
    assert (then.values, then.again, then.same) == ({"total": 4}, {"total": 8}, False)
    assert (now.values, now.again, now.same) == ({"total": 6}, {"total": 12}, False)
    assert then.code != then.registered == first.code
