"""The index of texts by their meaning, over a folder that changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import perco
from perco import sources, views
from perco.embeddings import EmbeddingIndex, embed
from tests.support.graphs import write

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs

TEA = "Tea is made of leaves that are steeped in hot water for some minutes."
COFFEE = "Coffee is made of beans that are roasted, ground and brewed with water."
SHIPS = "Ships are moored with ropes, and tugs pull the large ones into the port."


class Model:
    """Counts what it embeds."""

    def __init__(self) -> None:
        self.texts: Counter[str] = Counter()

    def __call__(self, some: list[str]) -> Sequence[bytes]:
        self.texts.update(some)
        return embed(some)


async def found(index: EmbeddingIndex, question: str, k: int = 1) -> list[tuple[str, str]]:
    return [(passage.name, passage.words) for passage in await index.search(question, k)]


async def test_it_follows_a_folder_and_embeds_each_paragraph_once(tmp_path: Path) -> None:
    notes, model = tmp_path / "notes", Model()
    notes.mkdir()
    (notes / "drinks.md").write_text(f"# Drinks\n\n{TEA}\n\n{COFFEE}\n")
    (notes / "port.md").write_text(f"{SHIPS}\n")
    index = EmbeddingIndex(tmp_path / "index", embed=model)
    source = sources.Folder(notes, index.text, match="*.md")
    async with perco.open(index.store, index.schema) as db, db.worker():

        async def follow() -> None:
            await source.sync(db)
            await db.wait_idle(timeout=60)

        await follow()
        assert (index.embedded, index.count()) == (3, 3)
        assert await found(index, "how is coffee brewed?") == [("drinks.md", COFFEE)]
        [passage] = await index.search("leaves", 1)
        assert (passage.headings, passage.words) == ("Drinks", TEA)
        (notes / "port.md").rename(notes / "harbour.md")
        (notes / "drinks.md").write_text(
            f"# Drinks\n\nMilk is what calves drink, and what we take from their mothers.\n\n{TEA}\n"
        )
        await follow()
        assert index.embedded == 4
        assert await found(index, "ships") == [("harbour.md", SHIPS)]
        assert COFFEE not in {words for _, words in await found(index, "how is coffee brewed?", 10)}
        (notes / "harbour.md").unlink()
        await follow()
        assert {name for name, _ in await found(index, "ships", 10)} == {"drinks.md"}
        async with db.snapshot() as snap:
            assert (await views.check(index.views, snap)).rows == {"chunk": 2, "vectors": 2}
    assert max(model.texts[text] for text in model.texts if text not in ("how is coffee brewed?", "ships")) == 1


async def test_a_model_may_return_numbers(tmp_path: Path) -> None:
    index = EmbeddingIndex(tmp_path, embed=lambda some: [[float(len(text)), 1.0] for text in some])
    async with perco.open(index.store, index.schema) as db, db.worker():
        await write(db, [(index.text, "a", "x" * 80), (index.text, "b", "yy")])
        await db.wait_idle(timeout=60)
    assert await found(index, "z", 1) == [("b", "yy")]  # and the store may be closed


async def test_another_version_embeds_all_again(tmp_path: Path) -> None:
    for version, dimensions in (1, 2), (2, 3):
        index = EmbeddingIndex(tmp_path, embed=lambda some, n=dimensions: [[1.0] * n for _ in some], version=version)
        async with perco.open(index.store, index.schema) as db, db.worker():
            if version == 1:
                await write(db, [(index.text, "a", TEA), (index.text, "b", COFFEE)])
            await db.wait_idle(timeout=60)
            assert index.embedded == 2
            assert len(await found(index, "z", 5)) == 2


async def test_a_paragraph_that_comes_twice_is_one_chunk(tmp_path: Path) -> None:
    index = EmbeddingIndex(tmp_path)
    async with perco.open(index.store, index.schema) as db, db.worker():
        await write(db, [(index.text, "a", f"{TEA}\n\n{TEA}"), (index.text, "b", TEA)])
        await db.wait_idle(timeout=60)
        assert (index.count(), index.embedded) == (2, 1)


async def test_there_is_no_index_yet(tmp_path: Path) -> None:
    index = EmbeddingIndex(tmp_path / "none")
    assert index.count() == 0
    with pytest.raises(perco.StoreError, match="index some texts first"):
        await index.search("anything")


async def test_a_model_that_fails_is_asked_again(tmp_path: Path) -> None:
    calls: list[Any] = []

    def model(some: list[str]) -> list[bytes]:
        calls.append(some)
        if len(calls) == 1:
            raise ConnectionError("the service is away")
        return embed(some)

    index = EmbeddingIndex(tmp_path, embed=model)
    async with perco.open(index.store, index.schema) as db, db.worker():
        await write(db, [(index.text, "a", TEA)])
        await db.wait_idle(timeout=60)
        assert index.count() == 1
    assert len(calls) == 2
