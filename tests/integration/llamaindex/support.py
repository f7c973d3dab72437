"""A vector store that counts what is written, and transformations that fail or change their documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.embeddings.mock_embed_model import MockEmbedding
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, Document, TransformComponent
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQuery, VectorStoreQueryResult

import perco.sync
from perco.llamaindex import DocumentStore, Pipeline

UPSERTS, DELETE, DUPLICATES = (
    DocstoreStrategy.UPSERTS,
    DocstoreStrategy.UPSERTS_AND_DELETE,
    DocstoreStrategy.DUPLICATES_ONLY,
)


class Vectors(BasePydanticVectorStore):
    """Nodes by id. `added` has the texts of all that were ever written."""

    stores_text: bool = True
    _nodes: dict[str, BaseNode] = PrivateAttr(default_factory=dict)
    _added: list[str] = PrivateAttr(default_factory=list)
    _before_add: Callable[[], object] | None = PrivateAttr(default=None)

    @property
    def client(self) -> Any:
        return None

    @property
    def texts(self) -> list[str]:
        return sorted(node.get_content() for node in self._nodes.values())

    @property
    def documents(self) -> list[str | None]:
        return sorted({node.ref_doc_id for node in self._nodes.values()}, key=str)

    @property
    def added(self) -> list[str]:
        return self._added

    def before_add(self, call: Callable[[], object] | None) -> None:
        self._before_add = call

    def add(self, nodes: Sequence[BaseNode], **how: Any) -> list[str]:
        if self._before_add is not None:
            self._before_add()
        self._added += [node.get_content() for node in nodes]
        self._nodes.update({node.node_id: node for node in nodes})
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **how: Any) -> None:
        self._nodes = {id: node for id, node in self._nodes.items() if node.ref_doc_id != ref_doc_id}

    def query(self, query: VectorStoreQuery, **how: Any) -> VectorStoreQueryResult:
        raise NotImplementedError


class Failing(TransformComponent):
    """Fails for documents with a text."""

    text: str

    def __call__(self, nodes: Sequence[BaseNode], **how: Any) -> Sequence[BaseNode]:
        if any(self.text in node.get_content() for node in nodes):
            raise ConnectionError(self.text)
        return nodes


class Shouting(TransformComponent):
    """Changes the documents that it is given."""

    def __call__(self, nodes: Sequence[BaseNode], **how: Any) -> Sequence[BaseNode]:
        for node in nodes:
            node.set_content(node.get_content().upper())
        return nodes


def embedding() -> MockEmbedding:
    return MockEmbedding(embed_dim=2)


def splitter() -> SentenceSplitter:
    return SentenceSplitter(chunk_size=200, chunk_overlap=0)


def doc(id: str, text: str, **metadata: Any) -> Document:
    return Document(id_=id, text=text, metadata=metadata)


Make = Callable[..., IngestionPipeline]


def theirs(vectors: Vectors, docstore: SimpleDocumentStore | None = None) -> Make:
    """A function that makes LlamaIndex's pipelines with these stores."""
    kept = docstore if docstore is not None else SimpleDocumentStore()

    def make(*transformations: TransformComponent, strategy: DocstoreStrategy = UPSERTS, **how: Any) -> Any:
        how.pop("source", None)
        by = [*(transformations or [splitter()]), embedding()]
        return IngestionPipeline(
            transformations=by, docstore=kept, vector_store=vectors, docstore_strategy=strategy, **how
        )

    return make


def ours(vectors: Vectors, db: Any) -> Make:
    """A function that makes perco's pipelines with these stores."""

    def make(*transformations: TransformComponent, strategy: DocstoreStrategy = UPSERTS, **how: Any) -> Any:
        by = [*(transformations or [splitter()]), embedding()]
        return Pipeline(
            transformations=by, docstore=DocumentStore(db), vector_store=vectors, docstore_strategy=strategy, **how
        )

    return make


def both(db: perco.sync.Database, scenario: Callable[[Make, Vectors], Any]) -> tuple[Any, Any]:
    """What a scenario gives with LlamaIndex's pipeline and store, and with perco's."""
    first, second = Vectors(), Vectors()
    return scenario(theirs(first), first), scenario(ours(second, db), second)
