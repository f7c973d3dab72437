"""LlamaIndex's ingestion pipeline, with the rules LI1 to LI5 of `perco.llamaindex`.

A generator decides the steps of a run. `run` does the steps in blocking code, `arun` with asyncio.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Final

from llama_index.core.bridge.pydantic import Field
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.ingestion.pipeline import remove_unstable_values
from llama_index.core.schema import BaseNode, Document, NodeRelationship, TransformComponent
from llama_index.core.storage.docstore.utils import doc_to_json, json_to_doc
from llama_index.core.utils import get_tqdm_iterable
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from perco.errors import UsageError
from perco.llamaindex import ingesting, values
from perco.llamaindex.ingesting import Written
from perco.llamaindex.stores import Cache, DocumentStore, KVStore, Prepared, prepared
from perco.llamaindex.values import Front, Value

_log = logging.getLogger("perco.llamaindex")

_CACHED_BYTES_MAX: Final = 64 << 20  # what a transformation gives for one document: more is not kept


@dataclass(frozen=True, slots=True)
class _Ask:
    """Call a function of the store."""

    of: Front
    function: Callable[..., Coroutine[Any, Any, Any]]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Transform:
    """Call a transformation with nodes."""

    by: TransformComponent
    nodes: list[BaseNode]


@dataclass(frozen=True, slots=True)
class _Delete:
    """Delete the nodes of a document from the vector store."""

    id: str


@dataclass(frozen=True, slots=True)
class _Add:
    """Write nodes to the vector store."""

    nodes: list[BaseNode]


_Step = _Ask | _Transform | _Delete | _Add
_Steps = Generator[_Step, Any, Any]


class _Run:
    """The steps of a run, one after another.

    Attributes:
        answer: the result of the last step, for the next one.
        nodes: once there is no further step, the nodes that the run has made.
    """

    def __init__(self, steps: _Steps) -> None:
        self.answer: Any = None
        self.nodes: list[BaseNode] = []
        self._steps = steps

    def __iter__(self) -> _Run:
        return self

    def __next__(self) -> _Step:
        answer, self.answer = self.answer, None
        try:
            return self._steps.send(answer)
        except StopIteration as ended:
            self.nodes = ended.value
            raise


@dataclass(slots=True)
class _Given:
    """A document, as it was given to a run.

    Attributes:
        id: the document's id: the given node's own, or that of the document it is a part of.
        nodes: the document itself, or some nodes of it.
        digest: of all of them.
    """

    id: str
    nodes: list[BaseNode] = field(default_factory=list)
    digest: str = ""


class Pipeline(IngestionPipeline):
    """LlamaIndex's `IngestionPipeline`, which loses no document, and deletes only the documents that it should.

    A document is unchanged if its text and metadata are. Documents are transformed and written `batch` at a time. If a
    transformation or the vector store fails, the run raises the error. It has noted the documents that were written by
    then, and the next run does the rest. Transformations get copies of the documents.

    With `DocstoreStrategy.UPSERTS_AND_DELETE`, a run deletes the documents that an earlier run with the same `source`
    was given, and this one was not. So give each run all documents of its source.

    Run one pipeline of a source at a time. If two runs write one document at the same time, the next run ingests it
    again.

    Args:
        docstore: a `DocumentStore`.
        vector_store: must store nodes durably before `add` returns. If it is in memory, save it yourself, and discard
            it only together with the document store.
        cache: a `Cache`; by default, one in the same store.
        source: the source of the documents.
        volatile: metadata that may change without the document being ingested again.
        batch: documents that are transformed together.
        others: see `IngestionPipeline`.

    Raises: UsageError.
    """

    source: str = Field(default="default", description="The source of the documents.")
    volatile: tuple[str, ...] = Field(default=("last_accessed_date",), description="Metadata that the hash leaves out.")
    batch: int = Field(default=100, ge=1, description="Documents that are transformed together.")

    def __init__(
        self,
        *,
        docstore: DocumentStore,
        vector_store: BasePydanticVectorStore,
        cache: Cache | None = None,
        source: str = "default",
        volatile: Sequence[str] = ("last_accessed_date",),
        batch: int = 100,
        **others: Any,
    ) -> None:
        if not isinstance(docstore, DocumentStore):
            raise UsageError(f"Pipeline takes docstore=perco.llamaindex.DocumentStore(db), not {docstore!r}")
        if vector_store is None:
            raise UsageError("Pipeline takes vector_store=: it notes documents once their nodes are there")
        if cache is not None and not isinstance(cache.cache, KVStore):
            raise UsageError(f"Pipeline takes cache=perco.llamaindex.Cache(db), not {cache!r}")
        if batch < 1:
            raise UsageError(f"Pipeline: batch is a number of documents, at least 1, not {batch!r}")
        if isinstance(volatile, str):
            raise UsageError(f"Pipeline: volatile is a list of names, not {volatile!r}")
        cache = cache if cache is not None else Cache(docstore.front.db)
        super().__init__(docstore=docstore, vector_store=vector_store, cache=cache, **others)
        self.source, self.volatile, self.batch = source, tuple(volatile), batch

    def persist(self, *args: Any, **how: Any) -> None:
        """Do nothing: the store keeps the documents and the cache."""

    def load(self, *args: Any, **how: Any) -> None:
        """Do nothing: the store has the documents and the cache."""

    # ------------------------------------------------------------ runs

    def run(
        self,
        show_progress: bool = False,
        documents: list[Document] | None = None,
        nodes: Sequence[BaseNode] | None = None,
        cache_collection: str | None = None,
        in_place: bool = True,
        store_doc_text: bool = True,
        num_workers: int | None = None,
        **kwargs: Any,
    ) -> Sequence[BaseNode]:
        """Ingest documents that are new or changed, and return their nodes. See `IngestionPipeline.run`.

        Raises: UsageError; errors of the transformations, and of the vector store.
        """
        steps = self._begin(documents, nodes, cache_collection, store_doc_text, show_progress, num_workers)
        for step in steps:
            match step:
                case _Ask(of, function, args):
                    steps.answer = of.ask(function, *args)
                case _Transform(by, some):
                    steps.answer = by(some, **kwargs)
                case _Delete(id):
                    self._vectors.delete(id)
                case _Add(some):
                    self._vectors.add(some)
        return steps.nodes

    async def arun(
        self,
        show_progress: bool = False,
        documents: list[Document] | None = None,
        nodes: Sequence[BaseNode] | None = None,
        cache_collection: str | None = None,
        in_place: bool = True,
        store_doc_text: bool = True,
        num_workers: int | None = None,
        **kwargs: Any,
    ) -> Sequence[BaseNode]:
        """See `run`."""
        steps = self._begin(documents, nodes, cache_collection, store_doc_text, show_progress, num_workers)
        for step in steps:
            match step:
                case _Ask(of, function, args):
                    steps.answer = await of.aask(function, *args)
                case _Transform(by, some):
                    steps.answer = await by.acall(some, **kwargs)
                case _Delete(id):
                    await self._vectors.adelete(id)
                case _Add(some):
                    await self._vectors.async_add(some)
        return steps.nodes

    @property
    def _documents(self) -> DocumentStore:
        if not isinstance(self.docstore, DocumentStore):
            raise UsageError(f"Pipeline takes docstore=perco.llamaindex.DocumentStore(db), not {self.docstore!r}")
        return self.docstore

    @property
    def _cache(self) -> KVStore:
        if not isinstance(self.cache.cache, KVStore):
            raise UsageError(f"Pipeline takes cache=perco.llamaindex.Cache(db), not {self.cache!r}")
        return self.cache.cache

    @property
    def _vectors(self) -> BasePydanticVectorStore:
        assert self.vector_store is not None
        return self.vector_store

    # ------------------------------------------------------------ what a run does

    def _begin(
        self,
        documents: list[Document] | None,
        nodes: Sequence[BaseNode] | None,
        collection: str | None,
        store_text: bool,
        show_progress: bool,
        workers: int | None,
    ) -> _Run:
        if workers is not None and workers > 1:
            raise UsageError(
                "perco's Pipeline transforms in one process: leave out num_workers=. For several processes, divide the "
                "documents, and give each its own source="
            )
        given = _grouped(self._prepare_inputs(documents, nodes), self.volatile)
        return _Run(self._steps(given, collection or self.cache.collection, store_text, show_progress))

    def _steps(self, given: list[_Given], collection: str, store_text: bool, show_progress: bool) -> _Steps:
        front, namespace, run = self._documents.front, self._documents.namespace, token_hex(8)
        hashes = [(each.id, each.digest) for each in given]
        if self.docstore_strategy == DocstoreStrategy.DUPLICATES_ONLY:
            wanted = set((yield _Ask(front, ingesting.unknown, (namespace, hashes))))
        else:
            wanted = set((yield _Ask(front, ingesting.changed, (namespace, self.source, hashes))))
        todo = [each for each in given if each.id in wanted]
        found: list[BaseNode] = []
        batches = [todo[at : at + self.batch] for at in range(0, len(todo), self.batch)]
        for some in get_tqdm_iterable(batches, show_progress, "Ingesting documents"):
            stored = {each.id: [prepared(node, store_text) for node in each.nodes] for each in some}
            made = yield from self._transformed(some, collection)
            yield from self._written(some, stored, made, run)
            found += [node for nodes in made.values() for node in nodes]
        if self.docstore_strategy == DocstoreStrategy.UPSERTS_AND_DELETE:
            ids = [each.id for each in given]
            for id in (yield _Ask(front, ingesting.lost, (namespace, self.source, run, ids))):
                yield _Delete(id)
                yield _Ask(front, ingesting.forget, (namespace, self.source, run, id))
        return found

    def _written(
        self, some: list[_Given], stored: dict[str, list[Prepared]], made: dict[str, list[BaseNode]], run: str
    ) -> _Steps:
        """Write what documents have become to the vector store, and note that it has them (LI1, LI2)."""
        front, namespace, ids = self._documents.front, self._documents.namespace, [each.id for each in some]
        vectors = [node for id in ids for node in self._with_vectors(id, made[id])]
        for id in (yield _Ask(front, ingesting.begin, (namespace, self.source, run, ids))):
            yield _Delete(id)
        if vectors:
            yield _Add(vectors)
        written = [Written(each.id, each.digest, stored[each.id]) for each in some]
        again = yield _Ask(front, ingesting.finish, (namespace, self.source, run, written))
        if again:
            _log.warning(
                "Another run has written %d of the documents of this run, or was killed: the next run ingests them "
                "again. The first one: %s",
                len(again),
                again[0],
            )

    def _with_vectors(self, id: str, nodes: list[BaseNode]) -> list[BaseNode]:
        """The nodes that go to the vector store, each with the document that they are deleted with."""
        found = [node for node in nodes if node.embedding is not None]
        if nodes and not found:
            raise UsageError(
                f"no node of document {id} has an embedding, so the vector store would not find it: add an embedding "
                "model as the last transformation"
            )
        for node in found:
            if node.ref_doc_id is None:
                node.relationships[NodeRelationship.SOURCE] = node.as_related_node_info()
        return found

    def _transformed(self, some: list[_Given], collection: str) -> _Steps:
        """The nodes that documents become, by document. Nodes that are in the cache are not made again (LI5)."""
        cache = self._cache.front
        nodes = {each.id: [node.model_copy(deep=True) for node in each.nodes] for each in some}
        for by in self.transformations:
            keys = {id: _key(by, now) for id, now in nodes.items()}
            kept: dict[str, Value | None] = dict.fromkeys(keys.values())
            if not self.disable_cache:
                kept = yield _Ask(cache, values.get_now, (collection, list(keys.values())))
            missing = [id for id, key in keys.items() if kept[key] is None]
            if missing:
                made = yield _Transform(by, [node for id in missing for node in nodes[id]])
                nodes.update(_by_document(made, missing, by))
                if not self.disable_cache:
                    yield _Ask(cache, values.put_all, (collection, self._kept(keys, nodes, missing), _CACHED_BYTES_MAX))
            for id, key in keys.items():
                value = kept[key]
                if value is not None:
                    nodes[id] = [json_to_doc(each) for each in value[self.cache.nodes_key]]
        return nodes

    def _kept(self, keys: dict[str, str], nodes: dict[str, list[BaseNode]], ids: list[str]) -> list[tuple[str, Value]]:
        whole = [id for id in ids if not any(map(_has_binary, nodes[id]))]
        return [(keys[id], {self.cache.nodes_key: [doc_to_json(node) for node in nodes[id]]}) for id in whole]


def _grouped(nodes: Sequence[BaseNode], volatile: tuple[str, ...]) -> list[_Given]:
    """The documents that nodes are, or belong to, with their hashes."""
    found: dict[str, _Given] = {}
    for node in nodes:
        id = node.ref_doc_id or node.node_id
        found.setdefault(id, _Given(id)).nodes.append(node)
    for each in found.values():
        hashes = [_hash(node, volatile) for node in each.nodes]
        alone = len(hashes) == 1 and each.nodes[0].node_id == each.id
        each.digest = hashes[0] if alone else hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    return list(found.values())


def _hash(node: BaseNode, volatile: tuple[str, ...]) -> str:
    """LlamaIndex's hash of a node, without some of its metadata."""
    if any(name in node.metadata for name in volatile):
        node = node.model_copy()
        node.metadata = {name: value for name, value in node.metadata.items() if name not in volatile}
    return node.hash


def _has_binary(node: BaseNode) -> bool:
    """Whether a node has an image, audio or video as bytes: LlamaIndex leaves them out when it stores a node."""
    kinds = ("text_resource", "image_resource", "audio_resource", "video_resource")
    return any(getattr(getattr(node, kind, None), "data", None) is not None for kind in kinds)


def _key(by: TransformComponent, nodes: list[BaseNode]) -> str:
    """The cache key of a transformation's result: a digest of its class, its settings and all of the nodes (LI5)."""
    kind = f"{type(by).__module__}.{type(by).__qualname__}"
    settings = remove_unstable_values(str(by.to_dict()))
    given = [[doc_to_json(node), node.hash] for node in nodes]  # the hash is also that of images, as bytes
    whole = json.dumps([kind, settings, given], sort_keys=True, default=repr)
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()


def _by_document(made: Iterable[BaseNode], ids: list[str], by: TransformComponent) -> dict[str, list[BaseNode]]:
    """The nodes that a transformation has given, by the document that they belong to. Raises: UsageError."""
    found: dict[str, list[BaseNode]] = {id: [] for id in ids}
    for node in made:
        of = node.ref_doc_id if node.ref_doc_id in found else node.node_id
        if of not in found:
            raise UsageError(
                f"{type(by).__name__} gave node {node.node_id}, which belongs to no document that it was given, so it "
                "could not be deleted with its document: set its relationship SOURCE"
            )
        found[of].append(node)
    return found
