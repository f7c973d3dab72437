"""perco's rows on a Bigtable server: Google's emulator, in memory, which `make build/bigtable-emulator` builds.

    one call        a read-modify-write of one row: perco's transactions, against an optimistic write by hand (ReadRows,
                    CheckAndMutateRow) by the same client; calls and CPU of the client for each
    the emulator    asked bare, by the same client: what it allows
    latency         with 5 ms for every call, one transaction at a time: how many round trips it takes
    the leader      is killed, or stopped, while a direct client commits: how long no commit succeeds

Nothing here is durable: an emulator has no disk. Its own CPU time is shown, and is not the client's.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import trio

import perco
from bench import leader
from bench.against.embedded import KEYS, ZERO, Perco, one_more, schema, value
from bench.against.load import Load, closed_loop, rates, row_of
from bench.harness import Report, Run, interleaved, version_of
from perco.bigtable import admin
from perco.bigtable.address import Place
from perco.bigtable.calls import Calls, Scan
from perco.bigtable.options import BigtableOptions
from perco.bigtable.wire import types
from perco.database.inside import inside

EMULATOR = Path(__file__).parents[1] / "build" / "bigtable-emulator"
SECONDS = 3.0  # of a round
IN_FLIGHT = 128
ROUND_TRIP_S = 0.005
ALONE = 100  # transactions, one after the other

PERCO, BY_HAND, READS, WRITES = "perco", "by hand, 2 calls", "the emulator: reads", "the emulator: conditional writes"


def main(run: Run) -> None:
    report = Report("bigtable", "none (an emulator in memory)")
    facts = run.machine("none (an emulator in memory)", {name: version_of(name) for name in ("grpcio", "protobuf")})
    if not EMULATOR.exists():
        run.say("The emulator is not built: make build/bigtable-emulator\n")
    else:
        with emulator() as started:
            _one_call(run, report, started)
            own = BigtableOptions(own=False)
            leader.fail_over(run, report, started.url, perco.Options(bigtable=own), own.lease_s)
            _latency(run, report)  # last: it has a server of its own
    run.finish(report, facts)


class Emulator:
    """Its process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._number = 0

    def url(self) -> str:
        """Make a store; returns its address."""
        self._number += 1
        url = f"bigtable://bench/bench?prefix=b{self._number}"
        admin.init(url)
        return url

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100


@contextmanager
def emulator() -> Iterator[Emulator]:
    """A server of its own, while the block lasts."""
    import os

    process = subprocess.Popen([EMULATOR], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        os.environ["BIGTABLE_EMULATOR_HOST"] = process.stdout.readline().strip()
        yield Emulator(process)
    finally:
        process.kill()
        process.wait()


# ------------------------------------------------------------------ one call


def _one_call(run: Run, report: Report, started: Emulator) -> None:
    calls: dict[str, list[float]] = {}
    for in_flight in (IN_FLIGHT,) if run.quick else (1, 16, IN_FLIGHT, 1024, 4096):
        sides: dict[str, Callable[[], Load]] = {
            PERCO: partial(trio.run, _perco, started, in_flight, calls),
            BY_HAND: partial(trio.run, _bare, started, in_flight, calls, _by_hand),
            READS: partial(trio.run, _bare, started, in_flight, calls, _read),
            WRITES: partial(trio.run, _bare, started, in_flight, calls, _write),
        }
        found = interleaved(run.rounds, sides)
        mine = rates(found[PERCO])
        table = [
            [
                *row_of(name, loads, "" if name == PERCO else f"{mine.of(rates(loads)):.2f}"),
                f"{median(calls[name]):.2f}",
            ]
            for name, loads in found.items()
        ]
        run.table(
            f"a read-modify-write of one of {len(KEYS)} rows, {in_flight} in flight, by one process",
            ("", "a second (least - most)", "p50 ms", "p99 ms", "CPU us of the client", "perco is", "calls"),
            table,
        )
        report.figures[f"by_hand_{in_flight}_per_s"] = rates(found[BY_HAND]).median
        report.figures[f"emulator_reads_{in_flight}_per_s"] = rates(found[READS]).median
        report.figures[f"emulator_writes_{in_flight}_per_s"] = rates(found[WRITES]).median
        report.figures[f"perco_{in_flight}_per_s"] = mine.median
        if in_flight == IN_FLIGHT:
            report.figures["txn_per_s"] = mine.median
            report.figures["cpu_us_per_txn"] = median(load.cpu_us for load in found[PERCO])
            report.figures["calls_per_txn"] = median(calls[PERCO])
            report.bars.append(("calls_per_txn", median(calls[PERCO]), "at most", 4.0))
            report.bars.append(("txn_per_s", mine.median, "at least", 2500.0))
        calls.clear()


async def _perco(started: Emulator, in_flight: int, calls: dict[str, list[float]]) -> Load:
    async with perco.open(started.url(), schema) as db:
        await _filled(db)
        store = Perco(db)
        before = await store.total()
        asked: Calls = inside(db).place.rows.calls  # type: ignore[attr-defined]
        made = asked.made

        async def call(rng: random.Random) -> None:
            await store.modify(rng.choice(KEYS), one_more)

        found = await closed_loop(call, in_flight, SECONDS)
        calls.setdefault(PERCO, []).append((asked.made - made) / found.calls)
        counted = await store.total() - before
    if counted != found.calls:
        raise AssertionError(f"perco: {found.calls} calls were answered, and the rows say {counted}")
    return found


async def _filled(db: perco.Database) -> None:
    """Fill the rows; return once that is over: secondaries are committed in the background."""
    async with db.transaction() as txn:
        for key in KEYS:
            txn.set(value, key, ZERO)
    calls: Calls = inside(db).place.rows.calls  # type: ignore[attr-defined]
    before = -1
    while calls.made - before > 1:  # the clock is noted once a second
        before = calls.made
        await trio.sleep(0.3)


async def _bare(
    started: Emulator,
    in_flight: int,
    calls: dict[str, list[float]],
    make: Callable[[Calls, Place, bytes], Awaitable[None]],
) -> Load:
    place = Place(started.url())
    asked = Calls(place, BigtableOptions())
    keys = [b"row%05d" % number for number in range(len(KEYS))]
    try:
        await asked.ask([_write_of(place, key, 1) for key in keys], trio.current_time() + 60)
        made = asked.made

        async def call(rng: random.Random) -> None:
            await make(asked, place, rng.choice(keys))

        found = await closed_loop(call, in_flight, SECONDS)
        name = {_by_hand: BY_HAND, _read: READS, _write: WRITES}[make]  # type: ignore[index]
        calls.setdefault(name, []).append((asked.made - made) / found.calls)
        return found
    finally:
        await asked.aclose()


def _write_of(place: Place, key: bytes, seen: int) -> Any:
    t = types()
    column = {"family_name": "p", "start_qualifier_closed": b"v", "end_qualifier_closed": b"v"}
    newer = t.RowFilter(timestamp_range_filter={"start_timestamp_micros": (seen + 1) * 1000})
    cell = {"family_name": "p", "column_qualifier": b"v", "timestamp_micros": (seen + 1) * 1000, "value": b"x" * 8}
    return t.CheckAndMutateRow(
        table_name=place.table,
        row_key=key,
        predicate_filter=t.RowFilter(chain={"filters": [t.RowFilter(column_range_filter=column), newer]}),
        false_mutations=[t.Mutation(set_cell=cell)],
    )


def _read_of(place: Place, key: bytes) -> Scan:
    t = types()
    column = {"family_name": "p", "start_qualifier_closed": b"v", "end_qualifier_closed": b"v"}
    newest = t.RowFilter(cells_per_column_limit_filter=1)
    request = t.ReadRows(
        table_name=place.table, filter=t.RowFilter(chain={"filters": [t.RowFilter(column_range_filter=column), newest]})
    )
    request.rows.row_keys.append(key)
    return Scan(request)


async def _answers(asked: Calls, requests: Sequence[Any]) -> list[Any]:
    found = await asked.ask(requests, trio.current_time() + 30)
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
    return found


async def _by_hand(asked: Calls, place: Place, key: bytes) -> None:
    while True:
        [read] = await _answers(asked, [_read_of(place, key)])
        seen = read.rows[0].cells[0].micros // 1000
        [written] = await _answers(asked, [_write_of(place, key, seen)])
        if not written.predicate_matched:
            return


async def _read(asked: Calls, place: Place, key: bytes) -> None:
    await _answers(asked, [_read_of(place, key)])


async def _write(asked: Calls, place: Place, key: bytes) -> None:
    await _answers(asked, [_write_of(place, key, 1 << 36)])


# ------------------------------------------------------------------ latency


def _latency(run: Run, report: Report) -> None:
    with emulator() as started:
        found = [trio.run(_alone, started) for _ in range(run.rounds)]
    trips = median(found)
    run.table(
        f"one read-modify-write at a time, {ROUND_TRIP_S * 1000:g} ms for every call",
        ("", "p50 ms", "round trips"),
        [["perco", f"{trips * ROUND_TRIP_S * 1000:.1f}", f"{trips:.2f}"]],
    )
    report.figures["round_trips_per_txn"] = trips
    report.bars.append(("round_trips_per_txn", trips, "at most", 4.5))


async def _alone(started: Emulator) -> float:
    """The median time of a transaction, in round trips."""
    async with perco.open(started.url(), schema) as db:
        store = Perco(db)
        async with db.transaction() as txn:
            txn.set(value, KEYS[0], ZERO)
        calls: Any = inside(db).place.rows.calls  # type: ignore[attr-defined]
        plain = calls.ask

        async def ask(requests: Sequence[Any], deadline: float) -> Any:
            answers = await plain(requests, deadline)
            await trio.sleep(ROUND_TRIP_S)
            return answers

        calls.ask = ask
        took = []
        for _ in range(ALONE):
            begun = time.perf_counter()
            await store.modify(KEYS[0], one_more)
            took.append(time.perf_counter() - begun)
        return median(took) / ROUND_TRIP_S
