"""What `Pipeline` notes of documents, on the store's loop: see LI1, LI2 and LI4 in `perco.llamaindex`.

The entry of a document that a run writes to the vector store, or deletes there, has no hash, and names the run. If
another run has begun to write the document meanwhile, both may have left nodes there. So neither notes a hash: the
first finds that the entry names the other, and the second, which has found the first one's name, leaves the entry
without a hash. The next run ingests the document again, or deletes it. A run that finds the name of one that was killed
cannot tell it from one that still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perco.database.database import Database
from perco.llamaindex import values
from perco.llamaindex.stores import OF_ENTRIES, Prepared, add, remove, remove_nodes, without_run
from perco.llamaindex.values import Value
from perco.txn.transaction import Transaction


class Written(NamedTuple):
    """A document whose nodes the vector store has.

    Attributes:
        id, digest: of the document.
        nodes: its nodes as the run was given them, in stored form.
    """

    id: str
    digest: str
    nodes: list[Prepared]


async def changed(db: Database, namespace: str, source: str, given: Sequence[tuple[str, str]]) -> list[str]:
    """The ids, of (id, hash), of documents whose hash is not noted. The others get this source, too (LI4)."""

    async def look(txn: Transaction, some: Sequence[tuple[str, str]]) -> list[str]:
        entries = await values.get_many(txn, namespace + OF_ENTRIES, [id for id, _ in some])
        found = []
        for id, digest in some:
            entry = entries[id]
            if entry is None or entry.get("doc_hash") != digest:
                found.append(id)
            else:
                await _join(txn, namespace, source, id, entry)
        return found

    found = []
    for at in range(0, len(given), values.AT_ONCE):
        found += await db.run(look, given[at : at + values.AT_ONCE])
    return found


async def unknown(db: Database, namespace: str, given: Sequence[tuple[str, str]]) -> list[str]:
    """The ids, of (id, hash), of documents whose hash no document has; of several with one hash, the first."""
    entries = await values.get_all(db, namespace + OF_ENTRIES)
    seen = {entry.get("doc_hash") for entry in entries.values() if "ref_doc_id" not in entry}
    found = []
    for id, digest in given:
        if digest not in seen:
            found.append(id)
            seen.add(digest)
    return found


async def begin(db: Database, namespace: str, source: str, run: str, ids: Sequence[str]) -> list[str]:
    """Note that a run writes documents: they lose their hashes (LI2). Returns those of which the vector store may have
    nodes."""

    async def mark(txn: Transaction) -> list[str]:
        entries = await values.get_many(txn, namespace + OF_ENTRIES, ids)
        for id in ids:
            await _join(txn, namespace, source, id, _marked(entries[id], run))
        return [id for id in ids if entries[id] is not None]

    return await db.run(mark)


def _marked(entry: Value | None, run: str) -> Value:
    before = entry or {}
    kept = {name: value for name, value in before.items() if name != "doc_hash"}
    return {**kept, "run": run, "taken": before.get("run") is not None}


async def _join(txn: Transaction, namespace: str, source: str, id: str, entry: Value) -> None:
    """Store an entry, with a source of its document."""
    sources = entry.get("sources", [])
    if source not in sources:
        txn.set(values.member, (namespace, source, id), True)
        entry = {**entry, "sources": [*sources, source]}
    elif "run" not in entry:
        return  # as it is
    await values.put(txn, namespace + OF_ENTRIES, id, entry)


async def finish(db: Database, namespace: str, source: str, run: str, written: Sequence[Written]) -> list[str]:
    """Note the hashes of documents that a run has written (LI1), and store their nodes. Returns the ids
    of those that another run has begun to write, too."""

    async def note(txn: Transaction, each: Written) -> bool:
        entry = await values.get(txn, namespace + OF_ENTRIES, each.id)
        if entry is None:  # it was deleted by hand meanwhile: the next run deletes what this one has written
            await _join(txn, namespace, source, each.id, {})
        if entry is None or entry.get("run") != run:
            return False
        await remove_nodes(txn, namespace, each.id)
        await add(txn, namespace, each.nodes)
        digest = {} if entry["taken"] else {"doc_hash": each.digest}
        await values.put(txn, namespace + OF_ENTRIES, each.id, {**without_run(entry), **digest})
        return not entry["taken"]

    async def note_all(txn: Transaction, some: list[Written]) -> list[str]:
        return [each.id for each in some if not await note(txn, each)]

    again = []
    for some in values.in_parts(written, _size):
        again += await db.run(note_all, some)
    return again


def _size(written: Written) -> tuple[int, int]:
    return len(written.nodes), sum(len(node.data or b"") for node in written.nodes)


async def lost(db: Database, namespace: str, source: str, run: str, ids: Sequence[str]) -> list[str]:
    """The documents that a source had, without these, and that no other source has. They lose their hashes (LI4)."""
    given = set(ids)
    async with db.snapshot() as snap:
        rows = snap.scan(values.member.table, prefix=(namespace, source), columns=[values.member])
        missing = [row.key[2] async for row in rows if row.key[2] not in given]

    async def leave(txn: Transaction, some: Sequence[str]) -> list[str]:
        entries = await values.get_many(txn, namespace + OF_ENTRIES, some)
        found = []
        for id in some:
            entry = entries[id]
            others = [each for each in (entry or {}).get("sources", []) if each != source]
            if entry is not None and others:
                txn.delete(values.member, (namespace, source, id))
                await values.put(txn, namespace + OF_ENTRIES, id, {**entry, "sources": others})
                continue
            found.append(id)
            if entry is not None:
                await values.put(txn, namespace + OF_ENTRIES, id, _marked(entry, run))
        return found

    found = []
    for at in range(0, len(missing), values.AT_ONCE):
        found += await db.run(leave, missing[at : at + values.AT_ONCE])
    return found


async def forget(db: Database, namespace: str, source: str, run: str, id: str) -> None:
    """Remove a document whose nodes have been deleted from the vector store, unless another run writes it again."""

    async def drop(txn: Transaction) -> None:
        entry = await values.get(txn, namespace + OF_ENTRIES, id)
        if entry is None or (entry.get("run") == run and not entry["taken"]):
            await remove(txn, namespace, id)
            txn.delete(values.member, (namespace, source, id))
        elif entry.get("run") == run:  # another run may still write it: the next one deletes it again
            await values.put(txn, namespace + OF_ENTRIES, id, without_run(entry))

    await db.run(drop)
