"""`python -m tests.sweep`: every step of every scenario with every fault; with --pairs, every two of them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from perco.testing import schedules, sweep
from perco.testing.schedules import Schedule
from perco.testing.sweep import Report
from tests.sweep.scenarios import SCENARIOS

_BY_NAME = {make().name: make for make in SCENARIOS}


def _singles(name: str) -> Report:
    return sweep.singles(_BY_NAME[name])


def _firsts(name: str) -> list[Schedule]:
    return sweep.firsts(_BY_NAME[name])


def _pairs(work: tuple[str, Schedule]) -> Report:
    name, first = work
    report = Report()
    for result in sweep.pairs(_BY_NAME[name], first):
        report.add(result)
    return report


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part like 1/4, 2/4, 3/4 or 4/4")
    return int(part), int(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing was wrong, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--pairs", action="store_true", help="two faults in a run as well: some hundred thousand runs")
    parser.add_argument("--scenario", choices=sorted(_BY_NAME), action="append", help="only this one (default: all)")
    parser.add_argument("--again", metavar="SCHEDULE", help="carry out one schedule of one scenario")
    parser.add_argument("--part", metavar="I/N", type=_part, default=(1, 1), help="of the pairs, one of N like parts")
    parser.add_argument("--processes", type=int, default=None, help="at a time (default: as many as there are cores)")
    given = parser.parse_args(arguments)
    names = given.scenario or list(_BY_NAME)
    if given.again:
        result = sweep.run(_BY_NAME[names[0]], schedules.parse(given.again))
        for number, step in enumerate(result.steps):
            met = " ".join(fault.kind.value for fault in result.fired if fault.step == number)
            print(f"{number:3}  process {step.process}  {step.kind:10}{met}".rstrip())
        print(result.problem or "nothing went wrong")
        return bool(result.problem)
    began = time.perf_counter()
    total = Report()
    with ProcessPoolExecutor(given.processes) as pool:
        for name in names:
            report = Report()
            for found in pool.map(_singles, [name]):
                report.merge(found)
            if given.pairs:
                [firsts] = pool.map(_firsts, [name])
                part, parts = given.part
                mine = [(name, first) for first in firsts[part - 1 :: parts]]
                for number, found in enumerate(pool.map(_pairs, mine), start=1):
                    report.merge(found)
                    if sys.stderr.isatty():
                        so_far = f"{number}/{len(mine)} first faults, {report.runs[2]} pairs, {len(report.wrong)} wrong"
                        print(f"\r{name}: {so_far}", end="\n" if number == len(mine) else "", file=sys.stderr)
            print(f"{name}: {report.runs[1]} runs with one fault, {report.runs[2]} with two, {len(report.wrong)} wrong")
            for result in report.wrong[:3]:
                schedule = schedules.again(result.schedule)
                print(f"{result.problem}\n    again: python -m tests.sweep --scenario {name!r} --again {schedule}")
            sys.stdout.flush()
            total.merge(report)
    print(total.table())
    print(f"{total.runs.total()} runs in {time.perf_counter() - began:.0f} s, {len(total.wrong)} wrong")
    for cell in total.empty():
        print(f"never met: {cell}")
    return bool(total.wrong)


if __name__ == "__main__":
    sys.exit(main())
