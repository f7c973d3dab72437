"""The changes that `perco crossover` replays."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import perco
from perco.crossover.changing import Changes, SourceChange
from perco.crossover.rows import SourceRow

pages = perco.Table("pages", key=perco.TEXT)
text = pages.column("text", perco.TEXT)
rank = pages.column("rank", perco.INT64)
sites = perco.Table("sites", key=perco.INT64)
name = sites.column("name", perco.TEXT)

PAGES, SITES = 90, 30


def source() -> list[SourceRow]:
    found = [SourceRow(pages, f"p{n}", {text: f"text {n}"} | ({rank: n} if n % 2 else {})) for n in range(PAGES)]
    return found + [SourceRow(sites, n, {name: f"site {n}"}) for n in range(SITES)]


def plain(changes: list[SourceChange]) -> list[Any]:
    return [(each.table.name, each.key, each.before, each.after) for each in changes]


def values_of(changes: Changes, table: perco.Table[Any]) -> Counter[str]:
    return Counter(repr(sorted(map(repr, row.items()))) for row in changes.rows[table].values())


def test_the_seed_decides() -> None:
    one, same, other = (Changes(source(), seed=seed) for seed in (1, 1, 2))
    assert plain(one.draw(200)) == plain(same.draw(200)) != plain(other.draw(200))


def test_they_lead_from_row_to_row() -> None:
    changes = Changes(source())
    rows = {(row.table, row.table.row(row.key)): dict(row.values) for row in source()}
    for change in changes.draw(1000):
        where = change.table, change.table.row(change.key)
        assert rows.get(where, {}) == change.before != change.after
        row = rows.setdefault(where, {})
        for column, value in change.writes:
            assert row.get(column) != value
            if value is None:
                del row[column]
            else:
                row[column] = value
        assert row == change.after
        if not row:
            del rows[where]
    assert rows == {(table, key): row for table, of in changes.rows.items() for key, row in of.items()}


def test_the_tables_keep_their_sizes_and_their_values() -> None:
    changes = Changes(source(), turnover=0.5)
    before = {table: values_of(changes, table) for table in changes.rows}
    changes.hold_out(0.3)
    kinds = Counter((bool(each.before), bool(each.after)) for each in changes.draw(3000))
    assert min(kinds[True, True], kinds[True, False], kinds[False, True]) > 500
    for table, size in ((pages, PAGES * 7 // 10), (sites, SITES * 7 // 10)):
        assert size - 2 <= len(changes.rows[table]) <= size  # one is between two rows, one may have gone
        assert values_of(changes, table) <= before[table]


def test_a_row_does_not_change_again_soon() -> None:
    changes = Changes(source())
    assert changes.apart == (PAGES + SITES) // 8
    drawn = [(each.table.name, each.key) for each in changes.draw(2000)]
    apart = changes.apart - 1  # rows that are gone do not count
    for at in range(len(drawn)):
        assert drawn[at] not in drawn[at + 1 : at + apart]


def test_rows_that_were_held_out_come_in() -> None:
    changes = Changes(source(), turnover=1.0)
    out = changes.hold_out(0.1)
    assert Counter(each.table for each in out) == {pages: 9, sites: 3}
    assert all(each.before and not each.after for each in out)
    assert len(changes) == PAGES + SITES - 12
    came = {(each.table, each.key) for each in changes.draw(400) if not each.before}
    assert came >= {(each.table, each.key) for each in out}
    assert len(changes) in range(PAGES + SITES - 18, PAGES + SITES - 11)


@pytest.mark.parametrize("turnover", [0.0, 0.2])
def test_rows_with_the_same_values_go_and_come_back(turnover: float) -> None:
    changes = Changes([SourceRow(sites, n, {name: "same"}) for n in range(100)], turnover=turnover)
    changes.hold_out(0.07)
    changes.draw(1)
    assert all(not each.before or not each.after for each in changes.draw(300))
    assert len(changes) in range(90, 94)


def test_rows_may_be_added() -> None:
    changes = Changes(source()[:PAGES])
    changes.draw(10)
    changes.add(source()[PAGES:])
    assert {each.table for each in changes.draw(200)} == {pages, sites}
