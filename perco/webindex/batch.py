"""The whole index computed from all pages at once: what the incremental index must be equal to.

It is kept as plain as it can be. There is nothing in it to go wrong in the same way as in the incremental one.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgpack

from perco.webindex.pages import DEFAULT_LIMITS, Page, ParseLimits, canonical_url, indexable, parse


@dataclass(frozen=True, slots=True)
class Document:
    """What the index holds of a page: its own words, and those of the pages that link to it."""

    url: str
    title: str
    text: str
    anchors: tuple[tuple[str, str], ...] = ()
    """(source URL, anchor text) of every page that links here, in the order of the sources."""


ANCHORS_MAX = 200
"""Of the links to a page, those of so many sources are kept: the first in the order of their URLs."""


def build(
    pages: Iterable[Page], limits: ParseLimits = DEFAULT_LIMITS, anchors_max: int = ANCHORS_MAX
) -> dict[str, Document]:
    """The documents of these pages, in the order of their URLs. Of several pages with one URL the last counts;
    a page whose URL has no canonical form counts for nothing."""
    current: dict[str, Page] = {}
    for page in pages:
        url = canonical_url(page.url, None, limits.url_bytes_max)
        if url is not None:
            current[url] = replace(page, url=url)
    parsed = {url: parse(current[url], limits) for url in sorted(current)}
    anchors: dict[str, list[tuple[str, str]]] = {url: [] for url in parsed}
    for source, found in parsed.items():
        for target, anchor in found.links:
            if target in anchors:
                anchors[target].append((source, anchor))
    return {
        url: Document(url, found.title, found.text, tuple(anchors[url][:anchors_max]))
        for url, found in parsed.items()
        if indexable(current[url])
    }


def digest(documents: Mapping[str, Document] | Iterable[Document]) -> str:
    """SHA-256, in hex, of the documents in the order of their URLs: equal for equal indexes only."""
    plain = documents.values() if isinstance(documents, Mapping) else documents
    return digest_in_order(sorted(plain, key=lambda document: document.url))


def digest_in_order(documents: Iterable[Document]) -> str:
    """The same of documents that already come in the order of their URLs, one at a time."""
    running = hashlib.sha256()
    for document in documents:
        running.update(msgpack.packb([document.url, document.title, document.text, document.anchors]))
    return running.hexdigest()
