"""Key bytes: order, prefix freedom, length."""

import pytest
from hypothesis import example, given, strategies as st

from perco.errors import Corruption
from perco.storage.cells import COLUMN_MAX, ROW_BYTES_MAX, TS_MAX
from perco.storage.keys import cell_key, escape, longest_key, past_row, split_key, unescape
from tests.core.storage.model import unhurried

LMDB_KEY_BYTES_MAX = 511
LONGEST = longest_key()

dense = st.lists(st.sampled_from([0, 0, 0, 1, 2, 0xFF]), max_size=ROW_BYTES_MAX).map(bytes)
zeros = st.builds(lambda n, end: b"\x00" * n + end, st.integers(0, 390), st.binary(max_size=10))
rows = st.one_of(st.binary(max_size=8), st.binary(max_size=ROW_BYTES_MAX), dense, zeros)
columns = st.integers(0, COLUMN_MAX)
timestamps = st.integers(1, TS_MAX)


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Two rows with a long beginning in common: where an escape is most likely to get the order wrong."""
    common = draw(rows)
    ends = st.lists(st.sampled_from([0, 0, 1, 0xFE, 0xFF]), max_size=12).map(bytes)
    return (common + draw(ends))[:ROW_BYTES_MAX], (common + draw(ends))[:ROW_BYTES_MAX]


pairs = st.one_of(st.tuples(rows, rows), neighbours())


@unhurried
@given(rows)
@example(b"")
@example(b"\x00" * ROW_BYTES_MAX)
def test_a_row_comes_back_from_its_escaped_form(row):
    assert unescape(escape(row)) == row


@unhurried
@given(pairs)
@example((b"\x00" * 31, b"\x00" * 32))
@example((b"\x00" * 40, b"\x00" * 39 + b"\x01"))
@example((b"\x00" * 40, b"\x00" * 41))
def test_escaping_keeps_the_order_of_rows(pair):
    first, second = pair
    assert (escape(first) < escape(second)) == (first < second)


@unhurried
@given(pairs)
@example((b"\x00" * 32, b"\x00" * 33))
@example((b"\x00" * 40, b"\x00" * 48))
def test_no_escaped_row_is_the_beginning_of_another(pair):
    first, second = pair
    if first != second:
        assert not escape(second).startswith(escape(first))


@unhurried
@given(pairs, columns, columns, timestamps, timestamps)
def test_keys_lie_by_row_then_column_then_newest_first(pair, column, other_column, ts, other_ts):
    first, second = pair
    keys = [cell_key(escape(first), column, ts), cell_key(escape(second), other_column, other_ts)]
    assert (keys[0] < keys[1]) == ((first, column, -ts) < (second, other_column, -other_ts))


@unhurried
@given(pairs, columns, timestamps)
def test_past_row_lies_between_a_row_and_the_next(pair, column, ts):
    low, high = sorted(pair)
    assert cell_key(escape(low), COLUMN_MAX, 1) < past_row(escape(low))
    assert cell_key(escape(low), column, ts) < past_row(escape(low))
    if low != high:
        assert past_row(escape(low)) < cell_key(escape(high), 0, TS_MAX)


@unhurried
@given(rows, columns, timestamps)
def test_a_key_splits_into_what_it_was_made_of(row, column, ts):
    assert split_key(cell_key(escape(row), column, ts)) == (escape(row), column, ts)


@unhurried
@given(rows)
def test_no_key_is_longer_than_the_longest(row):
    assert len(cell_key(escape(row), COLUMN_MAX, 1)) <= LONGEST


def test_the_longest_key_fits_lmdb():
    # An escaped length depends on where the 32nd zero stands and on how much follows it: all such rows are tried.
    lengths = {
        len(cell_key(escape((b"\x01" * ones + b"\x00" * (size - ones))[:size]), 0, 1))
        for size in range(ROW_BYTES_MAX + 1)
        for ones in range(size + 1)
    }
    assert max(lengths) == LONGEST <= LMDB_KEY_BYTES_MAX


@pytest.mark.parametrize(
    "prefix",
    [
        b"",
        b"a",  # no end
        b"a\x00",  # half an end
        b"a\x00\x01b",  # something behind the end
        b"a\x00\xff",  # an escaped zero and no end
        b"a\x00\x02",  # reserved for rows that go on elsewhere
        b"a\x00\x02\x00\x01",
        b"a\x00\x05b\x00\x01",
        b"\x00\xff" * 32,  # no group after the 32nd zero
        b"\x00\xff" * 32 + b"abcdefg",  # a group cut short
        b"\x00\xff" * 32 + b"abcdefgh\x09",  # a group of nine
        b"\x00\xff" * 32 + b"abcdefgh\xff",  # more announced than there is
        b"\x00\xff" * 32 + b"abcdefgh\x04",  # bytes where the padding should be
        b"\x00\xff" * 32 + b"a" + bytes(7) + b"\x01" + b"b" + bytes(7) + b"\x01",  # something behind the last group
        b"\x00\xff" * 32 + b"abcdefgh\xff" + bytes(8) + b"\x00",  # an empty group that nobody writes
    ],
)
def test_a_row_that_escape_never_wrote_is_corruption(prefix):
    with pytest.raises(Corruption):
        unescape(prefix)


@unhurried
@given(st.one_of(st.binary(max_size=40), st.lists(st.sampled_from([0, 1, 2, 0xFF]), max_size=90).map(bytes)))
def test_whatever_unescapes_is_what_escape_writes(prefix):
    try:
        row = unescape(prefix)
    except Corruption:
        return
    assert escape(row) == prefix


@pytest.mark.parametrize("key", [b"", b"a", b"\x01" + bytes(12)])
def test_a_key_too_short_for_a_cell_is_corruption(key):
    with pytest.raises(Corruption):
        split_key(key)
