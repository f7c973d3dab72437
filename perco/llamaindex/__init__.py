"""LlamaIndex's ingestion, with its document store and cache in a perco store.

    schema = perco.Schema(*perco.llamaindex.TABLES)
    with perco.sync.open("ingested", schema) as db:
        pipeline = Pipeline(
            transformations=[SentenceSplitter(), embedding],
            docstore=DocumentStore(db),
            vector_store=vector_store,
            docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
            source="handbook",
        )
        pipeline.run(documents=documents)

`KVStore`, `DocumentStore` and `Cache` also work with LlamaIndex's own `IngestionPipeline`. No store can mend some
faults of that pipeline, because it deletes documents, and notes hashes, before its transformations have succeeded.
`Pipeline` has its interface, and keeps these rules:

LI1 The hash of a document is noted only after all its nodes have been written to the vector store.
LI2 Before the vector store is touched for a document, the document's hash is removed. So if anything fails then, the
    next run ingests the document again.
LI3 Nothing is deleted, neither from the vector store nor here, until the transformations of the batch have succeeded.
    Documents that their source does not have any more are deleted after all others have been ingested.
LI4 A document is deleted if the source had it and no other source has it. perco keeps a document that another source
    has, and one that has the same content under another id.
LI5 The result of a transformation is found again only for the same nodes, ids included, and a transformation of the
    same class and settings.
"""

try:
    import llama_index.core as _core  # noqa: F401
except ImportError as _error:  # pragma: no cover
    raise ImportError("perco.llamaindex needs llama-index-core: pip install 'perco[llamaindex]'") from _error

from perco.llamaindex.pipeline import Pipeline as Pipeline
from perco.llamaindex.stores import Cache as Cache, DocumentStore as DocumentStore, KVStore as KVStore
from perco.llamaindex.values import TABLES as TABLES
