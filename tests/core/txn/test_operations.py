"""Operations, as pure functions of a cell's value."""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import Any

import pytest

from perco.txn.operations import OPERATIONS, UNCHANGED, Operation, adding, appending


@pytest.mark.parametrize(
    ("operation", "value", "new"),
    [
        (Operation("put", 1), None, 1),
        (Operation("put", 1), 5, 1),
        (Operation("delete"), 5, None),
        (Operation("put_if", 2, 1), 1, 2),
        (Operation("put_if", 2, 1), 3, UNCHANGED),
        (Operation("put_if", 2, 1), None, UNCHANGED),
        (Operation("put_if", 2, None), None, 2),
        (Operation("put_if", None, 1), 1, None),
        (adding(3), None, 3),
        (adding(3), 4, 7),
        (adding(0.5), 1, 1.5),
        (adding(Decimal("0.1")), Decimal("0.2"), Decimal("0.3")),
        (adding(Decimal(1)), Decimal("1" + "0" * 37), Decimal("1" + "0" * 36 + "1")),
        (adding(1), Decimal("1E-30"), Decimal("1." + "0" * 29 + "1")),
        (appending(b"b"), None, b"b"),
        (appending(b"b"), b"a", b"ab"),
        (appending("b"), "a", "ab"),
        (appending([2]), [1], [1, 2]),
        (appending((2,)), (1,), (1, 2)),
    ],
)
def test_an_operation_decides_by_the_value_alone(operation: Operation, value: Any, new: Any) -> None:  # C9
    assert operation.what in OPERATIONS
    made = operation.of(value)
    assert made is new if new is UNCHANGED else (made, type(made)) == (new, type(new))


def test_decimals_are_added_exactly_in_any_context() -> None:
    with localcontext(prec=3):
        assert adding(Decimal("0.01")).of(Decimal("1000000.01")) == Decimal("1000000.02")
    with pytest.raises(ArithmeticError):
        adding(Decimal("1E-2000")).of(Decimal("1E2000"))


@pytest.mark.parametrize(
    ("operation", "value", "said"),
    [
        (adding(1), "a", "the cell holds 'a'; only a number can be added to"),
        (adding(1), True, "the cell holds True; only a number"),
        (appending("b"), 1, "the cell holds 1; only bytes, text and lists"),
        (appending("b"), b"a", "the cell holds bytes, to which no str fits"),
    ],
)
def test_what_does_not_fit_the_value_is_a_type_error(operation: Operation, value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        operation.of(value)


@pytest.mark.parametrize("number", ["1", None, True, [1]])
def test_only_numbers_can_be_added(number: Any) -> None:
    with pytest.raises(TypeError, match="add takes a number"):
        adding(number)


@pytest.mark.parametrize("more", [1, None, {1}, {"a": 1}])
def test_only_bytes_text_and_lists_can_be_appended(more: Any) -> None:
    with pytest.raises(TypeError, match="append takes"):
        appending(more)
