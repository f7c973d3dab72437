"""`python -m tests.testing.seeds`: keeps a seed that finds each mutant, so that `make test-mutants` need not search.

The seeds are kept in `seeds.json`. If a seed no longer finds its mutant, the test searches from 0, and this command
replaces the seed. `--all` looks for all seeds again.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from perco.testing.shrink import root_of
from perco.testing.simulation import BIGTABLE, LOCAL, SimulationOptions, simulate
from tests.support.unlaned import without_lanes
from tests.testing.mutants import MUTANTS, Mutant
from tests.testing.mutants_ahead import AHEAD
from tests.testing.mutants_batches import BATCHES
from tests.testing.mutants_changes import CHANGES
from tests.testing.mutants_direct import DIRECT
from tests.testing.mutants_failing import FAILING
from tests.testing.mutants_growing import GROWING
from tests.testing.mutants_one_step import ONE_STEP
from tests.testing.mutants_served import SERVED
from tests.testing.mutants_signals import SIGNALS
from tests.testing.mutants_viewed import VIEWED

FILE: Final = Path(__file__).with_name("seeds.json")
SEEDS_MAX: Final = 200  # a mutant must die within this many
RUN_S: Final = 200  # real seconds for one run, which takes some 5: below the limit for a whole test
_OTHERS: Final[dict[str, Mutant]] = {**FAILING, **BATCHES, **GROWING, **AHEAD, **SERVED, **DIRECT, **CHANGES, **VIEWED}
ALL: Final[dict[str, Mutant]] = {**MUTANTS, **ONE_STEP, **SIGNALS, **_OTHERS}

_CANDIDATES: Final = 4  # seeds that find a mutant; the one with the shortest run is kept
_LOOKED_AT: Final = 12  # first seeds among which more candidates are sought, once one is found


class Found(NamedTuple):
    """Attributes:
    seconds: CPU time of the run.
    """

    seed: int
    how: str
    seconds: float


def options_for(name: str, seed: int) -> SimulationOptions:
    """The runs in which a mutant can be found: those of served stores, or of stores on Bigtable, whatever the seed
    would choose; or those of an embedded store with views."""
    if name in VIEWED:
        return SimulationOptions(processes=1, views=True)
    return SimulationOptions(
        processes=2 + seed % 2 if name in SERVED else None, store=BIGTABLE if name in DIRECT else LOCAL
    )


def died(seed: int, name: str = "") -> str:
    """How a run went wrong, or "". `name`: of the mutant that is switched on."""
    try:
        outcome = simulate(seed, options_for(name, seed))
    except Exception as error:  # an assertion of perco, or of the simulation itself, has failed
        return repr(root_of(error))
    return "".join(outcome.problems)


def kept() -> dict[str, int]:
    """The seed of each mutant that has one."""
    found: dict[str, int] = json.loads(FILE.read_text())
    return found


def keep(found: dict[str, int]) -> None:
    FILE.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


def search(name: str, seeds: Iterable[int]) -> Found | None:
    """The first of these seeds that finds a mutant.

    It searches in a child process: a run that a mutant breaks off may leave tasks and files behind, which could disturb
    the next run in the same process. A server forks the child, which has one thread only: a lock that another thread
    held at that moment would stay locked in the child.

    Raises: RuntimeError: the child has died, or one run took longer than `RUN_S`; it shows the child's stack.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    here, there = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r") as stack:
        child = context.Process(target=_search, args=(name, tuple(seeds), there, stack.name))
        child.start()
        there.close()
        try:
            found: Found | None = here.recv()
        except EOFError:
            child.join()
            raise RuntimeError(f"{name}: the search ended with {child.exitcode}\n{stack.read()}") from None
        finally:
            here.close()
        child.join()
    return found


def _search(name: str, seeds: Sequence[int], answer: Connection, stack: str) -> None:
    """`search` in the child. `stack`: a file for what it was doing when a run took too long."""
    sys.unraisablehook = lambda _: None  # leftovers complain when they are collected
    with open(stack, "w") as file, pytest.MonkeyPatch.context() as patch:
        without_lanes(patch)  # the faults are in what the lanes hand over to
        ALL[name](patch)
        found = None
        for seed in seeds:
            print(f"seed {seed}", file=file, flush=True)
            faulthandler.dump_traceback_later(RUN_S, exit=True, file=file)
            began = time.process_time()
            how = died(seed, name)
            if how:
                found = Found(seed, how[:2000], time.process_time() - began)
                break
        faulthandler.cancel_dump_traceback_later()
    answer.send(found)
    answer.close()
    os._exit(0)  # do not wait for leftovers of the runs


def _to_keep(name: str, known: int | None) -> int | None:
    """The known seed if it still finds the mutant, else another one; None: there is none within `SEEDS_MAX`."""
    if known is not None and search(name, [known]):
        return known
    candidates: list[Found] = []
    found = search(name, range(SEEDS_MAX))
    while found is not None:
        candidates.append(found)
        found = search(name, range(found.seed + 1, _LOOKED_AT)) if len(candidates) < _CANDIDATES else None
    return min(candidates, key=lambda found: found.seconds).seed if candidates else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.testing.seeds", description=__doc__)
    parser.add_argument("--all", action="store_true", help="also those whose seed still finds them")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="that search (default: one for each core)"
    )
    given = parser.parse_args(arguments)
    found = kept() if FILE.exists() else {}
    missing = 0
    with ProcessPoolExecutor(given.processes) as pool:
        searches = {pool.submit(_to_keep, name, None if given.all else found.get(name)): name for name in ALL}
        for search in as_completed(searches):
            name, seed = searches[search], search.result()
            before = found.pop(name, None)
            if seed is None:
                missing += 1
            else:
                found[name] = seed
            if seed != before:
                print(f"{name}: seed {seed}, before that {before}", flush=True)
                keep(found)
    keep({name: seed for name, seed in found.items() if name in ALL})
    print(f"{len(ALL)} mutants, {missing} not found within {SEEDS_MAX} seeds")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
