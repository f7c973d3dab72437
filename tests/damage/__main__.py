"""`python -m tests.damage --cases 10000 --seed 1`: damage files of a store, and see how `perco check` ends.

A case is a seed. For one that ends wrong the command is printed that runs it again, over the same
store: --store FOLDER --seed S --cases 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.queues
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.damage.running import Bench, make_store
from tests.support.copies import copy_as_itself

Result = tuple[int, str, str, str, str]  # the seed, the file, what was done to it, how the check ended, what is wrong
Results = multiprocessing.queues.SimpleQueue[Result | None]

_SHOWN = 3000  # characters of what a wrong case said


def _part(
    base: Path, seeds: range, results: multiprocessing.SimpleQueue[tuple[int, str, str, str, str] | None]
) -> None:
    bench = Bench(base)
    for seed in seeds:
        case, kind, wrong = bench.run(seed)
        results.put((seed, case.file, case.what, kind, wrong))
    results.put(None)


def _run(base: Path, folder: Path, cases: int, seed: int, jobs: int) -> Iterator[Result]:
    context = multiprocessing.get_context("fork")
    results: Results = context.SimpleQueue()
    running = []
    for job in range(jobs):
        store = folder / str(job)
        copy_as_itself(base, store)
        process = context.Process(target=_part, args=(store, range(seed + job, seed + cases, jobs), results))
        process.start()
        running.append(process)
    left = jobs
    while left:
        result = results.get()
        if result is None:
            left -= 1
        else:
            yield result
    for process in running:
        process.join()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.damage", description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--store", type=Path, help="damage copies of this one; made there if it is not")
    given = parser.parse_args()
    base = given.store or Path(tempfile.mkdtemp(prefix="perco-damage-")) / "store"
    if not base.exists():
        make_store(base)
    counts: Counter[str] = Counter()
    wrongs = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perco-damage-") as folder:
        results = _run(base, Path(folder), given.cases, given.seed, given.jobs)
        for done, (seed, file, what, kind, wrong) in enumerate(results, 1):
            counts[kind] += 1
            if wrong:
                wrongs += 1
                print(f"WRONG: {file}: {what} ({kind}): {wrong[:_SHOWN]}")
                print(f"  python -m tests.damage --store {base} --cases 1 --seed {seed}", flush=True)
            if not done % 500:
                print(f"{done} cases in {time.monotonic() - began:.0f} s: {dict(counts)}, {wrongs} wrong", flush=True)
    told = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(f"{given.cases} cases: {told}; {wrongs} wrong")
    if not wrongs and given.store is None:
        shutil.rmtree(base.parent)
    return 1 if wrongs else 0


if __name__ == "__main__":
    raise SystemExit(main())
