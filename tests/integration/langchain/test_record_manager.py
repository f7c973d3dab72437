"""LangChain's own indexing API, with perco's record manager: what is written, skipped, deleted and kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import perco
import perco.aio
import perco.sync

pytest.importorskip("langchain_core")

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import aindex, index
from langchain_core.vectorstores import InMemoryVectorStore

from perco.langchain import TABLES, RecordManager

pytestmark = [
    pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning"),  # the temporary folder may lie on tmpfs
    pytest.mark.filterwarnings("ignore:.*SHA-1:UserWarning"),
]


class Store(InMemoryVectorStore):
    """Counts what is embedded."""

    def __init__(self) -> None:
        super().__init__(DeterministicFakeEmbedding(size=4))
        self.added: list[str] = []
        self.fails = False

    def add_documents(self, documents: list[Document], ids: list[str] | None = None, **how: Any) -> list[str]:
        if self.fails:
            raise ConnectionError("the vector store is away")
        self.added += [each.page_content for each in documents]
        return super().add_documents(documents, ids, **how)

    @property
    def texts(self) -> list[str]:
        return sorted(each["text"] for each in self.store.values())


@pytest.fixture
def db(tmp_path: Path) -> Iterator[perco.sync.Database]:
    with perco.sync.open(tmp_path / "records", perco.Schema(*TABLES)) as opened:
        yield opened


@pytest.fixture
def manager(db: perco.sync.Database) -> RecordManager:
    return RecordManager("docs", db)


def doc(text: str, source: str) -> Document:
    return Document(page_content=text, metadata={"source": source})


def run(manager: RecordManager, store: Store, docs: Sequence[Document], **how: Any) -> dict[str, int]:
    options = {"cleanup": "scoped_full", "source_id_key": "source", "key_encoder": "sha256", **how}
    done = index(list(docs), manager, store, **options)
    return {name.removeprefix("num_"): count for name, count in done.items() if count}


def by_content(document: Document) -> str:
    return document.page_content


def test_what_is_there_is_not_written_again(manager: RecordManager) -> None:
    store = Store()
    docs = [doc("a", "1"), doc("b", "1"), doc("c", "2")]
    assert run(manager, store, docs) == {"added": 3}
    assert run(manager, store, docs) == {"skipped": 3}
    assert run(manager, store, [doc("a", "1"), doc("B", "1")]) == {"added": 1, "skipped": 1, "deleted": 1}
    assert store.texts == ["B", "a", "c"]
    assert store.added == ["a", "b", "c", "B"]


def test_a_source_of_many_batches_is_not_embedded_again(manager: RecordManager) -> None:
    store, docs = Store(), [doc(f"text {number}", "one") for number in range(25)]
    assert run(manager, store, docs, batch_size=4) == {"added": 25}
    assert run(manager, store, docs, batch_size=4) == {"skipped": 25}
    assert run(manager, store, docs[3:], batch_size=4) == {"skipped": 22, "deleted": 3}
    assert len(store.added) == 25


def test_a_document_that_two_sources_have_stays_until_both_have_lost_it(manager: RecordManager) -> None:
    store = Store()
    one, other = doc("same", "1"), doc("same", "2")
    assert run(manager, store, [one, other, doc("x", "1"), doc("y", "2")], key_encoder=by_content) == {
        "added": 3,
        "skipped": 1,
    }
    run(manager, store, [other], key_encoder=by_content)
    assert run(manager, store, [doc("x", "1")], key_encoder=by_content) == {"skipped": 1}  # source 1 has lost it
    assert "same" in store.texts
    assert run(manager, store, [doc("z", "2")], key_encoder=by_content) == {"added": 1, "deleted": 1}
    assert store.texts == ["x", "z"]


def test_a_vector_store_that_fails_is_written_the_next_time(manager: RecordManager) -> None:
    store = Store()
    assert run(manager, store, [doc("a", "1")]) == {"added": 1}
    store.fails = True
    with pytest.raises(ConnectionError):
        run(manager, store, [doc("a", "1"), doc("b", "1")])
    store.fails = False
    assert store.texts == ["a"]
    assert run(manager, store, [doc("a", "1"), doc("b", "1")]) == {"added": 1, "skipped": 1}
    assert store.texts == ["a", "b"]


@pytest.mark.parametrize("cleanup", ["full", "incremental", "scoped_full"])
def test_each_way_to_clean_up(manager: RecordManager, cleanup: str) -> None:
    store = Store()
    run(manager, store, [doc("a", "1"), doc("b", "2")], cleanup=cleanup)
    run(manager, store, [doc("A", "1")], cleanup=cleanup)
    assert store.texts == (["A"] if cleanup == "full" else ["A", "b"])


def test_namespaces_are_apart_and_all_is_kept(tmp_path: Path) -> None:
    store = Store()
    for turn in range(2):
        with perco.sync.open(tmp_path / "records", perco.Schema(*TABLES)) as db:
            for namespace in ("one", "other"):
                done = run(RecordManager(namespace, db), store, [doc("a", "1")])
                assert done == ({"skipped": 1} if turn else {"added": 1})
            assert RecordManager("third", db).list_keys() == []


def test_keys_are_listed_by_age_and_group(manager: RecordManager) -> None:
    manager.update(["a", "b"], group_ids=["g", None])
    between = manager.get_time()
    manager.update(["c", "d"], group_ids=["g", "h"], time_at_least=between)
    assert manager.list_keys() == ["a", "b", "c", "d"]
    assert (manager.list_keys(before=between), manager.list_keys(after=between)) == (["a", "b"], ["c", "d"])
    assert manager.list_keys(group_ids=["g"]) == ["a", "c"]
    assert manager.list_keys(group_ids=["g", "h"], after=between) == ["c", "d"]
    assert (manager.list_keys(limit=1), manager.list_keys(group_ids=["g"], limit=1)) == (["a"], ["a"])
    manager.update(["a"])  # it keeps its group
    assert manager.list_keys(before=between) == ["b"]
    assert manager.exists(["a", "x", "d"]) == [True, False, True]
    manager.delete_keys(["a", "x"])
    assert (manager.exists(["a"]), manager.list_keys(group_ids=["g"])) == ([False], ["c"])


def test_more_keys_than_a_transaction_takes(manager: RecordManager) -> None:
    keys = [f"{number:05}" for number in range(2500)]
    manager.update(keys, group_ids=["g"] * len(keys))
    assert manager.list_keys(group_ids=["g"]) == keys
    manager.delete_keys(keys)
    assert manager.list_keys() == []


def test_many_keys_that_another_source_holds(manager: RecordManager) -> None:
    keys = [f"{number:05}" for number in range(1500)]
    manager.update(keys, group_ids=["g"] * len(keys))
    manager.update([*keys, "z"], group_ids=["h"] * len(keys) + ["g"])
    now = manager.get_time()
    manager.update(keys, group_ids=["h"] * len(keys))
    manager.update(["0"], group_ids=["g"])  # the first of all keys; those that are taken out come after it
    later = manager.get_time()
    manager.update(keys, group_ids=["h"] * len(keys))
    assert manager.list_keys(group_ids=["g"], before=later) == ["0", "z"]
    assert manager.list_keys(group_ids=["g"], before=now, limit=10) == ["z"]
    manager.delete_keys(["0", "z"])
    assert manager.list_keys(group_ids=["g"], before=now) == manager.list_keys(group_ids=["g"]) == []
    assert len(manager.list_keys(group_ids=["h"])) == 1500


def test_what_does_not_fit_is_refused(manager: RecordManager) -> None:
    with pytest.raises(ValueError, match="2 keys and 1 groups"):
        manager.update(["a", "b"], group_ids=["g"])
    with pytest.raises(ValueError, match="that is the time of another store"):
        manager.update(["a"], time_at_least=1e15)
    with pytest.raises(perco.UsageError, match=r"opened by perco\.sync or perco\.aio"):
        RecordManager("docs", "records.db")  # type: ignore[arg-type]


def test_asyncio(tmp_path: Path) -> None:
    async def main() -> None:
        async with perco.aio.open(tmp_path / "records", perco.Schema(*TABLES)) as db:
            manager, store = RecordManager("docs", db), Store()
            how: dict[str, Any] = {"cleanup": "scoped_full", "source_id_key": "source", "key_encoder": "sha256"}
            assert (await aindex([doc("a", "1"), doc("b", "1")], manager, store, **how))["num_added"] == 2
            done = await aindex([doc("a", "1")], manager, store, **how)
            assert (done["num_skipped"], done["num_deleted"]) == (1, 1)
            with pytest.raises(perco.UsageError, match=r"use aindex\(\.\.\.\)"):
                manager.exists(["a"])
            assert await manager.alist_keys(limit=5) == await manager.alist_keys()

    asyncio.run(main())


def test_a_blocking_store_serves_aindex_too(manager: RecordManager) -> None:
    how: dict[str, Any] = {"cleanup": "scoped_full", "source_id_key": "source", "key_encoder": "sha256"}
    done = asyncio.run(aindex([doc("a", "1")], manager, Store(), **how))
    assert done["num_added"] == 1
    assert len(manager.list_keys()) == 1
