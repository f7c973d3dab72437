"""perco's side of figure 7: an observer clusters each document that arrives.

One table, in one tablet, holds the documents and, for each clustering, the canonical of each cluster. So a run commits
in one step, with one fsync, and runs for documents that wait at the same time share a transaction. The observer is
written by hand: it reads four cells, and writes those of the three clusters that change. Group views with
`views.smallest` would give the same canonicals, and also follow documents that change or go, which do not occur here.
For that, they keep a copy of each member, and need several runs for a document.

The repository is loaded in bulk, canonicals included, before the observer is declared: for the observer, all of it has
been clustered.

Arrivals are an open loop. Documents that are due at the same moment share a transaction, as in any crawler that hands
over what it has; each is clustered by a run of its own. A document's delay is the time from its intended arrival until
the commit of its run has been acknowledged: a snapshot that is taken then has its three canonicals.
"""

from __future__ import annotations

import random
import struct
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import trio

import perco
from bench.figure7.documents import CLUSTERINGS, SHIFT, Canonicals, Documents
from bench.harness import percentile
from perco.options import SplitOptions

IN_FLIGHT = 64  # runs
BATCH = 16  # of them, that share a transaction if as many wait
AT_ONCE = 64  # documents that one transaction loads
LOADERS = 4
WAITING_MOST_S = 0.2  # until all are clustered, at the end of a load that is sustained
BACKLOG = 10_000  # documents that arrive at once, for a first estimate of the capacity
ABOVE = 1.1  # times this estimate: the first rate that is tried
STEP_DOWN = 0.95
WARM_DOCUMENTS = 64
_CHUNK = 100_000  # documents, or clusters, that are Python objects at a time

_DOCUMENT, _CLUSTER, _NUMBER = struct.Struct(">cI"), struct.Struct(">BI"), struct.Struct(">I")
KEYS = struct.Struct(f">{CLUSTERINGS}I")


@dataclass(frozen=True, slots=True)
class Load:
    """Measurements of a run in which documents arrived at some rate.

    Attributes:
        per_s: documents that arrived a second; `seconds`: for how long.
        delays_s: of each document.
        cpu_s: CPU time of the process, until all were clustered.
        late_s: how long it took from the last arrival until all were clustered.
    """

    per_s: float
    seconds: float
    delays_s: Sequence[float]
    cpu_s: float
    late_s: float

    def ms(self, share: float) -> float:
        return 1000 * percentile(self.delays_s, share)

    @property
    def sustained(self) -> bool:
        """Whether hardly any waited at the end."""
        return self.late_s <= WAITING_MOST_S

    @property
    def clustered_per_s(self) -> float:
        """Documents, from the first arrival until all were clustered."""
        return len(self.delays_s) / (self.seconds + self.late_s)

    @property
    def cpu_us(self) -> float:
        """CPU time of a document."""
        return 1e6 * self.cpu_s / len(self.delays_s)


class Repository:
    """The store's table, and the observer."""

    def __init__(self, *, observed: bool) -> None:
        self.table = perco.Table("repository", key=perco.BYTES)
        self.keys: perco.Column[bytes, bytes] = self.table.column("keys", perco.BYTES)  # of a document
        self.canonical: perco.Column[bytes, bytes] = self.table.column("canonical", perco.BYTES)  # of a cluster
        self.schema = perco.Schema(self.table)
        if observed:
            self.schema.observe(self.keys, id="cluster", backfill=False, batch=BATCH)(self.cluster)

    async def cluster(self, txn: perco.Transaction, change: perco.Change[bytes, bytes]) -> None:
        """Make the document the canonical of its clusters that have none or a larger one."""
        document = change.key[1:]
        keys = await txn.get(self.keys, change.key)
        assert keys is not None, "documents are never deleted"
        clusters = [_CLUSTER.pack(clustering, key) for clustering, key in enumerate(KEYS.unpack(keys))]
        found = await txn.get_many(self.canonical, clusters)
        for cluster in clusters:
            canonical = found.get(cluster)
            if canonical is None or document < canonical:
                txn.set(self.canonical, cluster, document)


def row_of(document: int) -> bytes:
    """The key of a document's row."""
    return _DOCUMENT.pack(b"d", document)


async def load(store: Path, documents: Documents) -> float:
    """Load the repository in bulk. Returns how many seconds it took."""
    plain = Repository(observed=False)
    clusters, firsts = documents.canonicals(documents.size)
    began = time.perf_counter()

    def rows() -> Iterator[tuple[bytes, dict[perco.Column[Any, Any], bytes]]]:
        for at in range(0, len(clusters), _CHUNK):
            some = slice(at, at + _CHUNK)
            for number, first in zip(clusters[some].tolist(), firsts[some].tolist(), strict=True):
                yield _CLUSTER.pack(number >> SHIFT, number & 0xFFFFFFFF), {plain.canonical: _NUMBER.pack(first)}
        for at in range(0, documents.size, _CHUNK):
            keys_of = documents.keys(at, min(at + _CHUNK, documents.size)).tolist()
            for document, keys in enumerate(keys_of, at):
                yield row_of(document), {plain.keys: KEYS.pack(*keys)}

    async with perco.open(store, plain.schema) as db:
        published = await db.bulk_load({plain.table: rows()})
    if published.tablets != 1:
        raise RuntimeError(f"the repository is to be one tablet, but it takes {published.tablets}")
    return time.perf_counter() - began


class Clustering:
    """An open repository, with a worker."""

    def __init__(
        self, db: perco.Database, repository: Repository, worker: perco.WorkerHandle, documents: Documents, first: int
    ) -> None:
        self._db, self._repository, self._documents = db, repository, documents
        self._rng = random.Random(first)
        self._ended: dict[bytes, float] = {}
        self.next = first  # the document that arrives next
        worker.on_run(self._on_run)

    def _on_run(self, _: str, key: bytes, __: float) -> None:
        self._ended[key] = trio.current_time()

    async def arrive(self, per_s: float, seconds: float, least: int = 1) -> Load:
        """Documents arrive at random times for so long, or, at low rates, until `least` have arrived."""
        at, due = 0.0, list[float]()
        while (at := at + self._rng.expovariate(per_s)) < seconds or len(due) < least:
            due.append(at)
        first, self.next = self.next, self.next + len(due)
        rows = [KEYS.pack(*keys) for keys in self._documents.keys(first, self.next).tolist()]
        self._ended.clear()
        cpu = time.process_time()
        began = trio.current_time()
        await self._feed(first, rows, [began + each for each in due])
        await self._db.wait_idle()
        cpu = time.process_time() - cpu
        ended = [self._ended[row_of(first + i)] - began for i in range(len(due))]
        delays = [end - each for end, each in zip(ended, due, strict=True)]
        return Load(per_s, due[-1], delays, cpu, max(ended) - due[-1])

    async def _feed(self, first: int, rows: Sequence[bytes], due: Sequence[float]) -> None:
        """Load each document when it is due, with those that are due by then."""
        taken = 0
        turn = trio.Lock()

        async def feed() -> None:
            nonlocal taken
            while True:
                async with turn:
                    if taken == len(rows):
                        return
                    await trio.sleep_until(due[taken])
                    now, begin = trio.current_time(), taken
                    taken += 1
                    while taken < len(rows) and taken < begin + AT_ONCE and due[taken] <= now:
                        taken += 1
                    end = taken
                async with self._db.transaction() as txn:
                    for i in range(begin, end):
                        txn.set(self._repository.keys, row_of(first + i), rows[i])

        async with trio.open_nursery() as nursery:
            for _ in range(LOADERS):
                nursery.start_soon(feed)

    async def capacity(self, count: int) -> float:
        """The rate at which `count` documents are clustered that arrive all at once."""
        found = await self.arrive(1e9, 0.0, count)
        return count / found.late_s

    async def warm_up(self) -> None:
        """Let some documents arrive that do not count."""
        await self.capacity(WARM_DOCUMENTS)

    async def saturation(self, seconds: float) -> Load:
        """The load at the highest rate that is sustained: from above the rate of a backlog downwards, in steps."""
        await self.warm_up()
        rate = ABOVE * await self.capacity(BACKLOG)
        while not (found := await self.arrive(rate, seconds)).sustained:
            rate = min(STEP_DOWN * rate, found.clustered_per_s)
        return found

    async def canonicals(self) -> Canonicals:
        """The canonicals that the store has."""
        clusters, firsts = array("q"), array("q")
        canonical = self._repository.canonical
        async with self._db.snapshot() as snap:
            async for row in snap.scan(self._repository.table, columns=[canonical]):
                clustering, key = _CLUSTER.unpack(row.key)
                clusters.append(clustering << SHIFT | key)
                first = row[canonical]
                assert first is not None, "the scan reads rows that have it"
                firsts.append(_NUMBER.unpack(first)[0])
        return numpy.frombuffer(clusters, numpy.int64), numpy.frombuffer(firsts, numpy.int64)


@asynccontextmanager
async def clustering(store: Path | str, documents: Documents, first: int) -> AsyncIterator[Clustering]:
    """Open a loaded repository. `first`: the document that arrives first."""
    repository = Repository(observed=True)
    options = perco.Options(split=SplitOptions(on=False))  # 10^7 documents take more than a gibibyte
    async with perco.open(store, repository.schema, options=options) as db, db.worker(concurrency=IN_FLIGHT) as worker:
        yield Clustering(db, repository, worker, documents, first)
