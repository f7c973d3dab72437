"""Check-then-write, reads and scans over the memory engine, against a dict."""

import pytest
from hypothesis import given, settings, strategies as st

from perco.errors import Corruption
from perco.storage import ABSENT, APPLIED, PRESENT, TS_MAX, Mutation, Refused, ScanQuery, ScanRequest
from perco.storage.engine import MemoryBatch, MemoryEngine
from perco.storage.keys import cell_key, escape
from perco.storage.row import check_and_write, read_row, scan_rows
from tests.core.storage.model import GROUPS, TABLE, Model, mutations, queries, rows, scan_requests, unhurried


def contents(engine):
    return {group: [(key, engine.get(group, key)) for key in keys_of(engine, group)] for group in GROUPS}


def keys_of(engine, group):
    cursor = engine.cursor(group)
    more = cursor.set_range(b"")
    while more:
        yield cursor.key()
        more = cursor.next()


def filled(history, floor=0):
    engine, model = MemoryEngine(), Model(floor)
    for mutation in history:
        check_and_write(engine, mutation, floor)
        model.apply(mutation)
    return engine, model


def put(row, *cells):
    return Mutation(TABLE, [(row, [], [("data", column, ts, value) for column, ts, value in cells])])


histories = st.lists(mutations(rows), max_size=15)


@unhurried
@given(st.lists(mutations(rows), max_size=25), st.integers(0, 10))
def test_every_verdict_is_what_a_dict_would_say(history, floor):  # S1 T13
    engine, model = MemoryEngine(), Model(floor)
    for mutation in history:
        assert check_and_write(engine, mutation, floor) == model.apply(mutation)


@unhurried
@given(histories, mutations(rows))
def test_a_refused_mutation_writes_nothing(history, mutation):  # S1
    engine, _ = filled(history)
    before = contents(engine)
    if check_and_write(engine, mutation, floor=5) is not APPLIED:
        assert contents(engine) == before


def test_the_last_row_of_a_group_can_refuse_the_first():  # S1
    engine, _ = filled([put(b"c", (1, 5, b"there"))])
    group = Mutation(
        TABLE,
        [
            (b"a", [], [("data", 1, 6, b"new")]),
            (b"b", [(ABSENT, "lock", 1, 0, TS_MAX)], [("data", 1, 6, b"new")]),
            (b"c", [(PRESENT, "data", 1, 5, 5), (ABSENT, "data", 1, 5, 5)], [("data", 1, 5, None)]),
        ],
    )
    assert check_and_write(engine, group, 0) == Refused(2, 1)
    assert [read_row(engine, row, [("data", 1, 0, TS_MAX, 9)]) for row in (b"a", b"b", b"c")] == [
        [[]],
        [[]],
        [[(5, b"there")]],
    ]


def test_checks_of_a_group_look_at_the_state_before_it():  # S1
    engine = MemoryEngine()
    group = Mutation(
        TABLE, [(b"a", [], [("data", 1, 5, b"")]), (b"a", [(ABSENT, "data", 1, 5, 5)], [("data", 2, 5, b"")])]
    )
    assert check_and_write(engine, group, 0) is APPLIED


def test_a_mutation_that_breaks_off_has_written_nothing():  # S1
    engine = MemoryEngine()
    batch = MemoryBatch(engine)
    broken = Mutation(TABLE, [(b"a", [], [("data", 1, 5, b"x"), ("data", 1, -1, b"x")])])
    with pytest.raises(Exception, match=r"int|format"):
        check_and_write(batch, broken, 0)
    assert not engine.entries("data")


@pytest.mark.parametrize(("floor_ts", "verdict"), [(None, APPLIED), (6, APPLIED), (5, APPLIED), (4, Refused(0, -1))])
def test_below_the_floor_a_mutation_is_refused_whatever_it_checks(floor_ts, verdict):  # T13
    engine = MemoryEngine()
    mutation = Mutation(TABLE, [(b"a", [], [("data", 1, 9, b"")])], floor_ts)
    assert check_and_write(engine, mutation, floor=5) == verdict
    assert engine.entries("data") == (verdict is APPLIED)


@pytest.mark.parametrize(
    ("check", "holds"),
    [
        ((ABSENT, "data", 1, 0, TS_MAX), False),
        ((ABSENT, "data", 1, 5, 5), False),
        ((ABSENT, "data", 1, 5, 9), False),  # both ends of a range belong to it
        ((ABSENT, "data", 1, 1, 5), False),
        ((ABSENT, "data", 1, 1, 4), True),
        ((ABSENT, "data", 1, 6, TS_MAX), True),
        ((ABSENT, "data", 0, 0, TS_MAX), True),
        ((ABSENT, "data", 2, 0, TS_MAX), True),
        ((ABSENT, "write", 1, 0, TS_MAX), True),
        ((PRESENT, "data", 1, 5, 5), True),
        ((PRESENT, "data", 1, 4, 4), False),
        ((PRESENT, "data", 1, 6, 6), False),
        ((PRESENT, "lock", 1, 5, 5), False),
    ],
)
def test_a_check_sees_its_own_cells_and_no_others(check, holds):
    engine, _ = filled([put(b"a", (1, 5, b"")), put(b"", (1, 5, b"")), put(b"a\x00", (2, 5, b""))])
    verdict = check_and_write(engine, Mutation(TABLE, [(b"a", [check], [])]), 0)
    assert verdict == (APPLIED if holds else Refused(0, 0))


@unhurried
@given(histories, rows, st.lists(queries(), max_size=5))
def test_a_read_finds_what_a_dict_would(history, row, asked):
    engine, model = filled(history)
    assert read_row(engine, row, asked) == model.read(row, asked)


@unhurried
@given(st.sets(st.integers(1, 9)), st.integers(0, 10), st.integers(0, 10), st.integers(-9, 9))
def test_newest_and_oldest_within_a_range(versions, low, high, n):
    engine, model = filled([put(b"a", *[(1, ts, b"%d" % ts) for ts in versions], (0, 5, b""), (2, 5, b""))])
    query = ("data", 1, low, high, n)
    assert read_row(engine, b"a", [query]) == model.read(b"a", [query])


def whole(request):
    return request._replace(rows_max=1 << 20, bytes_max=1 << 30, seeks_max=1 << 30)


def pages(engine, request):
    """All pages of a scan, each held to its bounds."""
    out = []
    while True:
        page = scan_rows(engine, request)
        sizes = [sum(len(value) for found in cells for _, _, value in found) for _, cells in page.rows]
        assert len(page.rows) <= request.rows_max
        assert sum(sizes[:-1]) < request.bytes_max  # the last row may go over, none after it
        out.append(page)
        if page.next is None:
            return out
        if request.reverse:
            assert request.stop is None or page.next < request.stop
            request = request._replace(stop=page.next)
        else:
            assert page.next > request.start
            request = request._replace(start=page.next)
        assert len(out) < 100, "the scan does not get on"


@settings(unhurried, max_examples=200)
@given(histories, scan_requests())
def test_small_pages_give_the_same_rows_as_one_page_and_as_a_dict(history, request):
    engine, model = filled(history)
    one = scan_rows(engine, whole(request))
    assert one.next is None
    assert one.rows == model.scan(request)
    assert [row for page in pages(engine, request) for row in page.rows] == one.rows


def test_a_page_may_be_empty_and_yet_not_the_last():
    engine, _ = filled([put(b"%03d" % i, (1, 1, b"")) for i in range(100)] + [put(b"last", (2, 1, b"x"))])
    request = ScanRequest(TABLE, b"", None, (ScanQuery("data", (2,)),), seeks_max=10)
    found = pages(engine, request)
    assert [page.rows for page in found if page.rows] == [[(b"last", [[(2, 1, b"x")]])]]
    assert len(found) == 21  # two seeks a row, ten a page


class Counting:
    """A view that counts what its cursors are asked to do."""

    def __init__(self, engine):
        self._engine, self.steps, self.logs = engine, 0, False

    def get(self, group, key):
        self.steps += 1
        return self._engine.get(group, key)

    def cursor(self, group):
        return _CountingCursor(self, self._engine.cursor(group))


class _CountingCursor:
    def __init__(self, view, cursor):
        self._view, self._cursor = view, cursor

    def __getattr__(self, name):
        self._view.steps += name in ("set_range", "next", "prev", "last")
        return getattr(self._cursor, name)


VERSIONS = 100_000


@pytest.fixture(scope="module")
def deep():
    """Row b: column 2 has 100 000 versions, columns 1 and 3 and the rows around have one each."""
    engine = MemoryEngine()
    for row, column, newest in ((b"a", 1, 1), (b"b", 1, 1), (b"b", 2, VERSIONS), (b"b", 3, 1), (b"c", 1, 1)):
        for ts in range(newest, 0, -1):
            engine.put("data", cell_key(escape(row), column, ts), b"")
    return engine


@pytest.mark.parametrize(
    "query",
    [
        ("data", 2, 0, TS_MAX, 1),
        ("data", 2, 0, VERSIONS // 2, 1),
        ("data", 2, 0, VERSIONS // 2, 2),
        ("data", 2, 1, VERSIONS, -2),
        ("data", 2, VERSIONS // 2, VERSIONS, -2),
        ("data", 3, 0, TS_MAX, 1),
    ],
)
def test_a_read_seeks_past_versions(deep, query):
    view = Counting(deep)
    [cells] = read_row(view, b"b", [query])
    assert len(cells) == min(abs(query[4]), 2 if query[1] == 2 else 1)
    assert view.steps <= 4


def test_a_check_seeks_past_versions(deep):
    view = Counting(deep)
    checks = [(ABSENT, "data", 2, VERSIONS + 1, TS_MAX), (PRESENT, "data", 2, VERSIONS // 2, VERSIONS // 2)]
    assert check_and_write(view, Mutation(TABLE, [(b"b", checks, [])]), 0) is APPLIED
    assert view.steps <= 2


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "query",
    [
        ScanQuery("data", (1, 2, 3)),
        ScanQuery("data", (1, 2, 3), 0, VERSIONS // 2),
        ScanQuery("data", None, 1, 1, 9),  # the oldest version of each column
        ScanQuery("data", None, VERSIONS, TS_MAX, 9),
        ScanQuery("data", None, VERSIONS // 2, VERSIONS // 2, 9),
    ],
)
def test_a_scan_seeks_past_versions(deep, query, reverse):
    view = Counting(deep)
    page = scan_rows(view, ScanRequest(TABLE, b"", None, (query,), reverse))
    assert page.rows
    assert page.next is None
    assert view.steps <= 30


@pytest.mark.parametrize("columns", [None, (1, 2)])
@pytest.mark.parametrize("more", [(), (ScanQuery("lock", None),)])
def test_a_scan_leaves_values_out_where_nobody_asks_for_them(columns, more):
    engine = MemoryEngine()
    for column in (1, 2):
        engine.put("data", cell_key(escape(b"a"), column, 7), b"x" * 100)
    query = ScanQuery("data", columns, n=9, values=False)
    page = scan_rows(engine, ScanRequest(TABLE, b"", None, (query, *more)))
    [(row, [cells, *_])] = page.rows
    assert (row, cells) == (b"a", [(1, 7, b""), (2, 7, b"")])


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_says_where_a_key_is_corrupt(reverse):
    engine = MemoryEngine()
    engine.put("data", b"a\x00\x02" + cell_key(b"", 1, 1), b"")
    with pytest.raises(Corruption, match="6100"):
        scan_rows(engine, ScanRequest(TABLE, b"", None, (ScanQuery("data", (1,)), ScanQuery("data", None)), reverse))
