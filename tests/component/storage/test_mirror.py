"""The same operations on memory, on LMDB, on PostgreSQL, on Bigtable and on a dict have the same answers."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import trio
from hypothesis import given, settings, strategies as st

from perco.errors import UsageError
from perco.storage import Failed
from tests.component.storage.stores import TABLE, open_store
from tests.core.storage.model import Model, mutations, queries, rows, scan_requests, unhurried

SPLITS = [b"\x00" * 32, b"a\x00"]
FLOOR = 5


def in_one_tablet():
    """Rows of one mutation lie in one tablet (S1)."""
    borders = [b"", *SPLITS, None]
    parts = [
        rows.filter(lambda row, low=low, high=high: row >= low and (high is None or row < high))
        for low, high in pairwise(borders)
    ]
    return st.sampled_from(parts).flatmap(mutations)


def operations(mutations):
    """Histories of calls; `mutations`: of one mutation."""
    reads = st.tuples(st.just(TABLE), rows, st.lists(queries(), max_size=3))
    calls = st.one_of(
        st.tuples(st.just("apply"), st.lists(mutations, max_size=4)),
        st.tuples(st.just("apply"), st.lists(mutations, min_size=4, max_size=8)),
        st.tuples(st.just("read"), st.lists(reads, max_size=3)),
        st.tuples(st.just("scan"), scan_requests()),
    )
    return st.lists(calls, min_size=1, max_size=12)


@settings(unhurried, max_examples=40)
@given(operations(in_one_tablet()))
def test_memory_and_lmdb_answer_alike(history):  # S1 T13
    with tempfile.TemporaryDirectory() as folder:
        trio.run(compare, Path(folder), history)


async def compare(folder: Path, history) -> None:
    model = Model(FLOOR)
    async with open_store("memory", folder, SPLITS) as memory, open_store("lmdb", folder, SPLITS) as lmdb:
        for tablet in memory.tablets() + lmdb.tablets():
            tablet.floor = FLOOR
        for name, argument in history:
            answers = [await getattr(store, name)(argument) for store in (memory, lmdb)]
            assert answers[0] == answers[1]
            if name == "apply":
                assert answers[0] == [model.apply(mutation) for mutation in argument]
            elif name == "read":
                assert answers[0] == [model.read(row, asked) for _, row, asked in argument]
            else:
                wanted = model.scan(argument)
                assert await drain(memory, argument) == await drain(lmdb, argument) == wanted


@settings(unhurried, max_examples=40)
@given(operations(mutations(rows)))
def test_postgresql_answers_as_the_model_does(history):  # S1 T13
    trio.run(compare_with_model, history)


def of_one_row(mutation):
    return mutation._replace(rows=mutation.rows[:1])


@settings(unhurried, max_examples=60)
@given(operations(mutations(rows).map(of_one_row)))
def test_bigtable_answers_as_the_model_does(history):  # S1 T13
    trio.run(compare_with_model, history, "bigtable")


@settings(unhurried, max_examples=60)
@given(operations(mutations(rows).map(of_one_row)))
def test_bigtable_in_the_simulation_answers_as_the_model_does(history):  # S1 T13
    trio.run(compare_with_model, history, "bigtable model")


async def compare_with_model(history, kind="postgresql") -> None:
    model = Model(FLOOR)
    async with open_store(kind, Path()) as store:
        await store.raise_floor(FLOOR, wait=kind == "postgresql")  # it would wait for a former owner's calls
        for name, argument in history:
            if name == "apply":
                answers = await store.apply(argument)
                for mutation, answer in zip(argument, answers, strict=True):
                    if not isinstance(answer, Failed):  # for such checks Bigtable has no predicate
                        assert answer == model.apply(mutation)
                    else:
                        assert kind != "postgresql"
                        assert isinstance(answer.error, UsageError)
            elif name == "read":
                assert await store.read(argument) == [model.read(row, asked) for _, row, asked in argument]
            else:
                assert await drain(store, argument) == model.scan(argument)


async def drain(store, request):
    """All pages of a scan."""
    found = []
    for _ in range(500):
        page = await store.scan(request)
        found += page.rows
        if page.next is None:
            return found
        request = request._replace(stop=page.next) if request.reverse else request._replace(start=page.next)
    raise AssertionError("the scan does not get on")
