"""Locks, records and causes as bytes: round trips, and corrupted bytes."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given, strategies as st

from perco.errors import Corruption
from perco.protocol.records import (
    ACK,
    BARE,
    PUT,
    PUT_DATA,
    Cellref,
    Lock,
    ack_of,
    column_of,
    longer,
    observed_column,
    observer_of,
    observers_on,
    pack_cause,
    pack_lock,
    pack_record,
    unpack_cause,
    unpack_lock,
    unpack_record,
)
from perco.storage import TS_MAX

timestamps = st.integers(1, TS_MAX)
kinds = st.integers(PUT, ACK)
columns = st.integers(0, (1 << 32) - 1)
paths = st.lists(st.binary(min_size=2, max_size=2), max_size=32).map(b"".join)
locks = st.builds(
    Lock,
    kinds,
    st.builds(Cellref, st.text(max_size=64), st.binary(max_size=400), columns),
    st.binary(max_size=300),
    st.lists(st.integers(1, 0xFFFF), max_size=5).map(tuple),
    st.lists(timestamps, max_size=5).map(tuple),
    st.integers(0, TS_MAX),
    st.integers(0, 0xFFFF),
    st.text(max_size=32),
    paths,
).filter(lambda lock: lock.kind != PUT_DATA) | st.builds(
    lambda cell, group: Lock(PUT_DATA, cell, group.encode(), (), (), 0, 0, "token"),
    st.builds(Cellref, st.text(max_size=64), st.binary(max_size=400), columns),
    st.just("data") | st.text(max_size=60).map("data:".__add__),
)


@given(kinds, timestamps, st.binary(max_size=300))
def test_a_record_comes_back(kind: int, start_ts: int, body: bytes) -> None:
    assert unpack_record(pack_record(kind, start_ts, body)) == (kind, start_ts, body)


@given(locks)
def test_a_lock_comes_back(lock: Lock) -> None:  # N1
    assert unpack_lock(pack_lock(lock)) == lock
    assert unpack_lock(pack_lock(tuple(lock))) == lock
    assert isinstance(unpack_lock(pack_lock(lock)).primary, Cellref)


@given(locks, st.integers(0, 1 << 50))
def test_a_lock_of_an_earlier_version_is_read_without_its_wall_time(lock: Lock, wall_ms: int) -> None:  # L1
    *parts, path = lock
    assert unpack_lock(pack_lock((*parts, wall_ms, path))) == lock
    assert unpack_lock(pack_lock((*parts, wall_ms))) == lock._replace(path=b""), "nor was there a path at first"


@given(timestamps, st.integers(0, 0xFFFF), paths, st.integers(0, 0xFFFF))
def test_a_cause_comes_back(root: int, depth: int, path: bytes, attempts: int) -> None:  # N6, N9
    assert unpack_cause(pack_cause(root, depth, path, attempts)) == (root, depth, path, attempts)


@given(st.lists(st.integers(1, 0xFFFF), max_size=40))
def test_a_path_has_the_last_observers_of_a_chain(numbers: list[int]) -> None:  # N9
    path = b""
    for number in numbers:
        path = longer(path, number.to_bytes(2, "big"))
    assert observers_on(path) == numbers[-32:]
    assert unpack_cause(pack_cause(1, len(numbers), path))[2] == path


@given(st.integers(1, (1 << 15) - 1), st.integers(1, 0xFFFF))
def test_an_acks_column_tells_column_and_observer(number: int, observer: int) -> None:  # N3
    column = column_of(number)
    ack = ack_of(column, observer)
    assert (observed_column(ack), observer_of(ack)) == (column, observer)
    assert (observed_column(column), observer_of(column)) == (column, 0)
    assert column < ack < column_of(number + 1) < 1 << 32


@given(st.binary(max_size=20))
def test_any_bytes_are_a_record_or_corruption(data: bytes) -> None:
    try:
        record = unpack_record(data)
    except Corruption:
        assert len(data) < 9 or not PUT <= data[0] <= ACK
    else:
        assert pack_record(*record) == data


@given(st.binary(max_size=40))
def test_any_bytes_are_a_cause_or_corruption(data: bytes) -> None:
    try:
        assert pack_cause(*unpack_cause(data)) == data
    except Corruption:
        assert not 12 <= len(data) <= 76 or len(data) % 2


def well_formed(lock: Lock) -> bool:
    return (
        PUT <= lock.kind <= BARE
        and isinstance(lock.primary.table, str)
        and isinstance(lock.primary.row, bytes)
        and isinstance(lock.primary.column, int)
        and isinstance(lock.body, bytes)
        and all(isinstance(number, int) for number in (*lock.observers, *lock.covers, lock.root, lock.depth))
        and isinstance(lock.token, str)
    )


@given(st.binary(max_size=60))
def test_any_bytes_are_a_lock_or_corruption(data: bytes) -> None:
    try:
        assert well_formed(unpack_lock(data))
    except Corruption as error:
        assert error.where == "lock group"  # noqa: PT017


@given(locks, st.data())
def test_a_changed_byte_gives_a_lock_or_corruption(lock: Lock, data: st.DataObject) -> None:
    """A damaged record raises nothing but Corruption, and gives no field of another type than its own."""
    packed = bytearray(pack_lock(lock))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Corruption):
        assert well_formed(unpack_lock(bytes(packed)))


@given(locks, st.integers(0, 50))
def test_a_lock_cut_short_is_corruption(lock: Lock, cut: int) -> None:
    packed = pack_lock(lock)
    with pytest.raises(Corruption):
        unpack_lock(packed[: -1 - min(cut, len(packed) - 1)])


@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("wrong", [None, {}, [[]], 1.5])
def test_a_field_of_another_type_is_corruption(at: int, wrong: object) -> None:
    fields: list[object] = [PUT, ["t", b"r", 1], b"", [], [], 0, 0, "token", 0]
    unpack_lock(msgpack.packb(fields))
    fields[at] = wrong
    with pytest.raises(Corruption):
        unpack_lock(msgpack.packb(fields))


@pytest.mark.parametrize("kind", [0, 8, -1])
def test_a_lock_of_no_known_kind_is_corruption(kind: int) -> None:
    with pytest.raises(Corruption):
        unpack_lock(msgpack.packb([kind, ["t", b"r", 1], b"", [], [], 0, 0, "token", 0]))


def test_a_data_group_that_is_no_name_is_corruption() -> None:
    with pytest.raises(Corruption):
        unpack_lock(msgpack.packb([PUT_DATA, ["t", b"r", 1], b"\xff", [], [], 0, 0, "token", 0]))
