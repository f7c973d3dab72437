"""What every row store keeps, over memory, over LMDB and over a store without any capability alike."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from perco.errors import Corruption, TabletSplit, TransactionClosed, UsageError
from perco.storage import ABSENT, APPLIED, PRESENT, TS_MAX, Failed, Mutation, Refused, ScanPage, ScanQuery, ScanRequest
from perco.storage.cells import SEEKS_FEW
from tests.component.storage.stores import TABLE, delete, newest, open_store, put, put_all, value_of
from tests.support.turns import turns_of_others

ALL = (0, TS_MAX)


@pytest.fixture(params=["memory", "lmdb", "bare", "postgresql", "bigtable", "bigtable model"])
def kind(request):
    return request.param


# Not over a store without any capability: groups (S1), tablets, calls that continue.
of_tablets = pytest.mark.parametrize("kind", ["memory", "lmdb"], indirect=True)


@pytest.fixture
async def store(kind, tmp_path):
    """One tablet."""
    async with open_store(kind, tmp_path) as store:
        yield store


@pytest.fixture
async def parted(kind, tmp_path):
    """Three tablets: up to g, up to p, and the rest."""
    async with open_store(kind, tmp_path, [b"g", b"p"]) as store:
        yield store


# ------------------------------------------------------------ apply


async def test_each_mutation_of_a_call_has_a_verdict_of_its_own(store):  # S1
    held, refused = [(ABSENT, "data", 1, *ALL)], [(PRESENT, "data", 1, 7, 7)]
    verdicts = await store.apply(
        [
            Mutation(TABLE, [(b"a", held, [("data", 1, 1, b"a")])]),
            Mutation(TABLE, [(b"b", held + refused, [("data", 1, 1, b"b")])]),
            Mutation(TABLE, [(b"c", held, [("data", 1, 1, b"c")])]),
        ]
    )
    assert verdicts == [APPLIED, Refused(0, 1), APPLIED]
    assert [await value_of(store, row) for row in (b"a", b"b", b"c")] == [b"a", None, b"c"]


async def test_a_later_mutation_of_a_call_sees_an_earlier_one(store):  # S1
    check = [(ABSENT, "data", 1, *ALL)]
    mutation = Mutation(TABLE, [(b"a", check, [("data", 1, 1, b"")])])
    assert await store.apply([mutation, mutation]) == [APPLIED, Refused(0, 0)]


async def test_what_was_refused_can_be_sent_again(store):  # T6
    mutation = Mutation(TABLE, [(b"a", [(PRESENT, "lock", 1, 3, 3)], [("lock", 1, 3, None), ("write", 1, 4, b"")])])
    assert await store.apply([mutation]) == [Refused(0, 0)]
    await put_all(store, Mutation(TABLE, [(b"a", [], [("lock", 1, 3, b"")])]))
    assert await store.apply([mutation]) == [APPLIED]
    assert await store.apply([mutation]) == [Refused(0, 0)]


@of_tablets
async def test_a_group_is_all_or_nothing(store):  # S1
    group = [
        (b"a", [], [("data", 1, 1, b"")]),
        (b"b", [(ABSENT, "data", 1, *ALL)], [("data", 1, 1, b"")]),
        (b"c", [], [("write", 1, 1, b"")]),
    ]
    await put_all(store, put(b"b", ts=9))
    assert await store.apply([Mutation(TABLE, group)]) == [Refused(1, 0)]
    assert await store.read([newest(b"a"), (TABLE, b"c", [("write", 1, *ALL, 1)])]) == [[[]], [[]]]
    await put_all(store, delete(b"b", ts=9))
    assert await store.apply([Mutation(TABLE, group)]) == [APPLIED]
    assert await store.read([newest(b"a"), (TABLE, b"c", [("write", 1, *ALL, 1)])]) == [[[(1, b"")]], [[(1, b"")]]]


async def test_what_breaks_off_fails_alone_and_has_written_nothing(store):  # S1 S4
    broken = Mutation(TABLE, [(b"b", [], [("data", 1, 1, b"half"), ("data", 1, -1, b"done")])])
    first, middle, last = await store.apply([put(b"a", b"x"), broken, put(b"c", b"x")])
    assert (first, last) == (APPLIED, APPLIED)
    assert isinstance(middle, Failed)
    assert [await value_of(store, row) for row in (b"a", b"b", b"c")] == [b"x", None, b"x"]


async def test_below_the_floor_every_tablet_refuses(parted):  # T13
    await parted.raise_floor(10, wait=True)
    for row in (b"a", b"g", b"z"):
        below, at, without = (Mutation(TABLE, [(row, [], [("data", 1, 9, b"")])], floor) for floor in (9, 10, None))
        assert await parted.apply([below]) == [Refused(0, -1)]
        assert await value_of(parted, row) is None
        assert await parted.apply([at, without]) == [APPLIED, APPLIED]


async def test_a_delete_takes_the_cell_at_exactly_its_timestamp(store):
    await put_all(store, *[put(b"a", b"%d" % ts, ts) for ts in (1, 2, 3)])
    await put_all(store, delete(b"a", 2), delete(b"a", 4))
    assert await store.read([(TABLE, b"a", [("data", 1, *ALL, 9)])]) == [[[(3, b"3"), (1, b"1")]]]


async def test_a_put_replaces_the_cell_at_its_timestamp_only(store):
    await put_all(store, put(b"a", b"old", 1), put(b"a", b"other", 2), put(b"a", b"new", 1))
    assert await store.read([(TABLE, b"a", [("data", 1, *ALL, 9)])]) == [[[(2, b"other"), (1, b"new")]]]


async def test_groups_columns_and_rows_are_apart(store):
    cells = [("data", 1), ("data", 2), ("lock", 1), ("data:raw", 1)]
    for row in (b"", b"a", b"a\x00"):
        await put_all(
            store, Mutation(TABLE, [(row, [], [(group, column, 1, row + group.encode()) for group, column in cells])])
        )
    for row in (b"", b"a", b"a\x00"):
        found = await store.read([(TABLE, row, [(group, column, *ALL, 2) for group, column in cells])])
        assert found == [[[(1, row + group.encode())] for group, _ in cells]]


@pytest.mark.parametrize(
    ("row", "value"),
    [
        (b"", b""),
        (b"\x00" * 400, b"x"),
        (b"\xff" * 400, b"x"),
        (b"\x01" * 7 + b"\x00" * 393, b"x"),  # the longest key of all
        (b"a", b"v" * 2100),
        (b"a", b"v" * (8 << 20)),
    ],
)
async def test_rows_and_values_at_the_limits_come_back(store, kind, row, value):
    ts = 250_000_000_000 if kind == "bigtable" else TS_MAX  # Bigtable takes more, its emulator does not
    await put_all(store, put(row, value, ts))
    assert await store.read([(TABLE, row, [("data", 1, *ALL, 1)])]) == [[[(ts, value)]]]


async def test_no_mutations_no_verdicts(store):
    assert await store.apply([]) == []


async def test_an_unknown_table_is_a_usage_error_and_nothing_is_sent(store):
    strange = Mutation("strange", [(b"a", [], [("data", 1, 1, b"")])])
    with pytest.raises(UsageError, match="strange"):
        await store.apply([put(b"a"), strange])
    with pytest.raises(UsageError, match="strange"):
        await store.read([("strange", b"a", [])])
    with pytest.raises(UsageError, match="strange"):
        await store.scan(ScanRequest("strange", b"", None, ()))
    await put_all(store, put(b"b"))  # all mutations queued before have been made by now
    assert await value_of(store, b"a") is None


@of_tablets
async def test_a_group_over_two_tablets_is_not_made_and_others_are(parted):  # S1 P3
    group = Mutation(TABLE, [(row, [], [("data", 1, 1, b"")]) for row in (b"a", b"z")])
    made, failed = await parted.apply([put(b"b"), group])
    assert made is APPLIED
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, TabletSplit)
    assert [await value_of(parted, row) is None for row in (b"a", b"b", b"z")] == [True, False, True]


@of_tablets
async def test_rows_with_the_same_number_may_form_a_group(parted):  # S1
    assert parted.bounds(TABLE) == [b"", b"g", b"p"]
    numbers = [parted.locate(TABLE, row) for row in (b"", b"f\xff", b"g", b"o", b"p", b"\xff")]
    assert numbers == [0, 0, 1, 1, 2, 2]
    await put_all(parted, Mutation(TABLE, [(row, [], [("data", 1, 1, row)]) for row in (b"g", b"o")]))
    assert [await value_of(parted, row) for row in (b"g", b"o")] == [b"g", b"o"]


async def test_a_call_over_several_tablets_has_its_verdicts_in_order(parted):
    rows = [b"z", b"a", b"g", b"b", b"p"]
    check = (PRESENT, "data", 1, 1, 1)
    verdicts = await parted.apply([Mutation(TABLE, [(row, [check] if row < b"g" else [], [])]) for row in rows])
    assert verdicts == [APPLIED, Refused(0, 0), APPLIED, Refused(0, 0), APPLIED]


async def test_who_is_cancelled_already_sends_nothing(store):  # T10
    with trio.CancelScope() as scope:
        scope.cancel()
        await store.apply([put(b"a")])
    assert scope.cancelled_caught
    await put_all(store, put(b"b"))
    assert await value_of(store, b"a") is None


@of_tablets
async def test_statistics_count_what_was_done(store):
    [tablet] = store.tablets()
    refused = Mutation(TABLE, [(b"a", [(PRESENT, "lock", 1, 1, 1)], [])])
    broken = Mutation(TABLE, [(b"a", [], [("data", 1, -1, b"")])])
    await store.apply([put(b"a"), put(b"b"), refused, broken])
    found = tablet.statistics()
    assert (found.table, found.start, found.queued) == (TABLE, b"", 0)
    assert (found.mutations, found.refused, found.failed) == (4, 1, 1)
    assert tablet.entries("data") == 2
    assert tablet.entries("lock") == 0


# ------------------------------------------------------------ read


async def test_an_acknowledged_write_is_read_by_everybody(store):
    seen = []

    async def write_and_read(row):
        await put_all(store, put(row, row))
        seen.append(await value_of(store, row) == row)

    async with trio.open_nursery() as nursery:
        for i in range(100):
            nursery.start_soon(write_and_read, b"%d" % i)
    assert seen == [True] * 100


async def test_a_read_of_a_row_sees_all_of_a_mutation_or_nothing(store):  # S1
    rounds = 200
    queries = [("data", 1, *ALL, 1), ("write", 2, *ALL, 1), ("data:raw", 3, *ALL, 1)]

    def to(i):
        value = b"%d" % i
        return Mutation(TABLE, [(b"a", [], [("data", 1, 1, value), ("write", 2, 1, value), ("data:raw", 3, 1, value)])])

    async def write():
        for i in range(rounds):
            await store.apply([to(i)])
        done.set()

    done = trio.Event()
    await put_all(store, to(-1))
    seen = set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        while not done.is_set():
            [[[first], [second], [third]]] = await store.read([(TABLE, b"a", queries)])
            assert first == second == third
            seen.add(first)
            await trio.lowlevel.checkpoint()
    assert len(seen) > 1


async def test_a_read_answers_its_requests_in_order(parted):
    await put_all(parted, *[put(row, row) for row in (b"a", b"h", b"z")])
    rows = [b"z", b"a", b"nothing", b"h"]
    assert await parted.read([newest(row) for row in rows]) == [[[(1, b"z")]], [[(1, b"a")]], [[]], [[(1, b"h")]]]


async def test_a_task_that_only_reads_gives_way_to_others(store):
    async def read():
        for _ in range(1000):
            await store.read([newest(b"a")])

    assert await turns_of_others(read) >= 10


async def scans(store, count, request):
    for _ in range(count):
        with suppress(Corruption):
            await store.scan(request)


async def test_a_task_that_only_scans_gives_way_to_others(store):
    await put_all(store, *[put(b"%03d" % n, b"") for n in range(20)])
    request = ScanRequest(TABLE, b"", None, (ScanQuery("data", (1,)),))
    assert await turns_of_others(scans, store, 100, request) >= 90
    assert await turns_of_others(scans, store, 100, request._replace(seeks_max=SEEKS_FEW)) >= 30


@of_tablets
async def test_a_task_gives_way_after_some_short_scans(store, monkeypatch):
    await put_all(store, *[put(b"%03d" % n, b"") for n in range(20)])
    short = ScanRequest(TABLE, b"", b"002", (ScanQuery("data", (1,)),), seeks_max=SEEKS_FEW)
    assert 8 <= await turns_of_others(scans, store, 100, short) <= 20

    def fails(*_):
        raise Corruption("a page", "it is damaged")

    [tablet] = store.tablets_here()
    monkeypatch.setattr(type(tablet), "scan", fails)
    assert await turns_of_others(scans, store, 100, short) >= 3, "scans that fail count, too"


# ------------------------------------------------------------ scan


async def scan_all(store, request):
    """Rows of all pages, and how many pages it took."""
    rows, pages = [], 0
    while True:
        page = await store.scan(request)
        rows += [row for row, _ in page.rows]
        pages += 1
        assert pages <= 100, "the scan does not get on"
        if page.next is None:
            return rows, pages
        request = request._replace(stop=page.next) if request.reverse else request._replace(start=page.next)


LETTERS = [bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz"]
BORDERS = [b"", b"a", b"f", b"f\x00", b"g", b"h", b"o", b"p", b"q", b"z", b"z\x00", b"\xff"]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("rows_max", [1, 4, 256])
async def test_a_scan_goes_on_across_tablets(parted, rows_max, reverse):
    await put_all(parted, *[put(row) for row in LETTERS])
    for start in BORDERS:
        for stop in [*BORDERS, None]:
            request = ScanRequest(TABLE, start, stop, (ScanQuery("data", (1,)),), reverse, rows_max)
            wanted = [row for row in LETTERS if row >= start and (stop is None or row < stop)]
            rows, _ = await scan_all(parted, request)
            assert rows == (wanted[::-1] if reverse else wanted), (start, stop)


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_of_an_empty_range_is_over_at_once(parted, reverse):
    await put_all(parted, put(b"g"))
    for start, stop in ((b"g", b"g"), (b"p", b"g"), (b"", b"")):
        request = ScanRequest(TABLE, start, stop, (ScanQuery("data", (1,)),), reverse)
        assert await parted.scan(request) == ScanPage([], None)


@pytest.mark.parametrize("reverse", [False, True])
async def test_every_bound_of_a_page_is_kept_and_loses_no_row(parted, reverse):
    await put_all(parted, *[put(row, b"12345678") for row in LETTERS])
    wanted = LETTERS[::-1] if reverse else LETTERS
    request = ScanRequest(TABLE, b"", None, (ScanQuery("data", (1,)),), reverse)
    for bound in ({"rows_max": 2}, {"bytes_max": 16}, {"seeks_max": 4}):
        rows, pages = await scan_all(parted, request._replace(**bound))
        assert rows == wanted
        assert pages >= 13  # 26 rows, two a page
    assert await scan_all(parted, request) == (wanted, len(parted.bounds(TABLE)))  # a page ends with its tablet


async def test_a_scan_reads_versions_and_whole_groups(store):
    await put_all(
        store,
        *[put(b"a", b"%d" % ts, ts) for ts in (1, 2, 3)],
        Mutation(TABLE, [(b"a", [], [("lock", 7, 2, b"l"), ("lock", 9, 2, b"m"), ("lock", 9, 1, b"n")])]),
        Mutation(TABLE, [(b"b", [], [("lock", 7, 5, b"l")])]),
    )
    queries = (ScanQuery("data", (2, 1), 0, 2, 2), ScanQuery("lock", None, 0, 4, 9), ScanQuery("write", None))
    page = await store.scan(ScanRequest(TABLE, b"", None, queries))
    assert page == ScanPage(
        [(b"a", [[(1, 2, b"2"), (1, 1, b"1")], [(7, 2, b"l"), (9, 2, b"m"), (9, 1, b"n")], []])], None
    )


async def test_a_scan_returns_columns_in_the_order_in_which_they_are_named(store):
    await put_all(
        store, Mutation(TABLE, [(b"a", [], [("lock", column, ts, b"") for column in (1, 2) for ts in (3, 4)])])
    )
    for columns in ((1, 2), (2, 1)):
        page = await store.scan(ScanRequest(TABLE, b"", None, (ScanQuery("lock", columns, n=2),)))
        assert page.rows == [(b"a", [[(column, ts, b"") for column in columns for ts in (4, 3)]])]


async def test_a_scan_of_no_columns_finds_none(store):
    await put_all(store, put(b"a", b"v", 3))
    page = await store.scan(ScanRequest(TABLE, b"", None, (ScanQuery("data", ()), ScanQuery("data", (1,)))))
    assert page.rows == [(b"a", [[], [(1, 3, b"v")]])]
    page = await store.scan(ScanRequest(TABLE, b"", None, (ScanQuery("data", ()),)))
    assert page == ScanPage([], None)


async def test_a_scan_goes_on_where_it_stopped_whatever_is_written_meanwhile(store):
    await put_all(store, put(b"a"), put(b"c"))
    request = ScanRequest(TABLE, b"", None, (ScanQuery("data", (1,)),), rows_max=1)
    page = await store.scan(request)
    await put_all(store, put(b"b"))
    assert await scan_all(store, request._replace(start=page.next)) == ([b"c"], 1)
    assert await scan_all(store, request) == ([b"a", b"b", b"c"], 3)


@of_tablets
async def test_what_comes_after_the_end_fails_and_a_call_that_goes_on_is_woken(store):
    def then(verdicts):
        if verdicts != [APPLIED]:
            return None
        for tablet in store.tablets():
            tablet.refuse()
        return [put(b"late")]

    first = await store.apply_then([put(b"early")], then)
    if store.queues:  # it went on by itself
        [verdict] = first
        assert isinstance(verdict.error, TransactionClosed)
    else:
        assert then(first)
    [verdict] = await store.apply([put(b"later")])
    assert isinstance(verdict, Failed)
    assert isinstance(verdict.error, TransactionClosed)
    assert await value_of(store, b"late") is None
    assert await value_of(store, b"early") is not None


async def test_a_scan_of_whole_rows_takes_so_many_cells_of_each(store):
    """However many a row has: one with more does not take the place of the next."""
    for row in (b"a", b"b"):
        await store.apply([Mutation(TABLE, [(row, [], [("data", c, ts, b"v") for c in (1, 2) for ts in (1, 2, 3)])])])
    page = await store.scan(ScanRequest(TABLE, b"", None, (ScanQuery("data", None, n=4),)))
    wanted = [[(1, 3, b"v"), (1, 2, b"v"), (1, 1, b"v"), (2, 3, b"v")]]
    assert page.rows == [(b"a", wanted), (b"b", wanted)]
    assert page.next is None
