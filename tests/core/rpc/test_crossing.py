"""Errors come out of the wire as they went in."""

from __future__ import annotations

from collections.abc import Iterator

import msgpack
import pytest

from perco import errors
from perco.errors import PercoError
from perco.rpc.crossing import ERRORS, pack_error, unpack_error


def every(kind: type[PercoError] = PercoError) -> Iterator[type[PercoError]]:
    yield kind
    for below in kind.__subclasses__():
        if below.__module__ == "perco.errors":
            yield from every(below)


CELL = ("docs", b"k", "body")
MADE: list[PercoError] = [
    errors.WriteConflict([CELL], 7, 3, read=True),
    errors.ReadConflict([CELL], [("docs", b"a", None)], 3, 9),
    errors.RolledBack(3),
    errors.TabletSplit("docs"),
    errors.CatalogueChanged(3, 2),
    errors.SessionEnded("gone"),
    errors.TransientError("again"),
    errors.CommitUnknown("3/1/docs/61/00", "no answer", for_good=True),
    errors.SnapshotTooOld(3, 9, "docs", why="a pin went"),
    errors.SnapshotTooOld(1.5, "not noted yet", newer=True),
    errors.OwnerChanged(3),
    errors.HistoryGone(3, 7, "docs"),
    errors.StoreError("no"),
    errors.StoreFull("/x", "no space"),
    errors.StoreLocked("/x", 3, "perco"),
    errors.StoreLocked("/x", None, ""),
    errors.FormatUnknown("/x", "format 'y'", "perco 1"),
    errors.UnsuitableFolder("/x", "it is a file"),
    errors.NeedsCheck("/x"),
    errors.CopiedWhileOpen("/x"),
    errors.TimelineLost(7, 5, 9),
    errors.Unavailable("it took long", 7),
    errors.Unavailable("nobody is there", remedy="Start it."),
    errors.WriteUnknown("a pin", "no reply", "Drop it."),
    errors.NotIdle("not idle", {"a": 2}, {"a": (3, "docs", ValueError("bad"))}),
    errors.NotFresh(("totals",), 7, {"index: text": 2}),
    errors.WrongToken("no"),
    errors.VersionMismatch("no"),
    errors.UsageError("write it so"),
    errors.ReadOnly("reads only"),
    errors.TooLarge("a value", 9, 8, "Keep it elsewhere."),
    errors.TooLarge("a value", 9, 8, "Keep it elsewhere.", "bytes"),
    errors.SchemaMismatch("other"),
    errors.ChainTooLong("docs", ("a", "b", "a", "b"), 101, 100, 3),
    errors.UsedAfterFork("/x"),
    errors.Corruption("write group", "it is bad"),
    errors.BackupDamaged("backups/1", "it is bad"),
    errors.Corruption("write group", "it is bad", CELL),
    errors.BackgroundFailure("died"),
    errors.PercoError("any"),
]


def test_the_table_is_total() -> None:
    crossing = set(every()) - {errors.TransactionClosed}
    assert {kind.__name__ for kind in crossing} == ERRORS
    assert {type(error) for error in MADE} == crossing


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_it_comes_out_as_it_went_in(error: PercoError) -> None:
    again = unpack_error(msgpack.unpackb(msgpack.packb(pack_error(error)), use_list=False, strict_map_key=False))
    assert type(again) is type(error)
    if isinstance(error, errors.NotIdle):
        assert again.waiting == error.waiting  # type: ignore[attr-defined]
        assert "ValueError: bad" in str(again)
        return
    assert str(again) == str(error)
    fields = {name for name in vars(error) if not name.startswith("_")}
    assert {name: getattr(again, name) for name in fields} == {name: getattr(error, name) for name in fields}


def test_what_waits_is_told_only_by_who_knows_it() -> None:
    nobody, nothing = errors.NotIdle("not idle", None, {}), errors.NotIdle("not idle", {}, {})
    assert str(nobody) == "not idle, and the server does not answer, so it is not known which changes wait"
    assert str(nothing) == "not idle; waiting: a transaction under way"
    for error in nobody, nothing:
        assert error.waiting == {}
        assert str(unpack_error(pack_error(error))) == str(error)


def test_a_store_that_its_owner_has_closed_ends_the_session_of_a_client() -> None:  # R5
    error = unpack_error(pack_error(errors.TransactionClosed("the store that this belongs to has been closed")))
    assert type(error) is errors.SessionEnded
    assert str(error).startswith("the process that serves this store has closed it. Run it again")


def test_an_error_of_ones_own_crosses_as_what_it_is_a_kind_of() -> None:
    class Mine(errors.UsageError):
        pass

    assert type(unpack_error(pack_error(Mine("so")))) is errors.UsageError


def test_what_a_newer_server_says_is_told() -> None:
    error = unpack_error(("Unheard", ("of",)))
    assert type(error) is errors.StoreError
    assert "Unheard" in str(error)
