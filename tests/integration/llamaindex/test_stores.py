"""The key-value store, the document store and the cache."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import perco
import perco.aio
import perco.sync

pytest.importorskip("llama_index.core")

from llama_index.core import StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.embeddings.mock_embed_model import MockEmbedding
from llama_index.core.schema import (
    BaseNode,
    Document,
    IndexNode,
    MediaResource,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.storage.index_store.keyval_index_store import KVIndexStore

from perco.llamaindex import TABLES, Cache, DocumentStore, KVStore
from perco.llamaindex.values import AT_ONCE, PART_BYTES
from tests.integration.llamaindex.support import doc

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs


def test_values_come_back_as_they_were(db: perco.sync.Database) -> None:
    store = KVStore(db)
    value: dict[str, Any] = {"t": "ü\ud800\x00", "f": 1e300, "n": None, "l": [1, [True]], "d": {"1": {}}}
    store.put("k", value)
    store.put("k", {"other": 1}, "elsewhere")
    store.put("j", {})
    assert (store.get("k"), store.get("k", "elsewhere"), store.get("x")) == (value, {"other": 1}, None)
    assert store.get_all() == {"j": {}, "k": value}
    assert (store.delete("k"), store.delete("k"), store.get("k")) == (True, False, None)
    assert store.get_all("elsewhere") == {"k": {"other": 1}}
    store.clear("elsewhere")
    assert (store.get_all("elsewhere"), store.get_all()) == ({}, {"j": {}})


def test_long_values_take_several_rows_and_give_them_back(db: perco.sync.Database) -> None:
    store = KVStore(db)
    long = {"text": "x" * (2 * PART_BYTES + 5)}
    store.put_all([("a", long), ("b", {"text": "short"})])
    assert (store.get("a"), store.get_all()) == (long, {"a": long, "b": {"text": "short"}})
    store.put("a", {"text": "y" * PART_BYTES})
    assert store.get("a") == {"text": "y" * PART_BYTES}
    store.put("a", {})
    assert store.get_all() == {"a": {}, "b": {"text": "short"}}
    store.put("a", long)
    assert store.delete("a")
    assert store.get_all() == {"b": {"text": "short"}}


def test_more_values_than_a_transaction_takes(db: perco.sync.Database) -> None:
    store = KVStore(db)
    pairs = [(f"{number:05}", {"n": number}) for number in range(2 * AT_ONCE + 500)]
    store.put_all(pairs, batch_size=7)
    assert store.get_all() == dict(pairs)
    store.clear()
    assert store.get_all() == {}


def test_what_does_not_fit_is_refused(db: perco.sync.Database) -> None:
    with pytest.raises(perco.UsageError, match=r"data, k: JSON cannot hold the value"):
        KVStore(db).put("k", {"path": Path("x")})
    with pytest.raises(perco.UsageError, match=r"KVStore takes a store opened by perco\.sync or perco\.aio"):
        KVStore("ingested.db")  # type: ignore[arg-type]


def _nodes() -> list[BaseNode]:
    of = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="a")}
    return [TextNode(id_=str(each), text=f"part {each}", relationships=of, metadata={"n": 1}) for each in range(3)]


def test_a_document_store_does_what_llamaindex_s_does(db: perco.sync.Database) -> None:
    def use(store: SimpleDocumentStore | DocumentStore) -> list[Any]:
        said: list[Any] = []
        store.add_documents([doc("a", "hello", m=1)])
        store.add_documents(_nodes())
        said += [
            store.docs,
            deepcopy(store.get_all_ref_doc_info()),
            store.get_document_hash("a"),
            store.get_document_hash("1"),
        ]
        with pytest.raises(ValueError, match=r"node_id 1 already exists\. Set allow_update to True"):
            store.add_documents(_nodes()[1:], allow_update=False)
        store.delete_document("1")
        said += [sorted(store.docs), deepcopy(store.get_ref_doc_info("a")), store.ref_doc_exists("a")]
        store.set_document_hash("2", "h")
        said += [store.get_document_hash("2"), store.document_exists("2"), store.document_exists("1")]
        store.delete_document("2")
        store.delete_ref_doc("a")
        said += [store.docs, deepcopy(store.get_all_ref_doc_info()), store.get_all_document_hashes()]
        for delete, what in ((store.delete_document, "doc_id a"), (store.delete_ref_doc, "ref_doc_id a")):
            with pytest.raises(ValueError, match=f"^{what} not found"):
                delete("a")
            delete("a", raise_error=False)
        return said

    assert use(DocumentStore(db)) == use(SimpleDocumentStore())


def test_all_ids_are_among_the_hashes(db: perco.sync.Database) -> None:
    store = DocumentStore(db)
    store.add_documents([doc("a", "same"), doc("b", "same"), *_nodes()])
    hashes = store.get_all_document_hashes()
    assert set(hashes.values()) == {"a", "b"}
    assert {doc("x", "same").hash, *(node.hash for node in _nodes())} < set(hashes)


def test_namespaces_are_apart_and_all_is_kept(tmp_path: Path) -> None:
    for turn in range(2):
        with perco.sync.open(tmp_path / "ingested", perco.Schema(*TABLES)) as db:
            one, other = DocumentStore(db, "one"), DocumentStore(db, "other")
            assert (one.document_exists("a"), other.document_exists("a")) == (turn == 1, False)
            one.add_documents([doc("a", "hello")])


def test_documents_of_other_kinds_come_back(db: perco.sync.Database) -> None:
    store = DocumentStore(db)
    nodes: list[BaseNode] = [
        Document(id_="i", image_resource=MediaResource(path=Path("a.png"), mimetype="image/png")),
        IndexNode(id_="p", text="see a", index_id="a"),
    ]
    store.add_documents(nodes)
    assert list(store.docs.values()) == nodes


def test_more_nodes_than_a_transaction_takes(db: perco.sync.Database) -> None:
    store = DocumentStore(db)
    of = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="a")}
    store.add_documents([TextNode(id_=f"{each:05}", text="t", relationships=of) for each in range(AT_ONCE + 5)])
    info = store.get_ref_doc_info("a")
    assert info is not None
    assert len(info.node_ids) == len(store.docs) == AT_ONCE + 5
    store.delete_ref_doc("a")
    assert store.docs == {}


def test_the_cache(db: perco.sync.Database, tmp_path: Path) -> None:
    cache = Cache(db)
    cache.put("k", [doc("a", "hello")])
    found = cache.get("k")
    assert found is not None
    assert [node.get_content() for node in found] == ["hello"]
    assert cache.get("x") is None
    cache.persist(str(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()
    cache.clear()
    assert cache.get("k") is None


def test_llamaindex_s_indexes_use_them(db: perco.sync.Database) -> None:
    documents = [doc("a", "hello"), doc("b", "world")]
    context = StorageContext.from_defaults(docstore=DocumentStore(db), index_store=KVIndexStore(KVStore(db), "indexes"))
    index = VectorStoreIndex.from_documents(
        documents, context, embed_model=MockEmbedding(embed_dim=2), store_nodes_override=True
    )
    assert index.refresh_ref_docs([doc("a", "HELLO"), documents[1]]) == [True, False]
    assert {node.get_content() for node in DocumentStore(db).docs.values()} == {"HELLO", "world"}
    index.delete_ref_doc("b", delete_from_docstore=True)
    found = load_index_from_storage(context, embed_model=MockEmbedding(embed_dim=2))
    assert list(found.ref_doc_info) == ["a"]


@pytest.mark.parametrize("kind", ["aio", "sync"])
def test_asyncio(tmp_path: Path, kind: str) -> None:
    async def use(db: Any) -> None:
        store, documents = KVStore(db), DocumentStore(db)
        await store.aput("k", {"v": 1})
        await store.aput_all([("j", {})])
        assert (await store.aget("k"), await store.aget_all()) == ({"v": 1}, {"j": {}, "k": {"v": 1}})
        assert (await store.adelete("k"), await store.aget("k")) == (True, None)
        await store.aclear()
        assert await store.aget_all() == {}
        await documents.async_add_documents([doc("a", "hello"), *_nodes()])
        await documents.aset_document_hash("a", "h")
        assert await documents.aget_document_hash("a") == "h"
        await documents.adelete_ref_doc("a")
        assert await documents.aget_all_document_hashes() == {}
        with pytest.raises(ValueError, match="ref_doc_id a not found"):
            await documents.adelete_ref_doc("a")

    async def main() -> None:
        if kind == "sync":
            with perco.sync.open(tmp_path / "ingested", perco.Schema(*TABLES)) as db:
                await use(db)
            return
        async with perco.aio.open(tmp_path / "ingested", perco.Schema(*TABLES)) as other:
            await use(other)
            with pytest.raises(perco.UsageError, match="use the async methods"):
                KVStore(other).get("k")

    asyncio.run(main())
