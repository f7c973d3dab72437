"""Near-duplicates: documents with almost the same features, such as runs of words, get the same label.

Two documents are near each other if the Jaccard similarity of their sets of features is at least a threshold. It is
estimated by MinHash (Broder, 1997), and candidates are found by locality-sensitive hashing: the signature of a document
is cut into bands, and two documents are compared if they agree in a whole band. A cluster is a set of documents that
are near each other, directly or through others.

    document --sign--> bands   (hash of a band, document) -> signature
                       links   (document, document, nothing): so a document without others has a label, too
    bands --link-->    links   (document, another one of the same band, hash of the band)
    links --clusters--> the label

Among the documents of a band, all pairs are compared. The links are not these pairs, but lead from each document of a
cluster to the first one: they connect the same documents, and are fewer.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final, TypeVar

from perco.errors import UsageError
from perco.schema.codecs import BOOL, BYTES
from perco.schema.schema import Column
from perco.txn.row import Row
from perco.views.compiled import codecs_of, key_of, parts_of, prefix
from perco.views.declaring import Views
from perco.views.rows import Group, Put
from perco.views.wiring import must_be_count, must_be_links, must_be_plain, table_of_parts

K = TypeVar("K")
V = TypeVar("V")

Features = Callable[[Any], Collection[str]]

THRESHOLD: Final = 0.8
PERMUTATIONS: Final = 256
PERMUTATIONS_MAX: Final = 1024
COMPARED_MAX: Final = 1000
KEY_BYTES_MAX: Final = 180  # a link has the keys of two documents
_BANDED: Final = 128  # of the permutations, at most, make up the bands: each band costs a run
_RECALL: Final = 0.95  # of pairs exactly at the threshold, by the bands alone
_SEED: Final = 1
_CHANCE: Final = 1 / 256  # that a byte of two signatures is the same though the minima differ
_WORD: Final = re.compile(r"\w+")


def words(run: int = 3) -> Features:
    """Features of a text: each run of so many words, in lower case; of a shorter text, the text."""
    must_be_count("words", "run", run)

    def features(text: str) -> Collection[str]:
        found = _WORD.findall(text.lower())
        last = len(found) - run
        return {" ".join(found[at : at + run]) for at in range(max(last, 0) + 1)} if found else ()

    return features


def near_duplicates(
    v: Views,
    column: Column[K, V],
    *,
    id: str,
    into: Column[K, Any],
    features: Callable[[V], Collection[str]] | None = None,
    threshold: float = THRESHOLD,
    permutations: int = PERMUTATIONS,
    compared_max: int = COMPARED_MAX,
    version: int = 1,
) -> None:
    """Declare the views that label near-duplicates: all documents of a cluster get the smallest of their keys.

    Pairs of documents whose similarity, as estimated, is at least the threshold connect the documents of a cluster. A
    document that changes or is deleted leaves its cluster, which may fall apart. Needs `pip install 'perco[near]'`.

    The estimate of a similarity s has a standard error of about sqrt(s * (1 - s) / permutations). Pairs well above the
    threshold are found, pairs well below are not.

    Args:
        column: the documents. Their keys have at most 180 bytes and 3 parts.
        id: the views and tables that this adds have names that begin with it.
        into: the column that gets the label, in a table with the documents' keys; it may be the documents' own table.
        features: a pure function of the column's value that returns a set of texts. By default, `views.words(3)`: runs
            of three words. A document without features has a cluster of its own.
        threshold: the least Jaccard similarity of near-duplicates, above 0 and at most 1.
        permutations: the length of a signature, in bytes; each band of a document stores it.
        compared_max: of more documents with the same band, only the first ones, by their keys, are compared there.
        version: raise it when `features`, the threshold or the permutations change.

    Raises: UsageError.
    """
    if not isinstance(into, Column):
        raise UsageError(f"{id}: into= takes the column of the labels, not {into!r}")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
        raise UsageError(f"{id}: threshold is a similarity, above 0 and at most 1, not {threshold!r}")
    must_be_count(id, "permutations", permutations, "permutations")
    if permutations > PERMUTATIONS_MAX:
        raise UsageError(f"{id}: {permutations} permutations are more than {PERMUTATIONS_MAX}")
    must_be_count(id, "compared_max", compared_max)
    with v.all_or_nothing():
        _declare(v, column, id, into, features, threshold, permutations, compared_max, version)


def _declare(
    v: Views,
    column: Column[K, V],
    id: str,
    into: Column[K, Any],
    features: Callable[[V], Collection[str]] | None,
    threshold: float,
    permutations: int,
    compared_max: int,
    version: int,
) -> None:
    key = column.table.key
    nodes = codecs_of(key)
    bands = table_of_parts(f"{id}.bands", (BYTES, *nodes))
    links = table_of_parts(f"{id}.links", (*nodes, *nodes, BYTES))
    sign, near, alone = bands.column("sign", BYTES), links.column("near", BOOL), links.column("alone", BOOL)
    must_be_links(id, links, into)
    of, minhash = words() if features is None else features, _minhash()
    must_be_plain(id, of)
    for table in (bands, links):
        v.take_up(id, table)
    banded, least = min(permutations, _BANDED), threshold
    rows = band_rows(threshold, banded)

    def link(one: Any, other: Any, band: bytes) -> tuple[Any, ...]:
        return *parts_of(key, one), *parts_of(key, other), band

    @v.each(column, id=f"{id} sign", into=[sign, alone], version=version)
    def signed(row: Row[K]) -> Iterable[Put[Any]]:
        size = len(column.table.row(row.key))
        if size > KEY_BYTES_MAX:
            raise UsageError(f"{id}: the key {row.key!r} has {size} bytes, and {KEY_BYTES_MAX} are the most here")
        yield Put(links, link(row.key, row.key, b""), {alone: True})
        values = signature(minhash, sorted(of(row[column])), permutations)  # type: ignore[arg-type]  # it is there
        short = bytes(value & 255 for value in values)
        for band in _bands(values[:banded], rows):
            yield Put(bands, (band, *parts_of(key, row.key)), {sign: short})

    @v.group(sign, id=f"{id} link", by=prefix(1), into=near, first=compared_max, version=version)
    def linked(band: bytes, members: Group[Any]) -> Iterable[Put[Any]]:
        found = [(key_of(key, member.key[1:]), member[sign] or b"") for member in members]
        for at, first in enumerate(clusters([short for _, short in found], least)):
            if at != first:
                yield Put(links, link(found[at][0], found[first][0], band), {near: True})

    v.components(near, alone, id=id, into=into, version=version)


def signature(minhash: Any, features: list[str], permutations: int) -> list[int]:
    """The minima of some features; none without features."""
    if not features:
        return []
    made = minhash(num_perm=permutations, seed=_SEED)
    made.update(features)
    found: list[int] = made.digest()
    return found


def band_rows(threshold: float, permutations: int) -> int:
    """The length of a band: the longest with which a pair at the threshold agrees in a band with a chance of 95 %."""
    best = 1
    for rows in range(1, permutations + 1):
        if 1 - (1 - threshold**rows) ** (permutations // rows) >= _RECALL:
            best = rows
    return best


def _bands(values: Sequence[int], rows: int) -> Iterable[bytes]:
    """A hash of each band, with its number."""
    for at in range(0, len(values) - rows + 1, rows):
        yield blake2b(struct.pack(f"<{rows + 1}Q", at, *values[at : at + rows]), digest_size=8).digest()


def clusters(signatures: Sequence[bytes], threshold: float) -> list[int]:
    """For each signature, the first one of its cluster. All pairs are compared."""
    import numpy

    if len(signatures) == 1:
        return [0]
    size = len(signatures[0])
    least = size * (_CHANCE + threshold * (1 - _CHANCE))  # equal bytes
    table = numpy.frombuffer(b"".join(signatures), dtype=numpy.uint8).reshape(len(signatures), size)
    first = list(range(len(signatures)))

    def root(at: int) -> int:
        while first[at] != at:
            first[at] = at = first[first[at]]
        return at

    for at in range(len(signatures) - 1):
        equal = (table[at + 1 :] == table[at]).sum(axis=1)
        for other in numpy.flatnonzero(equal >= least - 1e-9):
            low, high = sorted((root(at), root(at + 1 + int(other))))
            first[high] = low
    return [root(at) for at in range(len(signatures))]


def _minhash() -> Any:
    try:
        import numpy as numpy  # found missing now, not in a run
        import rensa
    except ImportError as error:
        raise UsageError(f"near-duplicates need {error.name}: pip install 'perco[near]'") from error
    return rensa.RMinHash
