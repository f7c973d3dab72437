"""Errors of LlamaIndex's ingestion, which these tests show with its own stores, and that perco's do not make.

If a test fails because LlamaIndex has become right, take out its first half.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.ingestion import IngestionCache, IngestionPipeline, run_transformations
from llama_index.core.schema import BaseNode, NodeRelationship, RelatedNodeInfo, TextNode, TransformComponent
from llama_index.core.storage.docstore import SimpleDocumentStore

import perco.sync
from perco.llamaindex import DocumentStore, Pipeline
from tests.integration.llamaindex.support import (
    DELETE,
    DUPLICATES,
    UPSERTS,
    Failing,
    Make,
    Shouting,
    Vectors,
    both,
    doc,
    embedding,
    ours,
    splitter,
    theirs,
)

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs


def test_documents_of_equal_content_are_deleted(db: perco.sync.Database) -> None:  # LI4
    def scenario(make: Make, vectors: Vectors) -> Any:
        make(strategy=DELETE, disable_cache=True).run(documents=[doc("a", "same"), doc("b", "same"), doc("c", "own")])
        make(strategy=DELETE).run(documents=[doc("c", "own")])
        return vectors.documents

    assert both(db, scenario) == (["a", "c"], ["c"])


def test_the_document_store_alone_mends_that(db: perco.sync.Database) -> None:
    vectors = Vectors()
    for documents in ([doc("a", "same"), doc("b", "same"), doc("c", "own")], [doc("c", "own")]):
        IngestionPipeline(
            transformations=[embedding()],
            docstore=DocumentStore(db),
            vector_store=vectors,
            docstore_strategy=DELETE,
            disable_cache=True,
        ).run(documents=documents)
    assert set(DocumentStore(db).docs) == {"c"}


def test_a_failing_transformation_does_not_make_a_document_a_duplicate(db: perco.sync.Database) -> None:  # LI1
    def scenario(make: Make, vectors: Vectors) -> Any:
        with pytest.raises(ConnectionError):
            make(Failing(text="hello"), strategy=DUPLICATES).run(documents=[doc("a", "hello")])
        make(strategy=DUPLICATES).run(documents=[doc("a", "hello")])
        return vectors.texts

    assert both(db, scenario) == ([], ["hello"])


@pytest.mark.parametrize("strategy", [UPSERTS, DELETE])
def test_a_failing_transformation_deletes_nothing(db: perco.sync.Database, strategy: Any) -> None:  # LI3
    def scenario(make: Make, vectors: Vectors) -> Any:
        make(strategy=strategy).run(documents=[doc("a", "old"), doc("b", "gone")])
        with pytest.raises(ConnectionError):
            make(Failing(text="new"), strategy=strategy).run(documents=[doc("a", "new")])
        return vectors.texts

    left = [] if strategy == DELETE else ["gone"]
    assert both(db, scenario) == (left, ["gone", "old"])


def test_a_vector_store_that_fails_loses_nothing_that_comes_back(db: perco.sync.Database) -> None:  # LI2
    def fail() -> None:
        raise ConnectionError

    def scenario(make: Make, vectors: Vectors) -> Any:
        make().run(documents=[doc("a", "old")])
        vectors.before_add(fail)
        with pytest.raises(ConnectionError):
            make().run(documents=[doc("a", "new")])
        vectors.before_add(None)
        make().run(documents=[doc("a", "old")])
        return vectors.texts

    assert both(db, scenario) == ([], ["old"])


def test_transformations_that_change_documents_do_not_make_them_new(db: perco.sync.Database) -> None:
    def scenario(make: Make, vectors: Vectors) -> Any:
        for _ in range(2):
            make(Shouting()).run(documents=[doc("a", "hello")])
        return vectors.added

    assert both(db, scenario) == (["HELLO", "HELLO"], ["HELLO"])


def test_parts_of_a_document_are_not_ingested_again(db: perco.sync.Database) -> None:
    def parts() -> list[BaseNode]:
        of = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="a")}
        return [TextNode(id_=str(each), text=f"part {each}", relationships=of) for each in range(2)]

    def scenario(make: Make, vectors: Vectors) -> Any:
        for _ in range(2):
            make(Failing(text="-")).run(nodes=parts())
        return vectors.added

    assert both(db, scenario) == (["part 0", "part 1"] * 2, ["part 0", "part 1"])


def test_reading_a_file_does_not_make_it_new(db: perco.sync.Database) -> None:
    def scenario(make: Make, vectors: Vectors) -> Any:
        for day in range(2):
            make().run(documents=[doc("a", "hello", last_accessed_date=f"2026-01-0{day + 1}")])
        return vectors.added

    assert both(db, scenario) == (["hello"] * 2, ["hello"])


def test_another_source_is_not_deleted(db: perco.sync.Database) -> None:  # LI4
    def scenario(make: Make, vectors: Vectors) -> Any:
        make(strategy=DELETE, source="one").run(documents=[doc("a", "of one"), doc("b", "of one, too")])
        make(strategy=DELETE, source="other").run(documents=[doc("c", "of other")])
        make(strategy=DELETE, source="one").run(documents=[doc("a", "of one")])
        return vectors.texts

    assert both(db, scenario) == (["of one"], ["of one", "of other"])


def test_documents_whose_text_is_not_stored_are_deleted(db: perco.sync.Database) -> None:
    def scenario(make: Make, vectors: Vectors) -> Any:
        make(strategy=DELETE).run(documents=[doc("a", "hello"), doc("b", "gone")], store_doc_text=False)
        try:
            make(strategy=DELETE).run(documents=[doc("a", "hello")], store_doc_text=False)
        except ValueError as error:
            return str(error), vectors.texts
        return vectors.texts

    assert both(db, scenario) == (("doc_id b not found.", ["gone", "hello"]), ["hello"])


def test_a_document_gets_its_own_nodes_from_the_cache(db: perco.sync.Database) -> None:  # LI5
    def scenario(make: Make, vectors: Vectors) -> Any:
        pipeline = make()
        for id in ("a", "b"):
            pipeline.run(documents=[doc(id, "same")])
        return vectors.documents

    assert both(db, scenario) == (["a"], ["a", "b"])


def test_where_documents_end_counts_for_the_cache(db: perco.sync.Database) -> None:  # LI5
    def scenario(make: Make, vectors: Vectors) -> Any:
        pipeline = make(strategy=DELETE)
        pipeline.run(documents=[doc("a", "xy"), doc("b", "z")])
        pipeline.run(documents=[doc("a", "x"), doc("b", "yz")])
        return vectors.texts

    assert both(db, scenario) == (["xy", "z"], ["x", "yz"])


class Same(TransformComponent):
    def __call__(self, nodes: Sequence[BaseNode], **how: Any) -> Sequence[BaseNode]:
        return nodes


def test_transformations_without_settings_are_told_apart_by_the_cache(db: perco.sync.Database) -> None:  # LI5
    kept = run_transformations([doc("a", "hello")], [Same(), Shouting()], cache=IngestionCache())
    assert [node.get_content() for node in kept] == ["hello"]
    vectors = Vectors()
    ours(vectors, db)(Same(), Shouting()).run(documents=[doc("a", "hello")])
    assert vectors.texts == ["HELLO"]


def _chunks() -> list[BaseNode]:
    of = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="a")}
    return [TextNode(id_=str(each), text=f"part {each}", relationships=of) for each in range(2)]


def test_asynchronous_deletes_leave_no_node_behind(db: perco.sync.Database) -> None:
    async def left(store: SimpleDocumentStore | DocumentStore) -> Any:
        await store.async_add_documents(_chunks())
        await store.adelete_document("0")
        info = await store.aget_ref_doc_info("a")
        await store.adelete_document("1")
        return info and info.node_ids, await store.aget_ref_doc_info("a") is None

    assert asyncio.run(left(SimpleDocumentStore())) == (["0", "1"], False)
    assert asyncio.run(left(DocumentStore(db))) == (["1"], True)


def test_nodes_that_an_index_keeps_there_are_not_deleted(db: perco.sync.Database) -> None:  # LI4
    for store in (SimpleDocumentStore(), DocumentStore(db)):
        vectors = Vectors()
        make = theirs(vectors, store) if isinstance(store, SimpleDocumentStore) else ours(vectors, db)
        make(strategy=DELETE).run(documents=[doc("a", "hello")])
        store.add_documents([TextNode(id_="n", text="of an index")])
        make(strategy=DELETE).run(documents=[doc("a", "hello")])
        assert store.document_exists("n") == isinstance(store, DocumentStore)


def test_asyncio_is_as_right(db: perco.sync.Database) -> None:
    async def main() -> None:
        vectors = Vectors()
        how: dict[str, Any] = {"docstore": DocumentStore(db), "vector_store": vectors, "docstore_strategy": DELETE}
        await Pipeline(transformations=[splitter(), embedding()], **how).arun(documents=[doc("a", "s"), doc("b", "s")])
        with pytest.raises(ConnectionError):
            await Pipeline(transformations=[Failing(text="new")], **how).arun(documents=[doc("a", "new")])
        assert vectors.documents == ["a", "b"]
        await Pipeline(transformations=[splitter(), embedding()], **how).arun(documents=[doc("b", "s")])
        assert (vectors.documents, vectors.added) == (["b"], ["s", "s"])

    asyncio.run(main())
