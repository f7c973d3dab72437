"""The web index as observers: pages in, a search index out, change by change.

    pages.contents --parse--+--> docs.parsed, .place, members   what a page says, where it stands among its duplicates
    pages.rank ----rank-----+          |
                            |          '--> dups.changed --elect--> dups.canonical, .listing --export--> SQLite
                            |                   ^
                            '--> links, docs.linked --gather--> docs.anchors
    docs.said --reprocess--> docs.stale --parse again

parse    a page changed: extract its title, text and links, and hash its content. A link is a row of `links` with the
         key (target, source): the links are inverted. Write links that are new or changed, and delete those that are
         gone. The text of a page includes the texts of the pages in its frames, so the page is parsed again when one of
         these texts changes.
rank     the rank of a page changed: move the page among its duplicates.
gather   the links to a page have changed: collect their texts again. A page that many pages link to is a hot spot.
elect    a cluster (the pages with one content hash) changed: choose the canonical page, and list its duplicates and the
         texts of the links to any of them. The rows of `members` are sorted for the election: the first row of a
         cluster is its canonical page. The cluster of a page with many copies is a hot spot.
export   a listing changed: hand the document to the search index, as of the run's snapshot. The snapshot's timestamp is
         the version of the document's row there. An older version never replaces a newer one, and a repeated one
         changes nothing. So the export takes effect once, no matter when the process dies.
reprocess  the text of a page has changed, and other pages show it in frames: signal that these other pages are stale.

Why the order of arrival does not matter, under snapshot isolation:

-   `docs.place` is one small cell, (content hash, rank), and the page's row in `members` changes with it. A transaction
    that changes a page's place, or gathers the links to the page, writes this cell. So if two such transactions
    overlap, they conflict on this cell, and on no other.
-   Only an election writes a cluster's row, from one snapshot, and all searchable data of the cluster is stored under
    the cluster's hash. When another page becomes canonical, no data moves from page to page, so none can be lost on the
    way.
-   Runs for a signal may overlap. So each run writes a cell of its row even if nothing is new. The second of two
    overlapping runs then conflicts with the first, and runs again; so the last run to commit has seen the newest data.
-   The run for a page reads the texts of the pages in its frames under a read lock. If one of these texts changes at
    the same time, either the run sees the new text, or the transaction that changes it sees that the page shows it.

`batch.build` makes the same documents from the same pages without any of this; the tests compare the two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import perco
from perco import Column, Schema, Signal, Table
from perco.webindex.batch import (
    ANCHORS_MAX,
    DEFAULT_RANK,
    DUPLICATES_MAX,
    Document,
    content_hash,
    seat,
    usable_rank,
)
from perco.webindex.exporter import Exporter
from perco.webindex.pages import (
    DEFAULT_LIMITS,
    Page,
    Parsed,
    ParseLimits,
    canonical_url,
    indexable,
    key_part,
    pack,
    parse,
    rendered,
    unpack,
)
from perco.webindex.search import ExportRow

STALE_AT_ONCE = 2500  # how many pages a run of `reprocess` signals; a chain may have a hundred such runs (N9)
_LISTED_AT_ONCE = 100  # documents
_READ_AT_ONCE = 8  # members of a cluster; the first few usually have all the links that are kept

Anchors = tuple[tuple[str, str], ...]  # (source URL, text)


class Place(NamedTuple):
    """A page's place: the cluster of its content hash, and the rank that sorts it there."""

    content: bytes
    rank: float


class Listing(NamedTuple):
    """All data of a cluster except its words, which every page of the cluster has."""

    canonical: str
    rank: float
    duplicates: tuple[str, ...]
    anchors: Anchors


class WebIndex:
    """The tables and observers of a web index.

    Args:
        exporter: where documents go; None for programs that only load or read, and run no observers.
        limits: how much of a page is indexed.
        anchors_max: the number of links to a document whose texts are kept.
        duplicates_max: how many duplicates of a document are kept, together with the texts of the links to them.
        stale_at_once: how many pages one run of `reprocess` signals as stale.
    """

    limits: ParseLimits
    anchors_max: int
    duplicates_max: int
    exporter: Exporter
    pages: Table[str]
    contents: Column[str, bytes]
    rank: Column[str, float]
    docs: Table[str]
    parsed: Column[str, Any]
    own: Column[str, str]
    outlinks: Column[str, Any]
    embedded: Column[str, Any]
    place: Column[str, Any]
    anchors: Column[str, Any]
    told: Column[str, str]
    linked: Signal[str]
    said: Signal[str]
    stale: Signal[str]
    links: Table[tuple[str, str]]
    anchor: Column[tuple[str, str], str]
    uses: Table[tuple[str, str]]
    user: Column[tuple[str, str], str]
    members: Table[tuple[bytes, int, str]]
    member: Column[tuple[bytes, int, str], str]
    dups: Table[bytes]
    canonical: Column[bytes, str]
    listing: Column[bytes, Any]
    changed: Signal[bytes]
    crawls: Table[str]
    sources: Column[str, Any]
    schema: Schema

    def __init__(
        self,
        exporter: Exporter | None = None,
        limits: ParseLimits = DEFAULT_LIMITS,
        anchors_max: int = ANCHORS_MAX,
        duplicates_max: int = DUPLICATES_MAX,
        stale_at_once: int = STALE_AT_ONCE,
    ) -> None:
        self.limits, self.anchors_max, self.duplicates_max = limits, anchors_max, duplicates_max
        self.stale_at_once = stale_at_once
        self.exporter = exporter or Exporter()
        self.pages = perco.Table("pages", key=perco.TEXT)
        self.contents = self.pages.column("contents", perco.BYTES, group="raw")
        self.rank = self.pages.column("rank", perco.FLOAT64)
        self.docs = perco.Table("docs", key=perco.TEXT)
        self.parsed = self.docs.column("parsed", perco.MSGPACK, group="text")  # (title, text including that of frames)
        self.own = self.docs.column("own", perco.TEXT, group="text")  # if a page has frames: its text without theirs
        self.outlinks = self.docs.column("outlinks", perco.MSGPACK)  # ((target, anchor text), ...)
        self.embedded = self.docs.column("embedded", perco.MSGPACK)  # (URL, ...) of the pages in its frames
        self.place = self.docs.column("place", perco.MSGPACK)  # Place; only of indexed pages
        self.anchors = self.docs.column("anchors", perco.MSGPACK)  # Anchors of the links to the page
        self.told = self.docs.column("told", perco.TEXT)  # how far `reprocess` has come
        self.linked = self.docs.signal("linked")
        self.said = self.docs.signal("said")
        self.stale = self.docs.signal("stale")
        self.links = perco.Table("links", key=perco.Tuple(perco.TEXT, perco.TEXT))  # (target, source)
        self.anchor = self.links.column("anchor", perco.TEXT)
        self.uses = perco.Table("uses", key=perco.Tuple(perco.TEXT, perco.TEXT))  # (framed page, page that shows it)
        self.user = self.uses.column("url", perco.TEXT)
        self.members = perco.Table("members", key=perco.Tuple(perco.BYTES, perco.INT64, perco.TEXT))  # (hash, *seat)
        self.member = self.members.column("url", perco.TEXT)
        self.dups = perco.Table("dups", key=perco.BYTES)  # by content hash
        self.canonical = self.dups.column("canonical", perco.TEXT)
        self.listing = self.dups.column("listing", perco.MSGPACK)  # Listing
        self.changed = self.dups.signal("changed")
        self.crawls = perco.Table("crawls", key=perco.TEXT)
        self.sources = self.crawls.column("sources", perco.JSON)  # arguments of the crawler
        self.schema = perco.Schema(self.pages, self.docs, self.links, self.uses, self.members, self.dups, self.crawls)
        self._observe()

    def _observe(self) -> None:
        observe = self.schema.observe
        observe(self.contents, id="parse")(self.on_page)
        observe(self.stale, id="parse again")(self.on_page)
        observe(self.rank, id="rank")(self.on_rank)
        observe(self.linked, id="gather")(self.on_links)
        observe(self.changed, id="elect")(self.on_cluster)
        observe(self.listing, id="export")(self.export)
        observe(self.said, id="reprocess")(self.on_said)

    # ------------------------------------------------------------ loading

    async def load(self, txn: perco.Transaction, page: Page) -> bool:
        """Store a page, unless the same page is there already; returns whether it was new or different."""
        url = canonical_url(page.url)
        if url is None:
            return False
        packed = pack(replace(page, url=url))
        before = await txn.get(self.contents, url)
        if before == packed:
            return False
        txn.set(self.contents, url, packed)
        if before is None and await txn.get(self.rank, url) is None:
            txn.set(self.rank, url, DEFAULT_RANK)
        return True

    async def remove(self, txn: perco.Transaction, url: str) -> None:
        """Remove a page."""
        txn.delete(self.contents, url)
        txn.delete(self.rank, url)

    # ------------------------------------------------------------ pages

    async def on_page(self, txn: perco.Transaction, change: perco.Change[str, Any]) -> None:
        """Parse the title, text and links of a page that has changed, or that shows a changed page in a frame."""
        url = change.key
        packed = await txn.get(self.contents, url)
        before = await txn.row(self.docs, url, [self.parsed, self.own, self.outlinks, self.embedded, self.place])
        page = None if packed is None else unpack(packed)
        found = Parsed() if page is None else parse(page, self.limits)
        self._relink(txn, url, dict(before[self.outlinks] or ()), dict(found.links))
        self._embed(txn, url, before[self.embedded] or (), found.embedded)
        place: Place | None = None
        if page is None or not indexable(page):
            parsed = None
        else:
            shown = await txn.get_many(self.parsed, found.embedded, lock=True) if found.embedded else {}
            inside = [await self._own_text(txn, other, said) for other, said in shown.items() if said is not None]
            text = rendered(found.text, inside, self.limits) if inside else found.text
            parsed = found.title, text
            rank = await txn.get(self.rank, url)
            place = Place(content_hash(*parsed), usable_rank(rank))
        self._put(txn, self.parsed, url, before[self.parsed], parsed)
        self._put(txn, self.own, url, before[self.own], found.text if found.embedded else None)
        self._move(txn, url, _place(before[self.place]), place)
        said = before[self.own] if before[self.own] is not None else (before[self.parsed] or ("", None))[1]
        if said != (None if place is None else found.text) and await self._is_shown(txn, url):
            txn.delete(self.told, url)
            txn.signal(self.said, url)

    def _relink(self, txn: perco.Transaction, url: str, before: dict[str, str], links: dict[str, str]) -> None:
        """Write the links of a page that are new or have changed, and delete those that are gone."""
        source = key_part(url)
        for target in before.keys() - links.keys():
            txn.delete(self.anchor, (key_part(target), source))
            txn.signal(self.linked, target)
        for target, text in links.items():
            if before.get(target) != text:
                # If the source is too long for a key, it is stored after the text; the text has no NUL in it.
                txn.set(self.anchor, (key_part(target), source), text if source == url else f"{text}\0{url}")
                txn.signal(self.linked, target)
        self._put(txn, self.outlinks, url, tuple(before.items()) or None, tuple(links.items()) or None)

    def _embed(self, txn: perco.Transaction, url: str, before: Iterable[str], embedded: Iterable[str]) -> None:
        for other in set(before).difference(embedded):
            txn.delete(self.user, (key_part(other), key_part(url)))
        for other in set(embedded).difference(before):
            txn.set(self.user, (key_part(other), key_part(url)), url)
        self._put(txn, self.embedded, url, tuple(before) or None, tuple(embedded) or None)

    async def _own_text(self, txn: perco.Transaction, url: str, parsed: tuple[str, str]) -> str:
        own = await txn.get(self.own, url)
        return parsed[1] if own is None else own

    async def _is_shown(self, txn: perco.Transaction, url: str) -> bool:
        return bool(await txn.scan(self.uses, prefix=(key_part(url),), columns=[self.user], limit=1).all())

    async def on_rank(self, txn: perco.Transaction, change: perco.Change[str, float]) -> None:
        """Move a page whose rank has changed."""
        place = _place(await txn.get(self.place, change.key))
        after = None if place is None else place._replace(rank=usable_rank(change.value))
        # If a run of `on_page` in flight has read the old rank, it conflicts with this run; one of the two runs again.
        self._move(txn, change.key, place, after)

    async def on_links(self, txn: perco.Transaction, change: perco.Change[str, None]) -> None:
        """Gather the texts of the links to a page again."""
        url = change.key
        before = await txn.row(self.docs, url, [self.place, self.anchors])
        scan = txn.scan(self.links, prefix=(key_part(url),), columns=[self.anchor], limit=self.anchors_max)
        anchors = tuple([_anchor(row.key[1], row[self.anchor] or "") async for row in scan])
        place = _place(before[self.place])
        self._move(txn, url, place, place)
        if anchors != (before[self.anchors] or ()):
            self._put(txn, self.anchors, url, before[self.anchors], anchors or None)
            if place is not None:
                txn.signal(self.changed, place.content)

    async def on_said(self, txn: perco.Transaction, change: perco.Change[str, None]) -> None:
        """Signal that the pages that show a changed page are stale; a run signals a limited number of them."""
        url, shown = change.key, key_part(change.key)
        told = await txn.get(self.told, url)
        start, stop = (shown, f"{told}\0" if told is not None else ""), (f"{shown}\0", "")
        scan = txn.scan(self.uses, start=start, stop=stop, columns=[self.user], limit=self.stale_at_once)
        users = [(row.key[1], row[self.user]) async for row in scan]
        for _, user in users:
            assert user is not None
            txn.signal(self.stale, user)
        if len(users) == self.stale_at_once:
            txn.set(self.told, url, users[-1][0])
            txn.signal(self.said, url)
        elif told is not None:
            txn.delete(self.told, url)

    # ------------------------------------------------------------ clusters

    def _move(self, txn: perco.Transaction, url: str, before: Place | None, after: Place | None) -> None:
        """Write a page's place, even if it is the same. If it has changed, move the page's row in `members`, and signal
        the clusters that the page leaves and enters."""
        if after is None:
            txn.delete(self.place, url)
        else:
            txn.set(self.place, url, after)
        if before == after:
            return
        if before is not None:
            txn.delete(self.member, (before.content, *seat(before.rank, url)))
        if after is not None:
            txn.set(self.member, (after.content, *seat(after.rank, url)), url)
        for content in {place.content for place in (before, after) if place is not None}:
            txn.signal(self.changed, content)

    async def on_cluster(self, txn: perco.Transaction, change: perco.Change[bytes, None]) -> None:
        """Elect again, because a page of a cluster is new, is gone, or has another rank or other links to it."""
        await self._elect(txn, change.key)

    async def _elect(self, txn: perco.Transaction, content: bytes) -> None:
        scan = txn.scan(self.members, prefix=(content,), columns=[self.member], limit=1 + self.duplicates_max)
        urls = [url async for row in scan if (url := row[self.member]) is not None]
        before = await txn.get(self.listing, content)
        if not urls:
            txn.delete(self.canonical, content)
            self._put(txn, self.listing, content, before, None)
            return
        txn.set(self.canonical, content, urls[0])
        place = _place(await txn.get(self.place, urls[0]))
        assert place is not None, "the rows of members go with the places of their pages"
        listing = Listing(urls[0], place.rank, tuple(urls[1:]), await self._gathered(txn, urls))
        self._put(txn, self.listing, content, before, listing)

    async def elect_and_export(self, txn: perco.Transaction, content: bytes) -> None:
        """Elect again, and have the document exported even if nothing changes."""
        await self._elect(txn, content)
        listing = await txn.get(self.listing, content)
        if listing is not None:
            txn.set(self.listing, content, listing)

    async def _gathered(self, txn: perco.Transaction, urls: Sequence[str]) -> Anchors:
        """The texts of the links to these pages: at most `anchors_max` of them, the first ones."""
        gathered: list[tuple[str, str]] = []
        for at in range(0, len(urls), _READ_AT_ONCE):
            found = await txn.get_many(self.anchors, urls[at : at + _READ_AT_ONCE])
            gathered += [anchor for anchors in found.values() for anchor in anchors or ()]
            if len(gathered) >= self.anchors_max:
                break
        return tuple(gathered[: self.anchors_max])

    async def export(self, txn: perco.Transaction, change: perco.Change[bytes, Any]) -> None:
        """Export the document, as of this run's snapshot, to the search index."""
        content, document = change.key, None
        if change.value is not None:
            listing = Listing(*change.value)
            document = await self._document(txn, content, listing)
            if document is None:
                # The canonical page has left the cluster. If it comes back before the cluster's next election, that
                # election changes nothing, and so nothing is exported. Therefore hold the election here; the listing
                # that it changes is exported.
                await self._elect(txn, content)
                return
        await self.exporter.put(ExportRow(content.hex(), txn.start_ts, document))

    # ------------------------------------------------------------ reading

    async def _document(self, snap: perco.Snapshot, content: bytes, listing: Listing) -> Document | None:
        """The document of a listing; None if the canonical page is not in this cluster any more."""
        row = await snap.row(self.docs, listing.canonical, [self.parsed, self.place])
        return _document_of(content, listing, row[self.parsed], _place(row[self.place]))

    async def document(self, snap: perco.Snapshot, url: str) -> Document | None:
        """The document that a page belongs to, as the canonical page or a duplicate; None if it belongs to none."""
        place = _place(await snap.get(self.place, url))
        if place is None:
            return None
        listing = await snap.get(self.listing, place.content)
        return None if listing is None else await self._document(snap, place.content, Listing(*listing))

    async def documents(self, snap: perco.Snapshot) -> dict[str, Document]:
        """All documents of a snapshot, by the URLs of their canonical pages."""
        return {document.url: document async for _, document in self.listed(snap) if document is not None}

    async def listed(self, snap: perco.Snapshot) -> AsyncIterator[tuple[bytes, Document | None]]:
        """(content hash, document) of all documents of a snapshot. The document is None if its canonical page has left
        the cluster, and no other page has been elected yet."""
        some: list[tuple[bytes, Listing]] = []
        async for row in snap.scan(self.dups, columns=[self.listing]):
            listing: Any = row[self.listing]
            some.append((row.key, Listing(*listing)))
            if len(some) >= _LISTED_AT_ONCE:
                for each in await self._documents(snap, some):
                    yield each
                some = []
        for each in await self._documents(snap, some):
            yield each

    async def _documents(
        self, snap: perco.Snapshot, some: Sequence[tuple[bytes, Listing]]
    ) -> list[tuple[bytes, Document | None]]:
        urls = {listing.canonical for _, listing in some}
        parsed, places = await snap.get_many(self.parsed, urls), await snap.get_many(self.place, urls)
        found: list[tuple[bytes, Document | None]] = []
        for content, listing in some:
            said, place = parsed.get(listing.canonical), _place(places.get(listing.canonical))
            found.append((content, _document_of(content, listing, said, place)))
        return found

    async def all_pages(self, snap: perco.Snapshot) -> tuple[list[Page], dict[str, float]]:
        """All pages of a snapshot and their ranks, for the batch build to start from."""
        pages, ranks = [], {}
        async for row in snap.scan(self.pages, columns=[self.contents, self.rank]):
            packed, rank = row[self.contents], row[self.rank]
            if packed is not None:
                pages.append(unpack(packed))
                ranks[row.key] = usable_rank(rank)
        return pages, ranks

    # ------------------------------------------------------------ cells

    def _put(self, txn: perco.Transaction, column: Any, key: Any, before: Any, after: Any) -> None:
        """Write a cell if its value has changed. None means that there is no value."""
        if after is None:
            if before is not None:
                txn.delete(column, key)
        elif after != before:
            txn.set(column, key, after)


def _document_of(
    content: bytes, listing: Listing, parsed: tuple[str, str] | None, place: Place | None
) -> Document | None:
    """See `WebIndex._document`. `parsed`, `place`: of the canonical page."""
    if place is None or place.content != content:
        return None
    title, text = parsed or ("", "")
    return Document(listing.canonical, title, text, listing.anchors, listing.duplicates, listing.rank)


def _place(stored: tuple[bytes, float] | None) -> Place | None:
    return None if stored is None else Place(*stored)


def _anchor(source: str, text: str) -> tuple[str, str]:
    text, _, whole = text.partition("\0")
    return whole or source, text
