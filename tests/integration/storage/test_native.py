"""The native path of the LMDB store (perco/storage/native) does what the slower path does, to the byte, and
hands back what it cannot do."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest
import trio
import trio.lowlevel
from hypothesis import given, settings, strategies as st

from perco.errors import StoreFull, Unavailable
from perco.storage import (
    APPLIED,
    DATA,
    LOG,
    TS_MAX,
    WRITE,
    Failed,
    LmdbOptions,
    Mutation,
    NoReply,
    Refused,
    ScanQuery,
    ScanRequest,
    lmdb_native,
)
from perco.storage.keys import cell_key, escape, log_key
from perco.storage.lmdb_engine import MapTooSmall
from tests.component.storage.stores import GROUPS, TABLE, lmdb_engine, open_lmdb, put, value_of
from tests.core.storage.model import mutations, queries, ranges, rows, scan_requests, timestamps, unhurried
from tests.support.zeros import dense_rows

_REASON = lmdb_native.native_why_not()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=f"no extension here: {_REASON}")


NEVER = {"read": 0, "scan": 0, "scan_log": 0, "apply": 0}


class Dictated:
    """Stands for `native`: notes who was asked, so that a test knows which path was taken."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.answered = dict(NEVER)

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._native, name)
        if name not in self.answered:
            return asked

        def ask(*arguments: Any) -> Any:
            made = asked(*arguments)
            self.answered[name] += made is not None
            return made

        return ask


# ------------------------------------------------------------ the same, to the byte


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("commit"),
            st.lists(mutations(rows | dense_rows), max_size=5),
            st.integers(0, 9),
            st.frozensets(st.just("lock")),
        ),
        st.tuples(st.just("read"), rows, st.lists(queries(), max_size=3), st.booleans()),
        st.tuples(st.just("scan"), scan_requests()),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("logs", [False, True])
@settings(unhurried, max_examples=150)
@given(steps)
def test_both_paths_answer_alike_and_write_the_same_bytes(logs: bool, history: list[Any]) -> None:  # S1 T13 E1
    groups = (*GROUPS, LOG) if logs else GROUPS
    with tempfile.TemporaryDirectory() as folder:
        native, slow = (lmdb_engine(Path(folder) / name, groups=groups) for name in ("native", "slow"))
        slow.stay_slow()
        asked = native.native = Dictated(native.native)
        done = dict(NEVER)
        try:
            for step in history:
                if step[0] == "commit":
                    # Groups are skipped only while they have no cells.
                    empty = {group for group in step[3] if not slow.entries(group)} if len(step[1]) == 1 else set()
                    answers = [engine.commit(step[1], step[2], None, empty) for engine in (native, slow)]
                    done["apply"] += 1
                elif step[0] == "read":
                    answers = [engine.read(step[1], step[2], shared=step[3]) for engine in (native, slow)]
                    for engine in (native, slow):
                        engine.end_shared()
                    done["read"] += 1
                else:
                    answers = [engine.scan(step[1]) for engine in (native, slow)]
                    done["scan"] += not step[1].reverse
                assert answers[0] == answers[1]
            assert asked.answered == done, "nothing was handed back"
        finally:
            native.native = asked._native
            native.close()
            slow.close()
        assert (native.path / "data.mdb").read_bytes() == (slow.path / "data.mdb").read_bytes()


few_rows = st.sampled_from([b"a", b"a\x00", b"ab"]) | dense_rows


@st.composite
def log_requests(draw: st.DrawFn) -> ScanRequest:
    at = draw(st.none() | st.tuples(few_rows, st.integers(0, 1), timestamps))
    return ScanRequest(
        TABLE,
        b"",
        None,
        (ScanQuery(WRITE, None, *draw(ranges), draw(st.integers(0, 3))),),
        rows_max=draw(st.integers(1, 5)),
        bytes_max=draw(st.integers(1, 9)),
        log=b"" if at is None else log_key(escape(at[0]), *at[1:]),
    )


logged = st.tuples(
    few_rows, st.integers(0, 1), timestamps, st.binary(max_size=3), st.sampled_from([False, False, True])
)


@settings(unhurried, max_examples=150)
@given(st.lists(logged, min_size=5, max_size=20), st.lists(log_requests(), min_size=1, max_size=8))
def test_both_paths_read_the_same_log(entries: list[Any], requests: list[ScanRequest]) -> None:  # E1
    with tempfile.TemporaryDirectory() as folder:
        engine = lmdb_engine(Path(folder), groups=(*GROUPS, LOG))
        for row, column, ts, record, lost in entries:
            engine.commit([Mutation(TABLE, [(row, [], [(WRITE, column, ts, record)])])], 0)
            if lost:
                with engine._env.begin(engine._dbs[WRITE], write=True) as txn:
                    txn.delete(cell_key(escape(row), column, ts))
        asked = engine.native = Dictated(engine.native)
        try:
            for request in requests:
                found = engine.scan(request)
                engine.native = None
                assert engine.scan(request) == found
                engine.native = asked
            assert asked.answered["scan_log"] == len(requests), "nothing was handed back"
        finally:
            engine.native = asked._native
            engine.close()


def test_numbers_of_a_log_request_that_do_not_fit_are_pythons(tmp_path: Path) -> None:
    engine = lmdb_engine(tmp_path, groups=(*GROUPS, LOG))
    native = engine.native
    assert native is not None
    assert native.scan_log(b"", 0, TS_MAX, 2, 9, 99) == []
    for place in range(5):
        for odd in (-1, 1 << 63, 1 << 64, None):
            numbers: list[Any] = [0, TS_MAX, 2, 9, 99]
            numbers[place] = odd
            assert native.scan_log(b"", *numbers) is None
    assert native.scan_log(b"x" * 600, 0, TS_MAX, 2, 9, 99) is None
    engine.close()


@settings(unhurried, max_examples=100)
@given(st.lists(st.tuples(dense_rows, st.binary(max_size=40)), min_size=1, max_size=30))
def test_a_scan_returns_every_row_as_it_was_written(given_rows: list[tuple[bytes, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = lmdb_engine(Path(folder))
        for row, value in given_rows:
            engine.commit([put(row, value)], 0)
        for request in (
            ScanRequest(TABLE, b"", None, (ScanQuery(DATA, (1,)),)),
            ScanRequest(TABLE, b"", None, (ScanQuery(DATA, None),)),
        ):
            found = [(row, cells[0][2]) for row, [cells] in engine.scan(request).rows]
            assert found == sorted(dict(given_rows).items())
        engine.close()


def test_what_python_would_refuse_is_refused_by_python(tmp_path: Path) -> None:
    """Arguments of other types never reach the extension's memory."""
    engine = lmdb_engine(tmp_path)
    odd: list[Any] = [
        Mutation(TABLE, [(b"a", [], [(DATA, 1, 1, "text")])]),
        Mutation(TABLE, [(b"a", [], [(DATA, -1, 1, b"")])]),
        Mutation(TABLE, [(b"a", [], [(DATA, 1, 1 << 70, b"")])]),
        Mutation(TABLE, [(b"a", [], [("data:other", 1, 1, b"")])]),
        Mutation(TABLE, [(b"a" * 600, [], [(DATA, 1, 1, b"")])]),
        Mutation(TABLE, [(b"a", [], [(DATA, 1)])]),
        Mutation(TABLE, [("a", [], [(DATA, 1, 1, b"")])]),  # type: ignore[list-item]
        Mutation(TABLE, 5),  # type: ignore[arg-type]
        ("no", "mutation"),
    ]
    for mutation in odd:
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever Python says
            engine.commit([put(b"beside"), mutation], 0)
        assert engine.read(b"beside", [(DATA, 1, 0, TS_MAX, 1)]) == [[]], "S1: a batch that failed has left nothing"
    for query in ((DATA, -1, 0, 5, 1), (DATA, 1, 0, 1 << 70, 1), ("data:other", 1, 0, 5, 1)):
        with pytest.raises(Exception):  # noqa: B017, PT011
            engine.read(b"a", [query])
    engine.close()


# ------------------------------------------------------------ what is handed back


@contextmanager
def disk_that(path: Path, replacement: str, flags: int) -> Iterator[None]:
    """Meanwhile, the descriptors that LMDB has of a file lead elsewhere."""
    ours = [
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}") == str(path)
    ]
    kept = {file: os.dup(file) for file in ours}
    other = os.open(replacement, flags)
    try:
        for file in ours:
            os.dup2(other, file)
        yield
    finally:
        for file, saved in kept.items():
            os.dup2(saved, file)
            os.close(saved)
        os.close(other)


@pytest.mark.parametrize("lone", [False, True])
async def test_a_commit_that_fails_on_the_disk_has_written_nothing(tmp_path: Path, lone: bool) -> None:  # S4 T4
    async with open_lmdb(tmp_path) as (store, tablet):
        assert await store.apply([put(b"a")]) == [APPLIED]
        with disk_that(tmp_path / "data.mdb", "/dev/full", os.O_RDWR):
            verdicts = await store.apply([put(b"b")] if lone else [put(b"b"), put(b"c")])
        assert all(isinstance(verdict, Failed) for verdict in verdicts), verdicts
        assert all(isinstance(verdict.error, StoreFull | Unavailable) for verdict in verdicts)  # type: ignore[union-attr]
        assert await value_of(store, b"b") is None
        assert await store.apply([put(b"c")]) == [APPLIED]
        assert tablet.engine.native is not None


def test_a_failed_commit_is_judged_as_one_of_python_is(tmp_path: Path) -> None:  # T4 S4
    engine = lmdb_engine(tmp_path)
    engine.commit([put(b"a")], 0)
    last = engine._env.info()["last_txnid"]
    text = os.strerror(errno.EIO)
    [verdict] = engine.after_failure((errno.EIO, text, last), 1)
    assert isinstance(verdict, NoReply), "its meta page is there"
    with pytest.raises(Unavailable, match="disk failed"):
        engine.after_failure((errno.EIO, text, last + 1), 1)
    with pytest.raises(StoreFull):
        engine.after_failure((errno.ENOSPC, os.strerror(errno.ENOSPC), last + 1), 1)
    with pytest.raises(MapTooSmall):
        engine.after_failure((-30792, "MDB_MAP_FULL", last + 1), 1)
    engine.close()


async def test_a_batch_without_room_goes_back_and_the_next_ones_do_not(tmp_path: Path) -> None:  # S4 S6
    options = LmdbOptions(sync=False, map_bytes=1 << 20, ahead_bytes=64 << 10)
    async with open_lmdb(tmp_path, options) as (store, tablet):
        handed: list[int] = []
        back = tablet._handed_back

        def noted(work: Any) -> Any:
            handed.append(len(work[0][1]))
            return back(work)

        tablet._handed_back = noted  # type: ignore[method-assign]
        before = tablet.engine.map_bytes
        for n in range(200):
            assert await store.apply([put(b"%d" % n, b"x" * 20_000)]) == [APPLIED]
        assert tablet.engine.map_bytes > before
        assert 0 < len(handed) < 100, "it allocates ahead, and then has room for several batches"


async def test_the_floor_holds_for_a_batch_that_was_queued_before_it_was_raised(tmp_path: Path) -> None:  # T13
    async with open_lmdb(tmp_path) as (store, tablet), trio.open_nursery() as nursery:
        go_on = threading.Event()
        verdicts: list[Any] = []

        async def late() -> None:
            verdicts.extend(await store.apply([Mutation(TABLE, put(b"late").rows, floor_ts=5)]))

        nursery.start_soon(tablet.park, go_on)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(tablet.raise_floor, 7)  # queued behind the parked writer
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(late)  # closes a batch before the floor is raised, and is written after it
        await trio.testing.wait_all_tasks_blocked()
        assert tablet.floor == 0
        go_on.set()
        while not verdicts:
            await trio.lowlevel.checkpoint()
        assert verdicts == [Refused(0, -1)]


async def test_a_copy_notes_what_is_written_while_it_is_made(tmp_path: Path) -> None:  # P2
    (tmp_path / "copy").mkdir()
    async with open_lmdb(tmp_path / "from") as (store, tablet):
        await store.apply([put(b"a"), put(b"m")])
        await tablet.copy_from(b"m", None, tmp_path / "copy", GROUPS)
        assert await store.apply([put(b"n"), put(b"b")]) == [APPLIED, APPLIED]
        await tablet.cut(b"m")
        await tablet.uncut()
        assert await store.apply([put(b"o")]) == [APPLIED]
    engine = lmdb_engine(tmp_path / "copy")
    for row, there in ((b"m", True), (b"n", True), (b"b", False), (b"o", False)):
        assert bool(engine.read(row, [(DATA, 1, 0, TS_MAX, 1)])[0]) == there, row
    engine.close()


def test_a_batch_of_a_process_that_was_fenced_off_is_refused(tmp_path: Path) -> None:  # F1
    engine = lmdb_engine(tmp_path)
    engine.take_over()
    native, room = engine.native, -(1 << 40)
    assert native is not None
    assert native.apply([put(b"a")], room, 0, frozenset()) == [APPLIED]
    with engine._env.begin(write=True) as txn:
        txn.put(b"\0epoch", (9).to_bytes(8, "big"))
    assert native.apply([put(b"b")], room, 0, frozenset()) is None
    assert engine.read(b"b", [(DATA, 1, 0, TS_MAX, 1)]) == [[]]
    engine.close()


def test_a_batch_is_begun_only_if_all_that_it_may_need_is_allocated(tmp_path: Path) -> None:  # S4
    engine = lmdb_engine(tmp_path)
    native = engine.native
    assert native is not None
    assert native.limit == min(engine.file_bytes(), engine.map_bytes)
    used = engine.used_bytes()
    native.limit = used + 8191
    assert native.apply([put(b"a")], 8192, 0, frozenset()) is None
    native.limit = used + 8192
    assert native.apply([put(b"a")], 8192, 0, frozenset()) == [APPLIED]
    assert engine.make_room(1 << 20, reserve=False) is None
    assert native.limit >= engine.used_bytes() + (1 << 20)
    engine.close()


def test_a_damaged_page_is_pythons_to_report(tmp_path: Path) -> None:
    engine = lmdb_engine(tmp_path)
    engine.native.close()  # type: ignore[union-attr]
    assert engine.native.read(b"a", [(DATA, 1, 0, TS_MAX, 1)], frozenset(), False) is None  # type: ignore[union-attr]
    assert engine.native.scan_log(b"", 0, TS_MAX, 2, 9, 99) is None  # type: ignore[union-attr]
    assert engine.native.apply([put(b"a")], 0, 0, frozenset()) is None  # type: ignore[union-attr]
    assert engine.read(b"a", [(DATA, 1, 0, TS_MAX, 1)]) == [[]]
    engine.close()


# ------------------------------------------------------------ the environment is verified


def test_an_environment_that_is_not_recognized_is_used_the_slower_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with lmdb.open(str(tmp_path / "other"), max_dbs=10) as other:
        for group in GROUPS:
            other.open_db(group.encode())
        assert lmdb_native.environment(other, tmp_path / "elsewhere", GROUPS) is None
        assert lmdb_native.environment(other, tmp_path / "other", GROUPS) is not None
        assert lmdb_native.environment(other, tmp_path / "other", [*GROUPS, "data:missing"]) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    monkeypatch.setattr("perco.storage.lmdb_engine.environment", lambda *_: None)
    engine = lmdb_engine(tmp_path / "slow")
    assert engine.native is None
    assert engine.commit([put(b"a", b"1")], 0) == [APPLIED]
    engine.close()


def test_only_an_object_that_has_the_environment_is_taken_for_it(tmp_path: Path) -> None:
    module = lmdb_native._module()
    assert not isinstance(module, str)
    with lmdb.open(str(tmp_path), max_dbs=10) as env:
        info, page = env.info(), env.stat()["psize"]
        assert module.Environment(env, os.fsencode(tmp_path), page, info["map_size"])
        holder = (ctypes.c_uint64 * 64)(*range(1, 1 << 16, 1 << 10))
        for impostor in (holder, object(), [1, 2], "text", 7, tmp_path, module):
            with pytest.raises(module.Unverified):
                module.Environment(impostor, os.fsencode(tmp_path), page, info["map_size"])
        there, size = os.fsencode(tmp_path), info["map_size"]
        for described in ((b"/", page, size), (there, page // 2, size), (there, page, size + 1)):
            with pytest.raises(module.Unverified):
                module.Environment(env, *described)


def test_the_variable_switches_it_off() -> None:
    program = "from perco.storage import lmdb_native; print(lmdb_native.native_why_not())"
    for value, said in (("0", "PERCO_NATIVE=0"), ("1", "")):
        environment = os.environ | {"PERCO_NATIVE": value}
        command = [sys.executable, "-c", program]
        made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert made.stdout.strip() == said
