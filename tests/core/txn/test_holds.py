"""The watermark as a value: who holds it, and that it only moves up."""

from __future__ import annotations

from hypothesis import given, strategies as st

from perco.clock.holds import Holder, Holds, Pin
from perco.storage import TS_MAX


def pin(name: str, ts: int, expires_ms: int) -> Pin:
    return Pin(name, "tests", ts, 0, expires_ms)


def test_nobody_holds_it_but_the_last_timestamp_issued() -> None:  # G1
    holds = Holds()
    assert holds.advance(9, 0, {"t": TS_MAX}) == Holder("retention", 9)
    assert (holds.watermark, holds.cuts) == (9, {"t": 9})


def test_the_oldest_open_transaction_holds_it_at_its_start() -> None:  # G1, trap 17: at its start, not below
    holds = Holds()
    holds.open |= {5, 7}
    assert holds.advance(9, 0, {"t": TS_MAX}) == Holder("transaction", 5)
    assert holds.watermark == 5
    holds.open.discard(5)
    assert holds.advance(9, 0, {"t": TS_MAX}) == Holder("transaction", 7)
    assert holds.watermark == 7


def test_a_pin_holds_it_until_its_lease_has_run_out() -> None:  # T15
    holds = Holds()
    holds.pins["export"] = pin("export", 4, 1000)
    assert holds.advance(9, 999, {"t": TS_MAX}) == Holder("pin", 4, "export")
    assert holds.advance(9, 1000, {"t": TS_MAX}) == Holder("retention", 9)


def test_a_past_snapshot_is_let_in_down_to_the_cut_and_holds_it() -> None:  # T15, G1
    holds = Holds()
    holds.advance(6, 0, {"t": TS_MAX})
    assert not holds.hold(5)
    first, twin = holds.hold(6), holds.hold(6)
    assert len({0, first, twin}) == 3
    assert holds.advance(9, 0, {"t": TS_MAX}) == Holder("snapshot", 6)
    holds.release(first)
    assert holds.advance(9, 0, {"t": TS_MAX}) == Holder("snapshot", 6)
    holds.release(twin)
    assert holds.advance(9, 0, {"t": TS_MAX}) == Holder("retention", 9)


def test_tables_are_cut_where_their_own_retention_says() -> None:
    holds = Holds()
    assert holds.advance(9, 0, {"long": 2, "short": 8}) == Holder("retention", 8)
    assert (holds.watermark, holds.cuts, holds.oldest()) == (8, {"long": 2, "short": 8}, 2)


def test_a_longer_retention_does_not_bring_back_what_has_gone() -> None:  # G1: it only moves up
    holds = Holds()
    holds.advance(9, 0, {"t": 8})
    holds.advance(9, 0, {"t": 3})
    assert (holds.watermark, holds.cuts) == (8, {"t": 8})
    holds.take_over(5, {"t": 5, "u": 4})
    assert (holds.watermark, holds.cuts) == (8, {"t": 8, "u": 4})


_STEPS = st.lists(
    st.tuples(st.sampled_from(["draw", "end", "hold", "release", "advance"]), st.integers(0, 40)), max_size=60
)


@given(_STEPS)
def test_it_only_moves_up_and_never_above_whoever_reads(steps: list[tuple[str, int]]) -> None:  # G1
    holds, last, held, before = Holds(), 0, dict[int, int](), 0
    for step, n in steps:
        match step:
            case "draw":
                last += 1
                holds.open.add(last)
            case "end" if holds.open:
                holds.open.discard(sorted(holds.open)[n % len(holds.open)])
            case "hold" if last:
                ts = 1 + n % last
                if number := holds.hold(ts):
                    assert ts >= holds.oldest()
                    held[number] = ts
            case "release" if held:
                number = sorted(held)[n % len(held)]
                holds.release(number)
                del held[number]
            case "advance":
                holds.advance(last, 0, {"t": n, "u": n // 2})
        assert holds.watermark >= before
        before = holds.watermark
        assert all(cut <= holds.watermark for cut in holds.cuts.values())
        assert all(ts >= holds.watermark for ts in holds.open)
        assert all(ts >= holds.oldest() for ts in held.values())
