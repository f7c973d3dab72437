"""Keys and values as bytes."""

from __future__ import annotations

import inspect
import math
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal, localcontext
from typing import Any

import pytest
from hypothesis import given, strategies as st

import perco
from perco import BOOL, BYTES, DATE, DECIMAL, FLOAT64, INT64, JSON, MSGPACK, TEXT, TIMESTAMP, Codec, Tuple, UsageError
from perco.errors import Corruption
from perco.schema.codecs import codec_named, decoded, encoded, written

RANK = perco.Table("docs", key=perco.TEXT).column("rank", perco.INT64)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
moments = st.datetimes(timezones=st.just(UTC))


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    most = 10**precision - 1
    return st.integers(-most, most).map(lambda number: Decimal(f"{number}E-{scale}"))


ORDERED: dict[str, tuple[Codec[Any], st.SearchStrategy[Any]]] = {
    "bytes": (BYTES, st.binary(max_size=40)),
    "text": (TEXT, st.text(max_size=20)),
    "int64": (INT64, int64),
    "date": (DATE, st.dates()),
    "timestamp": (TIMESTAMP, moments),
    "decimal(12,2)": (DECIMAL(12, 2), decimals(12, 2)),
    "decimal(38,37)": (DECIMAL(38, 37), decimals(38, 37)),
    "decimal(5,0)": (DECIMAL(5), decimals(5, 0)),
    "tuple(decimal(4,1),text,decimal(20,2))": (
        Tuple(DECIMAL(4, 1), TEXT, DECIMAL(20, 2)),
        st.tuples(decimals(4, 1), st.text(max_size=2), decimals(20, 2)),
    ),
    "tuple(date,timestamp)": (Tuple(DATE, TIMESTAMP), st.tuples(st.dates(), moments)),
    "tuple(text,int64)": (Tuple(TEXT, INT64), st.tuples(st.text(max_size=8), int64)),
    "tuple(bytes,bytes,bytes)": (
        Tuple(BYTES, BYTES, BYTES),
        st.tuples(*[st.binary(max_size=4) | st.lists(st.sampled_from([0, 1, 255])).map(bytes)] * 3),
    ),
    "tuple(int64,text)": (Tuple(INT64, TEXT), st.tuples(st.integers(-3, 3), st.text(alphabet="\0\1a", max_size=3))),
}
plain = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text()
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
msgpack_values = st.recursive(
    plain | st.binary(),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=8,
)
OTHERS: dict[str, tuple[Codec[Any], st.SearchStrategy[Any]]] = {
    "float64": (FLOAT64, st.floats(allow_nan=False)),
    "bool": (BOOL, st.booleans()),
    "json": (JSON, json_values),
    "msgpack": (MSGPACK, msgpack_values),
}
ALL = ORDERED | OTHERS


@pytest.mark.parametrize("name", list(ALL))
@given(data=st.data())
def test_a_value_comes_back(name: str, data: st.DataObject) -> None:
    codec, values = ALL[name]
    value = data.draw(values)
    encoded = codec.encode(value)
    assert type(encoded) is bytes
    back = codec.decode(encoded)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("name", list(ORDERED))
@given(data=st.data())
def test_keys_sort_as_their_bytes(name: str, data: st.DataObject) -> None:
    codec, values = ORDERED[name]
    one, two = data.draw(values), data.draw(values)
    assert (one < two) == (codec.encode(one) < codec.encode(two))
    assert (one == two) == (codec.encode(one) == codec.encode(two))


@given(st.tuples(st.text(max_size=4), int64), st.tuples(st.text(max_size=4), int64))
def test_a_tuples_prefix_is_that_of_all_that_begin_alike(one: tuple[str, int], two: tuple[str, int]) -> None:
    codec = Tuple(TEXT, INT64)
    assert codec.encode(one).startswith(codec.part_prefix(one[:1]))
    assert codec.encode(two).startswith(codec.part_prefix(one[:1])) == (one[0] == two[0])
    assert codec.part_prefix(()) == b""
    assert codec.part_prefix(one) == codec.encode(one)


@given(st.lists(st.sampled_from([b"\x00\x01", b"\x00\xff", b"\x00", b"\x01", b"\xff", b"a"])))
def test_bytes_that_are_a_tuple_are_its_only_form(pieces: list[bytes]) -> None:
    codec, data = Tuple(BYTES, BYTES), b"".join(pieces)
    with suppress(ValueError):
        assert codec.encode(codec.decode(data)) == data


@pytest.mark.parametrize("name", list(ALL))
@given(data=st.binary(max_size=24))
def test_any_stored_bytes_are_a_value_or_corruption(name: str, data: bytes) -> None:
    codec, _ = ALL[name]
    try:
        decoded(codec, data, RANK, "a")
    except Corruption as error:
        assert error.where == "docs['a'].rank, value"  # noqa: PT017


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        (TEXT, b"\xff"),
        (INT64, b"123"),
        (FLOAT64, b"123456789"),
        (BOOL, b"\x02"),
        (DATE, b"123"),
        (DATE, b"\xff" * 4),
        (TIMESTAMP, b"1234567"),
        (TIMESTAMP, b"\xff" * 8),
        (DECIMAL(5), b"1234567"),
        (DECIMAL(5), INT64.encode(100_000)),  # would be written as something else: a key of no row
        (DECIMAL(38), b"\xff" * 16),
        (BOOL, b""),
        (JSON, b"{"),
        (MSGPACK, b"\x81"),
        (MSGPACK, b"\x81\x80\xc0"),  # a map as the key of a map
        (MSGPACK, b"\xc1"),
        (MSGPACK, b"\x01\x01"),
        (Tuple(TEXT, INT64), b"a\x00\x01"),
        (Tuple(TEXT, TEXT), b"a\x00\x01b\x00\x02"),
        (Tuple(TEXT, TEXT), b"a\x00\x01b\x00\x01c"),
        (Tuple(TEXT, TEXT), b"a\x00\x01b\x00\x01c\x00\x01"),
        (Tuple(TEXT, TEXT), b"a\x00\x01b\x00\x00\x01"),
    ],
)
def test_what_does_not_decode_is_corruption(codec: Codec[Any], data: bytes) -> None:
    with pytest.raises(Corruption, match=r"docs\['a'\]\.rank"):
        decoded(codec, data, RANK, "a")


@pytest.mark.parametrize(
    ("codec", "value"),
    [
        (BYTES, "text"),
        (BYTES, 1),
        (TEXT, b"bytes"),
        (TEXT, None),
        (TEXT, "\ud800"),
        (INT64, 1.0),
        (INT64, True),
        (INT64, 1 << 63),
        (INT64, -(1 << 63) - 1),
        (INT64, "1"),
        (FLOAT64, "1"),
        (FLOAT64, True),
        (FLOAT64, 10**400),
        (BOOL, 1),
        (DATE, datetime(2026, 3, 1, tzinfo=UTC)),
        (DATE, "2026-03-01"),
        (TIMESTAMP, date(2026, 3, 1)),
        (TIMESTAMP, datetime(2026, 3, 1)),
        (TIMESTAMP, datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1)))),
        (TIMESTAMP, datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-1)))),
        (DECIMAL(4, 2), Decimal("100")),
        (DECIMAL(4, 2), Decimal("1.001")),
        (DECIMAL(4, 2), Decimal("1e-999999999")),
        (DECIMAL(4, 2), Decimal("1e999999999")),
        (DECIMAL(4, 2), Decimal("nan")),
        (DECIMAL(4, 2), 1.5),
        (DECIMAL(4, 2), True),
        (JSON, {1, 2}),
        (JSON, math.nan),
        (JSON, b"bytes"),
        (MSGPACK, {1, 2}),
        (MSGPACK, 1 << 70),
        (MSGPACK, object()),
        (Tuple(TEXT, INT64), ("a",)),
        (Tuple(TEXT, INT64), ["a", 1]),
        (Tuple(TEXT, INT64), ("a", "b")),
        (Tuple(TEXT, INT64), "a"),
    ],
)
def test_what_a_codec_cannot_take_is_a_type_or_value_error(codec: Codec[Any], value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        codec.encode(value)


@pytest.mark.parametrize("name", list(ALL))
def test_a_value_that_was_not_awaited_is_told_and_python_does_not_warn_on_top(name: str) -> None:
    async def fetch() -> str:
        raise AssertionError

    forgotten = fetch()
    with pytest.raises(TypeError, match=r"^value of docs\.rank: got <coroutine .*fetch.*; did you forget `await`\?$"):
        encoded(ALL[name][0], forgotten, RANK, "value of ")
    assert inspect.getcoroutinestate(forgotten) == inspect.CORO_CLOSED


def test_a_codec_that_fails_for_another_reason_says_which() -> None:
    with pytest.raises(TypeError, match=r"^value of docs\.rank: expected int, got str$"):
        encoded(INT64, "1", RANK, "value of ")  # type: ignore[arg-type]


def test_bytes_like_values_are_taken_as_bytes() -> None:
    assert BYTES.encode(bytearray(b"a")) == BYTES.encode(memoryview(b"a")) == b"a"  # type: ignore[arg-type]


@given(moments, st.integers(-14 * 60, 14 * 60))
def test_a_moment_is_the_same_in_every_time_zone(moment: datetime, minutes: int) -> None:
    with suppress(OverflowError):
        there = moment.astimezone(timezone(timedelta(minutes=minutes)))
        assert TIMESTAMP.encode(there) == TIMESTAMP.encode(moment)
        assert written(there) == written(moment) == moment.isoformat().replace("+00:00", "Z")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Decimal("-0"), "0.00"),
        (Decimal("1.5"), "1.50"),
        (Decimal("1.500"), "1.50"),
        (Decimal("1E+2"), "100.00"),
        (7, "7.00"),
        (Decimal("-99999999999999999999999999999999999.25"), "-99999999999999999999999999999999999.25"),
    ],
)
def test_a_decimal_is_exact_and_has_the_digits_of_its_codec(value: Any, text: str) -> None:
    codec = DECIMAL(37, 2)
    with localcontext(prec=3):  # the program's own arithmetic rounds
        assert str(codec.decode(codec.encode(value))) == text


@pytest.mark.parametrize("arguments", [(0,), (39,), (4, 5), (4, -1), ("4",), (True,), (4, 1.0)])
def test_a_decimal_has_up_to_38_digits(arguments: Any) -> None:
    with pytest.raises(UsageError, match=r"DECIMAL\(.*: (precision|scale) is a whole number from"):
        DECIMAL(*arguments)


def test_names_that_are_no_decimals_are_somebody_elses() -> None:
    for name in ("decimal(0,0)", "decimal(39,0)", "decimal(4,5)", "decimal(4)"):
        assert codec_named(name).decode(b"raw") == b"raw"
    assert codec_named("decimal(4,2)") is DECIMAL(4, 2)


def test_a_key_must_keep_order() -> None:
    for codec in (FLOAT64, BOOL, JSON, MSGPACK):
        with pytest.raises(UsageError, match="keep order"):
            perco.Table("t", key=codec)
        with pytest.raises(UsageError, match="keep order"):
            Tuple(TEXT, codec)


@pytest.mark.parametrize("count", [0, 1, 9])
def test_a_tuple_key_has_two_to_eight_parts(count: int) -> None:
    with pytest.raises(UsageError, match="2 to 8"):
        Tuple(*[TEXT] * count)


@pytest.mark.parametrize("name", ["", "x" * 61])
def test_a_codecs_name_has_a_length(name: str) -> None:
    with pytest.raises(UsageError):
        Codec(name, bytes, bytes)


@pytest.mark.parametrize("name", list(ALL))
def test_a_stored_name_finds_its_codec(name: str) -> None:  # N10
    codec, _ = ALL[name]
    assert codec.name == name
    found = codec_named(name)
    assert found.name == name
    assert found.ordered == codec.ordered


def test_a_codec_of_somebody_elses_reads_as_bytes() -> None:  # N10
    found = codec_named("acme-point")
    assert found.name == "acme-point"
    assert found.decode(b"raw") == b"raw"
