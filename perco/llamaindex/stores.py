"""LlamaIndex's stores: by key, of documents, and of the results of transformations.

The entry of a document, in the collection `NAMESPACE/metadata`, has its `doc_hash`, for a node the `ref_doc_id`, and
what `Pipeline` notes: the `sources` that have the document, and the `run` that is writing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from llama_index.core.ingestion import IngestionCache
from llama_index.core.ingestion.cache import DEFAULT_CACHE_NAME
from llama_index.core.schema import BaseNode
from llama_index.core.storage.docstore.keyval_docstore import (
    DEFAULT_COLLECTION_DATA_SUFFIX,
    DEFAULT_METADATA_COLLECTION_SUFFIX,
    DEFAULT_NAMESPACE,
    DEFAULT_REF_DOC_COLLECTION_SUFFIX,
    KVDocumentStore,
)
from llama_index.core.storage.docstore.utils import doc_to_json
from llama_index.core.storage.kvstore.types import DEFAULT_COLLECTION, BaseKVStore

import perco.aio
import perco.sync
from perco.database.database import Database
from perco.llamaindex import values
from perco.llamaindex.values import Front, Value, in_parts
from perco.txn.transaction import Transaction

OF_NODES: Final = DEFAULT_COLLECTION_DATA_SUFFIX
OF_REFERENCES: Final = DEFAULT_REF_DOC_COLLECTION_SUFFIX
OF_ENTRIES: Final = DEFAULT_METADATA_COLLECTION_SUFFIX


class KVStore(BaseKVStore):
    """Dicts by collection and key, as JSON. For LlamaIndex's document stores, index stores and caches.

    Args:
        db: a store that `perco.sync.open` has opened; the async methods call it in threads. Or one that
            `perco.aio.open` has opened, for the async methods only.

    Raises: UsageError.
    """

    def __init__(self, db: perco.sync.Database | perco.aio.Database) -> None:
        self.front: Front = Front(db, type(self).__name__)

    def put(self, key: str, val: Value, collection: str = DEFAULT_COLLECTION) -> None:
        """Set a value."""
        self.put_all([(key, val)], collection)

    async def aput(self, key: str, val: Value, collection: str = DEFAULT_COLLECTION) -> None:
        """See `put`."""
        await self.aput_all([(key, val)], collection)

    def put_all(
        self, kv_pairs: list[tuple[str, Value]], collection: str = DEFAULT_COLLECTION, batch_size: int = 1
    ) -> None:
        """Set values, up to a thousand in a transaction, whatever `batch_size` says."""
        self.front.ask(values.put_all, collection, kv_pairs)

    async def aput_all(
        self, kv_pairs: list[tuple[str, Value]], collection: str = DEFAULT_COLLECTION, batch_size: int = 1
    ) -> None:
        """See `put_all`."""
        await self.front.aask(values.put_all, collection, kv_pairs)

    def get(self, key: str, collection: str = DEFAULT_COLLECTION) -> Value | None:
        """A value; None: there is none."""
        return self.front.ask(values.get_now, collection, [key])[key]

    async def aget(self, key: str, collection: str = DEFAULT_COLLECTION) -> Value | None:
        """See `get`."""
        return (await self.front.aask(values.get_now, collection, [key]))[key]

    def get_all(self, collection: str = DEFAULT_COLLECTION) -> dict[str, Value]:
        """All values of a collection, in the order of their keys."""
        return self.front.ask(values.get_all, collection)

    async def aget_all(self, collection: str = DEFAULT_COLLECTION) -> dict[str, Value]:
        """See `get_all`."""
        return await self.front.aask(values.get_all, collection)

    def delete(self, key: str, collection: str = DEFAULT_COLLECTION) -> bool:
        """Remove a value. Returns whether there was one."""
        return self.front.ask(values.delete_now, collection, key)

    async def adelete(self, key: str, collection: str = DEFAULT_COLLECTION) -> bool:
        """See `delete`."""
        return await self.front.aask(values.delete_now, collection, key)

    def clear(self, collection: str = DEFAULT_COLLECTION) -> None:
        """Remove all values of a collection."""
        self.front.ask(values.clear, collection)

    async def aclear(self, collection: str = DEFAULT_COLLECTION) -> None:
        """See `clear`."""
        await self.front.aask(values.clear, collection)


class Cache(IngestionCache):
    """The results of transformations. It only grows: `clear` it from time to time, or when the code of a transformation
    has changed.

    Args:
        db: see `KVStore`.
        collection: separates caches in one store.
    """

    def __init__(
        self, db: perco.sync.Database | perco.aio.Database, *, collection: str = DEFAULT_CACHE_NAME, **more: Any
    ) -> None:
        super().__init__(cache=KVStore(db), collection=collection, **more)

    def clear(self, collection: str | None = None) -> None:
        """Remove all that is in the cache."""
        assert isinstance(self.cache, KVStore)
        self.cache.clear(collection or self.collection)

    async def aclear(self, collection: str | None = None) -> None:
        """See `clear`."""
        assert isinstance(self.cache, KVStore)
        await self.cache.aclear(collection or self.collection)

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Do nothing: the store keeps what is put."""


class DocumentStore(KVDocumentStore):
    """Documents and nodes, their hashes, and which nodes a document has. Each call is one transaction, unless it adds
    more than a thousand nodes, or 16 MiB.

    Args:
        db: see `KVStore`.
        namespace: separates document stores in one store.

    Raises: UsageError.
    """

    def __init__(self, db: perco.sync.Database | perco.aio.Database, namespace: str = DEFAULT_NAMESPACE) -> None:
        super().__init__(KVStore(db), namespace)
        self.front: Front = Front(db, type(self).__name__)
        self.namespace: str = namespace

    # ------------------------------------------------------------ nodes

    def add_documents(
        self,
        docs: Sequence[BaseNode],
        allow_update: bool = True,
        batch_size: int | None = None,
        store_text: bool = True,
    ) -> None:
        """Add documents or nodes, with their hashes. Raises: ValueError if one is there and `allow_update` is False."""
        self.front.ask(_add_all, self.namespace, list(docs), allow_update, store_text)

    async def async_add_documents(
        self,
        docs: Sequence[BaseNode],
        allow_update: bool = True,
        batch_size: int | None = None,
        store_text: bool = True,
    ) -> None:
        """See `add_documents`."""
        await self.front.aask(_add_all, self.namespace, list(docs), allow_update, store_text)

    def delete_document(self, doc_id: str, raise_error: bool = True) -> None:
        """Delete a document with its nodes, or a node. Raises: ValueError if it is unknown and `raise_error`."""
        self._must_be(self.front.ask(_delete, self.namespace, doc_id), f"doc_id {doc_id}", raise_error)

    async def adelete_document(self, doc_id: str, raise_error: bool = True) -> None:
        """See `delete_document`."""
        self._must_be(await self.front.aask(_delete, self.namespace, doc_id), f"doc_id {doc_id}", raise_error)

    def delete_ref_doc(self, ref_doc_id: str, raise_error: bool = True) -> None:
        """Delete a document with its nodes. Raises: ValueError if it is unknown and `raise_error`."""
        self._must_be(self.front.ask(_delete, self.namespace, ref_doc_id), f"ref_doc_id {ref_doc_id}", raise_error)

    async def adelete_ref_doc(self, ref_doc_id: str, raise_error: bool = True) -> None:
        """See `delete_ref_doc`."""
        there = await self.front.aask(_delete, self.namespace, ref_doc_id)
        self._must_be(there, f"ref_doc_id {ref_doc_id}", raise_error)

    def _must_be(self, there: bool, what: str, raise_error: bool) -> None:
        if not there and raise_error:
            raise ValueError(f"{what} not found.")

    # ------------------------------------------------------------ hashes

    def set_document_hash(self, doc_id: str, doc_hash: str) -> None:
        """Set the hash of a document."""
        self.set_document_hashes({doc_id: doc_hash})

    async def aset_document_hash(self, doc_id: str, doc_hash: str) -> None:
        """See `set_document_hash`."""
        await self.aset_document_hashes({doc_id: doc_hash})

    def set_document_hashes(self, doc_hashes: dict[str, str]) -> None:
        """Set the hashes of documents, up to a thousand in a transaction."""
        self.front.ask(_set_hashes, self.namespace, list(doc_hashes.items()))

    async def aset_document_hashes(self, doc_hashes: dict[str, str]) -> None:
        """See `set_document_hashes`."""
        await self.front.aask(_set_hashes, self.namespace, list(doc_hashes.items()))

    def get_all_document_hashes(self) -> dict[str, str]:
        """The id of a document by its hash; for a node, that of its document. If several documents have a hash, those
        but the first stand under "HASH ID". So the values are all documents, and the keys have all hashes."""
        return _by_hash(self.front.ask(values.get_all, self.namespace + OF_ENTRIES))

    async def aget_all_document_hashes(self) -> dict[str, str]:
        """See `get_all_document_hashes`."""
        return _by_hash(await self.front.aask(values.get_all, self.namespace + OF_ENTRIES))


def _by_hash(entries: dict[str, Value]) -> dict[str, str]:
    found: dict[str, str] = {}
    for id, entry in entries.items():
        digest, document = entry.get("doc_hash"), entry.get("ref_doc_id") or id
        if digest and found.setdefault(digest, document) != document:
            found[f"{digest} {document}"] = document
    return found


# ------------------------------------------------------------ on the loop


async def _add_all(db: Database, namespace: str, nodes: list[BaseNode], allow_update: bool, store_text: bool) -> None:
    async def write(txn: Transaction, some: list[Prepared]) -> None:
        if not allow_update:
            there = await values.get_many(txn, namespace + OF_NODES, [node.id for node in some])
            for id, value in there.items():
                if value is not None:
                    raise ValueError(f"node_id {id} already exists. Set allow_update to True to overwrite.")
        await add(txn, namespace, some)

    for some in in_parts([prepared(node, store_text) for node in nodes], lambda node: (1, len(node.data or b""))):
        await db.run(write, some)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A node as it is stored.

    Attributes:
        id: of the node.
        data: as JSON; None: only its hash is stored.
        digest: LlamaIndex's hash.
        reference: the document it belongs to, if any.
        metadata: of the node.
    """

    id: str
    data: bytes | None
    digest: str
    reference: str | None
    metadata: Value


def prepared(node: BaseNode, store_text: bool) -> Prepared:
    """A node as it is now. Raises: UsageError if JSON cannot hold it."""
    data = values.encoded(doc_to_json(node), f"node {node.node_id}") if store_text else None
    return Prepared(node.node_id, data, node.hash, node.ref_doc_id, dict(node.metadata))


async def add(txn: Transaction, namespace: str, nodes: Sequence[Prepared]) -> None:
    """Add nodes, with their hashes."""
    entries = await values.get_many(txn, namespace + OF_ENTRIES, [node.id for node in nodes])
    references = sorted({node.reference for node in nodes if node.reference is not None})
    known = await values.get_many(txn, namespace + OF_REFERENCES, references)
    infos = {id: known[id] or {"node_ids": [], "metadata": {}} for id in references}
    parts = {id: dict.fromkeys(info["node_ids"]) for id, info in infos.items()}
    for node in nodes:
        if node.data is not None:
            await values.put_data(txn, namespace + OF_NODES, node.id, node.data)
        entry = {**without_run(entries[node.id]), "doc_hash": node.digest}
        if node.reference is not None:
            entry["ref_doc_id"] = node.reference
            parts[node.reference][node.id] = None
            infos[node.reference]["metadata"] = infos[node.reference]["metadata"] or node.metadata
        await values.put(txn, namespace + OF_ENTRIES, node.id, entry)
    for id, info in infos.items():
        await values.put(txn, namespace + OF_REFERENCES, id, {**info, "node_ids": list(parts[id])})


def without_run(entry: Value | None) -> Value:
    """An entry without the mark of a run that is writing the document."""
    return {name: value for name, value in (entry or {}).items() if name not in ("run", "taken")}


async def _delete(db: Database, namespace: str, id: str) -> bool:
    return await db.run(remove, namespace, id)


async def remove(txn: Transaction, namespace: str, id: str) -> bool:
    """Delete a document with its nodes, or a node. Returns whether it was there."""
    entry = await values.get(txn, namespace + OF_ENTRIES, id)
    of = (entry or {}).get("ref_doc_id")
    if of is not None and of != id:
        info = await values.get(txn, namespace + OF_REFERENCES, of)
        if info is not None:
            info["node_ids"] = [each for each in info["node_ids"] if each != id]
            if info["node_ids"]:
                await values.put(txn, namespace + OF_REFERENCES, of, info)
            else:
                await _remove_alone(txn, namespace, of)
    nodes = await remove_nodes(txn, namespace, id)
    return await _remove_alone(txn, namespace, id) or nodes


async def remove_nodes(txn: Transaction, namespace: str, id: str) -> bool:
    """Delete the nodes that a document has. Returns whether there were any."""
    info = await values.get(txn, namespace + OF_REFERENCES, id)
    for each in (info or {}).get("node_ids", []):
        if each != id:
            await _remove_alone(txn, namespace, each)
    return await values.delete(txn, namespace + OF_REFERENCES, id)


async def _remove_alone(txn: Transaction, namespace: str, id: str) -> bool:
    """Delete what is stored under an id, but not its sources, so that their next runs delete its nodes from the vector
    store. Returns whether there was anything."""
    collections = (OF_ENTRIES, OF_NODES, OF_REFERENCES)
    return any([await values.delete(txn, namespace + each, id) for each in collections])


async def _set_hashes(db: Database, namespace: str, pairs: list[tuple[str, str]]) -> None:
    async def write(txn: Transaction, some: list[tuple[str, str]]) -> None:
        known = await values.get_many(txn, namespace + OF_ENTRIES, [id for id, _ in some])
        for id, digest in some:
            await values.put(txn, namespace + OF_ENTRIES, id, {**without_run(known[id]), "doc_hash": digest})

    for at in range(0, len(pairs), values.AT_ONCE):
        await db.run(write, pairs[at : at + values.AT_ONCE])
