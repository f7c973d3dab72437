"""The web index on views equals the batch index, whatever happened on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings, strategies as st

import perco
from perco import views
from perco.webindex import on_views
from perco.webindex.batch import build, digest
from perco.webindex.pages import Page
from perco.webindex.search import SearchIndex
from perco.webindex.synthetic import SyntheticWeb
from tests.component.webindex.test_incremental import Change, Model, Ranked, rounds


async def change_to(txn: perco.Transaction, change: Change) -> None:
    """Make a change of a source."""
    if isinstance(change, Page):
        await on_views.load(txn, change)
    elif isinstance(change, Ranked):
        if await txn.get(on_views.contents, change.url) is not None:
            txn.set(on_views.rank, change.url, change.rank)
    else:
        txn.delete(on_views.contents, change)
        txn.delete(on_views.rank, change)


async def in_order(db: perco.Database, changes: Sequence[Change]) -> None:
    for change in changes:
        await db.run(change_to, change)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=rounds, side_by_side=st.booleans(), most=st.sampled_from([(50, 20), (2, 1)]))
def test_it_equals_the_batch_index(plan: Sequence[Sequence[Change]], side_by_side: bool, most: tuple[int, int]) -> None:
    async def play() -> None:
        anchors_max, duplicates_max = most
        model = Model()
        with SearchIndex(":memory:") as search:
            index = on_views.web_views(search, anchors_max=anchors_max, duplicates_max=duplicates_max)
            async with (
                perco.open("memory:", index.schema, options=perco.Options(seed=1)) as db,
                db.worker(concurrency=8, scanners=2),
            ):
                for changes in plan:
                    by_url: dict[str, list[Change]] = {}
                    for change in changes:
                        model.apply(change)
                        by_url.setdefault(change if isinstance(change, str) else change.url, []).append(change)
                    async with trio.open_nursery() as nursery:
                        for ordered in by_url.values():
                            nursery.start_soon(in_order, db, ordered)
                    if not side_by_side:
                        await db.wait_idle()
                await db.wait_idle()
                async with db.snapshot() as snap:
                    assert (await views.check(index, snap)).equal
            wanted = build(model.pages.values(), model.ranks, anchors_max=anchors_max, duplicates_max=duplicates_max)
            assert search.digest() == digest(wanted)
            search.check()

    trio.run(play)


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_synthetic_web(tmp_path: Path, seed: int) -> None:
    web = SyntheticWeb(60, seed)
    with SearchIndex(tmp_path / "search") as search:
        index = on_views.web_views(search)
        async with perco.open("memory:", index.schema) as db, db.worker():
            for page in web:
                assert await db.run(on_views.load, page)
                assert not await db.run(on_views.load, page)
            await db.wait_idle()
        assert search.digest() == digest(build(web))


def test_it_says_in_150_lines_what_the_observers_say_in_more() -> None:
    by_views, by_hand = (Path(on_views.__file__).with_name(name).read_text() for name in ("on_views.py", "index.py"))
    assert len(by_views.splitlines()) <= 150 < len(by_hand.splitlines())
