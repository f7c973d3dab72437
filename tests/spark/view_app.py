"""Views of every kind, which Spark builds and observers keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import perco
from perco import views

docs = perco.Table("docs", key=perco.TEXT)
body = docs.column("body", perco.TEXT)
author = docs.column("author", perco.TEXT)
people = perco.Table("people", key=perco.TEXT)
name = people.column("name", perco.TEXT)
cities = perco.Table("cities", key=perco.Tuple(perco.TEXT, perco.INT64))  # (author, number)
city = cities.column("city", perco.TEXT)

postings = perco.Table("postings", key=perco.Tuple(perco.TEXT, perco.TEXT))
n = postings.column("n", perco.INT64)
words = perco.Table("words", key=perco.TEXT)
total = words.column("total", perco.INT64)
top = words.column("top", perco.JSON)
lengths = perco.Table("lengths", key=perco.INT64)
which = lengths.column("which", perco.JSON)
credits = perco.Table("credits", key=perco.TEXT)
credit = credits.column("credit", perco.TEXT)
cards = perco.Table("cards", key=perco.TEXT)
card = cards.column("card", perco.JSON)
links = perco.Table("links", key=perco.Tuple(perco.TEXT, perco.TEXT, perco.TEXT))  # (document, document, word)
common = links.column("common", perco.TEXT)
clusters = perco.Table("clusters", key=perco.TEXT)
label = clusters.column("label", perco.TEXT)
sizes = perco.Table("sizes", key=perco.TEXT)
size = sizes.column("size", perco.INT64)
vectors = perco.Table("vectors", key=perco.TEXT)
vector = vectors.column("vector", perco.JSON)
marks = perco.Table("marks", key=perco.TEXT)
first = marks.column("first", perco.TEXT)
second = marks.column("second", perco.TEXT)
both = perco.Table("both", key=perco.TEXT)
pair = both.column("pair", perco.TEXT)

v = views.Views(
    perco.Schema(
        docs, people, cities, postings, words, lengths, credits, cards, links, clusters, sizes, vectors, marks, both
    )
)


@v.each(body, id="index", into=postings)
def index(row: perco.Row[str]) -> Iterable[views.Put[Any]]:
    for word, count in Counter((row[body] or "").split()).items():
        yield views.Put(postings, (word, row.key), {n: count})


@v.group(n, id="totals", by=views.prefix(1), into=words, keep=[views.count(), views.sum(n), views.largest(n, 3)])
def totals(word: str, rows: views.Group[Any]) -> Iterable[views.Put[Any]]:
    best = [[key[1], value] for key, value in rows.largest(n, 3)]
    yield views.Put(words, word, {total: rows.sum(n), top: best})


@v.group(
    body, author, id="by length", by=lambda row: len((row[body] or "").split()) or None, key=perco.INT64, into=which
)
def by_length(length: int, rows: views.Group[Any]) -> Iterable[views.Put[Any]]:
    yield views.Put(lengths, length, {which: [row.key for row in rows]})


@v.join(left=[author, body], right=name, id="credits", on=lambda row: row[author], into=credits, how="left")
def credited(left: perco.Row[str], right: perco.Row[str] | None) -> Iterable[views.Put[Any]]:
    yield views.Put(credits, left.key, {credit: f"{(left[body] or '')[:20]} by {right[name] if right else 'nobody'}"})


@v.cogroup(name, city, id="cards", into=cards)
def carded(key: str, person: perco.Row[str] | None, where: list[perco.Row[Any]]) -> Iterable[views.Put[Any]]:
    yield views.Put(cards, key, {card: [person[name] if person else None, [row[city] for row in where]]})


@v.group(n, id="pairs", by=views.prefix(1), into=links)
def pairs(word: str, rows: views.Group[Any]) -> Iterable[views.Put[Any]]:
    keys = [row.key[1] for row in rows]
    if word.startswith("rare"):
        for one, other in pairwise(keys):
            yield views.Put(links, (one, other, word), {common: word})


v.components(common, id="clusters", into=label)


@v.group(label, id="sizes", by=lambda row: row[label], key=perco.TEXT, into=size, keep=[views.count()])
def sized(cluster: str, rows: views.Group[Any]) -> Iterable[views.Put[Any]]:
    yield views.Put(sizes, cluster, {size: rows.count()})


@v.cached(id="embed", gives=perco.JSON, batch=4)
def embed(texts: list[str]) -> list[list[int]]:
    return [[len(text), text.count("a")] for text in texts]


@v.each(body, id="vectors", into=vectors)
def vectored(row: perco.Row[str]) -> Iterable[views.Put[Any]]:
    yield views.Put(vectors, row.key, {vector: embed(row[body])})


@v.each(body, id="first", into=first)
def marked_first(row: perco.Row[str]) -> Iterable[views.Put[Any]]:
    yield views.Put(marks, row.key, {first: (row[body] or "")[:3]})


@v.each(author, id="second", into=second)
def marked_second(row: perco.Row[str]) -> Iterable[views.Put[Any]]:
    yield views.Put(marks, row.key, {second: (row[author] or "")[:3]})


@v.each(first, second, id="both", into=both)
def paired(row: perco.Row[str]) -> Iterable[views.Put[Any]]:
    yield views.Put(both, row.key, {pair: f"{row[first]}/{row[second]}"})


# A smaller program.
texts = perco.Table("texts", key=perco.TEXT)
text = texts.column("text", perco.TEXT)
uses = perco.Table("uses", key=perco.Tuple(perco.TEXT, perco.TEXT))
times = uses.column("times", perco.INT64)
counts = perco.Table("counts", key=perco.TEXT)
count = counts.column("count", perco.INT64)
small = views.Views(perco.Schema(texts, uses, counts))


@small.each(text, id="uses", into=uses)
def used(row: perco.Row[str]) -> Iterable[views.Put[Any]]:
    for word, found in Counter((row[text] or "").split()).items():
        yield views.Put(uses, (word, row.key), {times: found})


@small.group(times, id="counts", by=views.prefix(1), into=counts, keep=[views.sum(times)])
def counted(word: str, rows: views.Group[Any]) -> Iterable[views.Put[Any]]:
    yield views.Put(counts, word, {count: rows.sum(times)})


clashes = perco.Table("clashes", key=perco.TEXT)
clash = clashes.column("clash", perco.TEXT)
clashing = views.Views(perco.Schema(texts, clashes))


@clashing.each(text, id="clashes", into=clashes)
def clashed(row: perco.Row[str]) -> Iterable[views.Put[Any]]:
    for word in set((row[text] or "").split()):
        yield views.Put(clashes, word, {clash: row.key})


papers = perco.Table("papers", key=perco.TEXT)
words_of = papers.column("words", perco.TEXT)
cluster = papers.column("cluster", perco.TEXT)  # in the documents' own table
alike = views.Views(perco.Schema(papers))
views.near_duplicates(alike, words_of, id="alike", into=cluster, features=views.words(1))
