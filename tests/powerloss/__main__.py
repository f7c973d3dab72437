"""`python -m tests.powerloss`: record what a store asks of the disk, let power fail at every moment, open what is left.

It needs strace, or a trace that was kept.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.powerloss import replay, trace, work
from tests.powerloss.disk import Disk

ROOT = Path(__file__).parents[2]
FIXTURE = Path(__file__).parent / "trace.gz"
_BASE = "/base"  # where a kept trace says that it was recorded


def recorded(durability: str, broken: str) -> Disk:
    """What the disk was asked by a run of `work` in a fresh folder."""
    with tempfile.TemporaryDirectory(prefix="perco-") as temporary:
        base = Path(temporary).resolve()
        _record(base, durability, broken)
        with open(base / "trace", encoding="ascii") as lines:
            return Disk(base, base / "reports").follow(trace.read(lines))


def kept(path: Path) -> Disk:
    """The same, of a trace that was kept."""
    with gzip.open(path, "rt", encoding="ascii") as lines:
        return Disk(Path(_BASE), Path(_BASE, "reports")).follow(trace.read(lines))


def keep(path: Path) -> None:
    """Record a trace, without the files that do not matter, to be read by `kept`."""
    with tempfile.TemporaryDirectory(prefix="perco-") as temporary:
        base = Path(temporary).resolve()
        _record(base, "power", "")
        old, new = (re.sub("(..)", r"\\x\1", name.encode().hex()) for name in (str(base), _BASE))
        text = (base / "trace").read_text(encoding="ascii").replace(old, new)
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(text.encode())


def _record(base: Path, durability: str, broken: str) -> None:
    command = [sys.executable, "-m", "tests.powerloss.work", str(base / "store"), str(base / "reports")]
    trace.record([*command, durability, broken], base / "trace", cwd=ROOT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing was wrong, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.powerloss", description=__doc__)
    parser.add_argument("--cases", type=int, help="about so many, of all moments (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="which of them, and which subsets (default: 0)")
    parser.add_argument("--trace", type=Path, help="one that was kept, instead of recording one")
    parser.add_argument("--keep", type=Path, help="record a trace to keep, and nothing else")
    parser.add_argument("--durability", choices=["power", "process"], default="power")
    parser.add_argument("--break", dest="broken", choices=sorted(work.BREAKS), default="", help="leave out a sync")
    parser.add_argument("--wrong-max", type=int, default=1000, help="stop after so many (default: 1000)")
    parser.add_argument("--processes", type=int, default=2, help="at a time (default: 2)")
    given = parser.parse_args(arguments)
    if given.trace is None and shutil.which("strace") is None:
        parser.error("there is no strace; install it, or give --trace tests/powerloss/trace.gz")
    if given.keep is not None:
        keep(given.keep)
        return 0
    began = time.perf_counter()
    disk = kept(given.trace) if given.trace is not None else recorded(given.durability, given.broken)
    rng = random.Random(given.seed)
    chosen = replay.sample(disk, rng, given.cases) if given.cases else list(replay.cases(disk, rng))
    print(
        f"{len(disk.changes)} changes, {disk.syncs} syncs, {len(disk.reported)} reports, {len(disk.moments())} moments"
    )
    verify = work.verify if given.durability == "power" else work.verify_or_refused
    wrong: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    results = replay.try_all(disk, chosen, verify, processes=given.processes)
    for case, problem in results:
        tried[case.kind] += 1
        if problem:
            what = re.sub(r"\d+", "N", problem.splitlines()[-1])
            wrong[what] += 1
            if wrong[what] == 1:
                print(f"{case}\n{problem}\n", flush=True)
            if wrong.total() >= given.wrong_max:
                results.close()
                break
    for what, count in wrong.most_common():
        print(f"{count} times: {what}")
    print(", ".join(f"{count} {kind}" for kind, count in sorted(tried.items())))
    print(f"{tried.total()} cases in {time.perf_counter() - began:.0f} s, {wrong.total()} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
