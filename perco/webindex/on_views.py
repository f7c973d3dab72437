"""The web index as views: what `index.py` says in observers, declared once.

    pages.contents --parse--> docs (the title and text of a page), links, frames
    frames --show--> frames.inner       the texts of the pages in a page's frames
    pages.rank --rank--> around.score
    docs, around, links, frames --place--> members   where a page stands among the pages with the same content
    members --elect--> documents        the first of these is canonical, the others are its duplicates
    documents --export--> the search index

perco keeps what `index.py` keeps by hand: which run gave which row, what has to be taken back, and who must run again.
`batch.build` makes the same documents from the same pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import perco
from perco.views import Delivered, Group, Put, Views, first, prefix
from perco.webindex.batch import ANCHORS_MAX, DUPLICATES_MAX, Document, content_hash, seat, usable_rank
from perco.webindex.pages import (
    DEFAULT_LIMITS,
    Page,
    ParseLimits,
    canonical_url,
    indexable,
    key_part,
    pack,
    parse,
    rendered,
    unpack,
)
from perco.webindex.search import ExportRow, SearchIndex

Puts: TypeAlias = Iterable[Put[Any]]

pages: perco.Table[str] = perco.Table("pages", key=perco.TEXT)  # by URL; the other tables have the URL's key part
contents: perco.Column[str, bytes] = pages.column("contents", perco.BYTES, group="raw")
rank: perco.Column[str, float] = pages.column("rank", perco.FLOAT64)
docs: perco.Table[str] = perco.Table("docs", key=perco.TEXT)
said: perco.Column[str, Any] = docs.column("said", perco.MSGPACK)  # (URL, title, text without that of frames)
links: perco.Table[Any] = perco.Table("links", key=perco.Tuple(perco.TEXT, perco.TEXT))  # (target, source)
anchor: perco.Column[Any, Any] = links.column("anchor", perco.MSGPACK)  # (source URL, text)
frames: perco.Table[Any] = perco.Table("frames", key=perco.Tuple(perco.TEXT, perco.INT64))  # (page, number)
shown: perco.Column[Any, str] = frames.column("shown", perco.TEXT)
inner: perco.Column[Any, str] = frames.column("inner", perco.TEXT)
around: perco.Table[str] = perco.Table("around", key=perco.TEXT)  # what others say about a page
score: perco.Column[str, float] = around.column("score", perco.FLOAT64)
members: perco.Table[Any] = perco.Table(
    "members", key=perco.Tuple(perco.BYTES, perco.INT64, perco.TEXT)
)  # (hash, *seat)
member: perco.Column[Any, Any] = members.column("member", perco.MSGPACK)  # (URL, rank, anchors)
words: perco.Column[Any, Any] = members.column("words", perco.MSGPACK)  # (title, text)
documents: perco.Table[bytes] = perco.Table("documents", key=perco.BYTES)  # by content hash
document: perco.Column[bytes, Any] = documents.column("document", perco.MSGPACK)  # the arguments of a Document


def web_views(
    search: SearchIndex | None = None,
    limits: ParseLimits = DEFAULT_LIMITS,
    anchors_max: int = ANCHORS_MAX,
    duplicates_max: int = DUPLICATES_MAX,
) -> Views:
    """The views of a web index.

    Args:
        search: where documents go; None for programs that only load or read.
        limits, anchors_max, duplicates_max: see `WebIndex`.
    """
    v = Views(perco.Schema(pages, docs, links, frames, around, members, documents))

    @v.each(contents, id="parse", into=[docs, links, shown])
    def parse_page(row: perco.Row[str]) -> Puts:
        page, source = unpack(row[contents] or b""), key_part(row.key)
        found = parse(page, limits)
        if indexable(page):
            yield Put(docs, source, {said: (row.key, found.title, found.text)})
        for target, text in found.links:
            yield Put(links, (key_part(target), source), {anchor: (row.key, text)})
        for number, url in enumerate(found.embedded):
            yield Put(frames, (source, number), {shown: key_part(url)})

    @v.each(rank, id="rank", into=score)
    def rank_page(row: perco.Row[str]) -> Puts:
        yield Put(around, key_part(row.key), {score: row[rank]})

    @v.join(shown, said, id="show", on=lambda frame: frame[shown], into=inner)
    def show(frame: perco.Row[Any], other: Any) -> Puts:
        yield Put(frames, frame.key, {inner: other[said][2]})

    @v.cogroup(said, score, first(anchors_max, anchor), inner, id="place", into=members)
    def place(page: str, there: Any, ranked: Any, linked: list[Any], framed: list[Any]) -> Puts:
        if there is None:
            return
        url, title, text = there[said]
        if framed:
            text = rendered(text, [row[inner] for row in framed], limits)
        rank_now = usable_rank(ranked and ranked[score])
        seated = seat(rank_now, url)
        value = {member: (url, rank_now, [row[anchor] for row in linked]), words: (title, text)}
        yield Put(members, (content_hash(title, text), *seated), value)

    @v.group(member, words, id="elect", by=prefix(1), into=documents, first=1 + duplicates_max)
    def elect(content: bytes, rows: Group[Any]) -> Puts:
        found = [(*(row[member] or ()), *(row[words] or ())) for row in rows]
        url, ranked, _, title, text = found[0]
        linked = [link for each in found for link in each[2]][:anchors_max]
        yield Put(documents, content, {document: (url, title, text, linked, [each[0] for each in found[1:]], ranked)})

    if search is not None:
        v.sink(document, id="export", to=lambda rows: search.export([exported(row) for row in rows]))
    return v


def exported(row: Delivered) -> ExportRow:
    """A delivered row, as the search index takes it."""
    found = None if row.values is None else Document(*row.values["document"])
    return ExportRow(row.key.hex(), row.version, found)


async def load(txn: perco.Transaction, page: Page) -> bool:
    """Store a page, unless the same page is there already; returns whether it was new or different."""
    url = canonical_url(page.url)
    if url is None:
        return False
    packed = pack(replace(page, url=url))
    if await txn.get(contents, url) == packed:
        return False
    txn.set(contents, url, packed)
    return True
