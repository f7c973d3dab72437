"""Opens the row store behind a URL: `memory:` or a folder of LMDB tablets."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from perco.errors import PercoError, TransactionClosed, UsageError, UsedAfterFork
from perco.storage import (
    PROTOCOL_GROUPS,
    BatchOptions,
    Folder,
    LmdbEngine,
    LmdbOptions,
    LmdbTablet,
    LocalRowStore,
    MemoryTablet,
    Tablet,
)
from perco.storage.tablet import Resubmit
from perco.txn.catalogue import SYSTEM_TABLE, Catalogue


class Elsewhere(Protocol):
    """Other processes, which have the tablets of all tables open but the store's own."""

    def tablet(
        self,
        table: str,
        number: int,
        start: bytes,
        stop: bytes | None,
        groups: Sequence[str],
        resubmit: Resubmit,
    ) -> Tablet:
        """One that is on the disk already. `resubmit`: where what a call sends next goes."""
        ...

    async def aclose(self) -> None: ...


_stores: weakref.WeakSet[LocalStore] = weakref.WeakSet()


class LocalStore:
    """The row store of this process, and the folder it lies in, if any.

    Attributes: `store`, the seam; `readonly`; `path`, None for memory.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        durable: bool,
        readonly: bool,
        accept_loss: bool,
        lmdb: LmdbOptions,
        batch: BatchOptions,
        shared: bool = False,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.store = LocalRowStore()
        self._elsewhere = elsewhere
        self.readonly = readonly
        self._batch = batch
        self._lmdb = replace(lmdb, sync=durable)
        self._folder: Folder | None = None
        self._groups: dict[str, set[str]] = {}
        self.forked = False
        self._thread = threading.get_ident()
        self.path: Path | None = None
        text = os.fspath(url)
        if text == "memory:":
            if readonly:
                raise UsageError("a memory: store begins empty; there is nothing to read in it with readonly=True")
        else:
            self.path = _path_of(text)
            if readonly:
                self._folder = Folder.beside(self.path)
            else:
                self._folder = Folder.claim(self.path, durable=durable, accept_loss=accept_loss, shared=shared)
        _stores.add(self)
        try:
            self._add(SYSTEM_TABLE, (), (), sync=True)
        except BaseException:
            self.abandon()
            raise

    @property
    def threaded(self) -> bool:
        """Whether writers run on threads: not for memory."""
        return self._folder is not None

    @property
    def owner_alive(self) -> bool:
        """For a store opened beside its owner: whether a process is writing to it now."""
        return self._folder is not None and self.readonly and self._folder.owned_by_another()

    @property
    def term(self) -> bytes:
        """For a store opened beside its owner: names the owner's term, or the last one's; else nothing."""
        return self._folder.term() if self._folder is not None and self.readonly else b""

    def _add(self, table: str, splits: Sequence[bytes], groups: Sequence[str], *, sync: bool | None = None) -> None:
        starts = [b"", *splits]
        every = [*PROTOCOL_GROUPS, *groups]
        elsewhere = self._elsewhere if table != SYSTEM_TABLE else None

        def given(number: int) -> Tablet:
            assert elsewhere is not None
            stop = starts[number + 1] if number + 1 < len(starts) else None
            return elsewhere.tablet(table, number, starts[number], stop, every, self.store.submit)

        if self._folder is None:
            here = [MemoryTablet(table, start) for start in starts] if elsewhere is None else []
            self.store.add_table(table, here or [given(number) for number in range(len(starts))])
            self._groups[table] = set(groups)
            return
        tablets: list[Tablet] = []
        options = self._lmdb if sync is None else replace(self._lmdb, sync=sync)
        lock = not self._folder.without_lock
        paths = [
            self._folder.make_tablet_folder(table, number, lambda making: LmdbEngine.make(making, every, options))
            for number in range(len(starts))
        ]
        if self.readonly and not all(path.exists() for path in paths):
            return  # the owner has declared it and not made it yet
        with ExitStack() as opened:  # LMDB would not open again in this process what a failure leaves open
            for number, (start, path) in enumerate(zip(starts, paths, strict=True)):
                if elsewhere is not None:
                    tablets.append(given(number))
                    continue
                engine = LmdbEngine(path, every, options, readonly=self.readonly, lock=lock)
                opened.callback(engine.close)
                if not self.readonly:
                    engine.clear_dead_readers()
                tablets.append(LmdbTablet(table, start, engine, self._batch, self.store.submit, self.store.handover))
            opened.pop_all()
        self.store.add_table(table, tablets)
        self._groups[table] = set(groups)

    async def adapt(self, catalogue: Catalogue) -> None:
        """Open, or make, the tablets and groups that a catalogue names."""
        for name, entry in catalogue.tables.items():
            groups = catalogue.groups(name)
            if name not in self._groups:
                self._add(name, entry.splits, groups)
            elif missing := set(groups) - self._groups[name]:
                for tablet in self.store.tablets():
                    if tablet.table == name:
                        await tablet.add_groups(sorted(missing))
                self._groups[name] |= missing

    async def raise_floor(self, ts: int) -> None:
        """T13, in every tablet of every table."""
        await self.store.raise_floor(ts)

    def lock_file(self) -> int:
        """See `Folder.lock_file`; -1: there is no folder."""
        return self._folder.lock_file() if self._folder is not None else -1

    def check(self) -> None:
        """Raises UsedAfterFork in a child of the process that opened this."""
        if self.forked:
            raise UsedAfterFork(str(self.path))

    def _refuse(self, error: type[PercoError], text: str) -> None:
        """From now on whatever was left open, a snapshot or a transaction, raises this where it reads or writes."""

        def refused(*_: object) -> None:
            raise error(text)

        for tablet in self.store.tablets():
            for name in ("read", "scan", "submit"):
                setattr(tablet, name, refused)

    async def aclose(self) -> None:
        await self.store.aclose()
        self._refuse(TransactionClosed, "the store that this belongs to has been closed")
        if self._elsewhere is not None:
            await self._elsewhere.aclose()
        if self._folder is not None:
            self._folder.release(clean=True)
        _stores.discard(self)

    def end_views(self) -> None:
        """Before a fork: no view of ours is open, so the child has none to let go of (S5)."""
        if self._folder is not None and threading.get_ident() == self._thread:  # else the loop may be reading
            for tablet in self.store.tablets():
                tablet.end_views()

    def forget(self) -> None:
        """In a forked child: not ours any more (S5); and the parent's death must free the folder, not the child's."""
        if self._folder is not None:
            self.forked = True
            self._folder.forget()
            for tablet in self.store.tablets():
                tablet.forget()
            self._refuse(UsedAfterFork, str(self.path))

    def abandon(self) -> None:
        """Let go of the folder after a failed opening."""
        if self._folder is not None:
            self._folder.release(clean=False)
        _stores.discard(self)


def _path_of(text: str) -> Path:
    scheme, colon, _ = text.partition("://")
    if colon and scheme.isalpha():
        raise UsageError(f"{text!r}: perco opens a folder, memory:, unix:PATH or tcp://HOST:PORT, not {scheme}://")
    if not text:
        raise UsageError("the path of the store is empty")
    return Path(text).expanduser()


def _before_fork() -> None:
    for store in _stores:
        store.end_views()


def _after_fork() -> None:
    for store in _stores:
        store.forget()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
