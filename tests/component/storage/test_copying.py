"""A copy of a tablet that is being written to equals the tablet at the cut (P2), in every order of pages and writes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from perco.errors import StoreFull, TabletSplit, Unavailable
from perco.storage import (
    DATA,
    NOTIFY,
    TS_MAX,
    WRITE,
    LmdbEngine,
    LmdbOptions,
    Mutation,
    NoReply,
    ScanQuery,
    ScanRequest,
    splitting,
)
from perco.storage.keys import cell_key, escape
from perco.storage.splitting import Copying, middle

OPTIONS = LmdbOptions(sync=False, map_bytes=1 << 20)
GROUPS = [DATA, WRITE, NOTIFY]
FIRST = b"m"
ROWS = [b"a", b"l\xff", b"m", b"m\x00", b"n", b"z"]

writes = st.tuples(
    st.sampled_from(ROWS),
    st.sampled_from([*GROUPS, "data:new"]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.one_of(st.none(), st.binary(max_size=3)),
)
batches = st.lists(writes, min_size=1, max_size=4)


def cells(engine: LmdbEngine, row: bytes) -> dict[tuple[str, bytes], bytes]:
    found = {}
    for group in engine.groups():
        for key, value in engine.cells_from(group, escape(row), 10_000, 1 << 30):
            found[group, key] = value
    return found


def commit(engine: LmdbEngine, batch: list[tuple[bytes, str, int, int, bytes | None]]) -> list[Mutation]:
    mutations = [Mutation("t", [(row, (), [(group, column, ts, value)])]) for row, group, column, ts, value in batch]
    engine.add_groups([group for _, group, _, _, _ in batch])
    assert all(engine.commit(mutations, 0))
    return mutations


@pytest.fixture
def source(tmp_path: Path) -> Iterator[LmdbEngine]:
    engine = LmdbEngine(tmp_path / "source", GROUPS, OPTIONS, readonly=False, lock=True)
    yield engine
    engine.close()


@settings(max_examples=150)
@given(before=st.lists(writes, max_size=30), turns=st.lists(st.one_of(st.none(), batches), max_size=30))
@example(before=[], turns=[[(b"m", "data:new", 1, 1, b"x")], None])
def test_pages_and_writes_take_turns(before, turns):  # P2
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(splitting, "_CELLS", 2)
        engine = LmdbEngine(Path(folder, "source"), GROUPS, OPTIONS, readonly=False, lock=True)
        try:
            if before:
                commit(engine, before)
            copying = Copying(engine, FIRST, None, Path(folder, "copy"), GROUPS, OPTIONS)
            for batch in turns:
                if batch is None:
                    copying.step()
                else:
                    made = commit(engine, batch)
                    copying.note(made, engine.commit([], 0) or [splitting.APPLIED] * len(made))
            while not copying.step():
                pass
            copying.finish()
            copying.close()
            copy = LmdbEngine(Path(folder, "copy"), [*GROUPS, "data:new"], OPTIONS, readonly=False, lock=True)
            assert cells(copy, b"") == cells(engine, FIRST)
            copy.close()
        finally:
            engine.close()


def test_a_page_ends_with_its_bytes(source, monkeypatch):
    monkeypatch.setattr(splitting, "_PAGE_BYTES", 1000)
    commit(source, [(b"m%d" % i, DATA, 1, 1, b"x" * 600) for i in range(10)])
    copying = Copying(source, FIRST, None, source.path.with_name("copy"), GROUPS, OPTIONS)
    steps = 1
    while not copying.step():
        steps += 1
    assert copying.cells == 10
    assert steps == 5 + 1
    copying.close()


def test_what_nobody_knows_of_ends_it(source):  # P2
    copying = Copying(source, FIRST, None, source.path.with_name("copy"), GROUPS, OPTIONS)
    copying.note([Mutation("t", [(b"z", (), [(DATA, 1, 1, b"")])])], [NoReply("the disk")])
    with pytest.raises(Unavailable, match="the disk"):
        copying.step()
    copying.close()


def test_more_than_can_be_kept_ends_it(source, monkeypatch):
    monkeypatch.setattr(splitting, "_NOTED_BYTES_MAX", 200)
    copying = Copying(source, FIRST, None, source.path.with_name("copy"), GROUPS, OPTIONS)
    many = [Mutation("t", [(b"z%d" % i, (), [(DATA, 1, 1, b"")])]) for i in range(4)]
    copying.note(many, [splitting.APPLIED] * 4)
    with pytest.raises(Unavailable, match="rows were written faster"):
        copying.step()
    copying.close()


def test_who_writes_faster_than_it_copies_is_not_run_after_for_ever(source, monkeypatch):
    monkeypatch.setattr(splitting, "_ROUNDS", 3)
    monkeypatch.setattr(splitting, "_FEW", -1)
    copying = Copying(source, FIRST, None, source.path.with_name("copy"), GROUPS, OPTIONS)
    assert [copying.step() for _ in range(3)] == [False] * 3
    with pytest.raises(Unavailable, match="faster"):
        copying.step()
    copying.close()


def test_a_copy_that_does_not_fit_is_told(source):
    commit(source, [(b"m%d" % i, DATA, 1, 1, b"x" * 100_000) for i in range(4)])
    options = LmdbOptions(map_bytes=1, map_bytes_max=300_000)
    copying = Copying(source, FIRST, None, source.path.with_name("copy"), GROUPS, options)
    with pytest.raises(StoreFull):
        copying.step()
    copying.close()


def test_the_map_of_a_copy_grows(source):
    commit(source, [(b"m%d" % i, DATA, 1, 1, b"x" * 100_000) for i in range(4)])
    copying = Copying(source, FIRST, None, source.path.with_name("copy"), GROUPS, LmdbOptions(map_bytes=1))
    while not copying.step():
        pass
    assert copying.cells == 4
    copying.close()


def test_what_is_another_tablets_by_now_is_not_copied(source):  # P2
    commit(source, [(row, WRITE, 1, 1, b"x") for row in ROWS])
    copying = Copying(source, FIRST, b"n", source.path.with_name("copy"), GROUPS, OPTIONS)
    late = [Mutation("t", [(row, (), [(WRITE, 1, 2, b"")])]) for row in ROWS]
    copying.note(late, [splitting.APPLIED] * len(late))
    while not copying.step():
        pass
    assert copying.cells == 2
    assert {key for _, key in cells(copying._copy, b"")} == {
        cell_key(escape(row), 1, ts) for row in (b"m", b"m\x00") for ts in (1, 2)
    }
    copying.close()


def found(engine: LmdbEngine) -> bytes | None:
    return next((row for row in middle(engine, None) if row is not None), None)


@pytest.mark.parametrize("page", [1, 2, 3, 1000])
def test_the_middle(source, monkeypatch, page):
    monkeypatch.setattr(splitting, "_KEYS", page)
    assert found(source) is None
    commit(source, [(b"only", WRITE, 1, ts, b"") for ts in (1, 2, 3)])
    assert found(source) is None
    commit(source, [(b"r%d" % i, WRITE, 1, 1, b"") for i in range(7)])
    assert found(source) == b"r2"
    commit(source, [(b"s", WRITE, 1, ts, b"") for ts in range(1, 50)])
    assert found(source) == b"s"


def test_what_was_split_off_is_removed_and_marked(source):  # P4
    commit(source, [(row, group, 1, ts, b"x") for row in ROWS for group in GROUPS for ts in (1, 2)])
    kept = {at: value for at, value in cells(source, b"").items() if at[1] < escape(FIRST)}
    assert source.has_from(FIRST)
    steps = 1
    while source.remove_from(FIRST, 5):
        steps += 1
    assert steps == 5  # 24 cells
    assert not source.has_from(FIRST)
    assert cells(source, b"") == kept
    assert sorted(source.groups()) == sorted(GROUPS)
    assert len(kept) == 2 * 3 * 2


def test_who_reads_beside_finds_the_rows_or_the_mark(tmp_path):  # P4 P5
    def opened(*, readonly: bool) -> LmdbEngine:
        return LmdbEngine(tmp_path, GROUPS, OPTIONS, readonly=readonly, lock=True)

    request = ScanRequest("t", b"a", None, (ScanQuery(WRITE, None, 0, TS_MAX, 9),))
    newest = [(WRITE, 1, 0, TS_MAX, 1)]
    source = opened(readonly=False)
    commit(source, [(row, WRITE, 1, 1, b"x") for row in ROWS])
    source.close()
    beside = opened(readonly=True)
    assert beside.read(b"n", newest) == [[(1, b"x")]]
    beside.close()
    source = opened(readonly=False)
    assert source.remove_from(FIRST, 1)
    source.close()
    beside = opened(readonly=True)
    with pytest.raises(TabletSplit):
        beside.read(b"n", newest)
    for start, stop in [(b"a", None), (b"a", b"m\x00"), (b"z", None)]:
        with pytest.raises(TabletSplit):
            beside.scan(request._replace(start=start, stop=stop))
    assert beside.read(b"l\xff", newest) == [[(1, b"x")]]
    assert len(beside.scan(request._replace(stop=FIRST)).rows) == 2
    beside.close()
