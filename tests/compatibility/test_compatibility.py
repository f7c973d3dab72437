"""A store that an earlier version wrote is opened, read, observed and written by this one."""

from __future__ import annotations

import tarfile
import warnings
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pytest

import perco
from perco import views
from perco.check.check import CheckOptions, check
from tests.compatibility import make
from tests.support.places import local_of

STORES = sorted(make.HERE.glob("store-*.tar.xz"))


def test_there_is_a_store_of_this_version() -> None:
    assert f"store-{perco.__version__}.tar.xz" in {store.name for store in STORES}


@pytest.mark.parametrize("file", STORES, ids=lambda file: file.name)
async def test_a_store_of_an_earlier_version(file: Path, tmp_path: Path) -> None:
    with tarfile.open(file) as tar:
        tar.extractall(tmp_path, filter="data")
    async with perco.open(tmp_path / "store", readonly=True) as db:
        assert (await check(local_of(db).store, options=CheckOptions(pause_s=0.0))).clean
        assert list(db.schema.tables)[:3] == ["docs", "orders", "lengths"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", perco.errors.PercoWarning)  # it is a copy
        async with perco.open(tmp_path / "store", make.schema) as db:
            async with db.snapshot() as snap:
                assert len([row async for row in snap.scan(make.docs)]) == 42
                assert await snap.get(make.image, "z39") == bytes([39]) * 700
                assert await snap.get(make.body, "a00") is None
                row = await snap.row(make.orders, (date(2026, 1, 12), 39))
                assert row[make.at] == datetime(2026, 1, 1, 12, 39, tzinfo=UTC)
                assert row[make.price] == Decimal("9.75")
                assert row[make.more] == {1: (b"\xff", None)}
            [failed] = await db.failed()
            assert (failed.observer, failed.key) == ("measure", "bad")
            assert await db.paused() == {"hear"}
            waiting = await db.waiting()
            assert (waiting["measure"], waiting["hear"]) == (1, 1)
            changes = [row.key async for each in db.changes("docs", since=0) for row in each.rows]
            assert len(changes) > 80
            await db.resume("hear")
            async with db.worker():
                await db.wait_idle(timeout=60)
            async with db.snapshot() as snap:
                assert await snap.get(make.size, "waits") == 5
                assert await snap.get(make.seen, "waits") is True
                assert not (await views.check(make.declared, snap)).differences
            async with db.transaction() as txn:
                txn.set(make.body, "a01", "longer than before")
            await db.vacuum()
            assert (await check(local_of(db).store, options=CheckOptions(pause_s=0.0))).clean
