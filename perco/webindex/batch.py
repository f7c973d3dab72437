"""The whole index, computed from all pages at once: the result that the incremental index must equal.

It is as plain as possible, so that it cannot go wrong in the same way as the incremental one.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgpack

from perco.webindex.pages import (
    DEFAULT_LIMITS,
    Page,
    ParseLimits,
    canonical_url,
    indexable,
    key_part,
    parse,
    rendered,
)


@dataclass(frozen=True, slots=True)
class Document:
    """The index's entry for all pages with the same content: their words, and the texts of the links to any of them."""

    url: str
    """The URL of the canonical page: the page with the highest rank; of several such pages, the first by URL."""
    title: str
    text: str
    anchors: tuple[tuple[str, str], ...] = ()
    """(source URL, anchor text) of the links to these pages: first those to the canonical page, then those to its
    duplicates, in the order of `duplicates`. The links to one page are in the order of their sources."""
    duplicates: tuple[str, ...] = ()
    """The other pages with the same content, in the order in which they would become canonical."""
    rank: float = 1.0
    """The rank of the canonical page."""


ANCHORS_MAX = 50
"""How many links to a document are kept: the first ones in the order of `Document.anchors`."""

DUPLICATES_MAX = 20
"""How many duplicates of a document are kept, with the links to them: the first in the order of `duplicates`."""

DEFAULT_RANK = 1.0
"""The rank of a page that has not been ranked: the rank of the average page (`rank.pagerank`)."""


def usable_rank(rank: float | None) -> float:
    """The rank that is used: the default if `rank` is missing or not finite."""
    return rank if rank is not None and math.isfinite(rank) else DEFAULT_RANK


def seat(rank: float, url: str) -> tuple[int, str]:
    """A page's place among the pages with the same content: the highest rank comes first, and among equal ranks the
    smallest URL. The page with the smallest tuple is canonical. The tuple can be part of a row key."""
    (bits,) = struct.unpack(">q", struct.pack(">d", rank + 0.0))  # + 0.0: no negative zero
    return (-bits if bits >= 0 else bits & 0x7FFF_FFFF_FFFF_FFFF), key_part(url)


def content_hash(title: str, text: str) -> bytes:
    """Equal for pages with the same content: 16 bytes of a SHA-256."""
    return hashlib.sha256(f"{title}\0{text}".encode("utf-8", "surrogatepass")).digest()[:16]


def build(
    pages: Iterable[Page],
    ranks: Mapping[str, float] | None = None,
    limits: ParseLimits = DEFAULT_LIMITS,
    *,
    anchors_max: int = ANCHORS_MAX,
    duplicates_max: int = DUPLICATES_MAX,
) -> dict[str, Document]:
    """The documents of these pages, in the order of their URLs. If several pages have the same URL, only the last one
    counts. A page whose URL has no canonical form is ignored.

    Args:
        ranks: the ranks of pages, by canonical URL; all other pages have the default rank.
    """
    current: dict[str, Page] = {}
    for page in pages:
        url = canonical_url(page.url, None, limits.url_bytes_max)
        if url is not None:
            current[url] = replace(page, url=url)
    parsed = {url: parse(page, limits) for url, page in current.items()}
    links: dict[str, list[tuple[str, str]]] = {}
    for source in sorted(parsed, key=key_part):
        for target, anchor in parsed[source].links:
            links.setdefault(target, []).append((source, anchor))

    rank_of = {url: usable_rank(None if ranks is None else ranks.get(url)) for url in current}
    clusters: dict[bytes, list[str]] = {}
    words: dict[bytes, tuple[str, str]] = {}
    for url, found in parsed.items():
        if indexable(current[url]):
            inside = [parsed[other].text for other in found.embedded if other in parsed and indexable(current[other])]
            text = rendered(found.text, inside, limits)
            content = content_hash(found.title, text)
            words[content] = found.title, text
            clusters.setdefault(content, []).append(url)

    documents = []
    for content, urls in clusters.items():
        kept = sorted(urls, key=lambda url: seat(rank_of[url], url))[: 1 + duplicates_max]
        anchors = [link for url in kept for link in links.get(url, ())]
        documents.append(
            Document(kept[0], *words[content], tuple(anchors[:anchors_max]), tuple(kept[1:]), rank_of[kept[0]])
        )
    return {document.url: document for document in sorted(documents, key=lambda document: document.url)}


def digest(documents: Mapping[str, Document] | Iterable[Document]) -> str:
    """SHA-256, in hex, of the documents in the order of their URLs: two digests are equal only for equal indexes."""
    plain = documents.values() if isinstance(documents, Mapping) else documents
    return digest_in_order(sorted(plain, key=lambda document: document.url))


def digest_in_order(documents: Iterable[Document]) -> str:
    """Like `digest`, but for documents that arrive one at a time, in the order of their URLs."""
    running = hashlib.sha256()
    for each in documents:
        running.update(
            msgpack.packb([each.url, each.title, each.text, each.anchors, each.duplicates, float(each.rank)])
        )
    return running.hexdigest()
