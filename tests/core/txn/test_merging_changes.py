"""The logs of several tablets are merged into transactions (E3)."""

from __future__ import annotations

import random

import pytest

from perco.errors import Corruption
from perco.protocol.changes import Long, Merge, Source, Taken, value_of
from perco.protocol.records import ACK, DELETE, PUT, PUT_DATA, pack_record
from perco.storage import ScanRow

Logged = tuple[int, bytes, int]  # (commit_ts, row, column)


def page(entries: list[Logged]) -> list[ScanRow]:
    return [(row, [[(column, ts, b"record")]]) for ts, row, column in entries]


def merged(logs: list[list[Logged]], frontier: int, size: int) -> list[Taken]:
    """The transactions taken if each page of a log has that number of entries."""
    sources = [Source(number, b"", None) for number in range(len(logs))]
    merge, at, found = Merge(sources, 0, frontier), [0] * len(logs), []
    while not merge.over:
        for source in merge.hungry():
            entries = logs[source.table][at[source.table] :][:size]
            at[source.table] += len(entries)
            source.fill(page(entries), full=len(entries) == size)
        while (taken := merge.take()) is not None:
            found.append(taken)
    assert merge.take() is None
    return found


@pytest.mark.parametrize("seed", range(20))
def test_transactions_are_whole_and_in_order_however_the_logs_are_read(seed: int) -> None:  # E3
    rng = random.Random(seed)
    logs: list[list[Logged]] = [[] for _ in range(rng.randint(1, 4))]
    wanted: dict[int, list[tuple[int, Logged]]] = {}
    for ts in sorted(rng.sample(range(1, 200), 40)):
        for number in sorted(rng.sample(range(len(logs)), rng.randint(1, len(logs)))):
            for row in sorted(rng.sample([b"a", b"b", b"c"], rng.randint(1, 3))):
                entry = ts, row, 1 << 16
                logs[number].append(entry)
                wanted.setdefault(ts, []).append((number, entry))
    found = merged(logs, 200, rng.randint(1, 5))
    assert {
        taken.commit_ts: [(number, (e.commit_ts, e.row, e.column)) for number, e in taken.entries] for taken in found
    } == wanted
    assert [taken.commit_ts for taken in found] == sorted(wanted)


def test_an_entry_beyond_the_frontier_is_noticed() -> None:  # E3
    merge = Merge([Source(0, b"", None)], 0, 10)
    merge.sources[0].fill(page([(11, b"a", 1)]), full=False)
    with pytest.raises(AssertionError, match="E3"):
        merge.take()


def test_an_entry_that_was_returned_before_is_noticed() -> None:  # E3
    merge = Merge([Source(0, b"", None)], 5, 10)
    merge.sources[0].fill(page([(5, b"a", 1)]), full=False)
    with pytest.raises(AssertionError, match="E3"):
        merge.take()


def test_a_source_that_is_divided_keeps_its_rows_apart() -> None:  # P4
    source = Source(0, b"", None)
    other = source.divide(b"m")
    for each in (source, other):
        each.fill(page([(1, b"a", 1), (2, b"m", 1), (3, b"z", 1)]), full=False)
    assert [entry.row for entry in source.entries] == [b"a"]
    assert [entry.row for entry in other.entries] == [b"m", b"z"]


def test_a_log_that_is_out_of_order_is_noticed() -> None:
    source = Source(0, b"", None)
    source.fill(page([(5, b"a", 1)]), full=True)
    with pytest.raises(Corruption, match="out of order"):
        source.fill(page([(4, b"a", 1)]), full=True)


def test_a_page_that_is_out_of_order_is_noticed() -> None:  # E3
    source = Source(0, b"", None)
    with pytest.raises(Corruption, match="out of order"):
        source.fill(page([(5, b"a", 1), (7, b"a", 1), (6, b"a", 1), (8, b"a", 1)]), full=False)


def test_what_a_record_says() -> None:
    assert value_of(b"") is None
    assert value_of(pack_record(PUT, 1, b"value")) == b"value"
    assert value_of(pack_record(PUT, 1, b"")) == b""
    assert value_of(pack_record(PUT_DATA, 7, b"data:raw")) == Long("data:raw", 7)
    assert value_of(pack_record(DELETE, 1, b"")) is None
    assert value_of(pack_record(ACK, 1, b"")) is None
    with pytest.raises(Corruption):
        value_of(b"\x09")
