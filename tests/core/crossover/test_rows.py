"""The sample of source rows, and when views reflect a change."""

from __future__ import annotations

import random

import pytest

import perco
from perco.crossover.keeping import reflected
from perco.crossover.rows import Sampler, SourceRow, must_be_enough
from perco.errors import UsageError
from perco.views import Views

customers = perco.Table("customers", key=perco.TEXT)
name = customers.column("name", perco.TEXT)
orders = perco.Table("orders", key=perco.Tuple(perco.TEXT, perco.INT64))
item = orders.column("item", perco.TEXT)

ROWS = [SourceRow(customers, f"c{n}", {name: "x"}) for n in range(100)] + [
    SourceRow(orders, (f"c{n % 100}", n // 100), {item: "y"}) for n in range(400)
]


def sample(size: int, rows: list[SourceRow] = ROWS, seed: int = 0) -> list[SourceRow]:
    sampler = Sampler(size, seed)
    for row in rows:
        sampler.add(row)
    assert sampler.taken == len(rows)
    return sampler.rows()


def test_the_sample_does_not_depend_on_the_order() -> None:
    shuffled = list(ROWS)
    random.Random(1).shuffle(shuffled)
    assert sample(50) == sample(50, shuffled)
    assert sample(50) != sample(50, seed=1)


def test_its_beginning_is_a_smaller_sample() -> None:
    assert sample(200)[:50] == sample(50)
    assert len(sample(1000)) == len(ROWS)


def test_rows_that_belong_together_are_drawn_together() -> None:
    found = sample(100)  # each customer has four orders
    of = {row.key if row.table is customers else row.key[0] for row in found}
    assert len(of) == 20
    assert len([row for row in found if row.table is customers]) == 20


def test_one_first_part_may_have_more_rows_than_the_sample() -> None:
    found = sample(30, [SourceRow(orders, ("all", n), {item: "y"}) for n in range(1000)])
    assert len(found) == 30
    assert len({row.key for row in found} & {("all", n) for n in range(30)}) < 10  # not the first ones


def test_too_few_rows_are_refused() -> None:
    views = Views(perco.Schema(customers, orders))
    views.each(name, id="v", into=item)(lambda row: [])
    with pytest.raises(UsageError, match="the views read tables customers, and these have no values"):
        must_be_enough(views, [])
    with pytest.raises(UsageError, match="99 source rows are too few: at least 100"):
        must_be_enough(views, ROWS[:99])
    assert must_be_enough(views, ROWS[:100]) == ROWS[:100]


def test_views_reflect_a_change_when_no_run_with_its_cause_or_an_older_one_is_left() -> None:
    commits = [(10, 0.1), (20, 0.2), (30, 0.3), (5, 0.9)]
    runs = [(20, 0.7), (10, 0.4), (10, 0.5), (30, 0.6)]
    assert reflected(commits, runs) == [0.5, 0.7, 0.7, 0.9]
    assert reflected(commits, []) == [0.1, 0.2, 0.3, 0.9]
