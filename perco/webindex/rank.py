"""PageRank as a batch: computes the ranks of all pages from all links at once, and writes them to an observed column.

A rank depends on the whole graph, so small updates cannot keep it up to date (the paper's section 1: a computation that
cannot be broken down into small updates is better done as a batch). But small updates can keep up to date the data that
depends on a rank: only the pages whose rank has changed are processed again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import perco
from perco.webindex.batch import usable_rank
from perco.webindex.index import WebIndex
from perco.webindex.pages import key_part

DAMPING = 0.85
"""The share of readers who follow a link; the others open a random page."""

ERROR = 1e-9
"""The computation ends when a round moves the ranks, whose sum is 1, by no more than this in total."""

ROUNDS_MAX = 200
"""The computation also ends after this many rounds."""

MOVED_MIN = 0.01
"""A stored rank is kept unless the new rank differs from it by more than this share of it."""

ROWS_PER_TXN = 200
"""The number of ranks written in one transaction."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """The numbers of pages and links that a ranking saw, and of ranks that it wrote."""

    pages: int
    links: int
    changed: int


def pagerank(pages: int, sources: Sequence[int], targets: Sequence[int]) -> npt.NDArray[np.float64]:
    """The ranks of pages 0, 1, ...; their mean is 1 (Page et al. 1998, by power iteration).

    Args:
        pages: the number of pages.
        sources, targets: for each link between two of the pages, the page that it is on, and the page that it leads to.

    A page without links counts as if it had a link to every page.
    """
    if not pages:
        return np.zeros(0)
    source, target = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
    out = np.bincount(source, minlength=pages)
    share = 1.0 / out[source]
    ends = out == 0
    ranks = np.full(pages, 1.0 / pages)
    for _ in range(ROUNDS_MAX):
        followed = np.bincount(target, ranks[source] * share, minlength=pages) + ranks[ends].sum() / pages
        after = DAMPING * followed + (1.0 - DAMPING) / pages
        moved, ranks = float(np.abs(after - ranks).sum()), after
        if moved <= ERROR:
            break
    return ranks * pages


async def rank_all(db: perco.Database, index: WebIndex, moved_min: float = MOVED_MIN) -> Ranked:
    """Rank the pages of a store by the links between them, as of one snapshot, and write the ranks; observers do the
    rest. A page that is added meanwhile keeps its rank; a page that is removed meanwhile gets none. A stored rank is
    kept unless the new rank differs from it by more than the share `moved_min`."""
    before: dict[str, float | None] = {}
    numbers: dict[str, int] = {}
    sources, targets = array("q"), array("q")
    async with db.snapshot() as snap:
        async for page in snap.scan(index.pages, columns=[index.contents, index.rank]):
            if page[index.contents] is not None:
                numbers[key_part(page.key)] = len(before)
                before[page.key] = page[index.rank]
        async for link in snap.scan(index.links, columns=[index.anchor]):
            target, source = link.key
            if source in numbers and target in numbers:
                sources.append(numbers[source])
                targets.append(numbers[target])
    ranks = pagerank(len(before), sources, targets)
    # Keep only the digits that are exact, so that the same pages, ranked again, have the same ranks.
    found = {url: float(f"{rank:.6g}") for url, rank in zip(before, ranks, strict=True)}
    moved = [url for url, rank in found.items() if _moved(before[url], rank, moved_min)]
    changed = 0
    for at in range(0, len(moved), ROWS_PER_TXN):
        changed += await db.run(_write, index, {url: found[url] for url in moved[at : at + ROWS_PER_TXN]})
    return Ranked(len(before), len(sources), changed)


def _moved(before: float | None, after: float, share: float) -> bool:
    return before is None or abs(after - usable_rank(before)) > share * abs(usable_rank(before))


async def _write(txn: perco.Transaction, index: WebIndex, ranks: dict[str, float]) -> int:
    there = await txn.get_many(index.rank, ranks)
    for url, before in there.items():
        if before is not None:  # a page that is gone has no rank any more
            txn.set(index.rank, url, ranks[url])
    return sum(before is not None for before in there.values())
