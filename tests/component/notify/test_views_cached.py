"""Views with cached functions: their values are computed once, and follow their arguments."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco import views
from perco.errors import SessionEnded, TransactionClosed, TransientError
from perco.txn.inside import engine_of
from perco.views import batching, cached
from tests.component.notify.kit import client, get, memory, put, settle
from tests.support.graphs import check_equal
from tests.support.places import local_of


class Vectors:
    """Documents, and a vector for each of their lines. `calls`: the arguments of each call."""

    def __init__(self, *, version: int = 1, batch: int = 64, noise: list[int] | None = None) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT)
        self.body = self.docs.column("body", perco.TEXT)
        self.chunks = perco.Table("chunks", key=perco.Tuple(perco.TEXT, perco.INT64))
        self.line = self.chunks.column("line", perco.TEXT)
        self.vector = self.chunks.column("vector", perco.BYTES)
        self.views = views.Views(perco.Schema(self.docs, self.chunks))
        self.calls: list[list[str]] = []
        self.bad: set[str] = set()

        @self.views.cached(id="embed", gives=perco.BYTES, version=version, batch=batch, threads=0)
        def embed(lines: list[str]) -> list[bytes]:
            self.calls.append(lines)
            if self.bad.intersection(lines):
                raise ValueError(f"cannot embed {sorted(self.bad.intersection(lines))}")
            return [f"{version}:{line}{noise.pop() if noise else ''}".encode() for line in lines]

        self.embed = embed

        @self.views.each(self.body, id="chunk", into=self.chunks, version=version)
        def chunk(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
            for number, line in enumerate((doc[self.body] or "").split("\n")):
                yield views.Put(self.chunks, (doc.key, number), {self.line: line, self.vector: embed(line)})

    @property
    def called(self) -> list[str]:
        return [line for lines in self.calls for line in lines]


async def test_a_value_is_computed_once_whoever_needs_it() -> None:  # V9, V10
    made = Vectors()
    async with client(memory(), made.views.schema) as db, db.worker():
        await put(db, made.body, "a", "one\ntwo\none")
        await settle(db)
        assert sorted(made.called) == ["one", "two"]
        assert await get(db, made.vector, ("a", 2)) == b"1:one"
        await put(db, made.body, "b", "two\nthree")
        await settle(db)
        assert sorted(made.called) == ["one", "three", "two"]
        await put(db, made.body, "a", None)
        await settle(db)
        await put(db, made.body, "a", "one")  # and once more, though nobody had it for a while
        await settle(db)
        assert len(made.called) == 3
        await check_equal(db, made.views, {made.docs: {"a": {made.body: "one"}, "b": {made.body: "two\nthree"}}})
        async with db.snapshot() as snap:
            calls = len(made.calls)
            assert (await views.check(made.views, snap)).equal  # with the values that are stored
            assert [each.equal for each in await views.diff(made.views, snap)] == [True]
            [reason] = await views.why(made.views, snap, made.chunks, ("b", 1))
            assert reason.same
        assert [(each.mended, each.strays) for each in await views.rebuild(made.views, db)] == [(0, 0)]
        assert len(made.calls) == calls


async def test_a_row_that_is_the_same_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:  # V9
    made = Vectors()
    async with client(memory(), made.views.schema) as db, db.worker():
        await put(db, made.body, "a", "one\ntwo")
        await settle(db)
        before = await written(db, made)
        asked: list[str] = []
        right = cached.find

        async def find(snap: Any, laters: Any, **how: Any) -> Any:
            asked.extend(later.argument for later in laters)
            return await right(snap, laters, **how)

        monkeypatch.setattr("perco.views.running.find", find)
        await put(db, made.body, "a", "one\nthree")
        await settle(db)
        assert asked == ["three"]
        after = await written(db, made)
        assert (after["a", 0], after["a", 1] > before["a", 1]) == (before["a", 0], True)


async def test_a_row_follows_the_argument_of_its_value() -> None:  # V9
    made = Vectors()
    head = made.docs.column("head", perco.BYTES)

    @made.views.each(made.body, id="head", into=head)
    def first(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
        yield views.Put(made.docs, doc.key, {head: made.embed((doc[made.body] or "")[:1])})

    async with client(memory(), made.views.schema) as db, db.worker():
        for text, value in ("one", b"1:o"), ("other", b"1:o"), ("two", b"1:t"):
            await put(db, made.body, "a", text)
            await settle(db)
            assert await get(db, head, "a") == value


async def written(db: perco.Database, made: Vectors) -> dict[Any, int]:
    async with db.snapshot() as snap:
        return {row.key: row.commit_ts(made.vector) async for row in snap.scan(made.chunks)}


async def test_runs_share_calls_and_calls_have_a_largest_size() -> None:
    made = Vectors(batch=8)
    async with client(memory(), made.views.schema) as db:
        async with db.transaction() as txn:
            for number in range(40):
                txn.set(made.body, f"d{number}", f"line {number}")
        async with db.worker(concurrency=16):
            await settle(db)
    assert len(made.called) == 40
    assert 1 < max(map(len, made.calls)) <= 8  # the size of a batch depends on the store and the machine


async def test_only_the_run_with_a_bad_argument_fails() -> None:
    made = Vectors()
    made.bad.add("bad")
    options = perco.WorkerOptions(attempts=2, concurrency=16)
    async with client(memory(), made.views.schema) as db:
        async with db.transaction() as txn:
            for key in "abcdefgh":
                txn.set(made.body, key, "bad" if key == "e" else f"line {key}")
        async with db.worker(options=options):
            await db.wait_idle()
            [failed] = await db.failed()
            assert failed.key == "e"
            assert "cannot embed ['bad']" in failed.error
            assert len(await written(db, made)) == 7
            made.bad.clear()
            await db.replay_failed()
            await settle(db)
            assert await get(db, made.vector, ("e", 0)) == b"1:bad"


async def test_a_function_that_gives_another_value_each_time_gives_one_for_an_argument() -> None:  # V10
    made = Vectors(noise=list(range(100)))
    async with client(memory(), made.views.schema) as db:
        async with db.worker():
            await put(db, made.body, "a", "same")
            await settle(db)
            await put(db, made.body, "b", "same")
            await settle(db)
        first = await get(db, made.vector, ("a", 0))
        assert first == await get(db, made.vector, ("b", 0))
        # Two processes that did not know of each other: the value that is stored first counts.
        key = made.embed("same").key

        async def store(txn: perco.Transaction) -> Any:
            return await cached._store(txn, made.embed.results, {key: b"later", b"x": b"new"})

        assert await db.run(store) == {key: first, b"x": b"new"}
        async with db.snapshot() as snap:
            assert (await views.check(made.views, snap)).equal


async def test_another_version_computes_all_values_again() -> None:
    old, new = Vectors(), Vectors(version=2)
    async with client(memory(), old.views.schema) as db, db.worker():
        await put(db, old.body, "a", "one\ntwo")
        await settle(db)
        local = local_of(db)
    async with client(local, new.views.schema) as db:
        async with db.snapshot() as snap:
            [diff] = await views.diff(new.views, snap)
            assert (diff.changed, diff.differences[0].expected) == (2, {"line": "one", "vector": "embed('one')"})
            assert not new.calls
            [reason] = await views.why(new.views, snap, new.chunks, ("a", 0))
            assert (reason.same, reason.again) == (False, {"line": "one", "vector": "embed('one')"})
        async with db.worker():
            await settle(db)
            assert await get(db, new.vector, ("a", 0)) == b"2:one"
            assert sorted(new.called) == ["one", "two"]


async def test_a_worker_that_ends_in_a_call_leaves_nothing_waiting() -> None:
    made = Vectors()
    calling, never = trio.Event(), trio.Event()

    async def call(*_: Any) -> Any:
        calling.set()
        await never.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached, "in_halves", call)
        async with client(memory(), made.views.schema) as db:
            await put(db, made.body, "a", "one")
            async with db.worker():
                await calling.wait()
            local = local_of(db)
    async with client(local, made.views.schema) as db, db.worker():
        await settle(db)
        assert await get(db, made.vector, ("a", 0)) == b"1:one"


async def test_an_argument_counts_as_it_was_when_the_function_was_called() -> None:  # V10
    made = Vectors()
    seen: list[str] = []
    later = made.embed(seen)  # type: ignore[arg-type]
    seen.append("more")
    assert (later.argument, later.key) == ([], made.embed([]).key)  # type: ignore[arg-type]
    assert made.embed({"a": (1, None)}).argument == {"a": [1, None]}  # type: ignore[arg-type]


async def test_a_function_that_takes_its_list_apart_harms_nobody() -> None:
    made = Vectors()
    calls = 0

    @made.views.cached(id="taking", gives=perco.BYTES, threads=0)
    def taking(lines: list[str]) -> list[bytes]:
        nonlocal calls
        calls += 1
        out = []
        while lines:
            out.append(lines.pop(0).encode())
        if b"bad" in out:
            raise ValueError("bad")
        return out

    laters = [taking(line) for line in ("one", "bad", "two")]
    found = await batching.in_halves(taking.call, laters, None)
    assert [str(each) for each in found] == ["b'one'", "bad", "b'two'"]
    assert calls == 5


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_what_stops_a_program_stops_it_from_a_cached_function_too(
    threads: int, kind: type[BaseException]
) -> None:
    def stop(lines: list[str]) -> list[bytes]:
        raise kind("stop")

    limiter = trio.CapacityLimiter(1) if threads else None
    found = await batching.in_halves(stop, ["a", "b"], limiter)
    assert [(type(each), str(each)) for each in found] == [(kind, "stop")] * 2


async def test_an_error_of_another_store_does_not_steer_the_run() -> None:
    def conflicts(lines: list[str]) -> list[bytes]:
        raise SessionEnded("elsewhere")

    [error] = await batching.in_halves(conflicts, ["a"], None)
    assert isinstance(error, perco.StoreError)
    assert not isinstance(error, TransientError)
    assert "SessionEnded: elsewhere" in str(error)


async def test_one_wrong_value_does_not_spoil_the_others() -> None:
    made = Vectors()

    @made.views.cached(id="some", gives=perco.BYTES, threads=0)
    def some(lines: list[str]) -> list[Any]:
        return [None if line == "none" else line.encode() for line in lines]

    found = some.call([some("a"), some("none"), some("b")])
    assert (found[0], found[2]) == (b"a", b"b")
    assert "some returned None for 'none': it must return a value, or raise" in str(found[1])


async def test_a_value_that_came_after_the_runs_snapshot_is_found() -> None:
    made = Vectors()
    async with client(memory(), made.views.schema) as db, db.snapshot() as old:
        async with db.snapshot() as snap:
            await cached.find(snap, [made.embed("one")], compute=True)
        again = made.embed("one")
        assert await cached.find(old, [again], compute=True) == {again: b"1:one"}
    assert made.calls == [["one"]]


async def test_a_closed_store_is_forgotten_and_leaves_nobody_waiting() -> None:
    made = Vectors(batch=1)
    never = trio.Event()
    ended: list[str] = []

    async def call(*_: Any) -> Any:
        await never.wait()

    async def wait(snap: perco.Snapshot, line: str) -> None:
        with pytest.raises(TransactionClosed, match="the store was closed during calls of embed"):
            await cached.find(snap, [made.embed(line)], compute=True)
        ended.append(line)

    async def use(nursery: trio.Nursery) -> weakref.ref[Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cached, "in_halves", call)
            async with perco.open("memory:", made.views.schema) as db, db.snapshot() as snap:
                for line in ("one", "two"):
                    nursery.start_soon(wait, snap, line)
                await trio.testing.wait_all_tasks_blocked()
                return weakref.ref(engine_of(snap))

    async with trio.open_nursery() as nursery:
        engine = await use(nursery)
    assert sorted(ended) == ["one", "two"]
    await trio.lowlevel.checkpoint()
    gc.collect()
    assert engine() is None


def test_a_later_is_nothing_but_a_value() -> None:
    made = Vectors()
    for use in (str, bool, "{}".format):
        with pytest.raises(perco.UsageError, match=r"embed\('x'\) is found later"):
            use(made.embed("x"))


def test_a_build_computes_what_it_is_not_given() -> None:
    made = Vectors(batch=2)
    sources: Any = {made.docs: {"a": {made.body: "one\ntwo\nthree\none"}}}
    built = made.views.build(sources)
    assert built[made.chunks]["a", 3] == {made.line: "one", made.vector: b"1:one"}
    assert made.calls == [["one", "two"], ["three"]]
    built = made.views.build(sources, results={made.embed: {made.embed("two").key: b"known"}})
    assert built[made.chunks]["a", 1][made.vector] == b"known"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"id": "chunk"}, "two views, cached functions or sinks with the id"),
        ({"id": "e", "gives": str}, "gives= takes a codec"),
        ({"id": "e", "batch": 0}, "batch is a number from 1"),
        ({"id": "e", "threads": -1}, "threads is a number from 0"),
        ({"id": "e", "version": "1"}, "version is a number from 1"),
    ],
)
def test_what_cannot_be_declared_is_told(how: Any, message: str) -> None:
    made = Vectors()
    with pytest.raises(perco.UsageError, match=message):
        made.views.cached(**{"gives": perco.BYTES, **how})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "must return a list with a value for each"),
        ([], "must return a list with a value for each"),
        ("x", "must return a list with a value for each"),
        ([None], "returned None"),
        (["text"], "bytes"),
    ],
)
def test_what_a_function_must_return_is_told(value: Any, message: str) -> None:
    made = Vectors()

    @made.views.cached(id="other", gives=perco.BYTES)
    def other(arguments: list[str]) -> Any:
        return value

    try:
        [error] = other.call([other("a")])
    except perco.UsageError as raised:
        error = raised
    assert isinstance(error, perco.UsageError | TypeError)
    assert message in str(error)


def test_a_value_for_another_codec_is_told() -> None:
    made = Vectors()

    note = made.docs.column("note", perco.TEXT)

    @made.views.each(made.line, id="wrong", into=note)
    def wrong(row: perco.Row[Any]) -> Iterator[views.Put[Any]]:
        yield views.Put(made.docs, "a", {note: made.embed("x")})

    with pytest.raises(perco.UsageError, match=r"embed\('x'\) gives bytes, but .* takes text"):
        made.views.build({made.docs: {"a": {made.body: "x"}}})
    with pytest.raises(perco.UsageError, match="embed takes a str, a number"):
        made.embed(object())  # type: ignore[arg-type]
