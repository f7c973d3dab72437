"""Near-duplicates: how many are found, and what a document costs that comes, changes or goes.

The corpus is planted: one document in three is a copy of another one, with up to a quarter of its words replaced, a
paragraph left out, or a line of boilerplate added; the words are as frequent as in English (Zipf). The truth is exact:
an inverted index of all runs of three words finds every pair that has one in common, and the similarity of each is
computed from their sets. Clusters are what pairs of at least the threshold connect, exactly and as perco keeps them.

Recall is the share of pairs in one exact cluster that are in one cluster here, precision the other way round. Beside
them is which pairs of a given similarity are found: an estimate decides, so those at the threshold may go either way.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from itertools import accumulate, combinations, pairwise
from pathlib import Path

import trio

import perco
from bench.harness import Cell, Report, Run
from perco import views
from perco.views.near import THRESHOLD

DOCUMENTS, QUICK_DOCUMENTS = 20_000, 2_000
WORDS = 20_000  # in the vocabulary
LENGTH = (80, 400)  # of a document, in words
AT_ONCE = 50  # documents that a transaction loads
CHANGES = 60  # a round
SEED = 1
STEPS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.01)
RECALL, PRECISION = 0.95, 0.95

Pair = tuple[str, str]


class Corpus:
    """Documents with planted near-duplicates; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._words = [f"w{number}" for number in range(WORDS)]
        self._weights = list(accumulate(1 / (rank + 10) for rank in range(WORDS)))

    def _some(self, count: int) -> list[str]:
        return self.rng.choices(self._words, cum_weights=self._weights, k=count)

    def document(self) -> list[str]:
        """A new one."""
        return self._some(self.rng.randrange(*LENGTH))

    def copy(self, words: list[str]) -> list[str]:
        """A near-duplicate of a document, or one that is not so near."""
        rng, out = self.rng, list(words)
        for at in rng.sample(range(len(out)), int(len(out) * rng.choice([0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.25]))):
            out[at] = self._some(1)[0]
        if rng.random() < 0.3:
            at = rng.randrange(len(out))
            del out[at : at + rng.randrange(1, 20)]
        if rng.random() < 0.3:
            out += self._some(rng.randrange(1, 8))
        return out

    def texts(self, count: int) -> dict[str, str]:
        """All documents, by key."""
        made: list[list[str]] = []
        while len(made) < count:
            made.append(self.copy(self.rng.choice(made)) if made and self.rng.random() < 1 / 3 else self.document())
        return {f"doc {number:06}": " ".join(words) for number, words in enumerate(made)}


def similarities(texts: dict[str, str]) -> dict[Pair, float]:
    """The exact Jaccard similarity of all pairs that have a feature in common."""
    of, features = views.words(), {}
    having = defaultdict(list)
    for key, text in texts.items():
        features[key] = set(of(text))
        for feature in features[key]:
            having[feature].append(key)
    shared = Counter(pair for keys in having.values() for pair in combinations(sorted(keys), 2))
    return {
        (one, other): count / (len(features[one]) + len(features[other]) - count)
        for (one, other), count in shared.items()
    }


def connected(keys: Iterable[str], pairs: Iterable[Pair]) -> dict[str, str]:
    """The smallest key that pairs connect each one with."""
    label = {key: key for key in keys}
    members = {key: [key] for key in label}
    for one, other in pairs:
        low, high = sorted((label[one], label[other]))
        if low != high:
            for key in members[high]:
                label[key] = low
            members[low] += members.pop(high)
    return label


def together(label: dict[str, str]) -> set[Pair]:
    """All pairs with one label."""
    members = defaultdict(list)
    for key in sorted(label):
        members[label[key]].append(key)
    return {pair for keys in members.values() for pair in combinations(keys, 2)}


class Documents:
    """Documents that get the label of their cluster."""

    def __init__(self) -> None:
        self.table = perco.Table("documents", key=perco.TEXT)
        self.text = self.table.column("text", perco.TEXT)
        self.label = self.table.column("label", perco.TEXT)
        self.views = views.Views(perco.Schema(self.table))
        views.near_duplicates(self.views, self.text, id="near", into=self.label)

    async def write(self, txn: perco.Transaction, texts: dict[str, str | None]) -> None:
        for key, text in texts.items():
            if text is None:
                txn.delete(self.text, key)
            else:
                txn.set(self.text, key, text)

    async def labels(self, db: perco.Database) -> dict[str, str]:
        """The label of each document."""
        async with db.snapshot() as snap:
            return {row.key: row[self.label] or "" async for row in snap.scan(self.table, columns=[self.label])}


def main(run: Run) -> None:
    """Prints the tables and the RESULT line."""
    report = Report("near", "power")
    facts = run.machine("power (fsync before every answer)")
    with run.scratch() as folder:
        trio.run(_measure, run, report, folder)
    run.finish(report, facts)


async def _measure(run: Run, report: Report, folder: Path) -> None:
    count = QUICK_DOCUMENTS if run.quick else DOCUMENTS
    corpus, made = Corpus(SEED), Documents()
    texts = corpus.texts(count)
    async with perco.open(folder / "store", made.views.schema) as db, db.worker(concurrency=64, scanners=4) as worker:
        began, cpu = time.perf_counter(), time.process_time()
        keys = list(texts)
        for at in range(0, count, AT_ONCE):
            await db.run(made.write, {key: texts[key] for key in keys[at : at + AT_ONCE]})
            if at % (20 * AT_ONCE) == 0:
                await db.wait_idle()
        await db.wait_idle()
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        runs = sum(each.commits for each in worker.statistics().values())
        labels = await made.labels(db)
        async with db.snapshot() as snap:
            began = time.perf_counter()
            checked = await views.check(made.views, snap)
            batch_s = time.perf_counter() - began
        assert checked.equal, checked.differences
        rounds = [[ms async for ms in _changes(db, made, corpus, texts)] for _ in range(run.rounds)]
    _found(run, report, texts, labels)
    changes = Cell(tuple(statistics.median(each) for each in rounds))
    run.table(
        f"{count:,} documents, durable; equal to the definition",
        ("", ""),
        [
            ("loaded and labelled, documents a second", f"{count / wall_s:,.0f}"),
            ("CPU of a document, ms", f"{1000 * cpu_s / count:.1f}"),
            ("runs of a document", f"{runs / count:.1f}"),
            ("one document that comes, changes or goes, p50 ms (least - most)", str(changes)),
            (
                "the definition, for all documents at once, in one process, ms a document",
                f"{1000 * batch_s / count:.2f}",
            ),
        ],
    )
    report.figures.update(
        {
            "documents": count,
            "docs_per_s": count / wall_s,
            "cpu_ms_per_doc": 1000 * cpu_s / count,
            "change_ms": changes.median,
        }
    )


async def _changes(db: perco.Database, made: Documents, corpus: Corpus, texts: dict[str, str]) -> AsyncIterator[float]:
    """Documents that change, go and come again, one at a time; yields ms until the labels are up to date."""
    keys = list(texts)
    for number in range(CHANGES):
        key = corpus.rng.choice(keys)
        new = [None, " ".join(corpus.copy(texts[key].split())), " ".join(corpus.document())][number % 3]
        began = time.perf_counter()
        await db.run(made.write, {key: new})
        await db.wait_idle()
        yield 1000 * (time.perf_counter() - began)
        if new is None:
            await db.run(made.write, {key: texts[key]})
            await db.wait_idle()


def _found(run: Run, report: Report, texts: dict[str, str], labels: dict[str, str]) -> None:
    """How the clusters compare with the exact ones."""
    exact = similarities(texts)
    wanted = together(connected(texts, (pair for pair, similarity in exact.items() if similarity >= THRESHOLD)))
    found = together(labels)
    rows = []
    for low, high in pairwise(STEPS):
        pairs = [pair for pair, similarity in exact.items() if low <= similarity < high]
        there = sum(pair in found for pair in pairs)
        rows.append(
            (f"{low:.2f} to {min(high, 1):.2f}", f"{len(pairs):,}", f"{100 * there / max(len(pairs), 1):.1f} %")
        )
    run.table(
        f"pairs by their exact similarity, and how many of them are in one cluster; the threshold is {THRESHOLD}",
        ("similarity", "pairs", "in one cluster"),
        rows,
    )
    recall, precision = len(found & wanted) / len(wanted), len(found & wanted) / len(found)
    run.say(
        f"{len(wanted):,} pairs in one exact cluster, {len(found):,} in one cluster here: "
        f"recall {recall:.4f}, precision {precision:.4f}"
    )
    report.ratio("recall", recall)
    report.ratio("precision", precision)
    report.bars += [("recall", recall, "at least", RECALL), ("precision", precision, "at least", PRECISION)]
