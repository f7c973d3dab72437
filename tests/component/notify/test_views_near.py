"""Views of near-duplicates: clusters of documents with almost the same words."""

from __future__ import annotations

import random
from typing import Any

import perco
from perco import views
from tests.component.notify.kit import client, memory, put, settle
from tests.component.notify.test_views import rows

WORDS = [f"word{number}" for number in range(2000)]


class Docs:
    """Documents that get the label of their cluster."""

    def __init__(self, **how: Any) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT)
        self.text = self.docs.column("text", perco.TEXT)
        self.label = self.docs.column("label", perco.TEXT)
        self.views = views.Views(perco.Schema(self.docs))
        views.near_duplicates(self.views, self.text, id="near", into=self.label, **how)
        self.schema = self.views.schema

    async def clusters(self, db: perco.Database) -> dict[str, str]:
        """The label of each document."""
        return {key: values["label"] for key, values in (await rows(db, self.docs)).items() if "label" in values}

    async def check(self, db: perco.Database) -> None:
        async with db.snapshot() as snap:
            found = await views.check(self.views, snap)
        assert found.equal, found.differences


def text(rng: random.Random, length: int = 100) -> list[str]:
    return rng.choices(WORDS, k=length)


def edited(rng: random.Random, words: list[str], edits: int) -> list[str]:
    """The text with so many words replaced."""
    out = list(words)
    for at in rng.sample(range(len(out)), edits):
        out[at] = rng.choice(WORDS)
    return out


async def load(db: perco.Database, docs: Docs, texts: dict[str, list[str]]) -> None:
    for key, words in texts.items():
        await put(db, docs.text, key, " ".join(words))
    await settle(db)


async def test_documents_that_are_almost_the_same_share_a_label() -> None:
    docs, rng = Docs(), random.Random(1)
    first, second = text(rng), text(rng)
    async with client(memory(), docs.schema) as db, db.worker():
        texts = {"b": first, "c": edited(rng, first, 1), "d": edited(rng, first, 1), "e": second}
        await load(db, docs, texts)
        assert await docs.clusters(db) == {"b": "b", "c": "b", "d": "b", "e": "e"}
        await load(db, docs, {"a": edited(rng, second, 1), "e": edited(rng, second, 1)})
        assert await docs.clusters(db) == {"a": "a", "b": "b", "c": "b", "d": "b", "e": "a"}
        await load(db, docs, {"d": text(rng)})  # it leaves the cluster
        assert await docs.clusters(db) == {"a": "a", "b": "b", "c": "b", "d": "d", "e": "a"}
        await docs.check(db)


async def test_a_cluster_falls_apart_without_the_document_between() -> None:
    docs, rng = Docs(threshold=0.6), random.Random(2)
    one = text(rng)
    middle = [*edited(rng, one[:50], 5), *one[50:]]
    other = [*middle[:50], *edited(rng, middle[50:], 5)]
    async with client(memory(), docs.schema) as db, db.worker():
        await load(db, docs, {"a": one, "b": middle, "c": other})
        assert set((await docs.clusters(db)).values()) == {"a"}
        await put(db, docs.text, "b", None)
        await settle(db)
        assert await docs.clusters(db) == {"a": "a", "c": "c"}
        await docs.check(db)


async def test_short_and_empty_documents() -> None:
    docs = Docs()
    async with client(memory(), docs.schema) as db, db.worker():
        await load(db, docs, {"a": [], "b": [], "c": ["Hello"], "d": ["hello!"], "e": ["hello", "you"]})
        assert await docs.clusters(db) == {"a": "a", "b": "b", "c": "c", "d": "c", "e": "e"}
        await docs.check(db)


async def test_other_features() -> None:
    docs = Docs(features=lambda text: set(text.split("/")))
    async with client(memory(), docs.schema) as db, db.worker():
        await load(db, docs, {"a": ["x/y/z"], "b": ["z/x/y"], "c": ["xyz"]})
        assert await docs.clusters(db) == {"a": "a", "b": "a", "c": "c"}


async def test_of_many_documents_with_one_band_the_first_are_compared() -> None:
    docs = Docs(compared_max=3)
    async with client(memory(), docs.schema) as db, db.worker():
        await load(db, docs, {key: ["the", "same", "words"] for key in "abcde"})
        assert await docs.clusters(db) == {"a": "a", "b": "a", "c": "a", "d": "d", "e": "e"}
        await docs.check(db)


async def test_random_documents_equal_the_build() -> None:  # V7
    docs, rng = Docs(permutations=64), random.Random(3)
    families = [text(rng, 40) for _ in range(4)]
    async with client(memory(), docs.schema) as db, db.worker(concurrency=8):
        for _ in range(6):
            for _ in range(rng.randrange(1, 8)):
                key = rng.choice("abcdefghij")
                words = edited(rng, rng.choice(families), rng.randrange(4))
                await put(db, docs.text, key, None if rng.random() < 0.2 else " ".join(words))
            await settle(db)
            await docs.check(db)
