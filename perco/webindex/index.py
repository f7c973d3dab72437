"""The web index as observers: pages in, a search index out, change by change.

    pages.contents --parse--> docs.parsed, docs.outlinks, links.anchor --gather--> docs.anchors
                                    |                                                   |
                                    '----------------- export -------------------------'---> SQLite (FTS5)

parse    a page changed: its title, text and links; links that are new, changed or gone are written as rows of `links`,
         whose key is (target, source): the inversion.
gather   a link row changed: the target's anchors anew, from all link rows that point at it. Many changes of a target
         come at once; the first run that sees them all does for the others, which find that they have been covered.
export   a document changed: hand it to the search index, as of the run's snapshot. The snapshot's timestamp is the
         row's version there, so an older one never replaces a newer one and a repeated one changes nothing: effectively
         once, whenever the process dies.

`batch.build` makes the same documents from the same pages without any of this; the tests hold one against the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import perco
from perco.webindex.batch import ANCHORS_MAX, Document
from perco.webindex.exporter import Exporter
from perco.webindex.pages import DEFAULT_LIMITS, Page, ParseLimits, canonical_url, indexable, pack, parse, unpack
from perco.webindex.search import ExportRow


class WebIndex:
    """The tables and observers of a web index.

    Args:
        exporter: where documents go; None for programs that load or read and run no observers.
        limits: how much of a page is taken.
        anchors_max: of how many pages that link to a page the texts are kept.
    """

    def __init__(
        self,
        exporter: Exporter | None = None,
        limits: ParseLimits = DEFAULT_LIMITS,
        anchors_max: int = ANCHORS_MAX,
    ) -> None:
        self.limits, self.anchors_max = limits, anchors_max
        self.pages = perco.Table("pages", key=perco.TEXT)
        self.contents = self.pages.column("contents", perco.BYTES, group="raw")
        self.docs = perco.Table("docs", key=perco.TEXT)
        self.parsed = self.docs.column("parsed", perco.MSGPACK, group="text")  # (title, text)
        self.outlinks = self.docs.column("outlinks", perco.MSGPACK)  # ((target, anchor text), ...)
        self.anchors = self.docs.column("anchors", perco.MSGPACK)  # (as of, ((source, anchor text), ...))
        self.links = perco.Table("links", key=perco.Tuple(perco.TEXT, perco.TEXT))  # (target, source)
        self.anchor = self.links.column("anchor", perco.TEXT)
        self.crawls = perco.Table("crawls", key=perco.TEXT)
        self.sources = self.crawls.column("sources", perco.JSON)  # arguments of the crawler
        self.schema = perco.Schema(self.pages, self.docs, self.links, self.crawls)
        self.schema.observe(self.contents, id="parse")(self.parse)
        self.schema.observe(self.anchor, id="gather")(self.gather)
        self.exporter = exporter or Exporter()
        self.schema.observe(self.parsed, id="export text")(self.export)
        self.schema.observe(self.anchors, id="export anchors")(self.export)

    # ------------------------------------------------------------ loading

    async def load(self, txn: perco.Transaction, page: Page) -> bool:
        """Put a page, unless it is there already; whether it was new or different."""
        url = canonical_url(page.url)
        if url is None:
            return False
        packed = pack(replace(page, url=url))
        if await txn.get(self.contents, url) == packed:
            return False
        txn.set(self.contents, url, packed)
        return True

    async def remove(self, txn: perco.Transaction, url: str) -> None:
        """A page is gone."""
        txn.delete(self.contents, url)

    # ------------------------------------------------------------ observers

    async def parse(self, txn: perco.Transaction, change: perco.Change[str, bytes]) -> None:
        """Title, text and links of a changed page."""
        url = change.key
        before = dict(await txn.get(self.outlinks, url) or ())
        links: dict[str, str] = {}
        if change.value is None:
            txn.delete(self.parsed, url)
        else:
            page = unpack(change.value)
            found = parse(page, self.limits)
            links = dict(found.links)
            if indexable(page):
                txn.set(self.parsed, url, (found.title, found.text))
            else:
                txn.delete(self.parsed, url)
        for target in before.keys() - links.keys():
            txn.delete(self.anchor, (target, url))
        for target, text in links.items():
            if before.get(target) != text:
                txn.set(self.anchor, (target, url), text)
        if links != before:
            txn.set(self.outlinks, url, tuple(links.items()))

    async def gather(self, txn: perco.Transaction, change: perco.Change[tuple[str, str], str]) -> None:
        """The anchors of the target of a changed link."""
        target, _ = change.key
        current = await txn.get(self.anchors, target)
        if current is not None and current[0] >= change.commit_ts:
            return  # a later run has seen this change
        scan = txn.scan(self.links, prefix=(target,), columns=[self.anchor], limit=self.anchors_max)
        found = [(row.key[1], row[self.anchor]) async for row in scan]
        if found or current is not None:
            txn.set(self.anchors, target, (txn.start_ts, tuple(found)))

    async def export(self, txn: perco.Transaction, change: perco.Change[str, Any]) -> None:
        """The document as of this run's snapshot, to the search index."""
        document = await self.document(txn, change.key)
        await self.exporter.put(ExportRow(change.key, txn.start_ts, document))

    # ------------------------------------------------------------ reading

    async def document(self, snap: perco.Snapshot, url: str) -> Document | None:
        """The document of a URL, None if it has none."""
        row = await snap.row(self.docs, url, [self.parsed, self.anchors])
        return self._document(row)

    def _document(self, row: perco.Row[str]) -> Document | None:
        parsed, anchors = row[self.parsed], row[self.anchors]
        if parsed is None:
            return None
        title, text = parsed
        return Document(row.key, title, text, anchors[1] if anchors else ())

    async def documents(self, snap: perco.Snapshot) -> dict[str, Document]:
        """All documents of a snapshot, by URL."""
        scan = snap.scan(self.docs, columns=[self.parsed, self.anchors])
        found = [self._document(row) async for row in scan]
        return {document.url: document for document in found if document is not None}

    async def all_pages(self, snap: perco.Snapshot) -> list[Page]:
        """All pages of a snapshot, for the batch build to start from."""
        return [unpack(row[self.contents] or b"") async for row in snap.scan(self.pages, columns=[self.contents])]
