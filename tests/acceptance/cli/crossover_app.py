"""A program with views, a sink, an observer of its own, and a cached function."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

import perco
from perco import views

customers = perco.Table("customers", key=perco.TEXT)
name = customers.column("name", perco.TEXT)
orders = perco.Table("orders", key=perco.Tuple(perco.TEXT, perco.INT64))
item = orders.column("item", perco.TEXT)
cards = perco.Table("cards", key=perco.TEXT)
card = cards.column("card", perco.JSON)
totals = perco.Table("totals", key=perco.TEXT)
total = totals.column("total", perco.INT64)
louds = perco.Table("louds", key=perco.Tuple(perco.TEXT, perco.INT64))
loud = louds.column("loud", perco.TEXT)

shop = views.Views(perco.Schema(customers, orders, cards, totals, louds))


@shop.cogroup(name, item, id="cards", into=cards)
def carded(key: str, who: perco.Row[str] | None, bought: list[perco.Row[Any]]) -> Iterable[views.Put[Any]]:
    if who is not None and (who[name] or "").startswith("wrong"):
        raise ValueError("a wrong name")
    yield views.Put(cards, key, {card: [who and who[name], [row[item] for row in bought]]})


@shop.group(item, id="totals", by=lambda row: row[item], into=totals, keep=[views.count()])
def totaled(what: str, rows: views.Group[Any]) -> Iterable[views.Put[Any]]:
    yield views.Put(totals, what, {total: rows.count()})


@shop.cached(id="shout", gives=perco.TEXT)
def shout(words: list[str]) -> list[str]:
    return [word.upper() for word in words]


@shop.each(item, id="louds", into=louds)
def louder(row: perco.Row[Any]) -> Iterable[views.Put[Any]]:
    yield views.Put(louds, row.key, {loud: shout(row[item])})


def _must_not_run(*_: object) -> None:
    raise AssertionError("this reaches outside")


shop.sink(total, id="export", to=_must_not_run)


@shop.schema.observe(name, id="mail")
async def mail(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
    _must_not_run()


busy = views.Views(perco.Schema(customers, orders, cards))


@busy.each(item, id="busy", into=card)
def work(row: perco.Row[Any]) -> Iterable[views.Put[Any]]:
    print("busy", flush=True)
    yield views.Put(cards, str(row.key), {card: row[item]})


impure = views.Views(perco.Schema(customers, cards))
numbers = count()


@impure.each(name, id="numbers", into=card)
def numbered(row: perco.Row[str]) -> Iterable[views.Put[Any]]:
    yield views.Put(cards, row.key, {card: next(numbers)})
