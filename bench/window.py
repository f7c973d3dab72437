"""What a client gains by waiting a little before it asks: the delay window of the paper's section 2.5.

Reads and mutations of one client wait so long for others to go with in one frame (`WireOptions.window_s`); a frame that
is full leaves at once. Every transaction takes longer by two windows, and holds others up for longer, so conflicts grow
with it; what it saves is frames. One client process against one `perco serve`, durable: each transaction reads a row
and writes it, the rows all alike (Zipf 0) or popular (Zipf 1), with few and with many in flight.
"""

from __future__ import annotations

from functools import partial
from statistics import median

from bench.against.served import TASKS, server
from bench.engine import rates
from bench.harness import Report, Run, interleaved

WINDOWS_MS = (0, 1, 5, 20, 200)
SKEWS = (0.0, 1.0)
IN_FLIGHT = (8, 128, 512)
SECONDS = 1.5


def main(run: Run) -> None:
    """Print the tables and the RESULT line."""
    report = Report(run.name, "power")
    facts = run.machine("power (fsync before every answer)")
    with run.scratch() as folder, server(folder, durable=True) as served:
        for in_flight in (128,) if run.quick else IN_FLIGHT:
            sides = {
                (skew, window): partial(served.load, TASKS, in_flight, SECONDS, window / 1000, skew)
                for skew in SKEWS
                for window in WINDOWS_MS
            }
            found = interleaved(run.rounds, sides)
            rows = []
            for (skew, window), loads in found.items():
                p50, p99 = (median(load.ms(share) for load in loads) for share in (0.5, 0.99))
                retries = median(load.retries_per_call for load in loads)
                cpu = median(load.cpu_us for load in loads)
                times = (f"{p50:.1f}", f"{p99:.0f}", f"{retries:.3f}", f"{cpu:.0f}")
                rows.append((f"{skew:g}", window, rates(loads), *times))
                key = f"zipf{skew:g}_window{window}ms_in_flight{in_flight}"
                report.figures[f"{key}_per_s"] = rates(loads).median
                report.figures[f"{key}_p50_ms"], report.figures[f"{key}_retries"] = p50, retries
            for skew in SKEWS:
                none = rates(found[skew, 0])
                best = max(rates(found[skew, window]).of(none) for window in WINDOWS_MS[1:])
                report.ratio(f"best_window_vs_none_zipf{skew:g}_in_flight{in_flight}", best)
            run.table(
                f"{in_flight} in flight; CPU of client and server",
                ("Zipf", "window ms", "per second (least - most)", "p50 ms", "p99 ms", "retries each", "CPU us each"),
                rows,
            )
        served.check()
    run.finish(report, facts)
