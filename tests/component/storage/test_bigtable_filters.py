"""The pure parts of a store on Bigtable: predicates, chunks, keys, addresses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import trio

from perco.bigtable import filters, hints
from perco.bigtable.address import Place
from perco.bigtable.calls import settings
from perco.bigtable.chunks import Chunks, ReadCell
from perco.bigtable.keys import HINTED, column_of, place_of, qualifier
from perco.bigtable.options import BigtableOptions
from perco.bigtable.sampling import cuts
from perco.bigtable.wire import types
from perco.errors import Corruption, UsageError
from perco.protocol import failed, mutations
from perco.protocol.records import ACK, PUT, Cellref
from perco.storage import (
    ABSENT,
    LOCK,
    NOTIFY,
    PENDING,
    PRESENT,
    PROTOCOL_GROUPS,
    TS_MAX,
    Check,
    Mutation,
    ScanQuery,
    ScanRequest,
)

ALL = (0, TS_MAX)


def shapes(made: Any) -> list[str]:
    """The kinds of all filters in one."""
    kind = made.WhichOneof("filter")
    inner = {"chain": made.chain.filters, "interleave": made.interleave.filters}.get(kind, ())
    return [kind, *itertools.chain.from_iterable(shapes(each) for each in inner)]


def smallest(made: Any) -> int:
    """The number of parts of its smallest chain or interleave."""
    kind = made.WhichOneof("filter")
    inner = {"chain": made.chain.filters, "interleave": made.interleave.filters}.get(kind, ())
    return min([len(inner), *map(smallest, inner)]) if inner else 99


CHECKS: dict[str, list[Check]] = {
    "one absent": [(ABSENT, "lock", 1, *ALL)],
    "several absent": [(ABSENT, "lock", 1, 0, 4), (ABSENT, "lock", 1, 6, TS_MAX), (ABSENT, "write", 1, 5, TS_MAX)],
    "one present": [(PRESENT, "lock", 1, 5, 5)],
    "several present": [(PRESENT, "lock", 1, 5, 5), (PRESENT, "lock", 2, 5, 5), (PRESENT, "shared", 1, 5, 5)],
    "a mixture": [(ABSENT, "lock", 1, *ALL), (PRESENT, "failed", 1, 5, 5), (PRESENT, "notify", 1, 7, 7)],
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_service_takes_what_is_made_of_checks(name: str) -> None:  # S1
    """It refuses chains and interleaves of fewer than two parts; `condition` and `sink` are not atomic, or copy."""
    made = filters.predicate(CHECKS[name])
    assert made is not None
    assert smallest(made.filter) >= 2
    assert not {"condition", "sink", "row_key_regex_filter", "column_qualifier_regex_filter"} & set(shapes(made.filter))
    assert made.writes_if_found == any(check[0] == PRESENT for check in CHECKS[name])


def test_a_check_twice_counts_once() -> None:  # S1
    """The filter counts the cells that must be present."""
    once = filters.predicate(CHECKS["several present"])
    assert filters.predicate(CHECKS["several present"] * 2) == once
    assert filters.predicate([]) is None


def test_all_mutations_of_the_protocol_have_a_predicate() -> None:  # S1
    """Of one row, with several cells: the groups are in the right order."""
    primary = Cellref("t", b"a", 0)
    header = mutations.Header(5, primary, 0, 0, "")
    ack = mutations.ack_of(0, 1)
    part = [mutations.Intent("t", b"a", 0, PUT, b"v"), mutations.Intent("t", b"a", ack, ACK, b"", (), (3, -2))]
    cell = failed.FailedCell(1, 1, b"", 3, "", "", 0)
    made: list[Mutation] = [
        *(mutations.prewrite(header, part, again=again) for again in (False, True)),
        mutations.commit(header, part, 9),
        mutations.release(header, part, marker=True),
        mutations.put_marker(primary, 5),
        failed.count_attempt(Cellref("t", b"a", ack), 3, b"cause"),
        failed.put_back(Cellref("t", b"a", ack), 3, cell),
        failed.forget(Cellref("t", b"a", ack), 3),
        *(failed.give_up(Cellref("t", b"a", ack), 9, [3, 4], before, 4, cell) for before in (0, 2)),
    ]
    for mutation in made:
        for _, checks, _ in mutation.rows:
            assert filters.predicate(checks) is not None


def test_checks_that_it_cannot_combine_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot check in one step"):
        filters.predicate([(ABSENT, "notify", 1, *ALL), (PRESENT, "lock", 1, 5, 5)])
    with pytest.raises(UsageError, match="too many cells of one row"):
        filters.predicate([(ABSENT, "lock", column, *ALL) for column in range(1000)])


def test_more_queries_than_a_filter_has_room_for_become_ranges() -> None:
    made = filters.reading([("write", column, 0, 9, 1) for column in range(2000)])
    assert made.ByteSize() <= filters.FILTER_BYTES_MAX
    assert "column_range_filter" in shapes(made)
    many = ScanQuery("write", tuple(range(2000)), 0, 9)
    assert filters.scanning([many, ScanQuery("lock", None)]).ByteSize() <= filters.FILTER_BYTES_MAX


def test_every_group_and_column_has_a_place_of_its_own() -> None:
    groups = [*PROTOCOL_GROUPS, "data:raw", "data:r"]
    places = [(place_of(group)[0], qualifier(group, column)) for group in groups for column in (0, 1, (1 << 32) - 1)]
    assert len(set(places)) == len(places)
    for group in groups:
        tag = place_of(group)[1]
        assert column_of(tag, qualifier(group, 7)) == 7
        with pytest.raises(Corruption):
            column_of(tag, tag + b"x")


# ------------------------------------------------------------------ chunks


def response(*chunks: dict[str, Any], passed: bytes = b"") -> Any:
    made = types().ReadRowsResponse(last_scanned_row_key=passed)
    for chunk in chunks:
        given = dict(chunk)
        for name in ("family_name", "qualifier"):
            if name in given:
                given[name] = {"value": given[name]}
        made.chunks.add(**given)
    return made


def test_a_value_in_several_chunks_is_put_together() -> None:
    chunks = Chunks()
    first = {"row_key": b"r", "family_name": "p", "qualifier": b"q", "timestamp_micros": 7, "value": b"ab"}
    assert chunks.take(response({**first, "value_size": 4})) == []
    [row] = chunks.take(response({"value": b"cd"}, {"timestamp_micros": 6, "value": b"old", "commit_row": True}))
    assert row == (b"r", [ReadCell("p", b"q", 7, b"abcd"), ReadCell("p", b"q", 6, b"old")])
    assert chunks.passed == b"r"


def test_a_row_that_is_reset_is_forgotten() -> None:
    chunks = Chunks()
    cell = {"row_key": b"r", "family_name": "p", "qualifier": b"q", "timestamp_micros": 7, "value": b"x"}
    assert chunks.take(response(cell, {"reset_row": True})) == []
    [row] = chunks.take(response({**cell, "value": b"y", "commit_row": True}))
    assert row.cells == [ReadCell("p", b"q", 7, b"y")]
    assert chunks.take(response(passed=b"s")) == []
    assert chunks.passed == b"s"


def test_half_a_row_is_an_error() -> None:
    cell = {"row_key": b"r", "family_name": "p", "qualifier": b"q", "timestamp_micros": 7, "value": b"x"}
    with pytest.raises(Corruption, match="only a part"):
        Chunks().take(response(cell, {**cell, "row_key": b"s"}))
    with pytest.raises(Corruption, match="only a part"):
        Chunks().take(response({**cell, "value_size": 9, "commit_row": True}))


# ------------------------------------------------------------------ hints


def notifying(ts: int = 3) -> Mutation:
    return Mutation("t", [(b"r", [], [(NOTIFY, 1, ts, b"")])])


def cells(of: hints.Hints, *stamps: int, value: bytes = b"") -> list[ReadCell]:
    """Hints that one process has written, as they are read."""
    return [ReadCell("p", of._name, 1000 * stamp, value) for stamp in stamps]


def processes(options: BigtableOptions) -> tuple[hints.Hints, hints.Hints]:
    one, two = (hints.Hints(Place("bigtable://p/i"), options) for _ in range(2))
    return one, two


def stamps(found: list[hints.Hint]) -> list[int]:
    return [stamp for _, stamp in found]


async def test_a_hint_stays_while_its_mutation_may_take_effect(autojump_clock: Any) -> None:  # N7
    made, _ = processes(BigtableOptions(call_s=10.0, late_s=5.0))
    own = [made.begin(notifying())[0] for _ in range(3)]
    assert len(set(own)) == 3
    assert made.removable(cells(made, *own)) == []
    made.end(own[0], answered=True)
    made.end(own[1], answered=False)
    assert stamps(made.removable(cells(made, *own))) == own[:1]
    await trio.sleep(5.0)
    assert stamps(made.removable(cells(made, *own))) == own[:2]


async def test_another_processs_hints_stay_as_long_as_its_mutations(autojump_clock: Any) -> None:  # N7
    other, ours = processes(BigtableOptions(call_s=10.0, late_s=5.0))
    stamp = other.begin(notifying())[0]
    assert ours.begin(notifying())[0] == stamp, "their stamps are the same, their columns are not"
    ours.end(stamp, answered=True)
    await trio.sleep(100)
    assert ours.removable(cells(other, stamp)) == [], "it may have been written just now"
    await trio.sleep(14.9)
    assert ours.removable(cells(other, stamp)) == []
    await trio.sleep(0.2)
    assert ours.removable(cells(other, stamp)) == [(other._name, stamp)]


async def test_however_many_hints_others_have_written_they_go_in_the_end(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: Any
) -> None:
    """Only so many are remembered; those that have gone make room."""
    monkeypatch.setattr(hints, "_SEEN_MAX", 10)
    other, ours = processes(BigtableOptions(call_s=3.0, late_s=1.0))
    assert ours.removable(cells(other, *range(100, 105))) == []  # other processes remove these
    left = set(range(1, 40))
    for _ in range(60):
        found = ours.removable(cells(other, *sorted(left)))
        ours.gone(found)
        left -= set(stamps(found))
        assert len(ours._first_seen) <= 10
        await trio.sleep(1.0)
    assert not left


async def test_which_hints_are_needless(autojump_clock: Any) -> None:  # N7
    """Of rows without such a cell those that are safe; of others many, or none."""
    other, made = processes(BigtableOptions(call_s=1.0, late_s=0.0))
    few, many = list(range(1, 33)), list(range(1, 34))
    made.removable(cells(other, *many))
    await trio.sleep(1.0)
    held = [1000, 1001]
    replacing = cells(other, *held, value=b"\x01")
    for seen, unmarked, marked in [
        (cells(other, *few), few, None),
        (cells(other, *many), many, many),
        (replacing, held, None),
        ([*cells(other, *few), *replacing], [*few, *held], [*few, *held]),
        (cells(other, 2000), None, None),
    ]:
        for row, wanted in [((), unmarked), ({b"k"}, marked)]:
            found = made.needless({b"k": made.removable(seen)}, row)
            assert (stamps(found[b"k"]) if found else None) == wanted


def test_only_so_many_hints_are_removed_with_one_call() -> None:
    """Bigtable refuses a call of more than 100 000 mutations."""
    made, _ = processes(BigtableOptions())
    [found] = made.needless({b"k": [(b"hint", stamp) for stamp in range(100_000)]}, ()).values()
    assert len(found) == 10_000
    assert len(made.removal(b"k", found).mutations) == 10_000


def test_only_what_scans_must_find_has_a_hint() -> None:  # N7
    assert hints.wants_hint(notifying())
    assert not hints.wants_hint(Mutation("t", [(b"r", [], [(NOTIFY, 1, 3, None), ("lock", 1, 3, b"")])]))
    replacing: list[Check] = [(ABSENT, LOCK, 1, *ALL), (PRESENT, PENDING, 1, 2, 2)]
    assert not hints.wants_hint(Mutation("t", [(b"r", replacing, [(NOTIFY, 1, 3, b"")])]))
    checked: list[Check] = [(ABSENT, PENDING, 1, *ALL), (PRESENT, LOCK, 1, 2, 2)]
    assert hints.wants_hint(Mutation("t", [(b"r", checked, [(NOTIFY, 1, 3, b"")])]))
    assert hints.is_hinted(ScanRequest("t", b"", None, tuple(ScanQuery(group, None) for group in HINTED)))
    assert not hints.is_hinted(ScanRequest("t", b"", None, (ScanQuery(NOTIFY, None), ScanQuery("lock", None))))
    assert not hints.is_hinted(ScanRequest("t", b"", None, (ScanQuery(NOTIFY, None),), reverse=True))


# ------------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("bigtable://acme", "which project and instance"),
        ("bigtable:///main?prefix=web", "which project and instance"),
        ("bigtable://acme/main?prefix=a/b", "the name of the store's table"),
        ("bigtable://acme/main?prefix=", "the name of the store's table"),
        ("bigtable://acme/main?table=web", "prefix= and app_profile= only"),
        ("bigtable://acme/main?app_profile=a b", "not the name of an app profile"),
    ],
)
def test_an_address_that_says_too_little_or_too_much(url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Place(url)


def test_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIGTABLE_EMULATOR_HOST", raising=False)
    place = Place("bigtable://acme/main?app_profile=one&prefix=web")
    assert (place.instance, place.table) == ("projects/acme/instances/main", "projects/acme/instances/main/tables/web")
    assert (place.app_profile, place.emulator) == ("one", "")
    assert place.shown == "bigtable://acme/main?prefix=web&app_profile=one"


# ------------------------------------------------------------ samples

_MIB = 1 << 20
_SAMPLES = [(b"s\x00z", 100), (b"t\x00c", 300), (b"t\x00f", 500), (b"t\x00k", 700), (b"u\x00a", 900), (b"", 1000)]


@pytest.mark.parametrize(
    ("pieces", "rows"),
    [(1, [b""]), (2, [b"", b"f"]), (4, [b"", b"c", b"f", b"k"]), (9, [b"", b"c", b"f", b"k"])],
)
def test_a_table_is_cut_at_keys_that_were_sampled(pieces: int, rows: list[bytes]) -> None:
    """Those of other tables do not count; of four pieces each has about 200 of 800 bytes."""
    assert cuts("t", _SAMPLES, pieces) == rows


def test_large_pieces_are_cut_even_if_nobody_asks() -> None:
    samples = [(b"t\x00" + bytes([row]), 100 * _MIB * row) for row in range(1, 21)]
    assert cuts("t", [*samples, (b"", 2100 * _MIB)], 1) == [
        b"",
        *(bytes([row]) for row in (3, 5, 7, 10, 12, 14, 17, 19)),
    ]


@pytest.mark.parametrize("samples", [[], [(b"", 0)], [(b"", 500)], [(b"a\x00b", 100), (b"", 500)]])
def test_a_table_without_samples_is_one_piece(samples: list[tuple[bytes, int]]) -> None:
    assert cuts("t", samples, 3) == [b""]


@pytest.mark.parametrize(("late_s", "milliseconds"), [(5.0, 4000), (0.0, 2000), (60.0, 10_000)])
def test_a_connection_gives_up_before_a_call_would_be_too_late(late_s: float, milliseconds: int) -> None:  # T13
    assert dict(settings(late_s))["grpc.keepalive_timeout_ms"] == milliseconds
