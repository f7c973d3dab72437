"""Keys and values as text, there and back."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

import perco
from perco.cli.values import parse_key, parse_moment, parse_prefix, parse_value, plain, shown


@pytest.mark.parametrize(
    ("codec", "text", "value"),
    [
        (perco.TEXT, "a b", "a b"),
        (perco.BYTES, "a", b"a"),
        (perco.BYTES, "hex:00 FF", b"\x00\xff"),
        (perco.BYTES, "\udcff", b"\xff"),  # a byte of the command line that is not UTF-8
        (perco.INT64, "-7", -7),
        (perco.FLOAT64, "inf", math.inf),
        (perco.BOOL, "false", False),
        (perco.DATE, "2026-03-01", date(2026, 3, 1)),
        (perco.TIMESTAMP, "2026-03-01T12:00:00.5+01:00", datetime(2026, 3, 1, 11, 0, 0, 500_000, UTC)),
        (perco.DECIMAL(4, 2), "-1.5", Decimal("-1.50")),
        (perco.JSON, "null", None),
        (perco.MSGPACK, "[1]", [1]),
        (perco.Codec("digest", bytes, bytes), "hex:01", b"\x01"),  # one that only the program knows
    ],
)
def test_values(codec: perco.Codec[Any], text: str, value: object) -> None:
    assert parse_value(codec, text) == value


@pytest.mark.parametrize(
    ("codec", "text", "complaint"),
    [
        (perco.INT64, "1.5", "the value '1.5' is not a whole number"),
        (perco.INT64, "9" * 30, "does not fit 64 bits"),
        (perco.FLOAT64, "much", "is not a number"),
        (perco.BOOL, "yes", "is not true or false"),
        (perco.DATE, "today", "is not a date, such as 2026-03-01"),
        (perco.TIMESTAMP, "noon", "is not a time, such as"),
        (perco.TIMESTAMP, "2026-03-01T12:00", "has no time zone"),
        (perco.DECIMAL(4, 2), "much", "is not a decimal number"),
        (perco.DECIMAL(4, 2), "123", "more than 2 digits before the point"),
        (perco.JSON, "{", "is not JSON"),
        (perco.JSON, "NaN", "is not json"),
        (perco.BYTES, "hex:0", "pairs of hexadecimal digits"),
        (perco.TEXT, "\udcff", "is not text"),
    ],
)
def test_what_is_no_value_is_said(codec: perco.Codec[Any], text: str, complaint: str) -> None:
    with pytest.raises(perco.UsageError, match=complaint):
        parse_value(codec, text)


def test_tuple_keys_are_json_arrays() -> None:
    codec = perco.Tuple(perco.TEXT, perco.INT64, perco.BYTES)
    assert parse_key(codec, '["a", 1, "hex:00"]') == ("a", 1, b"\x00")
    assert parse_prefix(codec, '["a", 1]') == ("a", 1)
    for wrong in (
        '["a", 99999999999999999999, "b"]',
        '["a", 1]',
        '["a", 1, "b", 2]',
        '["a", "1", "b"]',
        '["a", true, "b"]',
        '"a"',
        "a",
        "[1, 1, 1]",
    ):
        with pytest.raises(perco.UsageError):
            parse_key(codec, wrong)


def test_other_parts_of_tuple_keys_are_strings() -> None:
    codec = perco.Tuple(perco.DATE, perco.TIMESTAMP, perco.DECIMAL(4, 2))
    key = (date(2026, 3, 1), datetime(2026, 3, 1, 12, tzinfo=UTC), Decimal("1.50"))
    assert parse_key(codec, '["2026-03-01", "2026-03-01T12:00:00Z", "1.5"]') == key
    assert shown(key) == json.dumps(plain(key)) == '["2026-03-01", "2026-03-01T12:00:00Z", "1.50"]'
    with pytest.raises(perco.UsageError, match=r"part 1.5 should be decimal\(4,2\)"):
        parse_key(codec, '["2026-03-01", "2026-03-01T12:00:00Z", 1.5]')


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (date(987, 3, 1), "0987-03-01"),
        (datetime(2026, 3, 1, 12, tzinfo=UTC), "2026-03-01T12:00:00Z"),
        (Decimal("1E+2"), "100"),
    ],
)
def test_dates_times_and_decimals_are_shown_as_they_are_typed(value: Any, text: str) -> None:
    assert shown(value) == plain(value) == text


@pytest.mark.parametrize(
    ("value", "document"),
    [
        (b"\x00", {"hex": "00"}),
        ("text", "text"),
        ((1, b"a"), [1, {"hex": "61"}]),
        ({"k": (b"a",)}, {"k": [{"hex": "61"}]}),
        ({1: 2}, {"pairs": [[1, 2]]}),
        (math.nan, {"float": "nan"}),
        (-math.inf, {"float": "-inf"}),
        (1.5, 1.5),
        (None, None),
        (True, True),
    ],
)
def test_json_says_every_value(value: object, document: object) -> None:
    assert plain(value) == document
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == document


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        ("plain", 0, "plain"),
        ("a\nb", 0, "a\nb"),
        ("a\nb", 10, "a\\nb"),
        ("x" * 20, 5, "xxxxx... (20 characters)"),
        (b"text", 10, "text"),
        (b"hex:00", 0, "hex:6865783a3030"),
        (b"\xff" * 20, 8, "hex:ffff... (20 bytes)"),
        (b"a\x00", 0, "hex:6100"),
        (12, 5, "12"),
        ([1, None], 0, "[1, null]"),
    ],
)
def test_values_for_people(value: object, width: int, text: str) -> None:
    assert shown(value, width) == text


@pytest.mark.parametrize("value", [b"", b"abc", b"\x00", b"hex:", bytes(range(256)), "ü".encode()])
def test_bytes_that_are_shown_can_be_typed(value: bytes) -> None:
    assert parse_value(perco.BYTES, shown(value)) == value


def test_a_time_without_an_offset_is_of_this_machine() -> None:
    assert parse_moment("2026-03-01T12:00").tzinfo is not None
    assert parse_moment("2026-03-01T12:00:00+02:00").utctimetuple().tm_hour == 10
    with pytest.raises(perco.UsageError):
        parse_moment("soon")
