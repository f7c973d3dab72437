from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

from examples import export
from tests.examples.running import run


def test_killed_when_the_outside_has_it_and_the_store_does_not_know_it_takes_effect_once(tmp_path: Path) -> None:
    run("export", tmp_path, killed_at=("put_price", 20))
    run("export", tmp_path, killed_at=("send_receipt", 8))
    printed = run("export", tmp_path)
    repeated = re.search(r"ignored (\d+) repeats", printed)
    assert repeated is not None
    assert int(repeated[1]) >= 1  # of the receipt that the outside had when the second one died
    assert "prices in the store, 0 differ outside" in printed
    assert "orders in the store, 0 receipts missing or extra" in printed


def test_an_old_delivery_that_arrives_late_changes_nothing(tmp_path: Path) -> None:
    outside = export.Outside(tmp_path / "outside.sqlite")
    with closing(outside.sqlite):
        assert outside.put_price("a", 1, version=10)
        assert outside.put_price("a", None, version=30)  # taken from the list
        assert not outside.put_price("a", 2, version=20)
        assert not outside.put_price("a", None, version=30)
        assert outside.sqlite.execute("SELECT * FROM prices").fetchall() == [("a", None, 30)]
        assert outside.put_price("a", 3, version=40)
        assert outside.send_receipt("1@10", "you ordered a")
        assert not outside.send_receipt("1@10", "you ordered a")
        assert outside.sqlite.execute("SELECT count(*) FROM receipts").fetchone() == (1,)
