"""A Bigtable emulator for the tests of a process, started when the first of them needs it, or a live instance
(`live.py`), or the table of the simulation, in memory; each test has a table of its own. Time may be virtual: it stands
still while a call is in flight."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest import mock

import pytest
import trio
import trio.testing

from perco.bigtable import admin, client, lease, repeating, rows
from perco.bigtable.address import Place
from perco.bigtable.calls import SERVICE, Answer, CallFailed, Calls, channel
from perco.bigtable.chunks import Chunks, ReadRow
from perco.bigtable.keys import MICROS, column_of, place_of, row_of, table_end
from perco.bigtable.options import BigtableOptions
from perco.bigtable.owner_row import Holder, change
from perco.bigtable.rows import FORMAT, FORMAT_ROW, BigtableRows, probes
from perco.bigtable.store import BigtableStore, Searched
from perco.bigtable.tickets import Tickets
from perco.bigtable.wire import types
from perco.database.inside import inside
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import DATA, PROTOCOL_GROUPS, Mutation
from perco.testing.bare import BareStore
from perco.testing.bigtable import PromptCalls, PromptChannel, Table
from tests.support import live
from tests.support.divided import Divided, Stored
from tests.support.realtime import held, waited_for

EMULATOR: Final = Path(__file__).parents[2] / "build" / "bigtable-emulator"
QUICK: Final = BigtableOptions(late_s=0.0, channels=1, lease_s=60.0, call_s=60.0)
_REAL_S: Final = 60.0  # for a call

_numbers = itertools.count()
_of_folders: dict[str, str] = {}
_model: dict[str, Table] | None = None  # the tables in memory, by name, in a block that uses them


@functools.cache
def running() -> None:
    """Start the emulator of this process, unless there is an instance. Skips the test if it is not built."""
    if live.instance():
        return
    if not EMULATOR.exists():
        pytest.skip("the Bigtable emulator is not built: make build/bigtable-emulator")
    process = subprocess.Popen([EMULATOR], stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    assert process.stdout is not None
    os.environ["BIGTABLE_EMULATOR_HOST"] = process.stdout.readline().strip()


def permits() -> BigtableOptions:
    """The options of a store with direct clients. Their permits are short: vacuums wait for them."""
    virtual = isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock)
    return replace(QUICK, call_s=0.02 if virtual else 2.0)


class ModelledCalls(PromptCalls):
    """Calls to a table in memory, whose requests and answers a test can lose, as those to the emulator."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._metadata: tuple[tuple[str, str], ...] = ()

    async def _answer(self, request: Any) -> Answer:
        lost = dict(self._metadata).get("perco-fault")
        if lost != "before":
            answer = await super()._answer(request)
        return CallFailed("UNAVAILABLE", f"lost {lost} the call") if lost else answer


@contextmanager
def modelled() -> Iterator[None]:
    """Stores on Bigtable that are opened in the block are in tables of the simulation, in memory."""
    global _model
    assert _model is None

    def table_of(place: Place) -> Table:
        assert _model is not None
        return _model.setdefault(place.table, Table(Random(0)))

    with (
        mock.patch.object(repeating, "Calls", lambda place, options: ModelledCalls(table_of(place))),
        mock.patch.object(lease, "channel", lambda place: PromptChannel(table_of(place))),
    ):
        _model = {}
        try:
            yield
        finally:
            _model = None


def fresh() -> str:
    """The address of a new store, whose table is there."""
    if _model is not None:
        return f"bigtable://model/model?prefix=t{next(_numbers)}"
    running()
    instance, prefix = live.instance() or "test/test", live.PREFIX if live.instance() else "t"
    url = f"bigtable://{instance}?prefix={prefix}{os.getpid()}_{next(_numbers)}"
    assert admin.init(url)
    if live.instance():
        live.drop_at_exit(url)
    return url


def address_of(folder: str) -> str:
    """The address of a store in place of a folder; the same for the same folder."""
    name = os.path.abspath(folder)
    if name not in _of_folders:
        _of_folders[name] = fresh()
    return _of_folders[name]


@contextmanager
def real_time() -> Iterator[None]:
    """While the block lasts, virtual time does not jump while a call to the emulator is in flight."""
    before = Calls.ask, client.now, rows.now

    async def ask(self: Calls, requests: Any, deadline: float) -> Any:
        return await plain(self, requests, max(deadline, trio.current_time() + _REAL_S))

    plain, Calls.ask = held(Calls.ask), ask  # type: ignore
    client.now = rows.now = trio.current_time  # type: ignore  # a permit lasts as long as its owner waits
    try:
        with waited_for():
            yield
    finally:
        Calls.ask, client.now, rows.now = before  # type: ignore


# ------------------------------------------------------------------ looks into the table


@functools.cache
def _link() -> Any:
    """A channel that blocks."""
    running()
    return channel(Place("bigtable://test/test"))


def cells_of(rows: BigtableRows, table: str) -> Iterator[tuple[bytes, str, bytes, int, bytes]]:
    """All cells of a perco table: (row, family, qualifier, timestamp, value)."""
    for row in _rows_of(rows.place.table, table):
        for family, name, stamp, value in row.cells:
            yield row_of(table, row.key), family, name, stamp // MICROS, value


def _rows_of(stored: str, table: str) -> Iterator[ReadRow]:
    t = types()
    request = t.ReadRows(table_name=stored)
    request.rows.row_ranges.add(start_key_closed=table.encode() + b"\x00", end_key_open=table_end(table))
    if _model is not None:
        yield from _model[stored].read_now(request)
        return
    call = _link().unary_stream(
        SERVICE + "ReadRows",
        request_serializer=t.ReadRows.SerializeToString,
        response_deserializer=t.ReadRowsResponse.FromString,
    )
    chunks = Chunks()
    for response in call(request):
        yield from chunks.take(response)


class DividedRows(Divided, BigtableRows):
    """Rows that are in tablets as the catalogue says."""

    def stored(self, table: str) -> Iterator[Stored]:
        groups = {place_of(group): group for of, group in self._groups if of == table}
        for row, family, name, ts, value in cells_of(self, table):
            tag = name[:-4]
            yield row, groups[family, tag], column_of(tag, name), ts, value


class DividedStore(BigtableStore):
    """As the product's, over `DividedRows`. No test waits for the calls of a former owner: there was none, or it has
    given the store back."""

    _rows = DividedRows

    @classmethod
    async def open(cls, url: str, options: BigtableOptions) -> DividedStore:
        store = await super().open(url, options)
        assert isinstance(store, DividedStore)
        store.store._sent.clear()
        return store

    async def adapt(self, catalogue: Any) -> None:
        await super().adapt(catalogue)
        self.rows.divide(catalogue)  # type: ignore[attr-defined]


class LocalRows:
    """In the place of a `LocalStore`: a table of the emulator, without a lease."""

    path = None
    forked = False
    local = None

    def __init__(self) -> None:
        self.store = DividedRows(Place(fresh()), QUICK)
        self.store.add(SYSTEM_TABLE, PROTOCOL_GROUPS)
        self.store.backwards = False  # as the opening of a store would find out: the emulator cannot read in reverse

    def check(self) -> None:
        """It is usable."""

    async def adapt(self, catalogue: Any) -> None:
        await trio.lowlevel.checkpoint()
        for name in catalogue.tables:
            self.store.add(name, list(catalogue.groups(name)))
        self.store.divide(catalogue)

    def clear_dead_readers(self) -> None:
        """There are none."""

    async def aclose(self) -> None:
        await self.store.calls.aclose()


class DirectBackend(BareStore):
    """Of an owner of `LocalRows` that lets clients read and write by themselves."""

    def __init__(self, local: LocalRows) -> None:
        super().__init__(local, local.store)  # type: ignore[arg-type]
        self.store: Searched = Searched(local.store, local.store.tables, 0.0)
        self.store.tablets = local.store.tablets  # type: ignore[attr-defined]
        self.place = getattr(local, "place", None)

    async def let_clients_in(self) -> Tickets:
        """As a store that has just been claimed."""
        rows: Any = self.rows
        options, seen = permits(), (await rows.notice()).holder.number
        ours = Holder(seen + 1, f"owner{next(_numbers)}", options.call_s, options.late_s, options.lease_s, "a test")
        await rows.put([change(rows.place, ours), *probes(rows.place)])
        await rows.apply([Mutation(SYSTEM_TABLE, [(FORMAT_ROW, [], [(DATA, 0, FORMAT, b"")])])])
        self.store.tickets = Tickets(rows, ours)
        return self.store.tickets


def client_rows(owner: Any, ticket: Callable[[], Awaitable[str]]) -> client.ClientRows:
    """The rows of a client of that owner's."""
    place: Any = inside(owner).engine.place
    return client.ClientRows(place.rows.place, permits(), ticket=ticket)
