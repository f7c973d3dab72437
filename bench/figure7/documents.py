"""The documents of figure 7, and the canonical of each cluster.

As in the paper's section 3.1, a document has three clustering keys, each drawn uniformly from 0.75 N keys, where N is
the size of the repository. So the average cluster has four members for each three documents, and a quarter of the keys
are unused. Keys that are drawn later come from 0.75 times what the repository has grown to: otherwise, a small
repository would have no unused keys left after a minute at full speed, and a document would cost less.

The result is the smallest document of each cluster, for each clustering. It is at the same time each document's
canonical, by its keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet

CLUSTERINGS = 3
PER_DOCUMENT = 0.75  # keys
SHIFT = 40  # a cluster's number is its clustering << SHIFT | its key
_DRAWN = 1 << 20  # at once

Canonicals = tuple[Any, Any]  # arrays: the clusters' numbers, ascending, and their smallest documents


class Documents:
    """All documents, by number: those below `size` are in the repository at the beginning."""

    def __init__(self, size: int, seed: int = 7) -> None:
        self.size = size
        self._rng = numpy.random.default_rng(seed)
        self._keys = numpy.empty((0, CLUSTERINGS), numpy.uint32)

    def keys(self, begin: int, end: int) -> Any:
        """An array of the keys of documents `begin` to `end`: a row for each."""
        while len(self._keys) < end:
            first = len(self._keys)
            count = max(_DRAWN, self.size) if first == 0 else _DRAWN
            among = PER_DOCUMENT * numpy.maximum(self.size, numpy.arange(first, first + count) + 1)
            drawn = self._rng.random((count, CLUSTERINGS)) * among[:, None]
            self._keys = numpy.concatenate([self._keys, drawn.astype(numpy.uint32)])
        return self._keys[begin:end]

    def canonicals(self, end: int) -> Canonicals:
        """The right result once all documents below `end` are clustered."""
        numbers = numbered(self.keys(0, end)).ravel()
        clusters, first = numpy.unique(numbers, return_index=True)
        return clusters, first // CLUSTERINGS

    def write(self, path: Path, begin: int, end: int) -> None:
        """Write documents to a Parquet file, which appears whole."""
        keys = self.keys(begin, end)
        columns = {"id": numpy.arange(begin, end, dtype=numpy.int32)}
        columns |= {f"key{i}": keys[:, i].astype(numpy.int32) for i in range(CLUSTERINGS)}
        beside = path.with_name(f".{path.name}")
        pyarrow.parquet.write_table(pyarrow.table(columns), beside, compression="lz4")
        beside.rename(path)


def numbered(keys: Any) -> Any:
    """The clusters' numbers, in the form of `keys`."""
    return keys.astype(numpy.int64) + (numpy.arange(CLUSTERINGS, dtype=numpy.int64) << SHIFT)


def same(found: Canonicals, wanted: Canonicals) -> bool:
    """Whether two results are equal, down to the last cluster."""
    return all(numpy.array_equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


def smallest(clusters: Any, documents: Any) -> Canonicals:
    """The canonicals from rows in any order, of which a cluster may have several: the smallest counts."""
    order = numpy.lexsort((documents, clusters))
    clusters, documents = clusters[order], documents[order]
    first = numpy.ones(len(clusters), bool)
    first[1:] = clusters[1:] != clusters[:-1]
    return clusters[first], documents[first]
