"""The benchmark of views, on a few rows: it builds what it says; no figure of it is judged here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import perco
from bench.views import STAGES, Groups, build_views
from perco import views
from perco.webindex import batch
from perco.webindex.synthetic import SyntheticWeb


async def test_a_web_is_built_on_views(tmp_path: Path) -> None:
    spent: Counter[str] = Counter()
    built = await build_views("memory:", tmp_path / "search", 60, spent)
    assert built.documents == len(batch.build(SyntheticWeb(60, 1)))
    assert built.pages == 60
    known = built.observers.keys()
    assert {id for mine, _ in STAGES.values() for id in mine} <= known
    assert spent.keys() <= known


async def test_groups_are_what_they_should_be() -> None:
    made = Groups()
    async with perco.open("memory:", made.views.schema) as db, db.worker():
        async with db.transaction() as txn:
            for i in range(30):
                txn.set(made.n, ("g", i), i)
        await db.wait_idle()
        async with db.snapshot() as snap:
            assert await snap.get(made.kept, "g") == [30, sum(range(30)), *range(29, 19, -1)]
            assert (await views.check(made.views, snap)).equal
