"""What `perco ui` makes of what it sees, again and again."""

from __future__ import annotations

from perco.cli.ui.shelf import Shelf
from perco.cli.ui.watching import _BANDS_MAX, Heat, TabletSeen, Watch, _rates, _Totals
from perco.serve.uses import ProcessUse, Runs


def tablet(start: bytes, mutations: int = 0, epoch: int = 1, table: str = "docs") -> TabletSeen:
    return TabletSeen(table, start, 0, 0, (1, epoch), mutations, 0, 0, 0)


def use(pid: int, commits: int, *runs: Runs, conflicts: int = 0) -> ProcessUse:
    return ProcessUse(str(pid), "client", pid, "app.py", list(runs), [], commits, 0, conflicts, 0, 0)


def test_rates_count_from_the_last_look_and_after_a_takeover_from_nothing() -> None:
    before = {("docs", b""): tablet(b"", 100), ("docs", b"m"): tablet(b"m", 500)}
    now = {("docs", b""): tablet(b"", 130), ("docs", b"m"): tablet(b"m", 40, epoch=2), ("docs", b"t"): tablet(b"t", 7)}
    assert _rates(before, now, 10.0) == {("docs", b""): 3.0, ("docs", b"m"): 4.0, ("docs", b"t"): 0.7}


def test_a_tablet_had_its_rows_elsewhere_before_a_split() -> None:
    watch = Watch(Shelf("nowhere"))
    watch.tablets = [tablet(b""), tablet(b"m"), tablet(b"", table="words")]
    watch.heat.append(Heat(1.0, {("docs", b""): 5.0, ("words", b""): 1.0}))
    watch.heat.append(Heat(2.0, {("docs", b""): 2.0, ("docs", b"m"): 9.0, ("words", b""): 0.0}))
    times, bands = watch.heat_map()
    assert times == [1.0, 2.0]
    assert [(band.first.table, band.first.start, list(band.rates)) for band in bands] == [
        ("docs", b"", [5.0, 2.0]),
        ("docs", b"m", [5.0, 9.0]),
        ("words", b"", [1.0, 0.0]),
    ]


def test_many_tablets_share_bands_and_a_band_is_the_sum_of_its_tablets() -> None:
    watch = Watch(Shelf("nowhere"))
    starts = [b"%06d" % n for n in range(3 * _BANDS_MAX)]
    watch.tablets = [tablet(start) for start in starts]
    watch.heat.append(Heat(1.0, {("docs", start): 1.0 for start in starts}))
    _, bands = watch.heat_map()
    assert len(bands) == _BANDS_MAX
    assert {(band.tablets, sum(band.rates)) for band in bands} == {(3, 3.0)}


def test_totals_rise_by_what_processes_did_since_they_were_seen() -> None:
    totals = _Totals()
    totals.add([use(1, 100, Runs("parse", 50, 5, 0), conflicts=3)])
    assert (totals.commits, totals.conflicts, totals.runs) == (0, 0, {"parse": (0, 0)})
    totals.add([use(1, 110, Runs("parse", 58, 6, 1), conflicts=4), use(2, 7, Runs("parse", 2, 0, 0))])
    assert (totals.commits, totals.conflicts, totals.runs) == (17, 1, {"parse": (10, 1)})
    totals.add([use(2, 7, Runs("parse", 2, 0, 0))])  # one has not answered in time
    totals.add([use(1, 111, Runs("parse", 1, 0, 0), conflicts=4), use(2, 7)])  # its worker has begun anew
    assert (totals.commits, totals.conflicts, totals.runs) == (18, 1, {"parse": (11, 1)})
