"""Advisory row locks: who runs observers on which row."""

from __future__ import annotations

from perco.notify.rowlocks import RowLocks


def test_a_row_has_one_holder() -> None:  # N8
    rows = RowLocks()
    assert rows.holder("docs", b"a") is None
    assert rows.take("docs", b"a", 1)
    assert not rows.take("docs", b"a", 2)
    assert not rows.take("docs", b"a", 1), "not even for the holder: one run of a row at a time"
    assert rows.holder("docs", b"a") == 1


def test_rows_of_other_tables_are_other_rows() -> None:  # N8
    rows = RowLocks()
    assert rows.take("docs", b"a", 1)
    assert rows.take("pages", b"a", 2)
    assert rows.take("docs", b"b", 2)
    assert len(rows) == 3


def test_what_is_let_go_may_be_taken() -> None:  # N8
    rows = RowLocks()
    rows.take("docs", b"a", 1)
    rows.release("docs", b"a")
    assert rows.holder("docs", b"a") is None
    assert len(rows) == 0
    assert rows.take("docs", b"a", 2)


def test_scanner_zero_holds_as_others_do() -> None:  # N8
    rows = RowLocks()
    rows.take("docs", b"a", 0)
    assert rows.holder("docs", b"a") == 0
    assert not rows.take("docs", b"a", 1)


def test_a_release_says_whether_a_scanner_has_passed_the_row() -> None:  # N8
    """Its run may be for other observers than those for which the scanner wanted the row."""
    rows = RowLocks()
    rows.take("docs", b"a", 0)
    assert not rows.release("docs", b"a")
    for passes in (lambda: rows.take("docs", b"a", 1), lambda: rows.passed("docs", b"a")):
        rows.take("docs", b"a", 0)
        passes()
        assert rows.release("docs", b"a")
        rows.take("docs", b"a", 0)
        assert not rows.release("docs", b"a")
