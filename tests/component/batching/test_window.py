"""The delay window, in virtual time over memory: what it holds, for how long, and what it does not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import trio
import trio.testing

from perco.errors import SessionEnded, StoreError, TabletSplit
from perco.storage import (
    ABSENT,
    APPLIED,
    TS_MAX,
    Batching,
    BatchOptions,
    Failed,
    LocalRowStore,
    MemoryTablet,
    Mutation,
    NoReply,
    ReadRequest,
    Refused,
    RowCells,
    ScanPage,
    ScanQuery,
    ScanRequest,
    Verdict,
)
from perco.txn.background import Background
from tests.component.storage.stores import TABLE, newest, put, value_of

FIXED = BatchOptions(window_s=0.5, adaptive=False)
ADAPTIVE = BatchOptions(window_s=0.5)


class Sent(NamedTuple):
    at: float
    kind: str
    rows: list[bytes]


class Distant:
    """A row store that is asked from afar: each call takes `reply_s`; `lose` loses the reply of the next."""

    groups = True
    chaining = deferring = None

    def tablets_here(self) -> list[Any]:
        return []

    def __init__(self, store: LocalRowStore) -> None:
        self.store = store
        self.reply_s = 0.0
        self.slow: dict[bytes, float] = {}  # rows that take longer
        self.log: list[Sent] = []
        self.lose = False
        self.lost = self.failed = 0
        self.damaged: set[bytes] = set()
        self._began = trio.current_time()

    def locate(self, table: str, row: bytes) -> int:
        return self.store.locate(table, row)

    def bounds(self, table: str) -> list[bytes]:
        return self.store.bounds(table)

    async def _sent(self, kind: str, rows: list[bytes]) -> None:
        self.log.append(Sent(round(trio.current_time() - self._began, 6), kind, rows))
        await trio.sleep(max([self.reply_s, *(self.slow.get(row, 0) for row in rows)]))

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        rows = [row for _, row, _ in requests]
        await self._sent("read", rows)
        if self.damaged & set(rows):
            self.failed += 1
            raise StoreError("damaged")
        return await self.store.read(requests)

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        await self._sent("read_first", [row for _, row, _ in requests])
        return await self.store.read_first(requests, bytes_max)

    async def scan(self, request: ScanRequest) -> ScanPage:
        await self._sent("scan", [request.start])
        return await self.store.scan(request)

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        verdicts = await self.store.apply(mutations)
        await self._sent("apply", [mutation.rows[0][0] for mutation in mutations])
        if self.lose:
            self.lost, self.lose = self.lost + 1, False
            return [NoReply("lost")] * len(mutations)
        return verdicts


class World:
    """Callers of one client; `later` starts one at a time."""

    def __init__(self, inner: Distant, store: Batching, nursery: trio.Nursery) -> None:
        self.inner, self.store, self.nursery = inner, store, nursery
        self.began = trio.current_time()
        self.ended: dict[str, float] = {}
        self.found: dict[str, Any] = {}
        self.scopes: dict[str, trio.CancelScope] = {}

    def now(self) -> float:
        return round(trio.current_time() - self.began, 6)

    def call(self, name: str, at: float, action: Callable[..., Awaitable[Any]], *args: Any) -> None:
        scope = self.scopes[name] = trio.CancelScope()

        async def run() -> None:
            await trio.sleep(at)
            with scope:
                try:
                    self.found[name] = await action(*args)
                except Exception as error:
                    self.found[name] = error
            self.ended[name] = self.now()

        self.nursery.start_soon(run)

    def put(self, name: str, at: float = 0.0, *more: Mutation) -> None:
        """A mutation of the row of that name."""
        self.call(name, at, self.store.apply, [put(name.encode()), *more])

    def get(self, name: str, at: float = 0.0, row: str = "") -> None:
        self.call(name, at, self.store.read, [newest((row or name).encode())])


@asynccontextmanager
async def world(options: BatchOptions, *splits: bytes) -> AsyncIterator[World]:
    local = LocalRowStore()
    local.add_table(TABLE, [MemoryTablet(TABLE, start) for start in (b"", *splits)])
    inner, background = Distant(local), Background()
    # Virtual time: a call that is held for ever ends the test.
    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            yield World(inner, Batching(inner, options, background.spawn), nursery)
    await background.aclose()
    assert background.failure() is None


async def until(seconds: float) -> None:
    await trio.sleep(seconds)
    await trio.testing.wait_all_tasks_blocked()


# ------------------------------------------------------------------ what a window holds, and for how long


@pytest.mark.parametrize("kind", ["put", "get"])
async def test_what_comes_within_a_window_leaves_in_one_call_at_its_end(kind: str) -> None:  # D1, D2
    async with world(FIXED) as w:
        for name, at in (("a", 0.0), ("b", 0.2), ("c", 0.499), ("d", 0.501), ("e", 3.0)):
            getattr(w, kind)(name, at)
    assert [(at, rows) for at, _, rows in w.inner.log] == [
        (0.5, [b"a", b"b", b"c"]),
        (1.001, [b"d"]),
        (3.5, [b"e"]),  # a lone one waits for exactly the window
    ]
    assert w.ended == {"a": 0.5, "b": 0.5, "c": 0.5, "d": 1.001, "e": 3.5}


async def test_a_call_leaves_although_an_earlier_one_is_out() -> None:  # D2
    async with world(FIXED) as w:
        w.inner.reply_s = 10.0
        w.put("a")
        w.put("b", 0.6)
    assert [at for at, _, _ in w.inner.log] == [0.5, 1.1]
    assert w.ended == {"a": 10.5, "b": 11.1}


async def test_reads_mutations_and_other_tablets_have_windows_of_their_own() -> None:  # D3
    async with world(FIXED, b"m") as w:
        w.put("a")
        w.get("b", 0.1)
        w.put("n", 0.2)
        w.get("o", 0.3)
    assert w.inner.log == [
        (0.5, "apply", [b"a"]),
        (0.6, "read", [b"b"]),
        (0.7, "apply", [b"n"]),
        (0.8, "read", [b"o"]),
    ]


async def test_scans_and_their_pages_are_not_held() -> None:  # D3
    async with world(FIXED) as w:
        w.put("a")
        w.call("scan", 0.1, w.store.scan, ScanRequest(TABLE, b"", None, (ScanQuery("data", None),)))
        w.call("page", 0.2, w.store.read_first, [newest(b"a")], 100)
    assert [(at, kind) for at, kind, _ in w.inner.log] == [(0.1, "scan"), (0.2, "read_first"), (0.5, "apply")]


async def test_nothing_is_asked_for_by_no_requests() -> None:
    async with world(FIXED) as w:
        assert await w.store.read([]) == await w.store.apply([]) == []
        assert w.now() == 0


@pytest.mark.parametrize("adaptive", [False, True])
async def test_a_batch_that_is_full_leaves_at_once(adaptive: bool) -> None:  # D2
    async with world(BatchOptions(window_s=0.5, adaptive=adaptive, mutations_max=3)) as w:
        w.inner.reply_s = 10.0
        w.put("first")  # with an adaptive window this one is out at once
        for i in range(7):
            w.put(str(i), 0.1)
    full = [rows for at, _, rows in w.inner.log if at == 0.1]
    assert sorted(map(len, full)) == [3, 3]
    assert sum(len(rows) for _, _, rows in w.inner.log) == 8
    assert max(at for at, _, _ in w.inner.log) <= 0.6


async def test_a_batch_holds_so_many_bytes_and_a_larger_mutation_goes_alone() -> None:  # D2
    async with world(BatchOptions(window_s=0.5, adaptive=False, bytes_max=1000)) as w:
        w.put("a")
        w.call("long", 0.1, w.store.apply, [put(b"long", b"x" * 2000)])
        w.put("b", 0.2)
        for i in range(20):
            w.put(f"row-{i:02}", 0.3)
    assert sorted(w.inner.log[:2]) == [(0.1, "apply", [b"a"]), (0.1, "apply", [b"long"])]
    rest = w.inner.log[2:]
    assert sum(len(rows) for _, _, rows in rest) == 21
    assert len(rest) == 2
    assert (rest[0].at, rest[1].at) == (0.3, 0.8)


# ------------------------------------------------------------------ adaptive windows


async def test_without_a_call_out_nothing_waits() -> None:  # D2
    async with world(ADAPTIVE) as w:
        for i in range(5):
            w.put(str(i), float(i))
            w.get(f"r{i}", float(i))
    assert [at for at, kind, _ in w.inner.log if kind == "apply"] == [0, 1, 2, 3, 4]
    assert [at for at, kind, _ in w.inner.log if kind == "read"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("reply_s", "left"), [(0.3, 0.3), (2.0, 0.6)])
async def test_who_comes_while_a_call_is_out_leaves_when_it_is_answered_or_the_window_ends(
    reply_s: float, left: float
) -> None:  # D2
    async with world(ADAPTIVE, b"m") as w:
        w.inner.reply_s = reply_s
        w.put("a")
        w.put("b", 0.1)
        w.put("c", 0.2)
        w.get("read", 0.2)
        w.put("other", 0.2)
    assert w.inner.log == [
        (0, "apply", [b"a"]),
        (0.2, "read", [b"read"]),  # D3: of its kind, and to its tablet, nothing is out
        (0.2, "apply", [b"other"]),
        (left, "apply", [b"b", b"c"]),
    ] or w.inner.log == [
        (0, "apply", [b"a"]),
        (0.2, "apply", [b"other"]),
        (0.2, "read", [b"read"]),
        (left, "apply", [b"b", b"c"]),
    ]


async def test_those_who_ask_in_the_same_turn_go_together_once_there_were_several() -> None:  # D1
    async with world(ADAPTIVE) as w:
        for i in range(4):
            w.put(f"a{i}")
        for i in range(4):
            w.put(f"b{i}", 5.0)
    assert [(at, len(rows)) for at, _, rows in w.inner.log] == [(0, 1), (0, 3), (5, 4)]


async def test_who_is_alone_again_goes_by_itself() -> None:
    async with world(ADAPTIVE) as w:
        for i in range(2):
            w.put(f"a{i}")
        for at in (1.0, 2.0, 3.0):
            w.put(f"b{at}", at)
    assert [(at, len(rows)) for at, _, rows in w.inner.log] == [(0, 1), (0, 1), (1, 1), (2, 1), (3, 1)]
    assert not w.store._mutations._out
    assert not w.store._mutations._open


# ------------------------------------------------------------------ cancelled callers


@pytest.mark.parametrize("kind", ["put", "get"])
async def test_who_is_cancelled_in_the_window_takes_its_part_out(kind: str) -> None:  # D4, T10
    async with world(FIXED) as w:
        getattr(w, kind)("a")
        getattr(w, kind)("b")
        await until(0.2)
        w.scopes["a"].cancel()
        await until(0.0)
        assert w.ended == {"a": 0.2}
    assert w.inner.log == [(0.5, "apply" if kind == "put" else "read", [b"b"])]
    assert await value_of(w.inner.store, b"a") is None


async def test_when_all_are_cancelled_nothing_is_sent() -> None:  # D4
    async with world(FIXED) as w:
        w.put("a")
        await until(0.2)
        w.scopes["a"].cancel()
        await until(1.0)
        w.put("b")
    assert w.inner.log == [(1.7, "apply", [b"b"])]


async def test_what_is_in_a_closed_batch_is_sent_and_waited_for() -> None:  # D4, T10
    async with world(FIXED) as w:
        w.inner.reply_s = 2.0
        w.put("a")
        w.get("read")
        await until(1.0)
        w.scopes["a"].cancel()
        w.scopes["read"].cancel()
        await until(0.0)
        assert w.ended == {"read": 1.0}
    assert w.ended["a"] == 2.5
    assert w.found["a"] == [APPLIED]
    assert await value_of(w.inner.store, b"a") == b""


async def test_a_call_to_two_tablets_is_waited_for_as_soon_as_one_part_was_sent() -> None:  # D4, T10
    async with world(FIXED, b"m") as w:
        w.inner.reply_s = 1.0
        w.put("n", 0.0)  # opens the window of the second tablet earlier
        w.put("a", 0.3, put(b"o"))
        await until(0.6)
        w.scopes["a"].cancel()
    assert w.inner.log == [(0.5, "apply", [b"n", b"o"]), (0.8, "apply", [b"a"])]
    assert w.found["a"] == [APPLIED, APPLIED]
    assert w.ended["a"] == 1.8


async def test_who_is_cancelled_in_the_turn_in_which_others_join_is_not_sent() -> None:  # D4
    fired = 0

    async def cancel(w: World, names: list[str]) -> None:
        nonlocal fired
        if w.store._mutations._open:  # somebody has begun a batch and lets others join it in this turn
            fired += 1
            for name in names:
                w.scopes[name].cancel()

    for _ in range(30):  # tasks run in any order
        async with world(ADAPTIVE) as w:
            w.put("x")
            w.put("y")
            await until(1.0)  # from now on calls of one turn go together
            before = fired
            for name in "abc":
                w.put(name)
            w.call("canceller", 0.0, cancel, w, ["a", "b"])
        sent = {row for _, _, rows in w.inner.log for row in rows}
        assert sent == ({b"x", b"y", b"c"} if fired > before else {b"x", b"y", b"a", b"b", b"c"})
    assert fired


# ------------------------------------------------------------------ tablets that are split, or slow


async def test_a_batch_is_divided_by_where_its_rows_lie_when_it_leaves() -> None:  # D5, P1, P3
    async with world(FIXED) as w:
        w.inner.slow = {b"z": 9.0}
        for i, name in enumerate("amz"):
            w.put(name, i / 100)
        w.call("group", 0.1, w.store.apply, [Mutation(TABLE, [(b"b", (), ()), (b"n", (), ())])])
        w.get("b", 0.1)
        w.get("y", 0.1)
        await until(0.2)
        [tablet] = w.inner.store.tablets()
        w.inner.store.add_split(tablet, MemoryTablet(TABLE, b"m"))
    assert sorted(w.inner.log) == [
        (0.5, "apply", [b"a", b"b"]),
        (0.5, "apply", [b"m", b"z"]),
        (0.6, "read", [b"b"]),
        (0.6, "read", [b"y"]),
    ]
    [split] = w.found["group"]
    assert isinstance(split, Failed)
    assert isinstance(split.error, TabletSplit)
    assert w.ended == {"a": 0.5, "group": 0.5, "b": 0.6, "y": 0.6, "m": 9.5, "z": 9.5}


@pytest.mark.parametrize("options", [FIXED, ADAPTIVE])
async def test_a_slow_tablet_delays_no_other(options: BatchOptions) -> None:  # D3
    async with world(options, b"m") as w:
        w.inner.slow = {b"n": 60.0}
        w.put("n")
        for i in range(4):
            w.put(f"a{i}", 1.0 + i)
    assert all(w.ended[f"a{i}"] <= 1.5 + i for i in range(4))
    assert w.ended["n"] >= 60


# ------------------------------------------------------------------ answers


async def test_each_caller_has_its_own_verdicts_and_cells() -> None:  # D6, S1
    refused = Mutation(
        TABLE,
        [
            (b"b", [(ABSENT, "data", 1, 0, TS_MAX)], [("data", 1, 2, b"new")]),
            (b"c", [], [("data", 1, 2, b"new")]),
        ],
    )
    async with world(FIXED, b"m") as w:
        await w.inner.store.apply([put(b"b", b"old")])
        w.call("three", 0.0, w.store.apply, [put(b"n", b"1"), put(b"a", b"2"), put(b"o", b"3")])
        w.call("group", 0.1, w.store.apply, [refused])
        w.call("cells", 1.0, w.store.read, [newest(b"o"), newest(b"a"), newest(b"n"), newest(b"none")])
        w.call("one", 1.0, w.store.read, [newest(b"b")])
    assert w.found["three"] == [APPLIED, APPLIED, APPLIED]
    assert w.found["group"] == [Refused(0, 0)]
    assert w.found["cells"] == [[[(1, b"3")]], [[(1, b"2")]], [[(1, b"1")]], [[]]]
    assert w.found["one"] == [[[(1, b"old")]]]
    assert await value_of(w.inner.store, b"c") is None  # all or nothing


async def test_a_lost_reply_is_lost_for_each_and_nothing_is_sent_twice() -> None:  # D6, T4
    async with world(FIXED) as w:
        w.inner.lose = True
        for i, name in enumerate("abc"):
            w.put(name, i / 100)
    assert w.inner.lost == 1
    assert [w.found[name] for name in "abc"] == [[NoReply("lost")]] * 3
    assert [rows for _, _, rows in w.inner.log] == [[b"a", b"b", b"c"]]


async def test_an_error_is_raised_by_each_as_its_own() -> None:  # D6
    async def fail(mutations: Sequence[Mutation]) -> list[Verdict]:
        raise StoreError("broken")

    async with world(FIXED) as w:
        w.inner.apply = fail  # type: ignore[method-assign]
        w.put("a")
        w.put("b")
    assert str(w.found["a"]) == str(w.found["b"]) == "broken"
    assert w.found["a"] is not w.found["b"]


async def test_what_is_wrong_with_one_read_is_told_to_nobody_else() -> None:  # D8, S4
    async with world(FIXED) as w:
        w.inner.damaged = {b"b"}
        for i, name in enumerate("abc"):
            w.get(name, i / 100)
    assert w.inner.failed == 2  # together, and alone
    assert [type(w.found[name]) for name in "abc"] == [list, StoreError, list]
    assert w.inner.log[0].rows == [b"a", b"b", b"c"]


async def test_what_would_have_to_wait_is_asked_for_alone() -> None:  # D8
    async def together(asked: list[Sequence[ReadRequest]]) -> list[list[RowCells] | None]:
        return [None if any(row == b"b" for _, row, _ in requests) else [[[]]] for requests in asked]

    async with world(FIXED) as w:
        w.inner.slow = {b"b": 7.0}
        store = Batching(w.inner, FIXED, w.nursery.start_soon, together)
        for name in "abc":
            w.call(name, 0.0, store.read, [newest(name.encode())])
    assert w.ended == {"a": 0.5, "b": 7.5, "c": 0.5}
    assert w.inner.log == [(0.5, "read", [b"b"])]


@pytest.mark.parametrize("options", [FIXED, ADAPTIVE])
async def test_a_read_whose_session_ends_while_it_waits_is_not_sent(options: BatchOptions) -> None:  # D7, R5
    async with world(options) as w:
        w.inner.reply_s = 0.4 if options.adaptive else 0.0
        w.get("out", -0.0)
        w.get("a", 0.1)
        w.put("b", 0.1)
        await until(0.2)
        w.store.end_reads()
        w.get("later")
    assert isinstance(w.found["a"], SessionEnded)
    assert w.ended["a"] == 0.2
    assert w.found["b"] == [APPLIED]
    assert w.found["later"] == [[[]]]
    assert [row for _, kind, rows in w.inner.log for row in rows if kind == "read"] in ([b"later"], [b"out", b"later"])


async def test_a_read_that_is_to_ask_alone_does_not_when_its_session_has_ended() -> None:  # D7, D8, R5
    async def together(asked: list[Sequence[ReadRequest]]) -> list[list[RowCells] | None]:
        await trio.sleep(1.0)
        return [None] * len(asked)

    async with world(FIXED) as w:
        store = Batching(w.inner, FIXED, w.nursery.start_soon, together)
        w.call("a", 0.0, store.read, [newest(b"a")])
        await until(1.0)
        store.end_reads()
    assert isinstance(w.found["a"], SessionEnded)
    assert w.inner.log == []


# ------------------------------------------------------------------ mutations that are made late


@pytest.mark.parametrize("options", [FIXED, ADAPTIVE])
async def test_a_late_mutation_is_made_when_its_batch_leaves(options: BatchOptions) -> None:
    made: dict[str, float] = {}

    def make(name: str) -> Mutation | None:
        made[name] = w.now()
        return put(name.encode()) if name != "none" else None

    async with world(options) as w:
        w.inner.reply_s = 0.2
        w.put("x")
        for name in ("a", "none", "b"):
            w.call(name, 0.1, w.store.apply_late, TABLE, name.encode(), 100, partial(make, name))
    left = 0.2 if options.adaptive else 0.5
    assert made == {"a": left, "none": left, "b": left}
    assert [w.found[name] for name in ("a", "none", "b")] == [APPLIED, None, APPLIED]
    assert sorted(row for _, _, rows in w.inner.log for row in rows) == [b"a", b"b", b"x"]


async def test_a_late_mutation_that_was_cancelled_is_not_made() -> None:  # D4
    async with world(FIXED) as w:
        w.call("a", 0.0, w.store.apply_late, TABLE, b"a", 100, lambda: pytest.fail("made"))
        await until(0.1)
        w.scopes["a"].cancel()
    assert w.inner.log == []
